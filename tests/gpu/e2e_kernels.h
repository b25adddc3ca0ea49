// What a client of the end-to-end program runs on the GPU itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace tessera::gpu_test {

// Sets the `count` elements at `to`, in device memory, to `code`, `cycles` of the multiprocessors' clock after the
// start: not a byte is written before. Returns the launch's error.
cudaError_t LaunchLateFill(std::uint16_t* to, std::size_t count, std::uint16_t code, std::int64_t cycles,
                           cudaStream_t stream);

}  // namespace tessera::gpu_test
