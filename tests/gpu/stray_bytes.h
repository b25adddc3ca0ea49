// Looks through device memory that is too large to be looked through on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace tessera::gpu_test {

// Adds to *count, in device memory, how many of the 16-byte words at `data` are not 16 times `value`. `data` is aligned
// to 16 bytes, `bytes` a multiple of 16.
cudaError_t CountOtherWords(const std::byte* data, std::size_t bytes, std::byte value, std::uint64_t* count,
                            cudaStream_t stream);

}  // namespace tessera::gpu_test
