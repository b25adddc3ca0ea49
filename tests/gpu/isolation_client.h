// A client process's session with a bf16 product in the daemon's memory, and what else a worker has on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/gpu/e2e_memory.h"

namespace tessera::gpu_test {

class GemmClient {
 public:
  // Of D[m, n] = A[m, k] * B[n, k] on buffers that the daemon owns; with random numbers, or zeros.
  static absl::StatusOr<GemmClient> Connect(const std::string& socket, const std::string& label, std::int64_t m,
                                            std::int64_t n, std::int64_t k, bool random);

  client::Session& session() { return session_; }
  const client::GemmSpec& spec() const { return spec_; }

 private:
  GemmClient(client::Client client, client::Session session, client::Buffer a, client::Buffer b, client::Buffer d)
      : client_(std::move(client)),
        session_(std::move(session)),
        a_(std::move(a)),
        b_(std::move(b)),
        d_(std::move(d)) {}

  client::Client client_;
  client::Session session_;
  client::Buffer a_;
  client::Buffer b_;
  client::Buffer d_;
  client::GemmSpec spec_;
};

// Kernels of this process, on a stream of its own.
class OwnWork {
 public:
  // Every kernel has been launched once, so that none is loaded later.
  static absl::StatusOr<OwnWork> Make();
  OwnWork(OwnWork&& other) noexcept
      : stream_(std::exchange(other.stream_, nullptr)), memory_(std::move(other.memory_)) {}
  OwnWork& operator=(OwnWork&&) = delete;
  ~OwnWork();

  absl::Status Tiny() const;
  absl::Status Busy() const;  // some 20 us on a quarter of the GPU
  absl::Status Wait() const;
  cudaStream_t stream() const { return stream_; }
  std::uint64_t* memory() const { return reinterpret_cast<std::uint64_t*>(memory_->data()); }

 private:
  OwnWork(cudaStream_t stream, std::unique_ptr<DeviceAllocation> memory)
      : stream_(stream), memory_(std::move(memory)) {}
  cudaStream_t stream_;
  std::unique_ptr<DeviceAllocation> memory_;
};

}  // namespace tessera::gpu_test
