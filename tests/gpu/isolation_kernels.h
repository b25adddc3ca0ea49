// What a client of the isolation program runs on the GPU itself. Each returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::gpu_test {

// Adds 1 to *count, in device memory.
cudaError_t LaunchTiny(std::uint64_t* count, cudaStream_t stream);

// Work for `blocks` multiprocessors: every thread a chain of `steps` multiplications, of some 2 ns each. Work and not a
// time on a clock: a kernel that is made to share the GPU has to take longer. `sink` is device memory of one float.
cudaError_t LaunchBusy(int blocks, int steps, float* sink, cudaStream_t stream);

// Reads an address that is not mapped, which ends the context; `sink` is device memory.
cudaError_t LaunchIllegalRead(std::uint64_t* sink, cudaStream_t stream);

}  // namespace tessera::gpu_test
