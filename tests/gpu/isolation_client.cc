#include "tests/gpu/isolation_client.h"

#include <chrono>
#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "tests/gpu/e2e_problem.h"
#include "tests/gpu/isolation_kernels.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMemoryBytes = 4096;
constexpr int kBusyBlocks = 32;
constexpr int kBusySteps = 10'000;

absl::Status Fill(client::Buffer& buffer, std::uint64_t seed) {
  const std::vector<std::byte> numbers = RandomBf16(static_cast<std::int64_t>(buffer.bytes() / 2), seed);
  return buffer.Upload(numbers.data(), numbers.size());
}

}  // namespace

absl::StatusOr<GemmClient> GemmClient::Connect(const std::string& socket, const std::string& label, std::int64_t m,
                                               std::int64_t n, std::int64_t k, bool random) {
  ASSIGN_OR_RETURN(client::Client client,
                   client::Client::Connect({.socket = socket, .side_channel = {}, .timeout = 10s}));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession(label));
  const auto bytes = [](std::int64_t rows, std::int64_t cols) { return static_cast<std::uint64_t>(rows * cols * 2); };
  ASSIGN_OR_RETURN(client::Buffer a, session.AllocateOnDevice(bytes(m, k)));
  ASSIGN_OR_RETURN(client::Buffer b, session.AllocateOnDevice(bytes(n, k)));
  ASSIGN_OR_RETURN(client::Buffer d, session.AllocateOnDevice(bytes(m, n)));
  if (random) {
    RETURN_IF_ERROR(Fill(a, 1));
    RETURN_IF_ERROR(Fill(b, 2));
  }
  GemmClient result(std::move(client), std::move(session), std::move(a), std::move(b), std::move(d));
  result.spec_ = {.a = result.a_.Tensor(DType::kBf16, {m, k}),
                  .b = result.b_.Tensor(DType::kBf16, {n, k}),
                  .d = result.d_.Tensor(DType::kBf16, {m, n}),
                  .backend = v1::BACKEND_CUDA};
  return result;
}

absl::StatusOr<OwnWork> OwnWork::Make() {
  ASSIGN_OR_RETURN(auto memory, AllocatePlain(kMemoryBytes));
  RETURN_IF_ERROR(ToStatus(cudaMemset(memory->data(), 0, kMemoryBytes), "cudaMemset"));
  RETURN_IF_ERROR(ToStatus(cudaDeviceSynchronize(), "cudaMemset"));
  cudaStream_t stream = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  OwnWork work(stream, std::move(memory));
  RETURN_IF_ERROR(work.Tiny());
  RETURN_IF_ERROR(work.Busy());
  RETURN_IF_ERROR(work.Wait());
  return work;
}

OwnWork::~OwnWork() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));  // fails only where the context is lost
}

absl::Status OwnWork::Tiny() const {
  return ToStatus(LaunchTiny(memory(), stream_), "a small kernel");
}

absl::Status OwnWork::Busy() const {
  return ToStatus(LaunchBusy(kBusyBlocks, kBusySteps, reinterpret_cast<float*>(memory() + 1), stream_), "a kernel");
}

absl::Status OwnWork::Wait() const {
  return ToStatus(cudaStreamSynchronize(stream_), "this process's own kernels");
}

}  // namespace tessera::gpu_test
