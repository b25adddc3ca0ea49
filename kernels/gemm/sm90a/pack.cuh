// Matrices of one-byte elements with any strides -> rows that are contiguous along K, in scratch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/grid_order.cuh"
#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::sm90a {

// `rows` x `k` elements a matrix; `batch` counts matrices through batch_shape, last dimension fastest.
struct PackShape {
  std::int64_t rows;
  std::int64_t k;
  std::int64_t batch_shape[kGemmBatchDimsMax];
  std::int64_t packed_row;  // bytes from one row of the packed matrix to the next, a multiple of 16
};

inline constexpr int kPackTile = 64;  // rows, and bytes of K, of a block
inline constexpr int kPackThreads = 256;

// A block packs a tile of a matrix: 4 x 4 bytes a thread, turned over in registers where rows are what is contiguous,
// by way of shared memory, so that both sides are read and written in whole lines. `words`: four neighbours along the
// rows can be read at once.
template <bool kWords>
__global__ void __launch_bounds__(kPackThreads)
    PackKernel(const GemmMatrix from, const PackShape shape, unsigned char* const to) {
  constexpr int kQuads = kPackTile / 4;
  // [row][quad of K], a quad apart so that quads of neighbouring rows are in different banks.
  __shared__ std::uint32_t tile[kPackTile][kQuads + 1];
  const std::int64_t k_tiles = (shape.k + kPackTile - 1) / kPackTile;
  const std::int64_t row_tiles = (shape.rows + kPackTile - 1) / kPackTile;
  const std::int64_t tiles = k_tiles * row_tiles * shape.batch_shape[0] * shape.batch_shape[1] * shape.batch_shape[2];
  device::WaitForGridAhead();
  for (std::int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const std::int64_t batch = index / (k_tiles * row_tiles);
    const std::int64_t in_batch = index % (k_tiles * row_tiles);
    const std::int64_t row0 = in_batch % row_tiles * kPackTile;
    const std::int64_t k0 = in_batch / row_tiles * kPackTile;
    const std::int64_t rest = batch / shape.batch_shape[2];
    const auto* const base =
        static_cast<const unsigned char*>(from.data) + batch % shape.batch_shape[2] * from.batch_stride[2] +
        rest % shape.batch_shape[1] * from.batch_stride[1] + rest / shape.batch_shape[1] * from.batch_stride[0];
    // Threads side by side along what is contiguous.
    const bool along_rows = from.row_stride == 1;
    const int major = static_cast<int>(threadIdx.x) / kQuads;
    const int minor = static_cast<int>(threadIdx.x) % kQuads;
    const int row = 4 * (along_rows ? minor : major);
    const int k = 4 * (along_rows ? major : minor);
    std::uint32_t line[4] = {};  // of K bytes k .. k + 3, for each of four rows
    if (kWords && row0 + row + 4 <= shape.rows && k0 + k + 4 <= shape.k) {
      std::uint32_t column[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        column[j] = *reinterpret_cast<const std::uint32_t*>(base + row0 + row + (k0 + k + j) * from.col_stride);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned pick = static_cast<unsigned>(i) | static_cast<unsigned>(i + 4) << 4U;
        const std::uint32_t low = __byte_perm(column[0], column[1], pick);
        const std::uint32_t high = __byte_perm(column[2], column[3], pick);
        line[i] = __byte_perm(low, high, 0x5410U);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (row0 + row + i >= shape.rows || k0 + k + j >= shape.k) continue;
          const std::uint32_t byte = base[(row0 + row + i) * from.row_stride + (k0 + k + j) * from.col_stride];
          line[i] |= byte << (8U * j);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[row + i][k / 4] = line[i];
    __syncthreads();
    unsigned char* const out = to + batch * shape.rows * shape.packed_row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int out_row = i * (kPackThreads / kQuads) + major;
      if (row0 + out_row >= shape.rows || k0 + 4 * minor >= shape.packed_row) continue;
      *reinterpret_cast<std::uint32_t*>(out + (row0 + out_row) * shape.packed_row + k0 + 4 * minor) =
          tile[out_row][minor];
    }
    __syncthreads();
  }
}

}  // namespace tessera::kernels::sm90a
