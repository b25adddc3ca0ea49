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
#include "kernels/gemm/sm90a/store_strip.cuh"
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
// sums; of a strip, 8 rows of D are a chunk: two accumulators of each of a thread's two columns, of all 32 threads.
// Block r of S adds up strips [r kStrips / S, (r + 1) kStrips / S), by the warps that have their own sums of them in
// registers. What a block sends stands as [strip][chunk][thread] in stages of the ring, which the producer lends; what
// it receives as [slice, less its own][strip][chunk][thread] in an area behind the ring, of which the end is where
// strips are turned over (store_strip.cuh).
template <int kTileRows, int kTileColumns, std::uint32_t kStageBytes>
struct Exchange {
  static constexpr int kStripColumns = 16;
  static constexpr int kStrips = kTileColumns / kStripColumns;
  static constexpr int kChunkRows = device::WgmmaFragment::kColumnStep;
  static constexpr int kChunks = kTileRows / kChunkRows;  // of a strip
  static constexpr std::uint32_t kChunkBytes = kStripColumns * kChunkRows * 4;
  static constexpr std::uint32_t kStripBytes = kChunks * kChunkBytes;
  static constexpr std::uint32_t kBytes = kStrips * kStripBytes;  // of all strips of one slice
  static constexpr std::uint32_t kStoreBytes = StripStore<kChunks * 4>::kBytes;
  // With S slices a block receives kStrips / S strips, rounded up, of S - 1 others, and stores as many.
  static_assert(2 * kStoreBytes <= kStripBytes, "what it stores fits beside what it receives");
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

// The consumers' side of the exchange. Two barriers a block: `arrived` counts the bytes that were sent here; `read`
// counts the warps, of all blocks of the tile, that have added up what they received, after which the next tile may be
// sent, and the producers have what they lent back. A block with all of K needs neither.
template <typename Config>
class SliceSums {
 public:
  using Accumulator = typename Config::Accumulator;
  using Stages = typename Config::Stages;
  using Sums = typename Config::Sums;

  __device__ __forceinline__ SliceSums(const Stages& ring, const SlicePlace& place, std::uint32_t warp)
      : ring_(ring),
        place_(place),
        warp_(warp),
        first_(FirstStrip(place, place.slice)),
        strips_(StripsOf(place, place.slice)) {}

  static __device__ __forceinline__ std::uint32_t ArrivedBarrier(const Stages& ring) { return ring.Other(0); }
  static __device__ __forceinline__ std::uint32_t ReadBarrier(const Stages& ring) { return ring.Other(1); }

  // One thread, as Ring::Init.
  static __device__ __forceinline__ void Init(const Stages& ring) {
    device::MbarrierInit(ArrivedBarrier(ring), 1);
    device::MbarrierInit(ReadBarrier(ring), Sums::kStrips);
  }

  // Whether the warp's strip is one that this block adds up, and so stores.
  __device__ __forceinline__ bool Owns() const { return warp_ - first_ < strips_; }

  // Where an owner turns its strip over.
  __device__ __forceinline__ std::uint32_t StoreArea() const {
    return ring_.Area() + Sums::kBytes - (warp_ - first_ + 1) * Sums::kStoreBytes;
  }

  // Sends the warp's strip of a tile of which `rows` are in D to the block that adds it up, or adds to it, in the order
  // of the slices behind this one and around, what the others send. Takes the lent stages, from `at` on. `last`: nobody
  // will send any more. All warps; with one slice there is nothing to do.
  __device__ __forceinline__ void Exchange(Accumulator (&acc)[Config::kAccumulators], std::uint32_t rows, bool last,
                                           RingPosition<Stages::kStages>& at) {
    if (place_.slices == 1) return;
    const std::uint32_t chunks = (rows + Sums::kChunkRows - 1) / Sums::kChunkRows;
    // The tile before has arrived: the waiting below says so.
    const auto expect = [&] {
      if (threadIdx.x != 0) return;
      device::MbarrierArriveExpect(ArrivedBarrier(ring_), (place_.slices - 1) * strips_ * chunks * Sums::kChunkBytes);
    };
    if (Owns()) {
      expect();
      for (int i = 0; i < Sums::kLentStages; ++i) at.Advance();
      device::MbarrierWait(ArrivedBarrier(ring_), parity_);
      Add(acc);
      __syncwarp();
      // Nobody waits for the last ones, which might come when their block has gone.
      const std::uint32_t lane = threadIdx.x % 32;
      if (!last && lane < place_.slices) {
        device::MbarrierArriveInBlock(device::InBlock(ReadBarrier(ring_), place_.OfSlice(lane)));
      }
    } else {
      device::MbarrierWait(ReadBarrier(ring_), parity_ ^ 1U);
      expect();
      Send(acc, chunks, TakeLent(at));
    }
    parity_ ^= 1U;
  }

 private:
  static __device__ __forceinline__ std::uint32_t FirstStrip(const SlicePlace& place, std::uint32_t slice) {
    return slice * Sums::kStrips / place.slices;
  }
  static __device__ __forceinline__ std::uint32_t StripsOf(const SlicePlace& place, std::uint32_t slice) {
    return FirstStrip(place, slice + 1) - FirstStrip(place, slice);
  }

  // Waits for the lent stage that the warp writes to; the warp's part of it.
  __device__ __forceinline__ std::uint32_t TakeLent(RingPosition<Stages::kStages>& at) const {
    std::uint32_t part = 0;
#pragma unroll
    for (int i = 0; i < Sums::kLentStages; ++i) {
      if (warp_ / Sums::kStageStrips == static_cast<std::uint32_t>(i)) {
        device::MbarrierWait(ring_.Full(at.stage), at.parity);
        part = ring_.A(at.stage) + warp_ % Sums::kStageStrips * Sums::kStripBytes;
      }
      at.Advance();
    }
    return part;
  }

  // A strip of another slice, in the block that adds those of slice number `block`; by the number among these.
  __device__ __forceinline__ std::uint32_t ReceivedStrip(std::uint32_t block, std::uint32_t slice,
                                                         std::uint32_t strip) const {
    const std::uint32_t other = slice < block ? slice : slice - 1;
    return ring_.Area() + (other * StripsOf(place_, block) + strip) * Sums::kStripBytes;
  }

  // All chunks to the lent stage, of which `chunks` go to the other block.
  __device__ __forceinline__ void Send(const Accumulator (&acc)[Config::kAccumulators], std::uint32_t chunks,
                                       std::uint32_t part) const {
    const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < Sums::kChunks; ++chunk) {
      device::SharedVector sums;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.word[i] = WordOf(acc[chunk * 4 + i]);
      device::StoreSharedVector(part + chunk * Sums::kChunkBytes + lane * 16, sums);
    }
    device::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) {
      const std::uint32_t target = ((warp_ + 1) * place_.slices - 1) / Sums::kStrips;
      const std::uint32_t rank = place_.OfSlice(target);
      const std::uint32_t to = ReceivedStrip(target, place_.slice, warp_ - FirstStrip(place_, target));
      device::CopyToBlock(device::InBlock(to, rank), part, chunks * Sums::kChunkBytes,
                          device::InBlock(ArrivedBarrier(ring_), rank));
    }
  }

  // With chunks that nobody sent: sums of rows outside of D, whatever they become.
  __device__ __forceinline__ void Add(Accumulator (&acc)[Config::kAccumulators]) const {
    const std::uint32_t lane = threadIdx.x % 32;
    for (std::uint32_t i = 1; i < place_.slices; ++i) {
      const std::uint32_t slice = (place_.slice + i) % place_.slices;
      const std::uint32_t strip = ReceivedStrip(place_.slice, slice, warp_ - first_) + lane * 16;
#pragma unroll
      for (int chunk = 0; chunk < Sums::kChunks; ++chunk) {
        const device::SharedVector sums = device::LoadSharedVector(strip + chunk * Sums::kChunkBytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[chunk * 4 + j] += SumOf<Accumulator>(sums.word[j]);
      }
    }
  }

  Stages ring_;
  SlicePlace place_;
  std::uint32_t warp_;
  std::uint32_t first_;  // strip that this block adds
  std::uint32_t strips_;
  std::uint32_t parity_ = 0;  // of this tile's phase of `arrived`
};

}  // namespace tessera::kernels::sm90a
