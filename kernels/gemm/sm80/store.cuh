// Staged accumulators of a warp -> D.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/gemm/cuda/epilogue.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm80/swizzle.cuh"

namespace tessera::kernels::sm80 {

inline constexpr int kStoreElements = 4;  // of a row of D, by one lane at once

__device__ __forceinline__ void StoreFour(float* target, const float (&values)[kStoreElements]) {
  *reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ void StoreFour(__nv_bfloat16* target, const float (&values)[kStoreElements]) {
  union {
    __nv_bfloat162 pairs[2];
    uint2 bits;
  } packed;
  packed.pairs[0] = __floats2bfloat162_rn(values[0], values[1]);
  packed.pairs[1] = __floats2bfloat162_rn(values[2], values[3]);
  *reinterpret_cast<uint2*>(target) = packed.bits;
}

// Rows m.. and columns n.. of D, whose element [0, 0] of this batch entry is `d`. A lane has four neighbouring columns,
// so that the lanes of a row write whole sectors; `vectors` promises that four elements from a multiple of four columns
// on are contiguous and aligned to their size.
template <DType kOut, int kRows, int kCols>
__device__ __forceinline__ void StoreRows(const GemmParams& params, typename cuda::Output<kOut>::Element* d,
                                          std::int64_t m, std::int64_t n, const float* staging, int lane,
                                          bool vectors) {
  constexpr int kLanesPerRow = kCols / kStoreElements;
  constexpr int kRowsPerPass = 32 / kLanesPerRow;
  static_assert(32 % kLanesPerRow == 0 && kRows % kRowsPerPass == 0, "lanes share the rows evenly");
  const int col = lane % kLanesPerRow * kStoreElements;
  const std::int64_t first_n = n + col;
  if (first_n >= params.n) return;
  const bool whole = vectors && params.n - first_n >= kStoreElements;
#pragma unroll 2
  for (int row = lane / kLanesPerRow; row < kRows; row += kRowsPerPass) {
    if (m + row >= params.m) return;
    const float4 sums = *reinterpret_cast<const float4*>(staging + StagingTile<kCols>::Offset(row, col));
    float values[kStoreElements] = {sums.x, sums.y, sums.z, sums.w};
    auto* const target = d + (m + row) * params.d.row_stride + first_n * params.d.col_stride;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kStoreElements; ++i) values[i] = cuda::Finish(params, m + row, first_n + i, values[i]);
      StoreFour(target, values);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kStoreElements; ++i) {
      if (first_n + i >= params.n) break;
      target[i * params.d.col_stride] =
          cuda::Output<kOut>::Round(cuda::Finish(params, m + row, first_n + i, values[i]));
    }
  }
}

}  // namespace tessera::kernels::sm80
