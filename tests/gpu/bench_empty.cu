#include "tests/gpu/bench_empty.h"

namespace tessera::gpu_test {
namespace {

__global__ void Empty() {}

}  // namespace

cudaError_t LaunchEmpty(cudaStream_t stream) {
  Empty<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

}  // namespace tessera::gpu_test
