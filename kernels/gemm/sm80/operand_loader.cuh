// Global memory -> shared memory for one operand: the tiles of K of one tile of rows, in order. Chunks are copied whole
// and asynchronously where addresses allow it, else gathered element by element; which one is the host's choice, the
// same for all blocks. Elements past an extent become zeros and are not read.
#pragma once

#include <cstdint>

#include "kernels/device/cp_async.cuh"
#include "kernels/gemm/sm80/swizzle.cuh"

namespace tessera::kernels::sm80 {

template <int kRows, int kDepth, bool kKContiguous, int kThreads>
class OperandLoader {
 public:
  using Tile = OperandTile<kRows, kDepth, kKContiguous>;

  // `matrix` is element [0, 0] of the batch entry, `row` the tile's first of `rows`, `depths` the extent K. Strides are
  // in elements. `chunked` promises: the lines' elements are contiguous, and all lines start at multiples of 16 bytes.
  __device__ __forceinline__ OperandLoader(const std::uint16_t* matrix, std::int64_t row_stride,
                                           std::int64_t depth_stride, std::uint32_t row, std::uint32_t rows,
                                           std::uint32_t depths, bool chunked)
      : matrix_(matrix),
        line_stride_(kKContiguous ? row_stride : depth_stride),
        element_stride_(kKContiguous ? depth_stride : row_stride),
        lines_(kKContiguous ? rows : depths),
        elements_(kKContiguous ? depths : rows),
        line_(kKContiguous ? row : 0),
        element_(kKContiguous ? 0 : row),
        chunked_(chunked) {
    const auto stride = static_cast<std::uint64_t>(line_stride_) * 2;
    address_ =
        reinterpret_cast<std::uint64_t>(matrix) + (line_ + OwnLine()) * stride + (element_ + OwnElement()) * 2ULL;
  }

  // Starts to fill the tile at `target` with the next kDepth elements of K. Chunked copies belong to the thread's open
  // copy group; gathered elements are stored on return.
  __device__ __forceinline__ void LoadNext(unsigned char* target) {
    unsigned char* const own = target + Tile::Offset(OwnLine(), threadIdx.x % Tile::kLineChunks);
    if (!chunked_) {
      Gather(own);
    } else if (lines_ - line_ >= Tile::kLines && elements_ - element_ >= kLineElements) {
      CopyWhole(own);
    } else {
      CopyEdge(own);
    }
    if constexpr (kKContiguous) {
      element_ += kDepth;
      address_ += kDepth * 2;
    } else {
      line_ += kDepth;
      address_ += kDepth * 2 * static_cast<std::uint64_t>(line_stride_);
    }
  }

 private:
  static constexpr int kLineElements = Tile::kLineChunks * kChunkElements;
  static constexpr int kLinesPerPass = kThreads / Tile::kLineChunks;
  static constexpr int kPasses = Tile::kLines / kLinesPerPass;
  static constexpr int kPassBytes = kLinesPerPass * Tile::kLineChunks * kChunkBytes;
  static_assert(kThreads % Tile::kLineChunks == 0, "a thread has the same chunk of every line it loads");
  static_assert(Tile::kLines % kLinesPerPass == 0, "threads share the chunks evenly");
  static_assert(kLinesPerPass % 8 == 0, "the lines of a thread are permuted alike, so they lie kPassBytes apart");

  // This thread's line in the first pass over a tile, and its chunk's first element.
  __device__ __forceinline__ static std::uint32_t OwnLine() { return threadIdx.x / Tile::kLineChunks; }
  __device__ __forceinline__ static std::uint32_t OwnElement() {
    return threadIdx.x % Tile::kLineChunks * kChunkElements;
  }

  // All of the tile lies within the extents.
  __device__ __forceinline__ void CopyWhole(unsigned char* own) const {
    const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(own));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::uint64_t address = address_ + pass * (kLinesPerPass * 2 * static_cast<std::uint64_t>(line_stride_));
      device::CopyAsync16(shared + pass * kPassBytes, reinterpret_cast<const void*>(address));
    }
  }

  // Rolled, as it is for the last tiles only. A chunk that the extents cut is gathered: a copy that zero-fills its tail
  // is an access to 16 bytes all the same, which compute-sanitizer faults at the end of an allocation.
  __device__ __forceinline__ void CopyEdge(unsigned char* own) const {
    const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(own));
    const std::uint32_t element = element_ + OwnElement();
    const bool cut = element < elements_ && elements_ - element < kChunkElements;
    std::uint64_t address = address_;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::uint32_t line = line_ + OwnLine() + pass * kLinesPerPass;
      if (cut) {
        GatherChunk(own + pass * kPassBytes, line, element);
      } else {
        const bool inside = line < lines_ && element < elements_;
        // Past the extents the sum may have left the operand: it is replaced before it becomes a pointer.
        const auto* const source = inside ? reinterpret_cast<const void*>(address) : matrix_;
        device::CopyAsync16OrZero(shared + pass * kPassBytes, source, inside);
      }
      address += kLinesPerPass * 2 * static_cast<std::uint64_t>(line_stride_);
    }
  }

  __device__ __forceinline__ std::uint32_t ElementOrZero(std::uint32_t line, std::uint32_t element) const {
    if (line >= lines_ || element >= elements_) return 0;
    return matrix_[line * line_stride_ + element * element_stride_];
  }

  __device__ __forceinline__ void GatherChunk(unsigned char* chunk, std::uint32_t line, std::uint32_t element) const {
    std::uint32_t pairs[kChunkElements / 2];
#pragma unroll
    for (int i = 0; i < kChunkElements / 2; ++i) {
      pairs[i] = ElementOrZero(line, element + 2 * i) | ElementOrZero(line, element + 2 * i + 1) << 16;
    }
    *reinterpret_cast<uint4*>(chunk) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  // Rolled: this path is bound by its loads, and registers belong to the accumulators.
  __device__ __forceinline__ void Gather(unsigned char* own) const {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      GatherChunk(own + pass * kPassBytes, line_ + OwnLine() + pass * kLinesPerPass, element_ + OwnElement());
    }
  }

  const std::uint16_t* matrix_;
  std::int64_t line_stride_;
  std::int64_t element_stride_;
  // Extents are below 2^31 and the next tile starts within them, so that no sum of these wraps.
  std::uint32_t lines_;
  std::uint32_t elements_;
  std::uint32_t line_;     // the next tile's first line
  std::uint32_t element_;  // and first element of a line
  // Of this thread's first chunk of the next tile, if chunked: an integer, as it may lie past the operand.
  std::uint64_t address_;
  bool chunked_;
};

}  // namespace tessera::kernels::sm80
