// The operands of `tessera gemm`: random or from files, in memory shared with the daemon or sent to it; and their check
// in float64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace tessera::client::cli {

struct GemmArguments {
  std::int64_t m = 1024;
  std::int64_t n = 1024;
  std::int64_t k = 1024;
  std::int64_t batch = 0;  // 0 = no batch dimension
  std::string pair = "bf16_bf16";
  std::string layout = "NT";
  std::string out = "bf16";
  std::string scales;  // "", tensor or row_col
  bool bias = false;
  std::string accumulation = "fast";
  std::string backend = "default";
  std::string memory;  // host, gpu or, empty, what the backend computes on
  std::uint64_t seed = 1;
  std::int64_t repeat = 5;
  bool check = false;
  std::string a_file;  // path[:name]; replaces m, k and the pair's first half
  std::string b_file;
  bool b_is_kn = false;  // the file holds [.., K, N]
  std::optional<float> a_scale;
  std::optional<float> b_scale;
  std::string save;
};

// Where operands live.
enum class OperandPlace {
  kMessage,  // in this process; they travel inside the messages
  kHost,     // in host memory that a session shares with the daemon
  kGpu,      // in the daemon's memory of its GPU, with a copy here that is filled and checked
};

class OperandMemory {
 public:
  // `session` is null for kMessage only.
  OperandMemory(OperandPlace place, Session* session) : place_(place), session_(session) {}

  // A tensor over at least `bytes` zeroed bytes, and at least one; packed unless strides are given. Its data() is
  // memory of this process.
  absl::StatusOr<TensorView> Allocate(std::uint64_t bytes, DType dtype, const std::vector<std::int64_t>& shape,
                                      const std::vector<std::int64_t>& strides = {});

  // Between the copies here and the GPU; nothing to do elsewhere.
  absl::Status Upload();
  absl::Status Download();

 private:
  struct Copy {
    std::size_t buffer = 0;  // of buffers_
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
  };

  const OperandPlace place_;
  Session* const session_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::vector<Copy> copies_;
};

// The views are `memory`'s.
absl::StatusOr<GemmSpec> MakeGemmProblem(OperandMemory& memory, const GemmArguments& arguments);

struct CheckResult {
  std::int64_t wrong = 0;
  double worst = 0;  // error / allowed
};

// d against float64, allowing float32 accumulation (2 K 2^-24 sum|a||b|), an fp32 epilogue and one rounding to d's
// type.
CheckResult CheckGemm(const GemmSpec& spec);

// d, packed row-major.
std::vector<std::byte> PackedOutput(const TensorView& d);

}  // namespace tessera::client::cli
