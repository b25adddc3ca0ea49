// K cut into slices: a task is one tile of one slice, its accumulators go to the workspace, and a second pass sums the
// slices in slice order, so that the result depends on the plan and never on the threads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/gemm/cpu/epilogue.h"
#include "kernels/gemm/cpu/tile.h"

namespace tessera::kernels::cpu {

// First K of slice `index`; slices are whole K blocks, late ones may be empty.
template <typename TileShape>
std::int64_t SliceBegin(std::int64_t k, int split, std::int64_t index) {
  const std::int64_t blocks = CeilDiv(CeilDiv(k, TileShape::kK), split);
  return std::min(k, index * blocks * TileShape::kK);
}

// Workspace: (split, batch, M, N) accumulators.
template <DType kA, DType kB, typename TileShape, typename Acc>
void ComputeSlices(const GemmParams& params, int split, const HostParallel& parallel, Acc* partials) {
  const std::int64_t tiles_m = CeilDiv(params.m, TileShape::kM);
  const std::int64_t tiles_n = CeilDiv(params.n, TileShape::kN);
  const std::int64_t batches = BatchCount(params);
  auto slice_tile = [&](std::int64_t task) {
    const std::int64_t slice = task / (batches * tiles_m * tiles_n);
    TileRange range{.batch = task / (tiles_m * tiles_n) % batches,
                    .m = task / tiles_n % tiles_m * TileShape::kM,
                    .n = task % tiles_n * TileShape::kN,
                    .k_begin = SliceBegin<TileShape>(params.k, split, slice),
                    .k_end = SliceBegin<TileShape>(params.k, split, slice + 1)};
    range.rows = static_cast<int>(std::min<std::int64_t>(TileShape::kM, params.m - range.m));
    range.cols = static_cast<int>(std::min<std::int64_t>(TileShape::kN, params.n - range.n));
    const auto* acc = ComputeTile<kA, kB, TileShape>(params, range);
    for (int row = 0; row < range.rows; ++row) {
      Acc* out = partials + ((slice * batches + range.batch) * params.m + range.m + row) * params.n + range.n;
      std::copy_n(acc + row * TileShape::kN, range.cols, out);
    }
  };
  ForEachTask(parallel, split * batches * tiles_m * tiles_n, slice_tile);
}

template <DType kOut, typename Acc>
void ReduceSlices(const GemmParams& params, int split, const HostParallel& parallel, Acc* partials) {
  const std::int64_t batches = BatchCount(params);
  const std::int64_t slice_pitch = batches * params.m * params.n;
  auto row_sum = [&](std::int64_t row) {
    Acc* sum = partials + row * params.n;  // slice 0's row becomes the sum
    for (int slice = 1; slice < split; ++slice) {
      const Acc* partial = sum + slice * slice_pitch;
      for (std::int64_t n = 0; n < params.n; ++n) sum[n] += partial[n];
    }
    StoreRow<kOut>(params, BatchOffset(params, params.d, row / params.m), row % params.m, 0, params.n, sum);
  };
  ForEachTask(parallel, batches * params.m, row_sum);
}

template <DType kA, DType kB, DType kOut, typename TileShape>
LaunchError SplitK(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
  using Acc = std::conditional_t<kIntegerProduct<kA, kB>, std::int64_t, float>;
  auto* partials = static_cast<Acc*>(context.workspace.scratch);
  ComputeSlices<kA, kB, TileShape>(params, shape.split, context.parallel, partials);
  ReduceSlices<kOut>(params, shape.split, context.parallel, partials);
  return kLaunchOk;
}

}  // namespace tessera::kernels::cpu
