#include "tests/gpu/stray_bytes.h"

namespace tessera::gpu_test {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kBlocks = 4096;

__global__ void __launch_bounds__(kThreads)
    CountKernel(const uint4* words, std::size_t size, std::uint32_t pattern, std::uint64_t* count) {
  unsigned long long others = 0;
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * kThreads;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x; i < size; i += step) {
    const uint4 word = words[i];
    others += word.x != pattern || word.y != pattern || word.z != pattern || word.w != pattern ? 1 : 0;
  }
  if (others > 0) atomicAdd(reinterpret_cast<unsigned long long*>(count), others);
}

}  // namespace

cudaError_t CountOtherWords(const std::byte* data, std::size_t bytes, std::byte value, std::uint64_t* count,
                            cudaStream_t stream) {
  const std::uint32_t pattern = static_cast<std::uint32_t>(value) * 0x01010101U;
  CountKernel<<<kBlocks, kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(data), bytes / sizeof(uint4), pattern,
                                                count);
  return cudaGetLastError();
}

}  // namespace tessera::gpu_test
