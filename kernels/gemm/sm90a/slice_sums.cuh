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
#include "kernels/gemm/sm90a/wgmma_gemm.cuh"

namespace tessera::kernels::sm90a {

// The partial sums of a tile, kTileRows of D by kTileColumns. A strip is the 16 columns of D of which one warp has the
// sums; of a strip, 8 rows of D are a chunk: a pair of accumulators of a thread's two columns, of all 32 threads. Block
// r of S adds strips [r kStrips / S, (r + 1) kStrips / S), and receives them as [slice][strip][chunk][thread]. Behind
// that area lies one for what a block sends, [strip][chunk][thread].
//
// In a chunk the 16 bytes of thread l stand at l ^ (l / 16 * 4). Then threads that write theirs are in different banks,
// and so are threads that read four consecutive columns of two rows each (SliceSums::Add).
template <int kTileRows, int kTileColumns>
struct Exchange {
  static constexpr int kStripColumns = 16;
  static constexpr int kStrips = kTileColumns / kStripColumns;
  static constexpr int kChunkRows = device::WgmmaFragment::kColumnStep;
  static constexpr int kChunks = kTileRows / kChunkRows;  // of a strip
  static constexpr std::uint32_t kChunkBytes = kStripColumns * kChunkRows * 4;
  static constexpr std::uint32_t kStripBytes = kChunks * kChunkBytes;
  static constexpr std::uint32_t kAreaBytes = kStrips * kStripBytes;
  static constexpr std::uint32_t kBytes = 2 * kAreaBytes;
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
// block's own warps; `read` counts the warps of every block that have added up what they received, after which the next
// tile may be sent, and what was sent of this one be overwritten. A block of its own, with all of K, needs neither:
// each warp finishes the strip that it has computed.
template <typename Config>
class SliceSums {
 public:
  using Accumulator = typename Config::Accumulator;
  using Sums = typename Config::Sums;
  using Block = SumBlock<Accumulator>;

  __device__ __forceinline__ SliceSums(const typename Config::Stages& ring, const ClusterPlace& cluster)
      : area_(ring.Area()),
        arrived_(ring.Other(0)),
        read_(ring.Other(1)),
        cluster_(cluster),
        strips_(Sums::kStrips / cluster.blocks) {}

  // One thread, as Ring::Init.
  static __device__ __forceinline__ void Init(const typename Config::Stages& ring, const ClusterPlace& cluster) {
    device::MbarrierInit(ring.Other(0), 1 + Sums::kStrips / cluster.blocks);
    device::MbarrierInit(ring.Other(1), kConsumerWarps * cluster.blocks);
  }

  // The warp's strip of a tile of which `rows` are in D.
  __device__ __forceinline__ void Send(const Accumulator (&acc)[Config::kAccumulators], std::uint32_t warp,
                                       std::uint32_t rows) const {
    const std::uint32_t chunks = ChunksOf(rows);
    if (cluster_.blocks == 1) {
      Write(acc, area_ + warp * Sums::kStripBytes, chunks);
      __syncwarp();
      return;
    }
    const bool first_lane = threadIdx.x % 32 == 0;
    if (threadIdx.x == 0) {
      device::MbarrierArriveExpect(arrived_, (cluster_.blocks - 1) * strips_ * chunks * Sums::kChunkBytes);
    }
    device::MbarrierWait(read_, parity_ ^ 1U);
    const std::uint32_t target = warp / strips_;
    const std::uint32_t place = area_ + (cluster_.rank * strips_ + warp % strips_) * Sums::kStripBytes;
    if (target == cluster_.rank) {
      Write(acc, place, chunks);
      __syncwarp();
      if (first_lane) device::MbarrierArrive(arrived_);
    } else {
      const std::uint32_t source = area_ + Sums::kAreaBytes + warp * Sums::kStripBytes;
      Write(acc, source, chunks);
      device::FenceAsyncProxy();
      __syncwarp();
      if (first_lane) {
        device::CopyToBlock(device::InBlock(place, target), source, chunks * Sums::kChunkBytes,
                            device::InBlock(arrived_, target));
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
    const std::uint32_t strip = warp / cluster_.blocks;
    const std::uint32_t column = (cluster_.rank * strips_ + strip) * Sums::kStripColumns + lane % 8 / 4 * 4;
    const std::uint32_t chunks = ChunksOf(rows);
    for (std::uint32_t chunk = warp % cluster_.blocks * 4 + lane / 8; chunk < chunks; chunk += 4 * cluster_.blocks) {
      const std::uint32_t row = chunk * Sums::kChunkRows + lane % 4 * 2;
      const auto prepared = prepare(row, column);
      if (cluster_.blocks > 1) device::MbarrierWait(arrived_, parity_);
      finish(prepared, row, column, Add(area_ + strip * Sums::kStripBytes + chunk * Sums::kChunkBytes));
    }
    if (cluster_.blocks > 1) device::MbarrierWait(arrived_, parity_);  // by warps without a chunk, too
    __syncwarp();
    // Nobody waits for the last ones, which might come when their block has gone.
    if (cluster_.blocks > 1 && !last && lane < cluster_.blocks) {
      device::MbarrierArriveInBlock(device::InBlock(read_, lane));
    }
    parity_ ^= 1U;
  }

 private:
  static __device__ __forceinline__ std::uint32_t ChunksOf(std::uint32_t rows) {
    return (rows + Sums::kChunkRows - 1) / Sums::kChunkRows;
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
    for (std::uint32_t slice = 1; slice < cluster_.blocks; ++slice) {
#pragma unroll
      for (int j = 0; j < Block::kColumns; ++j) {
        const device::SharedVector sums = device::LoadSharedVector((first ^ j * 64U) + slice * slice_bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) block.sum[j][i] += SumOf<Accumulator>(sums.word[i]);
      }
    }
    return block;
  }

  std::uint32_t area_;
  std::uint32_t arrived_;
  std::uint32_t read_;
  ClusterPlace cluster_;
  std::uint32_t strips_;      // of a block
  std::uint32_t parity_ = 0;  // of this tile's phase of `arrived`
};

}  // namespace tessera::kernels::sm90a
