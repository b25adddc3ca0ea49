// How the blocks of a cluster, each with a slice of K of the same tile of D, add up. Accumulators travel as the threads
// hold them: a warp writes its own to shared memory, 16 bytes a thread and 512 contiguous bytes at a time, and the copy
// engine takes them to the block that adds them, a few kilobytes a copy. Words sent one by one would each be counted
// into the receiver's barrier, which takes longer than the products of the tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/device/cluster.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/sm90a/ring.cuh"
#include "kernels/gemm/sm90a/wgmma_gemm.cuh"

namespace tessera::kernels::sm90a {

// A block's part of a cluster: one of `slices` of K of one of `abreast` tiles with neighbouring
// columns of D, which share the rows of A. Blocks of a tile have neighbouring ranks.
struct SlicePlace {
  std::uint32_t slice;
  std::uint32_t slices;
  std::uint32_t tile;
  std::uint32_t abreast;

  // The rank of the block with that slice of the same tile, and with the same slice of that tile.
  __device__ __forceinline__ std::uint32_t OfSlice(std::uint32_t other) const { return tile * slices + other; }
  __device__ __forceinline__ std::uint32_t OfTile(std::uint32_t other) const { return other * slices + slice; }
};

// The partial sums of a tile, kTileRows of D by kTileColumns. A strip is the 16 columns of D of which one warp has the
// sums; of a strip, 8 rows of D are a chunk: a pair of accumulators of a thread's two columns, of all 32 threads. Block
// r of S adds strips [r kStrips / S, (r + 1) kStrips / S). All strips of a block, its own and those for others, stand
// as [strip][chunk][thread] in stages of the ring, which the producer lends; what it receives stands as [slice, less
// its own][strip][chunk][thread] in an area behind the ring.
//
// In a chunk the 16 bytes of thread l stand at l ^ (l / 16 * 4). Then threads that write theirs are in different banks,
// and so are threads that read four consecutive columns of two rows each (SliceSums::Add).
template <int kTileRows, int kTileColumns, std::uint32_t kStageBytes>
struct Exchange {
  static constexpr int kStripColumns = 16;
  static constexpr int kStrips = kTileColumns / kStripColumns;
  static constexpr int kChunkRows = device::WgmmaFragment::kColumnStep;
  static constexpr int kChunks = kTileRows / kChunkRows;  // of a strip
  static constexpr std::uint32_t kChunkBytes = kStripColumns * kChunkRows * 4;
  static constexpr std::uint32_t kStripBytes = kChunks * kChunkBytes;
  static constexpr std::uint32_t kBytes =
      kStrips * kStripBytes;  // of all strips of one slice, no less than what a block receives
  static constexpr int kLentStages = kBytes <= kStageBytes ? 1 : 2;
  static constexpr int kStageStrips = kStrips / kLentStages;
  static_assert(kStageStrips * kStripBytes <= kStageBytes, "what is sent fits the lent stages");
  static_assert(kStrips == kConsumerWarps && kStrips % kClusterLimit == 0, "every block adds as many strips");
};

__device__ __forceinline__ std::uint32_t WordOf(float value) {
  return __float_as_uint(value);
}
__device__ __forceinline__ std::uint32_t WordOf(std::int32_t value) {
  return static_cast<std::uint32_t>(value);
}

template <typename Accumulator>
__device__ __forceinline__ Accumulator SumOf(std::uint32_t word) {
  if constexpr (std::is_same_v<Accumulator, float>) {
    return __uint_as_float(word);
  } else {
    return static_cast<Accumulator>(word);
  }
}

// Whole sums of one thread: rows `row` and `row` + 1 of the tile, columns `column` .. + 3 and + 8 .. + 11.
template <typename Accumulator>
struct SumBlock {
  static constexpr int kRows = 2;
  static constexpr int kGroups = 2;  // of columns
  static constexpr int kGroupStep = 8;
  static constexpr int kColumns = 4;  // of a group

  // of group g, column j, row i: [j][2 g + i], the order of a thread's accumulators
  Accumulator sum[kColumns][kGroups * kRows];

  __device__ __forceinline__ float At(int row, int group, int column) const {
    return static_cast<float>(sum[column][group * kRows + row]);
  }
};

// The consumers' side of the exchange. Two barriers a block: `arrived` counts the bytes that were sent here, and the
// block's own warps; `read` counts the warps of every block of the tile that have added up what they received, after
// which the next tile may be sent, and the producers have what they lent back. A block with all of K needs neither:
// each warp finishes the strip that it has computed.
template <typename Config>
class SliceSums {
 public:
  using Accumulator = typename Config::Accumulator;
  using Stages = typename Config::Stages;
  using Sums = typename Config::Sums;
  using Block = SumBlock<Accumulator>;

  __device__ __forceinline__ SliceSums(const Stages& ring, const SlicePlace& place)
      : ring_(ring), place_(place), first_(FirstStrip(place, place.slice)), strips_(StripsOf(place, place.slice)) {}

  static __device__ __forceinline__ std::uint32_t ArrivedBarrier(const Stages& ring) { return ring.Other(0); }
  static __device__ __forceinline__ std::uint32_t ReadBarrier(const Stages& ring) { return ring.Other(1); }

  // One thread, as Ring::Init.
  static __device__ __forceinline__ void Init(const Stages& ring, const SlicePlace& place) {
    device::MbarrierInit(ArrivedBarrier(ring), 1 + StripsOf(place, place.slice));
    device::MbarrierInit(ReadBarrier(ring), kConsumerWarps * place.slices);
  }

  // The warp's strip of a tile of which `rows` are in D. Takes the lent stages, from `at` on.
  __device__ __forceinline__ void Send(const Accumulator (&acc)[Config::kAccumulators], std::uint32_t warp,
                                       std::uint32_t rows, RingPosition<Stages::kStages>& at) {
    const std::uint32_t chunks = ChunksOf(rows);
    if (place_.slices == 1) {
      Write(acc, OwnStrip(warp), chunks);
      __syncwarp();
      return;
    }
    const std::uint32_t arrived = ArrivedBarrier(ring_);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (threadIdx.x == 0) {
      device::MbarrierArriveExpect(arrived, (place_.slices - 1) * strips_ * chunks * Sums::kChunkBytes);
    }
    device::MbarrierWait(ReadBarrier(ring_), parity_ ^ 1U);
    TakeLent(warp, at);
    Write(acc, OwnStrip(warp), chunks);
    const std::uint32_t target = ((warp + 1) * place_.slices - 1) / Sums::kStrips;
    if (target == place_.slice) {
      __syncwarp();
      if (first_lane) device::MbarrierArrive(arrived);
    } else {
      device::FenceAsyncProxy();
      __syncwarp();
      if (first_lane) {
        const std::uint32_t place = ReceivedStrip(target, place_.slice, warp - FirstStrip(place_, target));
        const std::uint32_t rank = place_.OfSlice(target);
        device::CopyToBlock(device::InBlock(place, rank), OwnStrip(warp), chunks * Sums::kChunkBytes,
                            device::InBlock(arrived, rank));
      }
    }
  }

  // Adds the slices in order. For each block of sums that is the thread's, `prepare(row, column)` gives what
  // `finish(prepared, row, column, block)` needs beside them; it runs before the sums are waited for. All consumer
  // threads.
  template <typename Prepare, typename Finish>
  __device__ __forceinline__ void Receive(std::uint32_t warp, std::uint32_t rows, bool last, const Prepare& prepare,
                                          const Finish& finish) {
    // Eight threads a chunk, of all strips side by side. With one slice, those of the warp's own strip.
    const std::uint32_t lane = threadIdx.x % 32;
    const bool alone = place_.slices == 1;
    const std::uint32_t strips = alone ? 1 : strips_;
    const std::uint32_t step = alone ? 4 : 4 * kConsumerWarps;
    const std::uint32_t end = strips * ChunksOf(rows);
    for (std::uint32_t i = (alone ? 0 : warp * 4) + lane / 8; i < end; i += step) {
      const std::uint32_t strip = alone ? warp : i % strips;
      const std::uint32_t chunk = i / strips;
      const std::uint32_t row = chunk * Sums::kChunkRows + lane % 4 * 2;
      const std::uint32_t column = (first_ + strip) * Sums::kStripColumns + lane % 8 / 4 * 4;
      const auto prepared = prepare(row, column);
      if (!alone) device::MbarrierWait(ArrivedBarrier(ring_), parity_);
      finish(prepared, row, column, Add(strip, chunk * Sums::kChunkBytes));
    }
    if (place_.slices > 1) device::MbarrierWait(ArrivedBarrier(ring_), parity_);  // by warps without a chunk, too
    __syncwarp();
    // Nobody waits for the last ones, which might come when their block has gone.
    if (place_.slices > 1 && !last && lane < place_.slices) {
      device::MbarrierArriveInBlock(device::InBlock(ReadBarrier(ring_), place_.OfSlice(lane)));
    }
    parity_ ^= 1U;
  }

 private:
  static __device__ __forceinline__ std::uint32_t ChunksOf(std::uint32_t rows) {
    return (rows + Sums::kChunkRows - 1) / Sums::kChunkRows;
  }

  static __device__ __forceinline__ std::uint32_t FirstStrip(const SlicePlace& place, std::uint32_t slice) {
    return slice * Sums::kStrips / place.slices;
  }
  static __device__ __forceinline__ std::uint32_t StripsOf(const SlicePlace& place, std::uint32_t slice) {
    return FirstStrip(place, slice + 1) - FirstStrip(place, slice);
  }

  // Waits for the lent stage that the warp writes to. Of the others it reads what their warps say they have written.
  __device__ __forceinline__ void TakeLent(std::uint32_t warp, RingPosition<Stages::kStages>& at) {
#pragma unroll
    for (int i = 0; i < Sums::kLentStages; ++i) {
      if (warp / Sums::kStageStrips == static_cast<std::uint32_t>(i)) {
        device::MbarrierWait(ring_.Full(at.stage), at.parity);
      }
      lent_[i] = ring_.A(at.stage);
      at.Advance();
    }
  }

  // Of this block's slice; by the number in the tile.
  __device__ __forceinline__ std::uint32_t OwnStrip(std::uint32_t strip) const {
    if (place_.slices == 1) return ring_.Area() + strip * Sums::kStripBytes;
    const std::uint32_t stage = strip < Sums::kStageStrips ? lent_[0] : lent_[Sums::kLentStages - 1];
    return stage + strip % Sums::kStageStrips * Sums::kStripBytes;
  }

  // Of another slice, in the block that adds those of slice number `block`; by the number among these.
  __device__ __forceinline__ std::uint32_t ReceivedStrip(std::uint32_t block, std::uint32_t slice,
                                                         std::uint32_t strip) const {
    const std::uint32_t other = slice < block ? slice : slice - 1;
    return ring_.Area() + (other * StripsOf(place_, block) + strip) * Sums::kStripBytes;
  }

  static __device__ __forceinline__ void Write(const Accumulator (&acc)[Config::kAccumulators], std::uint32_t strip,
                                               std::uint32_t chunks) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t place = strip + (lane ^ lane / 16 * 4) * 16;
#pragma unroll
    for (int chunk = 0; chunk < Sums::kChunks; ++chunk) {
      if (static_cast<std::uint32_t>(chunk) >= chunks) break;
      device::SharedVector sums;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.word[i] = WordOf(acc[chunk * 4 + i]);
      device::StoreSharedVector(place + chunk * Sums::kChunkBytes, sums);
    }
  }

  // Threads 4 j + c of the two halves of a warp, c = 0 .. 3, hold column j of their half and rows 2 c and 2 c + 1. Here
  // thread l of eight takes the four columns of half l / 4 and rows of c = l % 4.
  __device__ __forceinline__ Block Add(std::uint32_t strip, std::uint32_t chunk_offset) const {
    const std::uint32_t lane = threadIdx.x % 8;
    const std::uint32_t offset = chunk_offset + (lane / 4 * 20 + lane % 4) * 16;
    const auto read = [&](std::uint32_t slice, int column) {
      const std::uint32_t place =
          slice == place_.slice ? OwnStrip(first_ + strip) : ReceivedStrip(place_.slice, slice, strip);
      return device::LoadSharedVector((place + offset) ^ column * 64U);
    };
    Block block;
#pragma unroll
    for (int j = 0; j < Block::kColumns; ++j) {
      const device::SharedVector sums = read(0, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) block.sum[j][i] = SumOf<Accumulator>(sums.word[i]);
    }
    for (std::uint32_t slice = 1; slice < place_.slices; ++slice) {
#pragma unroll
      for (int j = 0; j < Block::kColumns; ++j) {
        const device::SharedVector sums = read(slice, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) block.sum[j][i] += SumOf<Accumulator>(sums.word[i]);
      }
    }
    return block;
  }

  Stages ring_;
  SlicePlace place_;
  std::uint32_t first_;  // strip that this block adds
  std::uint32_t strips_;
  std::uint32_t lent_[Sums::kLentStages] = {};
  std::uint32_t parity_ = 0;  // of this tile's phase of `arrived`
};

}  // namespace tessera::kernels::sm90a
