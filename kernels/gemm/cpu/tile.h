// One output tile over a range of K, shared by the packed CPU variants: decode both operands into float32 panels, run
// the microkernel over them, leave accumulators behind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "kernels/gemm/cpu/element.h"
#include "kernels/gemm/cpu/microkernel.h"
#include "kernels/gemm/cpu/tasks.h"
#include "kernels/gemm/cpu/tile_shape.h"

namespace tessera::kernels::cpu {

inline constexpr int kPanelElementsMax = 96 * 512;
inline constexpr int kTileElementsMax = 96 * 96;

// Working memory of one thread; every variant fits (asserted in ComputeTile).
struct TileBuffers {
  alignas(64) float a_panel[kPanelElementsMax];            // (kM / kMicroM, kK, kMicroM)
  alignas(64) float b_panel[kPanelElementsMax];            // (kN / kMicroN, kK, kMicroN)
  alignas(64) float product[kTileElementsMax];             // (kM, kN)
  alignas(64) std::int64_t integer_sum[kTileElementsMax];  // (kM, kN)
};

// On the heap: half a megabyte has no place in every thread's static storage.
inline TileBuffers& ThreadTileBuffers() {
  static thread_local const std::unique_ptr<TileBuffers> buffers = std::make_unique<TileBuffers>();
  return *buffers;
}

// rows x depth elements of a strided operand -> panels of kWidth rows, depth-major inside a panel; rows past the end
// are zero, so that the microkernel needs no edge case.
template <DType kType, int kWidth>
void PackPanels(const typename Element<kType>::Storage* source, std::int64_t row_stride, std::int64_t depth_stride,
                int rows, int depth, float* panels) {
  for (int panel = 0; panel < rows; panel += kWidth) {
    const int width = std::min(kWidth, rows - panel);
    float* out = panels + static_cast<std::int64_t>(panel) * depth;
    if (width < kWidth) std::fill(out, out + kWidth * depth, 0.0F);
    const auto* in = source + panel * row_stride;
    if (depth_stride == 1) {  // walk memory in its own order
      for (int row = 0; row < width; ++row) {
        for (int p = 0; p < depth; ++p) out[p * kWidth + row] = Element<kType>::Decode(in[row * row_stride + p]);
      }
    } else {
      for (int p = 0; p < depth; ++p) {
        for (int row = 0; row < width; ++row) {
          out[p * kWidth + row] = Element<kType>::Decode(in[row * row_stride + p * depth_stride]);
        }
      }
    }
  }
}

constexpr int RoundUp(int value, int to) {
  return (value + to - 1) / to * to;
}

// product (rows x cols, row pitch kN) += a_panel * b_panel over `depth`.
template <int kN>
void MultiplyPanels(const float* a_panel, const float* b_panel, int rows, int cols, int depth, float* product) {
  for (int j = 0; j < cols; j += kMicroN) {
    for (int i = 0; i < rows; i += kMicroM) {
      MultiplyMicroTile(a_panel + static_cast<std::int64_t>(i) * depth, b_panel + static_cast<std::int64_t>(j) * depth,
                        depth, product + i * kN + j, kN);
    }
  }
}

// What one task computes: outputs [m, m + rows) x [n, n + cols) of one batch entry over K in [k_begin, k_end).
struct TileRange {
  std::int64_t batch = 0;
  std::int64_t m = 0;
  std::int64_t n = 0;
  int rows = 0;
  int cols = 0;
  std::int64_t k_begin = 0;
  std::int64_t k_end = 0;
};

// Returns the accumulators, rows x cols with row pitch kN, valid until the thread's next tile: float, or int64 for
// integer products (float32 blocks of at most kExactIntegerK products, which are exact, summed in 64 bits).
template <DType kA, DType kB, typename TileShape>
auto* ComputeTile(const GemmParams& params, const TileRange& range) {
  constexpr bool kInteger = kIntegerProduct<kA, kB>;
  static_assert(TileShape::kM % kMicroM == 0 && TileShape::kN % kMicroN == 0, "whole microtiles");
  static_assert(TileShape::kM * TileShape::kK <= kPanelElementsMax &&
                TileShape::kN * TileShape::kK <= kPanelElementsMax);
  static_assert(TileShape::kM * TileShape::kN <= kTileElementsMax);
  static_assert(TileShape::kK <= kExactIntegerK, "an integer block must be exact in float32");

  TileBuffers& buffers = ThreadTileBuffers();
  const auto* a = static_cast<const typename Element<kA>::Storage*>(params.a.data) +
                  BatchOffset(params, params.a, range.batch) + range.m * params.a.row_stride;
  const auto* b = static_cast<const typename Element<kB>::Storage*>(params.b.data) +
                  BatchOffset(params, params.b, range.batch) + range.n * params.b.row_stride;
  const int padded_rows = RoundUp(range.rows, kMicroM);
  const int used = padded_rows * TileShape::kN;
  std::fill(buffers.product, buffers.product + used, 0.0F);
  if constexpr (kInteger) std::fill(buffers.integer_sum, buffers.integer_sum + used, 0);

  for (std::int64_t k = range.k_begin; k < range.k_end; k += TileShape::kK) {
    const int depth = static_cast<int>(std::min<std::int64_t>(TileShape::kK, range.k_end - k));
    PackPanels<kA, kMicroM>(a + k * params.a.col_stride, params.a.row_stride, params.a.col_stride, range.rows, depth,
                            buffers.a_panel);
    PackPanels<kB, kMicroN>(b + k * params.b.col_stride, params.b.row_stride, params.b.col_stride, range.cols, depth,
                            buffers.b_panel);
    MultiplyPanels<TileShape::kN>(buffers.a_panel, buffers.b_panel, range.rows, range.cols, depth, buffers.product);
    if constexpr (kInteger) {
      for (int i = 0; i < used; ++i) buffers.integer_sum[i] += static_cast<std::int64_t>(buffers.product[i]);
      std::fill(buffers.product, buffers.product + used, 0.0F);
    }
  }
  if constexpr (kInteger) {
    return buffers.integer_sum;
  } else {
    return buffers.product;
  }
}

}  // namespace tessera::kernels::cpu
