// GEMM for Hopper: the copy engine feeds a ring of stages in shared memory, tensor cores read it there. A block is
// three warpgroups, of which one keeps the ring full and two multiply, 64 rows of the tile each. The grid is
// persistent: a block a multiprocessor, tile after tile, and the ring fills for the next tile while this one is being
// stored. Two blocks of a cluster compute tiles one above the other; each fetches half of the tile of B that both need,
// for both.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

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
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/launch.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/main_loop.cuh"
#include "kernels/gemm/sm90a/operand.cuh"
#include "kernels/gemm/sm90a/ring.cuh"
#include "kernels/gemm/sm90a/store_tile.cuh"
#include "kernels/gemm/sm90a/tile_walk.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

inline constexpr int kConsumers = 2;  // warpgroups; the producer is the one after them
inline constexpr int kConsumerWarps = kConsumers * kWarpgroupThreads / 32;
inline constexpr int kBlockThreads = (kConsumers + 1) * kWarpgroupThreads;
// A thread of a consumer holds up to 128 accumulators, the producer next to nothing.
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kProducerRegisters = 40;
static_assert(kWarpgroupThreads * (kConsumers * kConsumerRegisters + kProducerRegisters) <= 65536,
              "RaiseRegisters would wait for ever");

// Whether fp8 sums move to float32 as they go, for which a thread holds its accumulators twice.
constexpr bool InTwoLevels(DType a, DType b, Accumulation accumulation) {
  return HasAccumulationChoice(a, b) && accumulation == Accumulation::kExact;
}

// What a kernel is compiled for. The type of D is not part of it: both leave the same accumulators by another path.
template <DType kA, DType kB, GemmLayout kLayout, bool kTwoLevels, typename TileShape>
struct WgmmaConfig {
  using Tile = TileShape;
  using Pair = device::WgmmaPair<kA, kB, !AContiguousAlongK(kLayout), !BContiguousAlongK(kLayout)>;
  using Accumulator = typename Pair::Accumulator;
  static constexpr bool kInTwoLevels = kTwoLevels;
  // Halves of fewer columns would read shared memory faster than it gives.
  static constexpr bool kInHalves = kTwoLevels && Tile::kN >= 128;
  // Half of B's tile is the least that a block fetches of it.
  static constexpr int kHalfN = Tile::kN / 2;
  using A = Operand<kA, AContiguousAlongK(kLayout), Tile::kM, Tile::kM>;
  using B = Operand<kB, BContiguousAlongK(kLayout), Tile::kN, kHalfN>;
  using Staged = StagedStore<Tile::kN>;
  using Stages =
      Ring<A::kBytes, B::kBytes, Tile::kStages, kConsumers * Staged::kBytes + kConsumerWarps * Staged::kBoxBytes>;
  static constexpr int kAccumulators = device::WgmmaFragment::kRows * Tile::kN / kWarpgroupThreads;

  static_assert(Tile::kM == kConsumers * device::WgmmaFragment::kRows, "64 rows a consumer");
  static_assert(Tile::kK == A::kTileK && Tile::kK == B::kTileK, "a step of K is one swizzled row");
  // Whether there are registers left for a tile that waits.
  static constexpr bool kDefersStores = !kTwoLevels || kAccumulators <= 80;
  static_assert(!kTwoLevels || kAccumulators <= 96, "two sets of accumulators must fit the registers");
};

// A block's part of a cluster.
struct ClusterPlace {
  std::uint32_t rank;
  std::uint32_t blocks;  // 1 or 2
};

// The tile's first row of A and D in this block.
template <typename Config>
__device__ __forceinline__ std::int32_t RowOf(const GemmParams& params, const TileIndex& tile,
                                              const ClusterPlace& cluster) {
  return TileBegin<Config::Tile::kM, Config::A::kRowUnit>(tile.m * cluster.blocks + cluster.rank, params.m);
}

// The tile's first row of B, which is its first column of D, where 8 elements are stored at a time.
template <typename Config>
__device__ __forceinline__ std::int32_t ColumnOf(const GemmParams& params, const TileIndex& tile) {
  constexpr int kUnit = 8;
  static_assert(kUnit % Config::B::kRowUnit == 0);
  return TileBegin<Config::Tile::kN, kUnit>(tile.n, params.n);
}

// Where in an input's tensor map a tile's matrix is; rows and K are filled in as the ring goes. A batch dimension that
// the input repeats has extent 1 in its map.
__device__ __forceinline__ device::TensorCoordinates BatchCoordinates(const GemmMatrix& matrix, const TileIndex& tile) {
  device::TensorCoordinates box = {{0, 0, 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    box.at[4 - i] = matrix.batch_stride[i] == 0 ? 0 : static_cast<std::int32_t>(tile.batch[i]);
  }
  return box;
}

// One thread: fills stage after stage for all tiles of the block. A stage is free when the consumers of both blocks
// have read it, for the other block's half lands in both.
template <typename Config>
__device__ __forceinline__ void Produce(const CUtensorMap& a_map, const CUtensorMap& b_map, const GemmParams& params,
                                        const TileGrid& grid, const ClusterPlace& cluster,
                                        const typename Config::Stages& ring) {
  using Tile = typename Config::Tile;
  using Stages = typename Config::Stages;
  if (grid.k_tiles == 0) return;  // there are no maps then
  const std::uint32_t stage_bytes = Config::A::TileBytes(params.m) + Config::B::TileBytes(params.n);
  RingPosition<Stages::kStages> at;
  const std::uint32_t step = gridDim.x / cluster.blocks;
  for (std::uint32_t tile = blockIdx.x / cluster.blocks; tile < grid.tiles; tile += step) {
    const TileIndex index = TileAt(grid, tile);
    const device::TensorCoordinates a_box = BatchCoordinates(params.a, index);
    const device::TensorCoordinates b_box = BatchCoordinates(params.b, index);
    const std::int32_t a_row = RowOf<Config>(params, index, cluster);
    const std::int32_t b_row = ColumnOf<Config>(params, index);
    for (std::uint32_t k_tile = 0; k_tile < grid.k_tiles; ++k_tile) {
      const auto k = static_cast<std::int32_t>(k_tile * Tile::kK);
      const std::uint32_t full = ring.Full(at.stage);
      device::MbarrierWait(ring.Empty(at.stage), at.parity ^ 1U);
      device::MbarrierArriveExpect(full, stage_bytes);
      const auto copy_a = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
        device::TmaLoad(destination, &a_map, full, box);
      };
      Config::A::Load(ring.A(at.stage), a_box, params.m, a_row, k, 0, Tile::kM, copy_a);
      if (cluster.blocks == 1) {
        const auto copy_b = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
          device::TmaLoad(destination, &b_map, full, box);
        };
        Config::B::Load(ring.B(at.stage), b_box, params.n, b_row, k, 0, Tile::kN, copy_b);
      } else {
        const auto copy_b = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
          device::TmaLoadMulticast(destination, &b_map, full, box, 3);
        };
        Config::B::Load(ring.B(at.stage), b_box, params.n, b_row, k, cluster.rank * Config::kHalfN, Config::kHalfN,
                        copy_b);
      }
      at.Advance();
    }
  }
  // The other block's last arrivals are on their way here, and this block's memory must not go before they have come.
  for (int stage = 0; stage < Stages::kStages; ++stage) {
    device::MbarrierWait(ring.Empty(at.stage), at.parity ^ 1U);
    at.Advance();
  }
}

// What a consumer needs beside the operands.
struct OutputMap {
  const CUtensorMap* map;
  StorePath path;
};

// Where in D a warpgroup's part of a tile begins, `rows` rows into the block's: for the copy engine.
template <typename Config>
__device__ __forceinline__ device::TensorCoordinates OutputBox(const GemmParams& params, const TileIndex& index,
                                                               const ClusterPlace& cluster, std::uint32_t rows) {
  device::TensorCoordinates box = BatchCoordinates(params.d, index);
  box.at[0] = ColumnOf<Config>(params, index);
  box.at[1] = RowOf<Config>(params, index, cluster) + static_cast<std::int32_t>(rows);
  return box;
}

// The same for a thread's accumulators.
template <typename Config>
__device__ __forceinline__ FragmentPlace OutputPlace(const GemmParams& params, const TileIndex& index,
                                                     const ClusterPlace& cluster, std::uint32_t rows) {
  using Fragment = device::WgmmaFragment;
  FragmentPlace place;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) place.batch_offset += index.batch[i] * params.d.batch_stride[i];
  place.row = std::int64_t{RowOf<Config>(params, index, cluster)} + rows + Fragment::FirstRow(threadIdx.x);
  place.column = ColumnOf<Config>(params, index) + Fragment::FirstColumn(threadIdx.x);
  place.rows = static_cast<int>(params.m - place.row);
  place.columns = static_cast<int>(params.n - place.column);
  return place;
}

template <int kCount>
__device__ __forceinline__ void StoreElementwise(const GemmParams& params, const StorePath path,
                                                 const FragmentPlace& place, const float (&value)[kCount]) {
  switch (path) {
    case StorePath::kBf16Elements:
      return StoreElements<DType::kBf16>(params, place, value);
    case StorePath::kF32Pairs:
      return StoreFloatPairs(params, place, value);
    case StorePath::kF32Elements:
      return StoreElements<DType::kF32>(params, place, value);
    case StorePath::kBf16Staged:
      return;
  }
}

// One consumer warpgroup: all tiles of the block. A tile for the copy engine waits, rounded, in registers, and is
// stored block by block under the products of the next tile: both warpgroups end a tile at about the same time, and the
// tensor cores would stand still while they store.
template <typename Config>
__device__ __forceinline__ void Consume(const GemmParams& params, const TileGrid& grid, const OutputMap& output,
                                        const ClusterPlace& cluster, const typename Config::Stages& ring,
                                        int consumer) {
  using Tile = typename Config::Tile;
  using Stages = typename Config::Stages;
  using A = typename Config::A;
  using B = typename Config::B;
  using Staged = typename Config::Staged;
  const Staged staged(ring.Area() + consumer * Staged::kBytes,
                      ring.Area() + kConsumers * Staged::kBytes + threadIdx.x / 32 * Staged::kBoxBytes, output.map);
  // Lane l of each warp tells block l of the cluster.
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t empty = device::InBlock(ring.Empty(0), lane < cluster.blocks ? lane : 0);
  const auto release = [&](int stage) {
    if (lane < cluster.blocks) device::MbarrierArriveInBlock(empty + stage * device::kMbarrierBytes);
  };
  const std::uint32_t rows = consumer * device::WgmmaFragment::kRows;
  const Factors factors(params);
  RingPosition<Stages::kStages> at;
  const std::uint32_t step = gridDim.x / cluster.blocks;
  RoundedFragment<Tile::kN> waiting;
  bool waits = false;
  std::uint32_t tile = blockIdx.x / cluster.blocks;
  for (; tile < grid.tiles; tile += step) {
    // In steps that each take less time than the products of a stage: where to, then block after block.
    const auto store_waiting = [&](std::uint32_t step_of_store) {
      if (!waits || step_of_store > Staged::kBlocks) return;
      if (step_of_store > 0) {
        staged.Store(step_of_store - 1, waiting);
      } else if (lane == 0) {
        staged.SetBox(OutputBox<Config>(params, TileAt(grid, tile - step), cluster, rows));
      }
    };
    typename Config::Accumulator acc[Config::kAccumulators];
    Multiply<Config, A, B>(ring, at, rows * device::kSwizzleRowBytes, grid.k_tiles, release, store_waiting, acc);
    // What a short K has left of it.
    for (std::uint32_t k = grid.k_tiles; k <= Staged::kBlocks; ++k) store_waiting(k);
    float value[Config::kAccumulators];
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) {
      if constexpr (std::is_same_v<typename Config::Accumulator, float>) {
        value[i] = acc[i];
      } else {
        value[i] = __int2float_rn(acc[i]);
      }
    }
    const bool is_staged = output.path == StorePath::kBf16Staged;
    waits = is_staged && Config::kDefersStores;
    FragmentPlace place;
    if (!is_staged || factors.Vary()) place = OutputPlace<Config>(params, TileAt(grid, tile), cluster, rows);
    FinishFragment(params, factors, place, value);
    if (!is_staged) {
      StoreElementwise(params, output.path, place, value);
      continue;
    }
    waiting.Set(value);
    if constexpr (!Config::kDefersStores) {
      if (lane == 0) staged.SetBox(OutputBox<Config>(params, TileAt(grid, tile), cluster, rows));
      staged.StoreAll(waiting);
    }
  }
  if (waits) {
    if (lane == 0) staged.SetBox(OutputBox<Config>(params, TileAt(grid, tile - step), cluster, rows));
    staged.StoreAll(waiting);
  }
  staged.Finish();
}

template <typename Config>
__global__ void __launch_bounds__(kBlockThreads, 1)
    WgmmaGemmKernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ CUtensorMap d_map, const __grid_constant__ GemmParams params,
                    const __grid_constant__ TileGrid grid, const StorePath path) {
  extern __shared__ unsigned char dynamic_shared[];
  const typename Config::Stages ring(dynamic_shared);
  const ClusterPlace cluster = {.rank = device::ClusterRank(), .blocks = device::ClusterBlocks()};
  // The producer's first copies would wait for the maps; they are the launch's own, so no grid ahead writes them.
  if (threadIdx.x == kConsumers * kWarpgroupThreads && grid.k_tiles > 0) {
    device::PrefetchTensorMap(&a_map);
    device::PrefetchTensorMap(&b_map);
  }
  if (threadIdx.x == 0) {
    ring.Init(kConsumerWarps * cluster.blocks);
    device::FenceMbarrierInit();
  }
  __syncwarp();
  // Both blocks' barriers must be there before either copies into the other.
  device::ClusterBarrier();
  device::WaitForGridAhead();
  // Read from one lane, so that the compiler sees that a warp has one role.
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kConsumerWarps) {
    device::RaiseRegisters<kConsumerRegisters>();
    Consume<Config>(params, grid, {.map = &d_map, .path = path}, cluster, ring, warp / 4);
  } else {
    device::LowerRegisters<kProducerRegisters>();
    // The other threads of the producer have nothing to do.
    if (warp == kConsumerWarps && device::ElectOne()) {
      Produce<Config>(a_map, b_map, params, grid, cluster, ring);
      device::LetNextGridStart();
    }
  }
  __syncwarp();  // the producer's warp has gone two ways
  // A block's shared memory stays until the other has sent its last half and arrival.
  device::ClusterBarrier();
}

template <DType kA, DType kB, DType kOut, Accumulation kAccumulation, GemmLayout kLayout, typename Tile>
struct WgmmaGemm {
  using Config = WgmmaConfig<kA, kB, kLayout, InTwoLevels(kA, kB, kAccumulation), Tile>;

  static cudaError_t Prepare(KernelFacts& facts) {
    return PrepareKernel(&WgmmaGemmKernel<Config>, Config::Stages::kSharedBytes, kBlockThreads, facts);
  }

  static cudaError_t Launch(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    constexpr GemmClass kClass = {.a = kA, .b = kB, .out = kOut, .accumulation = kAccumulation, .layout = kLayout};
    if (shape.split != 1 || shape.raster < 0) return cudaErrorInvalidValue;
    if (!GemmIllegal(params, kClass, Tile::kM, Tile::kN).empty()) return cudaErrorInvalidValue;
    const std::uint32_t cluster = ClusterFor(params);
    const std::uint32_t raster =
        shape.raster == 0 ? kDefaultRaster / cluster : static_cast<std::uint32_t>(shape.raster);
    const TileGrid grid = GridOf(params, std::int64_t{cluster} * Tile::kM, Tile::kN, Tile::kK, raster);
    if (grid.tiles == 0) return cudaSuccess;
    const StorePath path = StorePathOf(kOut, params);
    CUtensorMap a_map = {};
    CUtensorMap b_map = {};
    CUtensorMap d_map = {};
    const cudaError_t error = EncodeMaps(params, grid, path, a_map, b_map, d_map);
    if (error != cudaSuccess) return error;
    const GridShape launch = {.units = grid.tiles,
                              .cluster = cluster,
                              .threads = kBlockThreads,
                              .shared_bytes = Config::Stages::kSharedBytes};
    return LaunchPersistent(&WgmmaGemmKernel<Config>, launch, context.stream, a_map, b_map, d_map, params, grid, path);
  }

 private:
  // Tiles of M walked together by default: near the square root of a Hopper's 132 blocks times kN / kM, which makes the
  // block of the output that is computed at one time about square.
  static constexpr std::uint32_t kDefaultRaster = 8 * Tile::kN / Tile::kM;

  // Two blocks share a tile of B unless one of them would often have no tile of its own.
  static std::uint32_t ClusterFor(const GemmParams& params) {
    constexpr std::int64_t kManyTiles = 16;
    const std::int64_t m_tiles = (params.m + Tile::kM - 1) / Tile::kM;
    return m_tiles >= kManyTiles || m_tiles % 2 == 0 ? 2 : 1;
  }

  static cudaError_t EncodeMaps(const GemmParams& params, const TileGrid& grid, StorePath path, CUtensorMap& a_map,
                                CUtensorMap& b_map, CUtensorMap& d_map) {
    if (grid.k_tiles > 0) {
      cudaError_t error =
          device::FindTensorMap(Config::A::Map(params.a, params.m, params.k, params.batch_shape), a_map);
      if (error != cudaSuccess) return error;
      error = device::FindTensorMap(Config::B::Map(params.b, params.n, params.k, params.batch_shape), b_map);
      if (error != cudaSuccess) return error;
    }
    if (path != StorePath::kBf16Staged) return cudaSuccess;
    device::TensorMapShape d = MatrixMap(params.d, kOut, params.n, params.m, params.d.row_stride,
                                         Config::Staged::kColumns, Config::Staged::kRows, params.batch_shape);
    d.narrow = Config::Staged::kNarrow;
    return device::FindTensorMap(d, d_map);
  }
};

}  // namespace tessera::kernels::sm90a
