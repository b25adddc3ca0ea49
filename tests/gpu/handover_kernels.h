// What a client of the programs about handing work over puts on streams of its own. Nothing here waits for the GPU;
// each returns its own error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace tessera::gpu_test {

// Copies `count` elements of 16 bits, from device memory to device memory.
cudaError_t LaunchCopy16(std::uint16_t* to, const std::uint16_t* from, std::size_t count, cudaStream_t stream);

// Row r of the bf16 matrix [rows, columns] at `to`: all RowNumber(turn, r).
cudaError_t LaunchFillRows(std::uint16_t* to, std::int64_t rows, std::int64_t columns, std::uint32_t turn,
                           cudaStream_t stream);
constexpr std::uint32_t kRowNumbers = 4;  // RowNumber is 1 to this, of which each turn gives a row another one
constexpr std::uint32_t RowNumber(std::uint32_t turn, std::uint32_t row) {
  return 1 + (turn + row) % kRowNumbers;
}

// Adds the bf16 elements at `from` to those at `sums`.
cudaError_t LaunchAddTo(float* sums, const std::uint16_t* from, std::size_t count, cudaStream_t stream);

// cuStreamWriteValue64, and cuStreamWaitValue64 for at least `value`, with the runtime's types.
cudaError_t StreamWrite(cudaStream_t stream, std::uint64_t address, std::uint64_t value);
cudaError_t StreamWait(cudaStream_t stream, std::uint64_t address, std::uint64_t value);

}  // namespace tessera::gpu_test
