// The bf16 products of the end-to-end program: numbers, their float64 truth, and where operands live on the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/oracle/gemm_oracle.h"

namespace tessera::gpu_test {

// Where an operand's memory comes from.
enum class Home {
  kDaemon,      // Session::AllocateOnDevice
  kLegacy,      // cudaMalloc here, by its handle
  kDescriptor,  // cuMemCreate here, by its descriptor
};

struct Homes {
  Home a = Home::kDaemon;
  Home b = Home::kDaemon;
  Home d = Home::kDaemon;
};

// One operand's memory on the GPU, `bytes` at an offset in an allocation with guards on both sides.
class Operand {
 public:
  static absl::StatusOr<Operand> Make(client::Session& session, Home home, std::uint64_t bytes, std::uint64_t offset);

  // Fills the operand with `bytes`, and the guards with kGuard.
  absl::Status Write(const std::vector<std::byte>& bytes);
  // The operand's bytes; DATA_LOSS if a guard was written.
  absl::StatusOr<std::vector<std::byte>> Read() const;

  client::TensorView View(std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {}) const;
  client::Buffer& buffer() { return *buffer_; }

 private:
  Operand(std::uint64_t bytes, std::uint64_t offset) : bytes_(bytes), offset_(offset) {}
  std::uint64_t AllocationBytes() const;

  std::uint64_t bytes_;
  std::uint64_t offset_;                          // of the operand in the allocation
  std::unique_ptr<DeviceAllocation> allocation_;  // null: the daemon's. Outlives the buffer of it
  std::optional<client::Buffer> buffer_;  // of the allocation's bytes from offset_ on, or of all of the daemon's
};

class Problem {
 public:
  // NT, or NN where `b_by_columns`: B is stored [K, N]. `offset` of every operand in its memory, in bytes.
  Problem(std::string name, std::int64_t m, std::int64_t n, std::int64_t k, bool b_by_columns, std::uint64_t offset);

  const std::string& name() const { return name_; }
  bool aligned() const { return offset_ % 256 == 0; }

  // Computes with operands at `homes`; what is wrong, or "".
  std::string Run(client::Session& session, const Homes& homes, v1::Backend backend, const std::string& backend_name);

 private:
  absl::StatusOr<client::GemmResult> Compute(client::Session& session, const Homes& homes, v1::Backend backend,
                                             std::vector<std::byte>& d);
  std::string Judge(std::vector<std::byte>& d);

  std::string name_;
  std::int64_t m_;
  std::int64_t n_;
  std::int64_t k_;
  bool b_by_columns_;
  std::uint64_t offset_;
  std::vector<std::byte> a_;
  std::vector<std::byte> b_;
  kernels::GemmParams params_;  // host addresses
  oracle::GemmTruth truth_;
};

// Uniform in [-1, 1); the same for the same seed.
std::vector<std::byte> RandomBf16(std::int64_t elements, std::uint64_t seed);

}  // namespace tessera::gpu_test
