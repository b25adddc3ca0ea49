// How the blocks of a cluster, each with a slice of K of the same tile of D, add up. Accumulators travel as the threads
// hold them: a warp writes its own to shared memory, 16 bytes a thread and 512 contiguous bytes at a time, and the copy
// engine takes them to the block that adds them, a few kilobytes a copy. Words sent one by one would each be counted
// into the receiver's barrier, which takes two cycles a word and as long as the products of a tile of 64 rows.
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

// A block's part of a cluster: one of `slices` of K, a power of two, of one of `abreast` tiles with neighbouring
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
// r of S adds strips [r kStrips / S, (r + 1) kStrips / S), and receives them as [slice][strip][chunk][thread] in an
// area behind the ring. What it sends stands as [strip][chunk][thread] in stages of the ring, which the producer lends.
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
  static constexpr std::uint32_t kBytes = kStrips * kStripBytes;  // of all strips of one slice, or of a block's of all
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
      : ring_(ring), place_(place), strips_(Sums::kStrips / place.slices) {}

  static __device__ __forceinline__ std::uint32_t ArrivedBarrier(const Stages& ring) { return ring.Other(0); }
  static __device__ __forceinline__ std::uint32_t ReadBarrier(const Stages& ring) { return ring.Other(1); }

  // One thread, as Ring::Init.
  static __device__ __forceinline__ void Init(const Stages& ring, const SlicePlace& place) {
    device::MbarrierInit(ArrivedBarrier(ring), 1 + Sums::kStrips / place.slices);
    device::MbarrierInit(ReadBarrier(ring), kConsumerWarps * place.slices);
  }

  // The warp's strip of a tile of which `rows` are in D. Takes the lent stages, from `at` on.
  __device__ __forceinline__ void Send(const Accumulator (&acc)[Config::kAccumulators], std::uint32_t warp,
                                       std::uint32_t rows, RingPosition<Stages::kStages>& at) const {
    const std::uint32_t chunks = ChunksOf(rows);
    if (place_.slices == 1) {
      Write(acc, ring_.Area() + warp * Sums::kStripBytes, chunks);
      __syncwarp();
      return;
    }
    const std::uint32_t arrived = ArrivedBarrier(ring_);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (threadIdx.x == 0) {
      device::MbarrierArriveExpect(arrived, (place_.slices - 1) * strips_ * chunks * Sums::kChunkBytes);
    }
    device::MbarrierWait(ReadBarrier(ring_), parity_ ^ 1U);
    const std::uint32_t source = LentPlace(warp, at);
    const std::uint32_t target = warp / strips_;
    const std::uint32_t place = ring_.Area() + (place_.slice * strips_ + warp % strips_) * Sums::kStripBytes;
    if (target == place_.slice) {
      Write(acc, place, chunks);
      __syncwarp();
      if (first_lane) device::MbarrierArrive(arrived);
    } else {
      Write(acc, source, chunks);
      device::FenceAsyncProxy();
      __syncwarp();
      if (first_lane) {
        const std::uint32_t rank = place_.OfSlice(target);
        device::CopyToBlock(device::InBlock(place, rank), source, chunks * Sums::kChunkBytes,
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
    // As many warps as slices share a strip, eight threads a chunk. With one slice that strip is the warp's own.
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t strip = warp / place_.slices;
    const std::uint32_t column = (place_.slice * strips_ + strip) * Sums::kStripColumns + lane % 8 / 4 * 4;
    const std::uint32_t chunks = ChunksOf(rows);
    for (std::uint32_t chunk = warp % place_.slices * 4 + lane / 8; chunk < chunks; chunk += 4 * place_.slices) {
      const std::uint32_t row = chunk * Sums::kChunkRows + lane % 4 * 2;
      const auto prepared = prepare(row, column);
      if (place_.slices > 1) device::MbarrierWait(ArrivedBarrier(ring_), parity_);
      finish(prepared, row, column, Add(ring_.Area() + strip * Sums::kStripBytes + chunk * Sums::kChunkBytes));
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

  // Where the warp's strip stands in the lent stages, once they are there.
  __device__ __forceinline__ std::uint32_t LentPlace(std::uint32_t warp, RingPosition<Stages::kStages>& at) const {
    std::uint32_t place = 0;
#pragma unroll
    for (int i = 0; i < Sums::kLentStages; ++i) {
      if (warp / Sums::kStageStrips == static_cast<std::uint32_t>(i)) {
        device::MbarrierWait(ring_.Full(at.stage), at.parity);
        place = ring_.A(at.stage) + warp % Sums::kStageStrips * Sums::kStripBytes;
      }
      at.Advance();
    }
    return place;
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
  __device__ __forceinline__ Block Add(std::uint32_t chunk) const {
    const std::uint32_t lane = threadIdx.x % 8;
    const std::uint32_t first = chunk + (lane / 4 * 20 + lane % 4) * 16;
    const std::uint32_t slice_bytes = strips_ * Sums::kStripBytes;
    Block block;
#pragma unroll
    for (int j = 0; j < Block::kColumns; ++j) {
      const device::SharedVector sums = device::LoadSharedVector(first ^ j * 64U);
#pragma unroll
      for (int i = 0; i < 4; ++i) block.sum[j][i] = SumOf<Accumulator>(sums.word[i]);
    }
    for (std::uint32_t slice = 1; slice < place_.slices; ++slice) {
#pragma unroll
      for (int j = 0; j < Block::kColumns; ++j) {
        const device::SharedVector sums = device::LoadSharedVector((first ^ j * 64U) + slice * slice_bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) block.sum[j][i] += SumOf<Accumulator>(sums.word[i]);
      }
    }
    return block;
  }

  Stages ring_;
  SlicePlace place_;
  std::uint32_t strips_;      // of a block
  std::uint32_t parity_ = 0;  // of this tile's phase of `arrived`
};

}  // namespace tessera::kernels::sm90a
