// GEMM for Hopper with few rows of A, where what counts is to read B, the weights, as fast as memory gives them. The
// operands change places: 64 rows of B a warpgroup are the tensor core's first operand, of which it always takes 64,
// and the rows of A its second, of which it takes as few as 16. All multiprocessors read: the blocks of a cluster take
// a slice of K each of the same tile of D, and add up through each other's shared memory, in the order of the slices,
// so that the result does not depend on who came first.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
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
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/launch.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/main_loop.cuh"
#include "kernels/gemm/sm90a/operand.cuh"
#include "kernels/gemm/sm90a/ring.cuh"
#include "kernels/gemm/sm90a/slice_sums.cuh"
#include "kernels/gemm/sm90a/store_strip.cuh"
#include "kernels/gemm/sm90a/tile_walk.cuh"
#include "kernels/gemm/sm90a/wgmma_gemm.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

// A consumer's thread holds half as many accumulators as in wgmma_gemm.cuh, and the producer has more to know.
inline constexpr int kSliceConsumerRegisters = 216;
inline constexpr int kSliceProducerRegisters = 72;
static_assert(kWarpgroupThreads * (kConsumers * kSliceConsumerRegisters + kSliceProducerRegisters) <= 65536,
              "RaiseRegisters would wait for ever");

template <DType kA, DType kB, GemmLayout kLayout, bool kTwoLevels, typename TileShape>
struct SliceConfig {
  using Tile = TileShape;
  using Pair = device::WgmmaPair<kB, kA, !BContiguousAlongK(kLayout)>;  // B first
  using Accumulator = typename Pair::Accumulator;
  static constexpr bool kInTwoLevels = kTwoLevels;
  static constexpr bool kInHalves = false;
  // Tiles abreast that a cluster may have. Each block fetches its share of their rows of A for all.
  static constexpr int kAbreast = Tile::kM >= 64 ? 2 : 1;
  using A = Operand<kA, true, Tile::kM, Tile::kM / kAbreast>;
  using B = Operand<kB, BContiguousAlongK(kLayout), Tile::kN, Tile::kN>;
  using Sums = Exchange<Tile::kM, Tile::kN, B::kBytes + A::kBytes>;
  using Stages = Ring<B::kBytes, A::kBytes, Tile::kStages, Sums::kBytes>;
  static constexpr int kAccumulators = device::WgmmaFragment::kRows * Tile::kM / kWarpgroupThreads;
  // Not where sums are short: what they may lose is bounded for products in the order of K (kernels/gemm/README.md).
  static constexpr bool kStaggers = Tile::kM <= 32 && (kTwoLevels || !HasAccumulationChoice(kA, kB));

  static_assert(Tile::kN == kConsumers * device::WgmmaFragment::kRows, "64 rows of B a consumer");
  static_assert(Tile::kK == A::kTileK && Tile::kK == B::kTileK, "a step of K is one swizzled row");
};

// The slice of K of one block, in steps.
struct Slice {
  std::uint32_t first;
  std::uint32_t count;
};

__device__ __forceinline__ Slice SliceOf(std::uint32_t k_tiles, const SlicePlace& place) {
  // K has fewer than 2^25 steps and a cluster 8 slices.
  const auto cut = [&](std::uint32_t slice) { return k_tiles * slice / place.slices; };
  const std::uint32_t first = cut(place.slice);
  return {.first = first, .count = cut(place.slice + 1) - first};
}

// Units of a cluster, one after another. The first is reckoned while the block sets up.
class UnitWalk {
 public:
  explicit __device__ __forceinline__ UnitWalk(const TileGrid& grid)
      : grid_(grid), step_(device::ClusterCount()), unit_(device::ClusterIndex()), index_(TileAt(grid, unit_)) {}

  __device__ __forceinline__ const TileIndex& index() const { return index_; }
  __device__ __forceinline__ bool last() const { return unit_ + step_ >= grid_.tiles; }
  __device__ __forceinline__ void Next() {
    unit_ += step_;
    index_ = TileAt(grid_, unit_);
  }

 private:
  const TileGrid& grid_;
  std::uint32_t step_;
  std::uint32_t unit_;
  TileIndex index_;
};

// One thread: fills stage after stage with the block's slice of all tiles, and lends stages for each tile's exchange.
template <typename Config>
class SliceProducer {
 public:
  using Tile = typename Config::Tile;
  using Stages = typename Config::Stages;
  using Sums = typename Config::Sums;

  __device__ __forceinline__ SliceProducer(const CUtensorMap& a_map, const CUtensorMap& b_map, const GemmParams& params,
                                           const Stages& ring, const SlicePlace& place)
      : a_map_(a_map),
        b_map_(b_map),
        m_(static_cast<std::uint32_t>(params.m)),
        n_(static_cast<std::uint32_t>(params.n)),
        stage_bytes_(Config::A::TileBytes(params.m) + Config::B::TileBytes(params.n)),
        ring_(ring),
        place_(place) {
    for (std::uint32_t tile = 0; tile < place.abreast; ++tile) {
      abreast_mask_ |= static_cast<std::uint16_t>(1U << place.OfTile(tile));
    }
  }

  // Of the tile with batch coordinates `a_box` and `b_box`, a row of A and one of B.
  __device__ __forceinline__ void Fill(const Slice& slice, const device::TensorCoordinates& a_box,
                                       const device::TensorCoordinates& b_box, std::int32_t a_row, std::int32_t b_row) {
    const std::uint32_t begin = FirstStep(static_cast<std::uint32_t>(b_row) / Tile::kN, slice.count);
    for (std::uint32_t i = 0; i < slice.count; ++i) {
      const std::uint32_t step = begin + i < slice.count ? begin + i : begin + i - slice.count;
      const auto k = static_cast<std::int32_t>((slice.first + step) * Tile::kK);
      WaitForStage();
      const std::uint32_t full = ring_.Full(at_.stage);
      device::MbarrierArriveExpect(full, stage_bytes_);
      const auto copy_b = [&](std::uint32_t destination, const device::TensorCoordinates& box) {
        device::TmaLoad(destination, &b_map_, full, box);
      };
      Config::B::Load(ring_.A(at_.stage), b_box, n_, b_row, k, 0, Tile::kN, copy_b);
      FetchA(a_box, a_row, k, full);
      at_.Advance();
    }
  }

  // Stages for what the consumers send, without bytes.
  __device__ __forceinline__ void Lend() {
    TakeBack();
    lent_stage_ = at_.stage;
    lent_ = true;
    for (int i = 0; i < Sums::kLentStages; ++i) {
      WaitForFree();
      device::MbarrierArrive(ring_.Full(at_.stage));
      at_.Advance();
    }
  }

  // Other blocks' last arrivals are on their way here, and this block's memory must not go before they have come.
  // Stages that are lent are of the last tile, and nobody will give them back.
  __device__ __forceinline__ void Finish() {
    for (int i = lent_ ? Sums::kLentStages : 0; i < Stages::kStages; ++i) {
      WaitForFree();
      at_.Advance();
    }
  }

 private:
  // The step of a slice with which a column of tiles begins; after the last it goes on with the first. Where blocks
  // read other rows of B at the same time, they read a little faster if not all are at the same K, whose lines are a
  // row of B apart. With many rows of A that costs more, as the blocks find those in L2 if they read them at the same
  // time. It depends on the column alone, so that what becomes of a row of A does not depend on which it is.
  static __device__ __forceinline__ std::uint32_t FirstStep(std::uint32_t column, std::uint32_t steps) {
    constexpr std::uint32_t kApart = 7;
    if constexpr (!Config::kStaggers) return 0;
    return steps > 0 ? column * kApart % steps : 0;
  }

  __device__ __forceinline__ void FetchA(const device::TensorCoordinates& box, std::int32_t row, std::int32_t k,
                                         std::uint32_t full) const {
    if (Config::kAbreast == 1 || place_.abreast == 1) {
      const auto copy = [&](std::uint32_t destination, const device::TensorCoordinates& part) {
        device::TmaLoad(destination, &a_map_, full, part);
      };
      Config::A::Load(ring_.B(at_.stage), box, m_, row, k, 0, Tile::kM, copy);
    } else {
      const auto copy = [&](std::uint32_t destination, const device::TensorCoordinates& part) {
        device::TmaLoadMulticast(destination, &a_map_, full, part, abreast_mask_);
      };
      constexpr std::uint32_t kShare = Tile::kM / Config::kAbreast;
      Config::A::Load(ring_.B(at_.stage), box, m_, row, k, place_.tile * kShare, kShare, copy);
    }
  }

  __device__ __forceinline__ void WaitForFree() const { device::MbarrierWait(ring_.Empty(at_.stage), at_.parity ^ 1U); }

  __device__ __forceinline__ void WaitForStage() {
    if (lent_ && at_.stage == lent_stage_) TakeBack();
    WaitForFree();
  }

  // The lent stages are free when all that was sent has come, which the blocks that add it up say. All blocks that copy
  // into the stages hear it from here, in the consumers' place.
  __device__ __forceinline__ void TakeBack() {
    if (!lent_) return;
    device::MbarrierWait(SliceSums<Config>::ReadBarrier(ring_), read_parity_);
    read_parity_ ^= 1U;
    lent_ = false;
    for (int i = 0; i < Sums::kLentStages; ++i) {
      const std::uint32_t empty = ring_.Empty((lent_stage_ + i) % Stages::kStages);
      for (std::uint32_t tile = 0; tile < place_.abreast; ++tile) {
        device::MbarrierArriveInBlock(device::InBlock(empty, place_.OfTile(tile)), kConsumerWarps);
      }
    }
  }

  const CUtensorMap& a_map_;
  const CUtensorMap& b_map_;
  std::uint32_t m_;
  std::uint32_t n_;
  std::uint32_t stage_bytes_;
  Stages ring_;
  SlicePlace place_;
  std::uint16_t abreast_mask_ = 0;
  RingPosition<Stages::kStages> at_;
  int lent_stage_ = 0;
  bool lent_ = false;
  std::uint32_t read_parity_ = 0;
};

template <typename Config>
__device__ __forceinline__ void ProduceSlices(const CUtensorMap& a_map, const CUtensorMap& b_map,
                                              const GemmParams& params, const TileGrid& grid, const SlicePlace& place,
                                              const typename Config::Stages& ring, UnitWalk& walk) {
  using Tile = typename Config::Tile;
  const Slice slice = SliceOf(grid.k_tiles, place);
  SliceProducer<Config> producer(a_map, b_map, params, ring, place);
  for (;;) {
    const TileIndex& index = walk.index();
    producer.Fill(slice, BatchCoordinates(params.a, index), BatchCoordinates(params.b, index),
                  TileBegin<Tile::kM, Config::A::kRowUnit>(index.m, params.m),
                  static_cast<std::int32_t>((index.n * place.abreast + place.tile) * Tile::kN));
    if (place.slices > 1) producer.Lend();
    if (walk.last()) break;
    walk.Next();
  }
  device::LetNextGridStart();
  if (Config::kAbreast > 1) producer.Finish();
}

// Where the warp's strip of a tile is in D.
template <typename Config>
__device__ __forceinline__ StripPlace PlaceOfStrip(const GemmParams& params, const TileIndex& index,
                                                   std::uint32_t tile_of_row, std::uint32_t warp) {
  using Tile = typename Config::Tile;
  StripPlace place = {.batch_offset = 0,
                      .row = TileBegin<Tile::kM, Config::A::kRowUnit>(index.m, params.m),
                      .column = std::int64_t{tile_of_row} * Tile::kN + warp * 16,
                      .rows = 0};
  for (int i = 0; i < kGemmBatchDimsMax; ++i) place.batch_offset += index.batch[i] * params.d.batch_stride[i];
  place.rows = static_cast<std::uint32_t>(min(params.m - place.row, std::int64_t{Tile::kM}));
  return place;
}

// Gives a stage back, by all threads of a warp: lane l tells the block with tile l of those abreast.
template <typename Config>
class SliceRelease {
 public:
  __device__ __forceinline__ SliceRelease(const typename Config::Stages& ring, const SlicePlace& place)
      : tells_(threadIdx.x % 32 < place.abreast) {
    empty_ = ring.Empty(0);
    if (Config::kAbreast > 1) empty_ = device::InBlock(empty_, place.OfTile(tells_ ? threadIdx.x % 32 : 0));
  }

  __device__ __forceinline__ void operator()(int stage) const {
    if (!tells_) return;
    const std::uint32_t empty = empty_ + stage * device::kMbarrierBytes;
    if constexpr (Config::kAbreast == 1) {
      device::MbarrierArrive(empty);
    } else {
      device::MbarrierArriveInBlock(empty);
    }
  }

 private:
  bool tells_;
  std::uint32_t empty_;
};

// One consumer warpgroup: its part of all tiles of the block.
template <typename Config>
__device__ __forceinline__ void ConsumeSlices(const GemmParams& params, const TileGrid& grid, const StripOutput& output,
                                              const SlicePlace& place, const typename Config::Stages& ring,
                                              UnitWalk& walk, int warp) {
  using Stages = typename Config::Stages;
  using Tile = typename Config::Tile;
  const std::uint32_t offset = warp / 4 * device::WgmmaFragment::kRows * device::kSwizzleRowBytes;
  const SliceRelease<Config> release(ring, place);
  const Slice slice = SliceOf(grid.k_tiles, place);
  SliceSums<Config> sums(ring, place, warp);
  const StripStore<Config::kAccumulators> store(params, output, sums.StoreArea());
  RingPosition<Stages::kStages> at;
  for (;;) {
    typename Config::Accumulator acc[Config::kAccumulators];
    Multiply<Config, typename Config::B, typename Config::A>(ring, at, offset, slice.count, release, Nothing(), acc);
    const TileIndex& index = walk.index();
    const StripPlace strip = PlaceOfStrip<Config>(params, index, index.n * place.abreast + place.tile, warp);
    sums.Exchange(acc, strip.rows, walk.last(), at);
    if (sums.Owns()) store.Store(strip, acc);
    if (walk.last()) break;
    walk.Next();
  }
}

template <typename Config>
__global__ void __launch_bounds__(kBlockThreads, 1)
    SliceGemmKernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ GemmParams params, const __grid_constant__ TileGrid grid,
                    const StripOutput output, const std::uint32_t slices) {
  extern __shared__ unsigned char dynamic_shared[];
  const typename Config::Stages ring(dynamic_shared);
  const std::uint32_t blocks = device::ClusterBlocks();
  const std::uint32_t rank = device::ClusterRank();
  const SlicePlace place = {
      .slice = rank % slices, .slices = slices, .tile = rank / slices, .abreast = blocks / slices};
  // The producer's first copies would wait for the maps; they are the launch's own, so no grid ahead writes them.
  if (threadIdx.x == kConsumers * kWarpgroupThreads && grid.k_tiles > 0) {
    device::PrefetchTensorMap(&a_map);
    device::PrefetchTensorMap(&b_map);
  }
  if (threadIdx.x == 0) {
    ring.Init(kConsumerWarps * place.abreast);
    SliceSums<Config>::Init(ring);
    device::FenceMbarrierInit();
  }
  UnitWalk walk(grid);
  __syncwarp();
  // Before a block copies or sends to another, that one must have its barriers.
  device::ClusterBarrier();
  device::WaitForGridAhead();
  // Read from one lane, so that the compiler sees that a warp has one role.
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kConsumerWarps) {
    device::RaiseRegisters<kSliceConsumerRegisters>();
    ConsumeSlices<Config>(params, grid, output, place, ring, walk, warp);
  } else {
    device::LowerRegisters<kSliceProducerRegisters>();
    if (warp == kConsumerWarps && device::ElectOne()) {
      ProduceSlices<Config>(a_map, b_map, params, grid, place, ring, walk);
    }
  }
  __syncwarp();  // the producer's warp has gone two ways
  // A block's shared memory stays until what it has sent has come and the others have sent their last arrival.
  device::ClusterBarrier();
}

template <DType kA, DType kB, DType kOut, Accumulation kAccumulation, GemmLayout kLayout, typename Tile>
struct SliceGemm {
  static_assert(AContiguousAlongK(kLayout), "16 rows of A are no panel");
  using Config = SliceConfig<kA, kB, kLayout, InTwoLevels(kA, kB, kAccumulation), Tile>;

  static cudaError_t Prepare(KernelFacts& facts) {
    return PrepareKernel(&SliceGemmKernel<Config>, Config::Stages::kSharedBytes, kBlockThreads, facts);
  }

  static cudaError_t Launch(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    constexpr GemmClass kClass = {.a = kA, .b = kB, .out = kOut, .accumulation = kAccumulation, .layout = kLayout};
    if (!LegalClusterSplit(shape.split) || shape.raster < 0) return cudaErrorInvalidValue;
    if (!GemmIllegal(params, kClass, Tile::kM, Tile::kN).empty()) return cudaErrorInvalidValue;
    // By default all tiles of M of one column after another, so that B is read once.
    const std::uint32_t raster = shape.raster == 0 ? kGridTilesLimit - 1 : static_cast<std::uint32_t>(shape.raster);
    const auto slices = static_cast<std::uint32_t>(shape.split);
    const std::uint32_t abreast = AbreastFor(params, shape.split);
    const TileGrid grid = GridOf(params, Tile::kM, std::int64_t{abreast} * Tile::kN, Tile::kK, raster);
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
    // A cluster that the device does not hold beside the others would begin when these have done all their tiles.
    std::uint32_t held = grid.tiles;
    if (slices * abreast > 2) {
      const cudaError_t error = ClustersHeld(slices * abreast, held);
      if (error != cudaSuccess) return error;
    }
    const GridShape launch = {.units = std::min(grid.tiles, held),
                              .cluster = slices * abreast,
                              .threads = kBlockThreads,
                              .shared_bytes = Config::Stages::kSharedBytes};
    return LaunchPersistent(&SliceGemmKernel<Config>, launch, context.stream, a_map, b_map, params, grid,
                            StripOutputOf(kOut, params), slices);
  }

 private:
  // Clusters of more than two blocks do not all run at once, so tiles come abreast where K is in one slice. Not if
  // pairs of tiles need another round of blocks.
  static std::uint32_t AbreastFor(const GemmParams& params, int slices) {
    constexpr int kBlocks = 2;
    if (slices * Config::kAbreast > kBlocks || params.n <= Tile::kN) return 1;
    const auto rounds = [&](int abreast) {
      const std::int64_t units = CountTiles(params, Tile::kM, std::int64_t{abreast} * Tile::kN);
      const std::int64_t at_once = ClustersAtOnce(kProcessors, abreast);
      return (units + at_once - 1) / at_once;
    };
    return rounds(Config::kAbreast) <= rounds(1) ? Config::kAbreast : 1;
  }

  static constexpr int kProcessors = 132;  // of the Hoppers that this is tuned for

  // How many clusters of that many blocks the device holds, which depends on how many processors each of its parts has.
  static cudaError_t ClustersHeld(std::uint32_t blocks, std::uint32_t& held) {
    constexpr int kDevices = 16;
    static std::atomic<std::uint32_t> known[kDevices][kClusterLimit + 1] = {};
    int ordinal = 0;
    cudaError_t error = cudaGetDevice(&ordinal);
    if (error != cudaSuccess) return error;
    held = ordinal < kDevices ? known[ordinal][blocks].load(std::memory_order_relaxed) : 0;
    if (held > 0) return cudaSuccess;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = blocks;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(kBlockThreads);
    config.dynamicSmemBytes = Config::Stages::kSharedBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, &SliceGemmKernel<Config>, &config);
    if (error != cudaSuccess) return error;
    held = clusters > 0 ? static_cast<std::uint32_t>(clusters) : 1;
    if (ordinal < kDevices) known[ordinal][blocks].store(held, std::memory_order_relaxed);
    return cudaSuccess;
  }
};

}  // namespace tessera::kernels::sm90a
