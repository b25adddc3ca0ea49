#include "tests/gpu/e2e_kernels.h"

namespace tessera::gpu_test {
namespace {

constexpr int kThreads = 256;
// Few enough that all of them are on the GPU at once: they wait side by side.
constexpr int kBlocks = 64;

__global__ void LateFill(std::uint16_t* to, std::size_t count, std::uint16_t code, std::int64_t cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
  const std::size_t step = std::size_t{kThreads} * kBlocks;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) to[i] = code;
}

}  // namespace

cudaError_t LaunchLateFill(std::uint16_t* to, std::size_t count, std::uint16_t code, std::int64_t cycles,
                           cudaStream_t stream) {
  LateFill<<<kBlocks, kThreads, 0, stream>>>(to, count, code, cycles);
  return cudaGetLastError();
}

}  // namespace tessera::gpu_test
