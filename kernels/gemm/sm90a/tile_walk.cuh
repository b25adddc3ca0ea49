// Which tiles the blocks of a persistent grid compute, and in which order. A cluster computes a unit at a time: tiles
// one above the other, or one tile in slices of K; here a unit is what counts. Producer and consumers walk on their own
// and must agree, so both use this.
#pragma once

#include <cstdint>

namespace tessera::kernels::sm90a {

// The problem in units. The order is batch by batch; in a batch, groups of `raster` units of M; in a group, column
// after column of its units. Units that run at the same time thus form a block of the output, whose rows of A and of B
// stay in L2 while they are read again.
struct TileGrid {
  std::uint32_t m_tiles = 0;  // units along M
  std::uint32_t n_tiles = 0;
  std::uint32_t k_tiles = 0;  // steps along K
  std::uint32_t tiles = 0;    // units of all batches, below 2^31
  std::uint32_t raster = 1;   // 1 .. m_tiles
  std::uint32_t batch_1 = 1;  // extents of the two faster batch dimensions
  std::uint32_t batch_2 = 1;
};

struct TileIndex {
  std::uint32_t batch[3];
  std::uint32_t m;
  std::uint32_t n;
};

__device__ __forceinline__ TileIndex TileAt(const TileGrid& grid, std::uint32_t tile) {
  const std::uint32_t tiles_of_batch = grid.m_tiles * grid.n_tiles;
  const std::uint32_t batch = tile / tiles_of_batch;
  const std::uint32_t in_batch = tile - batch * tiles_of_batch;
  const std::uint32_t tiles_of_group = grid.raster * grid.n_tiles;
  const std::uint32_t group = in_batch / tiles_of_group;
  const std::uint32_t in_group = in_batch - group * tiles_of_group;
  const std::uint32_t first_m = group * grid.raster;
  const std::uint32_t height = min(grid.raster, grid.m_tiles - first_m);  // the last group may be lower
  const std::uint32_t n = in_group / height;
  const std::uint32_t rest = batch / grid.batch_2;
  return {.batch = {rest / grid.batch_1, rest % grid.batch_1, batch % grid.batch_2},
          .m = first_m + in_group - n * height,
          .n = n};
}

// The first row, or column, of tile number `tile` of `extent`: a multiple of `kUnit`. The last tile is moved back to
// end with the matrix, where it would reach beyond it: the copy engine takes longer for rows that are not there than
// for those that are. What two tiles then have in common is computed twice, with the same bits.
template <int kTile, int kUnit>
__device__ __forceinline__ std::int32_t TileBegin(std::uint32_t tile, std::int64_t extent) {
  static_assert(kTile % kUnit == 0, "tiles begin at multiples of the unit");
  // Extents are below 2^31, so the end of the last tile fits 32 bits without a sign.
  const std::uint32_t begin = tile * kTile;
  const std::uint32_t last = (static_cast<std::uint32_t>(extent) - kTile + kUnit - 1) / kUnit * kUnit;
  return static_cast<std::int32_t>(extent >= kTile ? min(begin, last) : begin);
}

}  // namespace tessera::kernels::sm90a
