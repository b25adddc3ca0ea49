#include "tests/gpu/isolation_kernels.h"

namespace tessera::gpu_test {
namespace {

constexpr int kBusyThreads = 128;
constexpr std::uintptr_t kNotMapped = std::uintptr_t{1} << 20;

__global__ void Tiny(std::uint64_t* count) {
  *count += 1;
}

__global__ void Busy(int steps, float factor, float* sink) {
  float value = static_cast<float>(threadIdx.x);
  for (int i = 0; i < steps; ++i) value = value * factor + 1.0F;
  if (value < 0) *sink = value;  // never, which the compiler does not know
}

__global__ void IllegalRead(const std::uint64_t* from, std::uint64_t* sink) {
  *sink = *from;
}

}  // namespace

cudaError_t LaunchTiny(std::uint64_t* count, cudaStream_t stream) {
  Tiny<<<1, 1, 0, stream>>>(count);
  return cudaGetLastError();
}

cudaError_t LaunchBusy(int blocks, int steps, float* sink, cudaStream_t stream) {
  Busy<<<blocks, kBusyThreads, 0, stream>>>(steps, 0.5F, sink);
  return cudaGetLastError();
}

cudaError_t LaunchIllegalRead(std::uint64_t* sink, cudaStream_t stream) {
  IllegalRead<<<1, 1, 0, stream>>>(reinterpret_cast<const std::uint64_t*>(kNotMapped), sink);
  return cudaGetLastError();
}

}  // namespace tessera::gpu_test
