// The definition of the product, one dot product an element: no packing, any strides. Fastest where there is hardly
// anything to compute.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/gemm/cpu/element.h"
#include "kernels/gemm/cpu/epilogue.h"
#include "kernels/gemm/cpu/tasks.h"
#include "kernels/gemm/cpu/tile_shape.h"

namespace tessera::kernels::cpu {

template <DType kA, DType kB>
auto DotProduct(const typename Element<kA>::Storage* a, std::int64_t a_stride, const typename Element<kB>::Storage* b,
                std::int64_t b_stride, std::int64_t k) {
  using Acc = std::conditional_t<kIntegerProduct<kA, kB>, std::int64_t, float>;
  Acc sum = 0;
  for (std::int64_t i = 0; i < k; ++i) {
    if constexpr (kIntegerProduct<kA, kB>) {
      sum += static_cast<int>(a[i * a_stride]) * static_cast<int>(b[i * b_stride]);
    } else {
      sum += Element<kA>::Decode(a[i * a_stride]) * Element<kB>::Decode(b[i * b_stride]);
    }
  }
  return sum;
}

// A task is kM x kN outputs of one batch entry.
template <DType kA, DType kB, DType kOut, typename TileShape>
LaunchError Reference(const GemmParams& params, const LaunchShape& /*shape*/, const LaunchContext& context) {
  using A = typename Element<kA>::Storage;
  using B = typename Element<kB>::Storage;
  const std::int64_t tiles_m = CeilDiv(params.m, TileShape::kM);
  const std::int64_t tiles_n = CeilDiv(params.n, TileShape::kN);
  auto tile = [&](std::int64_t task) {
    const std::int64_t batch = task / (tiles_m * tiles_n);
    const std::int64_t m_begin = task / tiles_n % tiles_m * TileShape::kM;
    const std::int64_t n_begin = task % tiles_n * TileShape::kN;
    const auto* a = static_cast<const A*>(params.a.data) + BatchOffset(params, params.a, batch);
    const auto* b = static_cast<const B*>(params.b.data) + BatchOffset(params, params.b, batch);
    const std::int64_t d_offset = BatchOffset(params, params.d, batch);
    for (std::int64_t m = m_begin; m < std::min<std::int64_t>(m_begin + TileShape::kM, params.m); ++m) {
      for (std::int64_t n = n_begin; n < std::min<std::int64_t>(n_begin + TileShape::kN, params.n); ++n) {
        const auto sum = DotProduct<kA, kB>(a + m * params.a.row_stride, params.a.col_stride,
                                            b + n * params.b.row_stride, params.b.col_stride, params.k);
        StoreRow<kOut>(params, d_offset, m, n, 1, &sum);
      }
    }
  };
  ForEachTask(context.parallel, BatchCount(params) * tiles_m * tiles_n, tile);
  return kLaunchOk;
}

}  // namespace tessera::kernels::cpu
