// GEMM for Hopper with a handful of rows of A and no exchange: a block has all of K for a strip of D so narrow that the
// problem has one for each multiprocessor. What a launch costs beyond reading B is then the least: no cluster to start
// together, no barrier between blocks, no sums on their way. The rows of A are the tensor core's first operand, of
// which it always takes 64 rows: what it reads behind those that are there is whatever the stage holds, and becomes
// rows of the product that nobody looks at.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/device/grid_order.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/tensor_map.h"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/device/wgmma_product.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/launch.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/main_loop.cuh"
#include "kernels/gemm/sm90a/operand.cuh"
#include "kernels/gemm/sm90a/ring.cuh"
#include "kernels/gemm/sm90a/store_tile.cuh"
#include "kernels/gemm/sm90a/tile_walk.cuh"
#include "kernels/gemm/sm90a/wgmma_gemm.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

inline constexpr int kNarrowWarps = 4;  // that multiply; the producer is the one after them
inline constexpr int kNarrowThreads = (kNarrowWarps + 1) * 32;

// A stage is several tiles of 128 bytes of K, all of A's before all of B's.
template <DType kA, DType kB, bool kTwoLevels, typename TileShape>
struct NarrowConfig {
  using Tile = TileShape;
  using Pair = device::WgmmaPair<kA, kB>;
  using Accumulator = typename Pair::Accumulator;
  static constexpr bool kInTwoLevels = kTwoLevels;
  using A = Operand<kA, true, Tile::kM, Tile::kM>;
  using B = Operand<kB, true, Tile::kN, Tile::kN>;
  static constexpr int kPanels = Tile::kK / A::kTileK;
  using Stages = Ring<kPanels * A::kBytes, kPanels * B::kBytes, Tile::kStages, 0>;
  static constexpr int kAccumulators = device::WgmmaFragment::kRows * Tile::kN / kWarpgroupThreads;

  static_assert(Tile::kK == kPanels * A::kTileK && A::kTileK == B::kTileK, "whole swizzled rows");
  static_assert(Tile::kM == 16, "the rows of one warp");
  // Rows that the tensor core reads behind the last tile of A.
  static_assert((kPanels - 1) * A::kBytes + device::WgmmaFragment::kRows * device::kSwizzleRowBytes <=
                    Stages::kStageBytes,
                "all 64 rows of the first operand are in its stage");
};

// One thread: fills stage after stage for all tiles of the block.
template <typename Config>
__device__ __forceinline__ void ProduceNarrow(const CUtensorMap& a_map, const CUtensorMap& b_map,
                                              const GemmParams& params, const TileGrid& grid, TileIndex index,
                                              const typename Config::Stages& ring) {
  using Tile = typename Config::Tile;
  using Stages = typename Config::Stages;
  const std::uint32_t stage_bytes = Config::kPanels * (Config::A::TileBytes(params.m) + Config::B::TileBytes(params.n));
  RingPosition<Stages::kStages> at;
  for (std::uint32_t tile = blockIdx.x;;) {
    const device::TensorCoordinates a_box = BatchCoordinates(params.a, index);
    const device::TensorCoordinates b_box = BatchCoordinates(params.b, index);
    const auto a_row = static_cast<std::int32_t>(index.m * Tile::kM);
    const auto b_row = static_cast<std::int32_t>(index.n * Tile::kN);
    for (std::uint32_t k_tile = 0; k_tile < grid.k_tiles; ++k_tile) {
      const std::uint32_t full = ring.Full(at.stage);
      device::MbarrierWait(ring.Empty(at.stage), at.parity ^ 1U);
      device::MbarrierArriveExpect(full, stage_bytes);
      const auto copy_a = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
        device::TmaLoad(destination, &a_map, full, box);
      };
      const auto copy_b = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
        device::TmaLoad(destination, &b_map, full, box);
      };
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        const auto k = static_cast<std::int32_t>(k_tile * Tile::kK + panel * Config::B::kTileK);
        Config::B::Load(ring.B(at.stage) + panel * Config::B::kBytes, b_box, params.n, b_row, k, 0, Tile::kN, copy_b);
        Config::A::Load(ring.A(at.stage) + panel * Config::A::kBytes, a_box, params.m, a_row, k, 0, Tile::kM, copy_a);
      }
      at.Advance();
    }
    tile += gridDim.x;
    if (tile >= grid.tiles) return;
    index = TileAt(grid, tile);
  }
}

// The products of a stage, by its tiles of K. With two levels each of them begins at 0 in accumulators of its own.
template <typename Config, int kSets, typename Accumulator>
__device__ __forceinline__ void MultiplyNarrowStage(const typename Config::Stages& ring, int stage,
                                                    Accumulator (&acc)[kSets][Config::kAccumulators]) {
#pragma unroll
  for (int panel = 0; panel < Config::kPanels; ++panel) {
    MultiplyStage<typename Config::Pair, typename Config::A, typename Config::B>(
        ring.A(stage) + panel * Config::A::kBytes, ring.B(stage) + panel * Config::B::kBytes, kSets > 1,
        acc[panel % kSets]);
  }
}

// One tile; as MultiplyThroughout and MultiplyInTwoLevels, over stages of several tiles of K.
template <typename Config, typename Release>
__device__ __forceinline__ void MultiplyNarrow(const typename Config::Stages& ring,
                                               RingPosition<Config::Stages::kStages>& at, std::uint32_t k_tiles,
                                               const Release& release,
                                               typename Config::Accumulator (&sum)[Config::kAccumulators]) {
  using Accumulator = typename Config::Accumulator;
  if constexpr (Config::kInTwoLevels) {
#pragma unroll
    for (Accumulator& value : sum) value = 0;
    Accumulator part[Config::kPanels][Config::kAccumulators];
    for (std::uint32_t k = 0; k < k_tiles; ++k) {
      device::MbarrierWait(ring.Full(at.stage), at.parity);
      MultiplyNarrowStage<Config>(ring, at.stage, part);
      device::WgmmaWait<0>();
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) device::PinAccumulators(part[panel]);
      release(at.stage);
      at.Advance();
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
#pragma unroll
        for (int i = 0; i < Config::kAccumulators; ++i) sum[i] = __fadd_rn(sum[i], part[panel][i]);
      }
    }
  } else {
    Accumulator acc[1][Config::kAccumulators];
#pragma unroll
    for (Accumulator& value : acc[0]) value = 0;
    int previous = 0;
    for (std::uint32_t k = 0; k < k_tiles; ++k) {
      device::MbarrierWait(ring.Full(at.stage), at.parity);
      MultiplyNarrowStage<Config>(ring, at.stage, acc);
      device::WgmmaWait<Config::kPanels>();
      if (k > 0) release(previous);
      previous = at.stage;
      at.Advance();
    }
    device::WgmmaWait<0>();
    device::PinAccumulators(acc[0]);
    if (k_tiles > 0) release(previous);
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) sum[i] = acc[0][i];
  }
}

// The four warps that multiply; the first has the rows that are there, and stores them.
template <typename Config>
__device__ __forceinline__ void ConsumeNarrow(const GemmParams& params, const TileGrid& grid, TileIndex index,
                                              StorePath path, const typename Config::Stages& ring, int warp) {
  using Fragment = device::WgmmaFragment;
  using Tile = typename Config::Tile;
  using Stages = typename Config::Stages;
  const bool first_lane = threadIdx.x % 32 == 0;
  const auto release = [&](int stage) {
    if (first_lane) device::MbarrierArrive(ring.Empty(stage));
  };
  const Factors factors(params);
  RingPosition<Stages::kStages> at;
  for (std::uint32_t tile = blockIdx.x;;) {
    typename Config::Accumulator sum[Config::kAccumulators];
    MultiplyNarrow<Config>(ring, at, grid.k_tiles, release, sum);
    if (warp == 0) {
      FragmentPlace place;
      for (int i = 0; i < kGemmBatchDimsMax; ++i) place.batch_offset += index.batch[i] * params.d.batch_stride[i];
      place.row = std::int64_t{index.m} * Tile::kM + Fragment::FirstRow(threadIdx.x);
      place.column = std::int64_t{index.n} * Tile::kN + Fragment::FirstColumn(threadIdx.x);
      place.rows = static_cast<int>(params.m - place.row);
      place.columns = static_cast<int>(params.n - place.column);
      float value[Config::kAccumulators];
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) value[i] = static_cast<float>(sum[i]);
      FinishFragment(params, factors, place, value);
      if (path == StorePath::kBf16Elements) {
        StoreElements<DType::kBf16>(params, place, value);
      } else if (path == StorePath::kF32Pairs) {
        StoreFloatPairs(params, place, value);
      } else {
        StoreElements<DType::kF32>(params, place, value);
      }
    }
    tile += gridDim.x;
    if (tile >= grid.tiles) return;
    index = TileAt(grid, tile);
  }
}

template <typename Config>
__global__ void __launch_bounds__(kNarrowThreads, 1)
    NarrowGemmKernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                     const __grid_constant__ GemmParams params, const __grid_constant__ TileGrid grid,
                     const StorePath path) {
  using Stages = typename Config::Stages;
  extern __shared__ unsigned char dynamic_shared[];
  const Stages ring(dynamic_shared);
  // The producer's first copies would wait for the maps; they are the launch's own, so no grid ahead writes them.
  if (threadIdx.x == kNarrowWarps * 32 && grid.k_tiles > 0) {
    device::PrefetchTensorMap(&a_map);
    device::PrefetchTensorMap(&b_map);
  }
  if (threadIdx.x == 0) {
    ring.Init(kNarrowWarps);
    device::FenceMbarrierInit();
  }
  const TileIndex first = TileAt(grid, blockIdx.x);
  __syncthreads();
  device::WaitForGridAhead();
  // Read from one lane, so that the compiler sees that a warp has one role.
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kNarrowWarps) {
    ConsumeNarrow<Config>(params, grid, first, path, ring, warp);
  } else if (device::ElectOne()) {
    ProduceNarrow<Config>(a_map, b_map, params, grid, first, ring);
    device::LetNextGridStart();
  }
}

template <DType kA, DType kB, DType kOut, Accumulation kAccumulation, GemmLayout kLayout, typename Tile>
struct NarrowGemm {
  static_assert(kLayout == GemmLayout::kNT, "32 rows of B are no panel");
  // As in SliceGemm: both accumulations of fp8 are the exact one.
  using Config = NarrowConfig<kA, kB, HasAccumulationChoice(kA, kB), Tile>;

  static cudaError_t Prepare(KernelFacts& facts) {
    return PrepareKernel(&NarrowGemmKernel<Config>, Config::Stages::kSharedBytes, kNarrowThreads, facts);
  }

  static cudaError_t Launch(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    constexpr GemmClass kClass = {.a = kA, .b = kB, .out = kOut, .accumulation = kAccumulation, .layout = kLayout};
    if (shape.split != 1 || shape.raster < 0) return cudaErrorInvalidValue;
    if (!GemmIllegal(params, kClass, Tile::kM, Tile::kN).empty()) return cudaErrorInvalidValue;
    // By default all tiles of M of one column after another, so that B is read once.
    const std::uint32_t raster = shape.raster == 0 ? kGridTilesLimit - 1 : static_cast<std::uint32_t>(shape.raster);
    const TileGrid grid = GridOf(params, Tile::kM, Tile::kN, Tile::kK, raster);
    if (grid.tiles == 0) return cudaSuccess;
    CUtensorMap a_map = {};
    CUtensorMap b_map = {};
    if (grid.k_tiles > 0) {
      cudaError_t error =
          device::FindTensorMap(Config::A::Map(params.a, params.m, params.k, params.batch_shape), a_map);
      if (error != cudaSuccess) return error;
      error = device::FindTensorMap(Config::B::Map(params.b, params.n, params.k, params.batch_shape), b_map);
      if (error != cudaSuccess) return error;
    }
    // Of bf16, so few elements gain nothing from the copy engine.
    const StorePath path = kOut == DType::kBf16 ? StorePath::kBf16Elements : StorePathOf(kOut, params);
    const GridShape launch = {
        .units = grid.tiles, .threads = kNarrowThreads, .shared_bytes = Config::Stages::kSharedBytes};
    return LaunchPersistent(&NarrowGemmKernel<Config>, launch, context.stream, a_map, b_map, params, grid, path);
  }
};

}  // namespace tessera::kernels::sm90a
