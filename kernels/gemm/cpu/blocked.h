// Packed and register-tiled: a task is one output tile over the whole of K.
#pragma once

#include <algorithm>

#include "kernels/gemm/cpu/epilogue.h"
#include "kernels/gemm/cpu/tile.h"

namespace tessera::kernels::cpu {

template <DType kA, DType kB, DType kOut, typename TileShape>
LaunchError Blocked(const GemmParams& params, const LaunchShape& /*shape*/, const LaunchContext& context) {
  const std::int64_t tiles_m = CeilDiv(params.m, TileShape::kM);
  const std::int64_t tiles_n = CeilDiv(params.n, TileShape::kN);
  auto tile = [&](std::int64_t task) {
    TileRange range{.batch = task / (tiles_m * tiles_n),
                    .m = task / tiles_n % tiles_m * TileShape::kM,
                    .n = task % tiles_n * TileShape::kN,
                    .k_end = params.k};
    range.rows = static_cast<int>(std::min<std::int64_t>(TileShape::kM, params.m - range.m));
    range.cols = static_cast<int>(std::min<std::int64_t>(TileShape::kN, params.n - range.n));
    const auto* acc = ComputeTile<kA, kB, TileShape>(params, range);
    const std::int64_t d_offset = BatchOffset(params, params.d, range.batch);
    for (int row = 0; row < range.rows; ++row) {
      StoreRow<kOut>(params, d_offset, range.m + row, range.n, range.cols, acc + row * TileShape::kN);
    }
  };
  ForEachTask(context.parallel, BatchCount(params) * tiles_m * tiles_n, tile);
  return kLaunchOk;
}

}  // namespace tessera::kernels::cpu
