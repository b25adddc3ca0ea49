// What the Hopper GEMMs can take, as host code without CUDA: the planner asks before it chooses one, and the launcher
// asks again. Everything here follows from what the copy engine's tensor maps can express (cuTensorMapEncodeTiled).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/dtype.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::sm90a {

inline constexpr std::int64_t kTmaAlignment = 16;                       // bytes, of the base and of strides
inline constexpr std::int64_t kTmaStrideLimit = std::int64_t{1} << 40;  // bytes
inline constexpr std::int64_t kTmaExtentLimit = std::int64_t{1} << 31;  // elements; coordinates are signed 32-bit
inline constexpr std::int64_t kGridTilesLimit = std::int64_t{1} << 31;  // tiles are counted in 32 bits

// A sum of int8 products is exact in 32 bits while it has fewer than this many: each is 2^14 at most.
inline constexpr std::int64_t kInt8SumLimit = std::int64_t{1} << 17;

constexpr bool TmaStrideLegal(std::int64_t stride, std::int64_t element_bytes) {
  return stride > 0 && stride < kTmaStrideLimit / element_bytes && stride * element_bytes % kTmaAlignment == 0;
}

// Why a matrix with contiguous rows, rows x k elements, cannot be reached through a tensor map, or nothing. The stride
// of a dimension of extent 1 is never used and may be anything; a batch stride of 0 is a dimension that the map leaves
// out.
inline std::string_view TmaIllegal(const GemmMatrix& matrix, std::size_t element_bytes, std::int64_t rows,
                                   std::int64_t k, const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) {
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  if (rows >= kTmaExtentLimit || k >= kTmaExtentLimit) return "an extent is 2^31 or more";
  if (k > 1 && matrix.col_stride != 1) return "not contiguous";
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

// The same of an input of `rows` by `k`, whichever of the two its layout has contiguous.
inline std::string_view InputIllegal(const GemmMatrix& matrix, DType dtype, bool k_contiguous, std::int64_t rows,
                                     std::int64_t k, const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) {
  if (k_contiguous) return TmaIllegal(matrix, DTypeBytes(dtype), rows, k, batch_shape);
  GemmMatrix transposed = matrix;
  transposed.row_stride = matrix.col_stride;
  transposed.col_stride = matrix.row_stride;
  return TmaIllegal(transposed, DTypeBytes(dtype), k, rows, batch_shape);
}

constexpr bool AContiguousAlongK(GemmLayout layout) {
  return layout == GemmLayout::kNT || layout == GemmLayout::kNN;
}
constexpr bool BContiguousAlongK(GemmLayout layout) {
  return layout == GemmLayout::kNT || layout == GemmLayout::kTT;
}

// Why a kernel with these tiles cannot compute the problem, or nothing. Of inputs that have no elements or no use
// nothing is asked.
inline std::string_view GemmIllegal(const GemmParams& params, const GemmClass& gemm_class, std::int64_t tile_m,
                                    std::int64_t tile_n) {
  if (params.m < 0 || params.n < 0 || params.k < 0) return "a negative extent";
  for (const std::int64_t extent : params.batch_shape) {
    if (extent < 0) return "a negative extent";
  }
  if (params.m >= kTmaExtentLimit || params.n >= kTmaExtentLimit) return "an extent is 2^31 or more";
  const std::int64_t tiles = CountTiles(params, tile_m, tile_n);
  if (tiles >= kGridTilesLimit) return "2^31 tiles or more";
  if (tiles == 0 || params.k == 0) return {};
  if (gemm_class.a == DType::kS8 && gemm_class.b == DType::kS8 && params.k >= kInt8SumLimit) {
    return "K is 2^17 or more: the sum may not fit 32 bits";
  }
  const std::string_view a = InputIllegal(params.a, gemm_class.a, AContiguousAlongK(gemm_class.layout), params.m,
                                          params.k, params.batch_shape);
  if (!a.empty()) return a;
  return InputIllegal(params.b, gemm_class.b, BContiguousAlongK(gemm_class.layout), params.n, params.k,
                      params.batch_shape);
}

// The same for a kernel that packs its operands first.
inline std::string_view PackIllegal(const GemmParams& params, const GemmClass& gemm_class, std::int64_t tile_m,
                                    std::int64_t tile_n) {
  if (params.m < 0 || params.n < 0 || params.k < 0) return "a negative extent";
  for (const std::int64_t extent : params.batch_shape) {
    if (extent < 0) return "a negative extent";
    if (extent >= kTmaExtentLimit) return "an extent is 2^31 or more";
  }
  if (!PackedTakes(gemm_class, params.m, params.n, params.k)) return "an extent is too large";
  if (CountTiles(params, tile_m, tile_n) >= kGridTilesLimit) return "2^31 tiles or more";
  return {};
}

}  // namespace tessera::kernels::sm90a
