// GEMM for Hopper with few rows of A, where what counts is to read B, the weights, as fast as memory gives them. The
// operands change places: 64 rows of B a warpgroup are the tensor core's first operand, of which it always takes 64,
// and the rows of A its second, of which it takes as few as 16. All multiprocessors read: the blocks of a cluster take
// a slice of K each of the same tile of D, and add up through each other's shared memory, in the order of the slices,
// so that the result does not depend on who came first.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/device/cluster.cuh"
#include "kernels/device/grid_order.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/tensor_map.h"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/device/wgmma_product.cuh"
#include "kernels/gemm/cuda/epilogue.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/launch.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/main_loop.cuh"
#include "kernels/gemm/sm90a/operand.cuh"
#include "kernels/gemm/sm90a/ring.cuh"
#include "kernels/gemm/sm90a/tile_walk.cuh"
#include "kernels/gemm/sm90a/wgmma_gemm.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

// Partial sums of a tile on their way to the block that adds them: block r of S has columns [r C, (r + 1) C) of D, with
// C = kColumns / S, and receives [slice][row of D][column] from all slices. Lines are 4 words longer than C, so that
// the 8 columns and 4 pairs of rows of a warp's store lie in 32 banks.
template <int kTileRows, int kTileColumns>
struct Exchange {
  static constexpr int kRows = kTileRows;        // of D
  static constexpr int kColumns = kTileColumns;  // of D, of all blocks together
  static constexpr int kPadding = 4;
  static constexpr std::uint32_t kBytes = kRows * (kColumns + kClusterLimit * kPadding) * 4;
};

template <DType kA, DType kB, GemmLayout kLayout, bool kTwoLevels, typename TileShape>
struct SliceConfig {
  using Tile = TileShape;
  using Pair = device::WgmmaPair<kB, kA, !BContiguousAlongK(kLayout)>;  // B first
  using Accumulator = typename Pair::Accumulator;
  static constexpr bool kInTwoLevels = kTwoLevels;
  using A = Operand<kA, true, Tile::kM, Tile::kM>;
  using B = Operand<kB, BContiguousAlongK(kLayout), Tile::kN, Tile::kN>;
  using Sums = Exchange<Tile::kM, Tile::kN>;
  using Stages = Ring<B::kBytes, A::kBytes, Tile::kStages, Sums::kBytes>;
  static constexpr int kAccumulators = device::WgmmaFragment::kRows * Tile::kM / kWarpgroupThreads;

  static_assert(Tile::kN == kConsumers * device::WgmmaFragment::kRows, "64 rows of B a consumer");
  static_assert(Tile::kK == A::kTileK && Tile::kK == B::kTileK, "a step of K is one swizzled row");
};

// The slice of K of one block, in steps.
struct Slice {
  std::uint32_t first;
  std::uint32_t count;
};

__device__ __forceinline__ Slice SliceOf(std::uint32_t k_tiles, const ClusterPlace& cluster) {
  const auto cut = [&](std::uint32_t slice) {
    return static_cast<std::uint32_t>(std::uint64_t{k_tiles} * slice / cluster.blocks);
  };
  const std::uint32_t first = cut(cluster.rank);
  return {.first = first, .count = cut(cluster.rank + 1) - first};
}

// One thread: fills stage after stage with the block's slice of all tiles.
template <typename Config>
__device__ __forceinline__ void ProduceSlices(const CUtensorMap& a_map, const CUtensorMap& b_map,
                                              const GemmParams& params, const TileGrid& grid,
                                              const ClusterPlace& cluster, const typename Config::Stages& ring) {
  using Tile = typename Config::Tile;
  using Stages = typename Config::Stages;
  if (grid.k_tiles == 0) return;  // there are no maps then
  const Slice slice = SliceOf(grid.k_tiles, cluster);
  RingPosition<Stages::kStages> at;
  const std::uint32_t step = gridDim.x / cluster.blocks;
  for (std::uint32_t tile = blockIdx.x / cluster.blocks; tile < grid.tiles; tile += step) {
    const TileIndex index = TileAt(grid, tile);
    const device::TensorCoordinates a_box = BatchCoordinates(params.a, index);
    const device::TensorCoordinates b_box = BatchCoordinates(params.b, index);
    const auto a_row = static_cast<std::int32_t>(index.m * Tile::kM);
    const auto b_row = static_cast<std::int32_t>(index.n * Tile::kN);
    for (std::uint32_t i = 0; i < slice.count; ++i) {
      const auto k = static_cast<std::int32_t>((slice.first + i) * Tile::kK);
      const std::uint32_t full = ring.Full(at.stage);
      device::MbarrierWait(ring.Empty(at.stage), at.parity ^ 1U);
      device::MbarrierArriveExpect(full, Stages::kStageBytes);
      const auto copy_b = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
        device::TmaLoad(destination, &b_map, full, box);
      };
      const auto copy_a = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
        device::TmaLoad(destination, &a_map, full, box);
      };
      Config::B::Load(ring.A(at.stage), b_box, b_row, k, 0, Tile::kN, copy_b);
      Config::A::Load(ring.B(at.stage), a_box, a_row, k, 0, Tile::kM, copy_a);
      at.Advance();
    }
  }
}

// Reads one partial sum of our own shared memory.
template <typename Accumulator>
__device__ __forceinline__ Accumulator LoadSum(std::uint32_t address) {
  const std::uint32_t word = device::LoadSharedWord(address);
  if constexpr (std::is_same_v<Accumulator, float>) {
    return __uint_as_float(word);
  } else {
    return static_cast<Accumulator>(word);
  }
}

__device__ __forceinline__ std::uint32_t WordOf(float value) {
  return __float_as_uint(value);
}
__device__ __forceinline__ std::uint32_t WordOf(std::int32_t value) {
  return static_cast<std::uint32_t>(value);
}

// The consumers' side of the exchange. Two barriers a block: `arrived` counts the bytes that were sent here, from every
// slice; `read` counts the warps of every block that have added up what they received, after which the next tile may be
// sent.
template <typename Config>
class SliceSums {
 public:
  using Accumulator = typename Config::Accumulator;
  using Sums = typename Config::Sums;

  __device__ __forceinline__ SliceSums(const typename Config::Stages& ring, const ClusterPlace& cluster)
      : area_(ring.Area()), arrived_(ring.Other(0)), read_(ring.Other(1)), cluster_(cluster) {
    columns_ = Sums::kColumns / cluster.blocks;
    line_bytes_ = (columns_ + Sums::kPadding) * 4;
  }

  // One thread, as Ring::Init.
  static __device__ __forceinline__ void Init(const typename Config::Stages& ring, const ClusterPlace& cluster) {
    device::MbarrierInit(ring.Other(0), 1);
    device::MbarrierInit(ring.Other(1), kConsumerWarps * cluster.blocks);
  }

  // `rows`: of D in this tile. The 16 columns of a warp go to one block, as a block has 16 or more.
  __device__ __forceinline__ void Send(const Accumulator (&acc)[Config::kAccumulators], int warp, int rows) const {
    using Fragment = device::WgmmaFragment;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t column = warp * 16;  // of the tile
    const std::uint32_t target = column / columns_;
    if (threadIdx.x == 0) device::MbarrierArriveExpect(arrived_, rows * Sums::kColumns * 4);
    device::MbarrierWait(read_, parity_ ^ 1U);
    const std::uint32_t line = cluster_.rank * Sums::kRows * line_bytes_;
    const std::uint32_t base = device::InBlock(area_ + line + (column - target * columns_ + lane / 4) * 4, target);
    const std::uint32_t arrived = device::InBlock(arrived_, target);
    const int first = Fragment::FirstColumn(lane);
#pragma unroll
    for (int pair = 0; pair < Config::kAccumulators / 4; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first + pair * Fragment::kColumnStep + i;
        if (row >= rows) continue;
#pragma unroll
        for (int r = 0; r < Fragment::kRowPairs; ++r) {
          device::SendToBlock(base + row * line_bytes_ + r * Fragment::kRowStep * 4,
                              WordOf(acc[Fragment::Index(r, pair, i)]), arrived);
        }
      }
    }
  }

  // Adds the slices in order and calls finish(row, column, sum) for the block's part of the tile; row and column count
  // from the tile's first. All consumer threads; neighbours have neighbouring columns.
  template <typename Finish>
  __device__ __forceinline__ void Receive(int rows, bool last, const Finish& finish) {
    const std::uint32_t column = threadIdx.x % columns_;
    const std::uint32_t first_row = threadIdx.x / columns_;
    const std::uint32_t row_step = kConsumers * kWarpgroupThreads / columns_;
    const std::uint32_t slice_bytes = Sums::kRows * line_bytes_;
    device::MbarrierWait(arrived_, parity_);
    for (std::uint32_t row = first_row; row < static_cast<std::uint32_t>(rows); row += row_step) {
      const std::uint32_t at = area_ + row * line_bytes_ + column * 4;
      Accumulator sum = LoadSum<Accumulator>(at);
      for (std::uint32_t slice = 1; slice < cluster_.blocks; ++slice) {
        sum += LoadSum<Accumulator>(at + slice * slice_bytes);
      }
      finish(row, cluster_.rank * columns_ + column, sum);
    }
    __syncwarp();
    const std::uint32_t lane = threadIdx.x % 32;
    // Nobody waits for the last ones, which might come when their block has gone.
    if (!last && lane < cluster_.blocks) device::MbarrierArriveInBlock(device::InBlock(read_, lane));
    parity_ ^= 1U;
  }

 private:
  std::uint32_t area_;
  std::uint32_t arrived_;
  std::uint32_t read_;
  ClusterPlace cluster_;
  std::uint32_t columns_;  // of a block
  std::uint32_t line_bytes_;
  std::uint32_t parity_ = 0;  // of this tile's phase of `arrived`
};

// The block's part of one tile of D.
template <typename Config>
__device__ __forceinline__ void StoreSums(const GemmParams& params, const TileIndex& index, DType out,
                                          bool last, SliceSums<Config>& sums) {
  using Tile = typename Config::Tile;
  const std::int64_t m0 = std::int64_t{index.m} * Tile::kM;
  const std::int64_t n0 = std::int64_t{index.n} * Tile::kN;
  const int rows = static_cast<int>(min(params.m - m0, std::int64_t{Tile::kM}));
  std::int64_t batch_offset = 0;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) batch_offset += index.batch[i] * params.d.batch_stride[i];
  sums.Receive(rows, last, [&](std::uint32_t row, std::uint32_t column, typename Config::Accumulator sum) {
    const std::int64_t m = m0 + row;
    const std::int64_t n = n0 + column;
    if (n >= params.n) return;
    const float value = cuda::Finish(params, m, n, static_cast<float>(sum));
    const std::int64_t at = batch_offset + m * params.d.row_stride + n * params.d.col_stride;
    if (out == DType::kBf16) {
      using Out = cuda::Output<DType::kBf16>;
      static_cast<Out::Element*>(params.d.data)[at] = Out::Round(value);
    } else {
      static_cast<float*>(params.d.data)[at] = value;
    }
  });
}

// One consumer warpgroup: its part of all tiles of the cluster.
template <typename Config>
__device__ __forceinline__ void ConsumeSlices(const GemmParams& params, const TileGrid& grid, DType out,
                                              const ClusterPlace& cluster, const typename Config::Stages& ring,
                                              int warp) {
  using Pair = typename Config::Pair;
  using Stages = typename Config::Stages;
  using Tile = typename Config::Tile;
  const std::uint32_t offset = warp / 4 * device::WgmmaFragment::kRows * device::kSwizzleRowBytes;
  const bool first_lane = threadIdx.x % 32 == 0;
  const auto release = [&](int stage) {
    if (first_lane) device::MbarrierArrive(ring.Empty(stage));
  };
  const Slice slice = SliceOf(grid.k_tiles, cluster);
  SliceSums<Config> sums(ring, cluster);
  RingPosition<Stages::kStages> at;
  const std::uint32_t step = gridDim.x / cluster.blocks;
  for (std::uint32_t tile = blockIdx.x / cluster.blocks; tile < grid.tiles; tile += step) {
    typename Config::Accumulator acc[Config::kAccumulators];
    if constexpr (Config::kInTwoLevels) {
      MultiplyInTwoLevels<Pair, typename Config::B, typename Config::A>(ring, at, offset, slice.count, release, acc);
    } else {
      MultiplyThroughout<Pair, typename Config::B, typename Config::A>(ring, at, offset, slice.count, release, acc);
    }
    const TileIndex index = TileAt(grid, tile);
    const std::int64_t rows = params.m - std::int64_t{index.m} * Tile::kM;
    sums.Send(acc, warp, static_cast<int>(min(rows, std::int64_t{Tile::kM})));
    StoreSums<Config>(params, index, out, /*last=*/tile + step >= grid.tiles, sums);
  }
}

template <typename Config>
__global__ void __launch_bounds__(kBlockThreads, 1)
    SliceGemmKernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ GemmParams params, const __grid_constant__ TileGrid grid, const DType out) {
  extern __shared__ unsigned char dynamic_shared[];
  const typename Config::Stages ring(dynamic_shared);
  const ClusterPlace cluster = {.rank = device::ClusterRank(), .blocks = device::ClusterBlocks()};
  // The producer's first copies would wait for the maps; they are the launch's own, so no grid ahead writes them.
  if (threadIdx.x == kConsumers * kWarpgroupThreads && grid.k_tiles > 0) {
    device::PrefetchTensorMap(&a_map);
    device::PrefetchTensorMap(&b_map);
  }
  if (threadIdx.x == 0) {
    ring.Init(kConsumerWarps);
    SliceSums<Config>::Init(ring, cluster);
    device::FenceMbarrierInit();
  }
  __syncwarp();
  // Before a block sends sums, the other must have its barriers.
  device::ClusterBarrier();
  device::WaitForGridAhead();
  // Read from one lane, so that the compiler sees that a warp has one role.
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kConsumerWarps) {
    device::RaiseRegisters<kConsumerRegisters>();
    ConsumeSlices<Config>(params, grid, out, cluster, ring, warp);
  } else {
    device::LowerRegisters<kProducerRegisters>();
    if (warp == kConsumerWarps && device::ElectOne()) {
      ProduceSlices<Config>(a_map, b_map, params, grid, cluster, ring);
      device::LetNextGridStart();
    }
  }
  __syncwarp();  // the producer's warp has gone two ways
  // A block's shared memory stays until the others have sent their last arrival.
  device::ClusterBarrier();
}

template <DType kA, DType kB, DType kOut, Accumulation kAccumulation, GemmLayout kLayout, typename Tile>
struct SliceGemm {
  static_assert(AContiguousAlongK(kLayout), "16 rows of A are no panel");
  // Where reading B is what takes time, moving fp8 sums to float32 costs none: both accumulations are the exact one.
  using Config = SliceConfig<kA, kB, kLayout, HasAccumulationChoice(kA, kB), Tile>;

  static cudaError_t Prepare(KernelFacts& facts) {
    return PrepareKernel(&SliceGemmKernel<Config>, Config::Stages::kSharedBytes, kBlockThreads, facts);
  }

  static cudaError_t Launch(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    constexpr GemmClass kClass = {.a = kA, .b = kB, .out = kOut, .accumulation = kAccumulation, .layout = kLayout};
    if (!LegalClusterSplit(shape.split) || shape.raster < 0) return cudaErrorInvalidValue;
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
    const GridShape launch = {.units = grid.tiles,
                              .cluster = static_cast<std::uint32_t>(shape.split),
                              .threads = kBlockThreads,
                              .shared_bytes = Config::Stages::kSharedBytes};
    return LaunchPersistent(&SliceGemmKernel<Config>, launch, context.stream, a_map, b_map, params, grid, kOut);
  }
};

}  // namespace tessera::kernels::sm90a
