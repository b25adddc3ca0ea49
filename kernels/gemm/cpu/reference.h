// The definition of the product, a dot product an element: no packing, any strides. Fastest where there is hardly
// anything to compute.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/gemm/cpu/element.h"
#include "kernels/gemm/cpu/epilogue.h"
#include "kernels/gemm/cpu/tasks.h"
#include "kernels/gemm/cpu/tile_shape.h"

namespace tessera::kernels::cpu {

// Rows of B that are multiplied side by side: one sum alone waits for its last addition.
inline constexpr int kSums = 8;

// sums[j] = a . b[j] over k, each added up in the order of k.
template <DType kA, DType kB, int kCount, typename Acc>
void DotProducts(const typename Element<kA>::Storage* a, std::int64_t a_stride, const typename Element<kB>::Storage* b,
                 std::int64_t b_row_stride, std::int64_t b_stride, std::int64_t k, Acc* sums) {
  Acc running[kCount] = {};
  for (std::int64_t i = 0; i < k; ++i) {
    for (int j = 0; j < kCount; ++j) {
      const auto b_bits = b[j * b_row_stride + i * b_stride];
      if constexpr (kIntegerProduct<kA, kB>) {
        running[j] += static_cast<int>(a[i * a_stride]) * static_cast<int>(b_bits);
      } else {
        running[j] += Element<kA>::Decode(a[i * a_stride]) * Element<kB>::Decode(b_bits);
      }
    }
  }
  std::copy_n(running, kCount, sums);
}

// A task is kM x kN outputs of one batch entry.
template <DType kA, DType kB, DType kOut, typename TileShape>
LaunchError Reference(const GemmParams& params, const LaunchShape& /*shape*/, const LaunchContext& context) {
  using A = typename Element<kA>::Storage;
  using B = typename Element<kB>::Storage;
  using Acc = std::conditional_t<kIntegerProduct<kA, kB>, std::int64_t, float>;
  const std::int64_t tiles_m = CeilDiv(params.m, TileShape::kM);
  const std::int64_t tiles_n = CeilDiv(params.n, TileShape::kN);
  auto tile = [&](std::int64_t task) {
    const std::int64_t batch = task / (tiles_m * tiles_n);
    const std::int64_t m_begin = task / tiles_n % tiles_m * TileShape::kM;
    const std::int64_t n_begin = task % tiles_n * TileShape::kN;
    const auto* a = static_cast<const A*>(params.a.data) + BatchOffset(params, params.a, batch);
    const auto* b = static_cast<const B*>(params.b.data) + BatchOffset(params, params.b, batch);
    const std::int64_t d_offset = BatchOffset(params, params.d, batch);
    const std::int64_t m_end = std::min<std::int64_t>(m_begin + TileShape::kM, params.m);
    const std::int64_t n_end = std::min<std::int64_t>(n_begin + TileShape::kN, params.n);
    for (std::int64_t m = m_begin; m < m_end; ++m) {
      const A* row = a + m * params.a.row_stride;
      Acc sums[kSums];
      std::int64_t n = n_begin;
      for (; n + kSums <= n_end; n += kSums) {
        DotProducts<kA, kB, kSums>(row, params.a.col_stride, b + n * params.b.row_stride, params.b.row_stride,
                                   params.b.col_stride, params.k, sums);
        StoreRow<kOut>(params, d_offset, m, n, kSums, sums);
      }
      for (; n < n_end; ++n) {
        DotProducts<kA, kB, 1>(row, params.a.col_stride, b + n * params.b.row_stride, params.b.row_stride,
                               params.b.col_stride, params.k, sums);
        StoreRow<kOut>(params, d_offset, m, n, 1, sums);
      }
    }
  };
  ForEachTask(context.parallel, BatchCount(params) * tiles_m * tiles_n, tile);
  return kLaunchOk;
}

}  // namespace tessera::kernels::cpu
