// The definition of the product, a dot product an element, any strides. Fastest where there is hardly anything to
// compute.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/gemm/cpu/element.h"
#include "kernels/gemm/cpu/epilogue.h"
#include "kernels/gemm/cpu/tasks.h"
#include "kernels/gemm/cpu/tile_shape.h"

namespace tessera::kernels::cpu {

// Rows of B that are multiplied side by side: one sum alone waits for its last addition, and eight fill vectors.
inline constexpr int kSums = 8;

// An operand's element, for exact sums of integers or sums of floats.
template <DType kType, typename Value>
Value DecodeAs(typename Element<kType>::Storage bits) {
  if constexpr (std::is_same_v<Value, int>) {
    return static_cast<int>(bits);
  } else {
    return Element<kType>::Decode(bits);
  }
}

// Of K, between two looks at B: each of its elements is decoded once for all rows of a task, into a panel on the stack.
inline constexpr std::int64_t kPanelK = 256;

// panel[i][j] = B[n + j, k + i], 0 beyond `count` rows.
template <DType kB, typename Value>
void DecodePanel(const GemmMatrix& matrix, const typename Element<kB>::Storage* b, int count, std::int64_t k_count,
                 Value (*panel)[kSums]) {
  for (int j = 0; j < kSums; ++j) {
    for (std::int64_t i = 0; i < k_count; ++i) {
      panel[i][j] = j < count ? DecodeAs<kB, Value>(b[j * matrix.row_stride + i * matrix.col_stride]) : Value{};
    }
  }
}

// sums[j] += a . panel[.][j], each added up in the order of k.
template <DType kA, typename Value, typename Acc>
void AddDotProducts(const typename Element<kA>::Storage* a, std::int64_t a_stride, const Value (*panel)[kSums],
                    std::int64_t k_count, Acc* sums) {
  Acc running[kSums];
  std::copy_n(sums, kSums, running);
  for (std::int64_t i = 0; i < k_count; ++i) {
    const Value a_value = DecodeAs<kA, Value>(a[i * a_stride]);
    for (int j = 0; j < kSums; ++j) running[j] += a_value * panel[i][j];
  }
  std::copy_n(running, kSums, sums);
}

// A task is kM x kN outputs of one batch entry.
template <DType kA, DType kB, DType kOut, typename TileShape>
LaunchError Reference(const GemmParams& params, const LaunchShape& /*shape*/, const LaunchContext& context) {
  using A = typename Element<kA>::Storage;
  using B = typename Element<kB>::Storage;
  using Acc = std::conditional_t<kIntegerProduct<kA, kB>, std::int64_t, float>;
  using Value = std::conditional_t<kIntegerProduct<kA, kB>, int, float>;  // a product of two is exact
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
    for (std::int64_t n = n_begin; n < n_end; n += kSums) {
      const int count = static_cast<int>(std::min<std::int64_t>(kSums, n_end - n));
      Acc sums[TileShape::kM][kSums] = {};
      for (std::int64_t k = 0; k < params.k; k += kPanelK) {
        Value panel[kPanelK][kSums];
        const std::int64_t k_count = std::min(kPanelK, params.k - k);
        DecodePanel<kB>(params.b, b + n * params.b.row_stride + k * params.b.col_stride, count, k_count, panel);
        for (std::int64_t m = m_begin; m < m_end; ++m) {
          const A* row = a + m * params.a.row_stride + k * params.a.col_stride;
          AddDotProducts<kA>(row, params.a.col_stride, panel, k_count, sums[m - m_begin]);
        }
      }
      for (std::int64_t m = m_begin; m < m_end; ++m) {
        StoreRow<kOut>(params, d_offset, m, n, count, sums[m - m_begin]);
      }
    }
  };
  ForEachTask(context.parallel, BatchCount(params) * tiles_m * tiles_n, tile);
  return kLaunchOk;
}

}  // namespace tessera::kernels::cpu
