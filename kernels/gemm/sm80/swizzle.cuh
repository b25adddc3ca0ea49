// Where a tile of an operand lies in shared memory. A tile is a number of lines, each contiguous as in global memory: a
// line is a row of K when the operand is K-contiguous, else the rows of one k. Lines follow one another without
// padding, and the 16-byte chunks of a line are permuted, so that the eight lines which one ldmatrix phase reads at the
// same chunk position lie in eight different groups of four banks, and eight chunks written side by side do as well.
//
// Plain constexpr arithmetic, so that a model of it on the host can be checked without a GPU.
#pragma once

namespace tessera::kernels::sm80 {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;  // of 16 bits

// A tile of kRows rows (of m or n) by kDepth elements of K, 16 bits each.
template <int kRows, int kDepth, bool kKContiguous>
struct OperandTile {
  static constexpr int kLines = kKContiguous ? kRows : kDepth;
  static constexpr int kLineChunks = (kKContiguous ? kDepth : kRows) / kChunkElements;
  static constexpr int kBytes = kRows * kDepth * 2;
  static_assert(kRows % kChunkElements == 0 && kDepth % kChunkElements == 0, "lines are whole chunks");
  static_assert(kLineChunks == 4 || kLineChunks % 8 == 0, "a line is half or whole rows of the 32 banks");

  // Bytes from the start of the tile to a chunk of a line.
  static constexpr int Offset(int line, int chunk) {
    const int swizzle = kLineChunks == 4 ? (line >> 1) & 3 : line & 7;
    return (line * kLineChunks + (chunk ^ swizzle)) * kChunkBytes;
  }

  // ldmatrix reads a block of 16 rows by 16 of K as four 8 x 8 matrices. For an A fragment they are ordered (rows 0-7,
  // k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); for a pair of B fragments (0-7, 0-7), (0-7, 8-15), (8-15, 0-7),
  // (8-15, 8-15), rows being n. Returns the offset that `lane` gives for the block at (row, 0), row a multiple of 16;
  // tiles that are not K-contiguous are read transposed.
  template <bool kRowsFirst>
  static constexpr int FragmentOffset(int row, int lane) {
    const int first = lane / 8 % 2 * 8;  // which half of the block, in the dimension that changes first
    const int second = lane / 16 * 8;    // and in the other
    const int row_half = kRowsFirst ? first : second;
    const int depth_half = kRowsFirst ? second : first;
    const int within = lane % 8;
    if constexpr (kKContiguous) return Offset(row + row_half + within, depth_half / kChunkElements);
    return Offset(depth_half + within, (row + row_half) / kChunkElements);
  }

  // From the offset for a block at (row, 0) to that for (row + rows, depth), multiples of 16. Steps along a line flip
  // bits of the chunk's place, as `rows` stays below a power of two that `row` is a multiple of; steps of 16 lines
  // leave the permutation as it is.
  static constexpr int Step(int offset, int rows, int depth) {
    const int along = kKContiguous ? depth : rows;
    const int lines = kKContiguous ? rows : depth;
    return (offset ^ (along / kChunkElements * kChunkBytes)) + lines * kLineChunks * kChunkBytes;
  }
};

// Where the accumulators of a warp lie, kCols float32 a row, on their way from fragments to rows of D: chunks of four
// permuted so that pairs written by a fragment's 4 x 4 lanes, and chunks read side by side, are free of bank conflicts.
template <int kCols>
struct StagingTile {
  static_assert(kCols % 32 == 0, "a row is whole rows of the 32 banks");

  // Elements from the start to (row, col).
  static constexpr int Offset(int row, int col) {
    return row * kCols + (((col >> 2) ^ ((row & 3) << 1)) << 2) + (col & 3);
  }
};

}  // namespace tessera::kernels::sm80
