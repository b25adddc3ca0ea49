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
#include "kernels/gemm/sm90a/slice_sums.cuh"
#include "kernels/gemm/sm90a/tile_walk.cuh"
#include "kernels/gemm/sm90a/wgmma_gemm.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

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

// How D is written, found by the host.
struct SliceOutput {
  DType type;
  bool vectors;  // four neighbours of a row at once, aligned to their size
};

inline SliceOutput SliceOutputOf(DType type, const GemmParams& params) {
  constexpr std::int64_t kElements = 4;
  const std::uintptr_t bytes = kElements * DTypeBytes(type);
  bool vectors = (params.n <= 1 || params.d.col_stride == 1) &&
                 reinterpret_cast<std::uintptr_t>(params.d.data) % bytes == 0 &&
                 (params.m <= 1 || params.d.row_stride % kElements == 0);
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    if (params.batch_shape[i] > 1 && params.d.batch_stride[i] % kElements != 0) vectors = false;
  }
  return {.type = type, .vectors = vectors};
}

// Four values of a row of D; those from `columns` on are outside.
template <DType kOut>
__device__ __forceinline__ void StoreGroup(const GemmParams& params, std::int64_t at, std::int64_t columns,
                                           bool vectors, const float (&value)[4]) {
  using Out = cuda::Output<kOut>;
  auto* const d = static_cast<typename Out::Element*>(params.d.data) + at;
  if (vectors && columns >= 4) {
    struct alignas(4 * sizeof(typename Out::Element)) Group {
      typename Out::Element element[4];
    };
    *reinterpret_cast<Group*>(d) = {Out::Round(value[0]), Out::Round(value[1]), Out::Round(value[2]),
                                    Out::Round(value[3])};
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < columns) d[j * params.d.col_stride] = Out::Round(value[j]);
  }
}

// Scales and bias of the elements of a SumBlock; of those outside of D, nothing is read.
struct SumFactors {
  float a_scale[2];
  float b_scale[2][4];
  float bias[2][4];
};

__device__ __forceinline__ SumFactors FactorsAt(const GemmParams& params, std::int64_t m, std::int64_t n) {
  SumFactors factors;
#pragma unroll
  for (int i = 0; i < 2; ++i) factors.a_scale[i] = m + i < params.m ? cuda::ScaleAt(params.a_scale, m + i) : 0.0F;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t column = n + group * 8 + j;
      const bool inside = column < params.n;
      factors.b_scale[group][j] = inside ? cuda::ScaleAt(params.b_scale, column) : 0.0F;
      factors.bias[group][j] = inside && params.bias.data != nullptr ? cuda::BiasAt(params.bias, column) : 0.0F;
    }
  }
  return factors;
}

// As cuda::Finish, which adds no bias where there is none: -0 stays.
template <typename Block>
__device__ __forceinline__ void StoreBlock(const GemmParams& params, const SliceOutput& output,
                                           std::int64_t batch_offset, std::int64_t m, std::int64_t n,
                                           const SumFactors& factors, const Block& block) {
#pragma unroll
  for (int i = 0; i < Block::kRows; ++i) {
    if (m + i >= params.m) continue;
#pragma unroll
    for (int group = 0; group < Block::kGroups; ++group) {
      const std::int64_t column = n + group * Block::kGroupStep;
      float value[Block::kColumns];
#pragma unroll
      for (int j = 0; j < Block::kColumns; ++j) {
        value[j] = __fmul_rn(__fmul_rn(block.At(i, group, j), factors.a_scale[i]), factors.b_scale[group][j]);
        if (params.bias.data != nullptr) value[j] = __fadd_rn(value[j], factors.bias[group][j]);
      }
      const std::int64_t at = batch_offset + (m + i) * params.d.row_stride + column * params.d.col_stride;
      if (output.type == DType::kBf16) {
        StoreGroup<DType::kBf16>(params, at, params.n - column, output.vectors, value);
      } else {
        StoreGroup<DType::kF32>(params, at, params.n - column, output.vectors, value);
      }
    }
  }
}

// The block's part of one tile of D.
template <typename Config>
__device__ __forceinline__ void StoreSums(const GemmParams& params, const TileIndex& index, const SliceOutput& output,
                                          std::uint32_t warp, std::uint32_t rows, bool last, SliceSums<Config>& sums) {
  using Tile = typename Config::Tile;
  const std::int64_t m0 = std::int64_t{index.m} * Tile::kM;
  const std::int64_t n0 = std::int64_t{index.n} * Tile::kN;
  std::int64_t batch_offset = 0;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) batch_offset += index.batch[i] * params.d.batch_stride[i];
  sums.Receive(
      warp, rows, last,
      [&](std::uint32_t row, std::uint32_t column) { return FactorsAt(params, m0 + row, n0 + column); },
      [&](const SumFactors& factors, std::uint32_t row, std::uint32_t column,
          const typename SliceSums<Config>::Block& block) {
        StoreBlock(params, output, batch_offset, m0 + row, n0 + column, factors, block);
      });
}

// One consumer warpgroup: its part of all tiles of the cluster.
template <typename Config>
__device__ __forceinline__ void ConsumeSlices(const GemmParams& params, const TileGrid& grid, const SliceOutput& output,
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
    const auto rows =
        static_cast<std::uint32_t>(min(params.m - std::int64_t{index.m} * Tile::kM, std::int64_t{Tile::kM}));
    sums.Send(acc, warp, rows);
    StoreSums<Config>(params, index, output, warp, rows, /*last=*/tile + step >= grid.tiles, sums);
  }
}

template <typename Config>
__global__ void __launch_bounds__(kBlockThreads, 1)
    SliceGemmKernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ GemmParams params, const __grid_constant__ TileGrid grid,
                    const SliceOutput output) {
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
    ConsumeSlices<Config>(params, grid, output, cluster, ring, warp);
  } else {
    device::LowerRegisters<kProducerRegisters>();
    if (warp == kConsumerWarps && device::ElectOne()) {
      ProduceSlices<Config>(a_map, b_map, params, grid, cluster, ring);
      device::LetNextGridStart();
    }
  }
  __syncwarp();  // the producer's warp has gone two ways
  // A block's shared memory stays until what it has sent has come and the others have sent their last arrival.
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
    return LaunchPersistent(&SliceGemmKernel<Config>, launch, context.stream, a_map, b_map, params, grid,
                            SliceOutputOf(kOut, params));
  }
};

}  // namespace tessera::kernels::sm90a
