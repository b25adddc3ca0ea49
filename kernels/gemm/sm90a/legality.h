// What the Hopper GEMMs can take, as host code without CUDA: the planner asks before it chooses one, and the launcher
// asks again. Everything here follows from what the copy engine's tensor maps can express (cuTensorMapEncodeTiled).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::sm90a {

inline constexpr std::int64_t kTmaAlignment = 16;                       // bytes, of the base and of strides
inline constexpr std::int64_t kTmaStrideLimit = std::int64_t{1} << 40;  // bytes
inline constexpr std::int64_t kTmaExtentLimit = std::int64_t{1} << 31;  // elements; coordinates are signed 32-bit
inline constexpr std::int64_t kGridTilesLimit = std::int64_t{1} << 31;  // tiles are counted in 32 bits

constexpr bool TmaStrideLegal(std::int64_t stride, std::int64_t element_bytes) {
  return stride > 0 && stride < kTmaStrideLimit / element_bytes && stride * element_bytes % kTmaAlignment == 0;
}

// Why a K-contiguous input of rows x k elements a matrix cannot be read through a tensor map, or nothing. The stride of
// a dimension of extent 1 is never used and may be anything; a batch stride of 0 is a dimension that the map leaves
// out.
inline std::string_view TmaIllegal(const GemmMatrix& matrix, std::size_t element_bytes, std::int64_t rows,
                                   std::int64_t k, const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) {
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  if (rows >= kTmaExtentLimit || k >= kTmaExtentLimit) return "an extent is 2^31 or more";
  if (k > 1 && matrix.col_stride != 1) return "not contiguous along K";
  if (reinterpret_cast<std::uintptr_t>(matrix.data) % kTmaAlignment != 0) return "base is not aligned to 16 bytes";
  if (rows > 1 && !TmaStrideLegal(matrix.row_stride, bytes)) {
    return "row stride is not a positive multiple of 16 bytes below 2^40";
  }
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    if (batch_shape[i] >= kTmaExtentLimit) return "an extent is 2^31 or more";
    if (batch_shape[i] > 1 && matrix.batch_stride[i] != 0 && !TmaStrideLegal(matrix.batch_stride[i], bytes)) {
      return "batch stride is not a positive multiple of 16 bytes below 2^40";
    }
  }
  return {};
}

// Tiles of the whole problem, or kGridTilesLimit if there are that many or more.
constexpr std::int64_t CountTiles(const GemmParams& params, std::int64_t tile_m, std::int64_t tile_n) {
  const std::int64_t factors[] = {(params.m + tile_m - 1) / tile_m, (params.n + tile_n - 1) / tile_n,
                                  params.batch_shape[0], params.batch_shape[1], params.batch_shape[2]};
  std::int64_t tiles = 1;
  for (const std::int64_t factor : factors) {
    if (factor == 0) return 0;
    if (factor >= kGridTilesLimit) tiles = kGridTilesLimit;
    if (tiles < kGridTilesLimit) tiles = tiles * factor < kGridTilesLimit ? tiles * factor : kGridTilesLimit;
  }
  return tiles;
}

// Why a kernel with these tiles cannot compute the problem, or nothing. Of inputs that have no elements or no use
// nothing is asked.
inline std::string_view GemmIllegal(const GemmParams& params, std::size_t a_bytes, std::size_t b_bytes,
                                    std::int64_t tile_m, std::int64_t tile_n) {
  if (params.m < 0 || params.n < 0 || params.k < 0) return "a negative extent";
  for (const std::int64_t extent : params.batch_shape) {
    if (extent < 0) return "a negative extent";
  }
  if (params.m >= kTmaExtentLimit || params.n >= kTmaExtentLimit) return "an extent is 2^31 or more";
  const std::int64_t tiles = CountTiles(params, tile_m, tile_n);
  if (tiles >= kGridTilesLimit) return "2^31 tiles or more";
  if (tiles == 0 || params.k == 0) return {};
  const std::string_view a = TmaIllegal(params.a, a_bytes, params.m, params.k, params.batch_shape);
  return a.empty() ? TmaIllegal(params.b, b_bytes, params.n, params.k, params.batch_shape) : a;
}

}  // namespace tessera::kernels::sm90a
