// The share of one warp in the product of a tile: fragments from shared memory, mma, accumulators in registers.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/gemm/sm80/swizzle.cuh"

namespace tessera::kernels::sm80 {

// kWarpM x kWarpN outputs at (warp_m, warp_n) of the block's tile.
template <typename TileA, typename TileB, int kDepth, int kWarpM, int kWarpN, bool kAKContiguous, bool kBKContiguous>
class WarpProduct {
 public:
  static constexpr int kBlocksM = kWarpM / 16;
  static constexpr int kBlocksN = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kDepth % 16 == 0, "fragments are read 16 x 16 at a time");
  static_assert(std::has_single_bit(static_cast<unsigned>(kWarpM)) &&
                    std::has_single_bit(static_cast<unsigned>(kWarpN)),
                "OperandTile::Step");

  __device__ __forceinline__ WarpProduct(int warp_m, int warp_n, int lane)
      : lane_(lane),
        a_offset_(TileA::template FragmentOffset<true>(warp_m, lane)),
        b_offset_(TileB::template FragmentOffset<false>(warp_n, lane)) {}

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[i][j][e] = 0.0F;
      }
    }
  }

  // Adds the product of one tile of K; `a` and `b` are shared-memory addresses of the operands' tiles.
  __device__ __forceinline__ void Accumulate(std::uint32_t a, std::uint32_t b) {
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) {
      std::uint32_t a_fragments[kBlocksM][4];
      std::uint32_t b_fragments[kBlocksN][2];
      LoadA(a_fragments, a, depth);
      LoadB(b_fragments, b, depth);
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) device::MmaBf16M16N8K16(sums_[i][j], a_fragments[i], b_fragments[j]);
      }
    }
  }

  // Writes the accumulators to the warp's staging area, in the order of StagingTile<kWarpN>.
  __device__ __forceinline__ void Stage(float* staging) const {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        const int row = i * 16 + lane_ / 4;
        const int col = j * 8 + lane_ % 4 * 2;
        const float(&sums)[4] = sums_[i][j];
        *reinterpret_cast<float2*>(staging + StagingTile<kWarpN>::Offset(row, col)) = make_float2(sums[0], sums[1]);
        *reinterpret_cast<float2*>(staging + StagingTile<kWarpN>::Offset(row + 8, col)) = make_float2(sums[2], sums[3]);
      }
    }
  }

 private:
  template <bool kTransposed>
  __device__ __forceinline__ static void Load(std::uint32_t (&fragment)[4], std::uint32_t address) {
    if constexpr (kTransposed) {
      device::LoadMatrixX4Transposed(fragment, address);
    } else {
      device::LoadMatrixX4(fragment, address);
    }
  }

  __device__ __forceinline__ void LoadA(std::uint32_t (&fragments)[kBlocksM][4], std::uint32_t a, int depth) const {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      Load<!kAKContiguous>(fragments[i], a + TileA::Step(a_offset_, i * 16, depth));
    }
  }

  __device__ __forceinline__ void LoadB(std::uint32_t (&fragments)[kBlocksN][2], std::uint32_t b, int depth) const {
#pragma unroll
    for (int j = 0; j < kBlocksN; j += 2) {
      std::uint32_t pair[4];
      Load<!kBKContiguous>(pair, b + TileB::Step(b_offset_, j * 8, depth));
      fragments[j][0] = pair[0];
      fragments[j][1] = pair[1];
      fragments[j + 1][0] = pair[2];
      fragments[j + 1][1] = pair[3];
    }
  }

  int lane_;
  int a_offset_;  // of the warp's first fragments, see FragmentOffset
  int b_offset_;
  float sums_[kBlocksM][kBlocksN][4];
};

}  // namespace tessera::kernels::sm80
