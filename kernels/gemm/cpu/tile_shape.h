// Elements of M, N and K that one task of a CPU variant handles, from its row.
#pragma once

namespace tessera::kernels::cpu {

template <int kTileM, int kTileN, int kTileK>
struct Tile {
  static constexpr int kM = kTileM;
  static constexpr int kN = kTileN;
  static constexpr int kK = kTileK;
};

}  // namespace tessera::kernels::cpu
