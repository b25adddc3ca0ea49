// Elements of M, N and K that one block of a CUDA variant computes at a time, and how many such tiles of K are under
// way, from its row.
#pragma once

namespace tessera::kernels::cuda {

template <int kTileM, int kTileN, int kTileK, int kTileStages>
struct Tile {
  static constexpr int kM = kTileM;
  static constexpr int kN = kTileN;
  static constexpr int kK = kTileK;
  static constexpr int kStages = kTileStages;
};

}  // namespace tessera::kernels::cuda
