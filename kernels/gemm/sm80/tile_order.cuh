// Which tile of D comes at which place of the order in which blocks take them: batch by batch, and within a matrix
// bands of `raster` tiles of M, walked along N, so that blocks that run together share rows of A and of B in L2.
#pragma once

#include <cstdint>

namespace tessera::kernels::sm80 {

struct TileOrder {
  std::int64_t tiles_m = 0;
  std::int64_t tiles_n = 0;
  std::int64_t total = 0;  // of all batches
  std::int64_t raster = 1;
};

struct TileIndex {
  std::int64_t batch = 0;
  std::int64_t m = 0;  // in tiles
  std::int64_t n = 0;
};

__device__ __forceinline__ TileIndex TileAt(const TileOrder& order, std::int64_t index) {
  const std::int64_t in_matrix = order.tiles_m * order.tiles_n;
  const std::int64_t in_band = order.raster * order.tiles_n;
  TileIndex tile;
  tile.batch = index / in_matrix;
  const std::int64_t rest = index - tile.batch * in_matrix;
  const std::int64_t band = rest / in_band;
  const std::int64_t first_m = band * order.raster;
  const std::int64_t height = min(order.raster, order.tiles_m - first_m);
  const std::int64_t within = rest - band * in_band;
  tile.n = within / height;
  tile.m = first_m + (within - tile.n * height);
  return tile;
}

}  // namespace tessera::kernels::sm80
