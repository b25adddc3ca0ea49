// Shared memory of the Hopper GEMMs: a ring of stages, each a tile of A and a tile of B of one step along K, with a
// pair of barriers a stage. The producer waits for `Empty`, asks the copy engine to fill the stage and count into
// `Full`; every consumer warp waits for `Full`, multiplies, and arrives at `Empty` when its products have been read.
// Stages are used in turn, without regard to where one output tile ends and the next begins, so the producer runs ahead
// across tiles.
#pragma once

#include <cstdint>

#include "kernels/device/mbarrier.cuh"
#include "kernels/device/wgmma.cuh"

namespace tessera::kernels::sm90a {

template <int kTileM, int kTileN, int kStageCount>
class Ring {
 public:
  static constexpr int kStages = kStageCount;
  static constexpr std::uint32_t kABytes = kTileM * device::kSwizzleRowBytes;
  static constexpr std::uint32_t kBBytes = kTileN * device::kSwizzleRowBytes;
  static constexpr std::uint32_t kStageBytes = kABytes + kBBytes;
  // The runtime aligns dynamic shared memory less than a swizzle atom needs; Ring rounds up within this.
  static constexpr std::uint32_t kSharedBytes =
      device::kSwizzleAtomBytes + kStages * (kStageBytes + 2 * device::kMbarrierBytes);
  static_assert(kABytes % device::kSwizzleAtomBytes == 0 && kBBytes % device::kSwizzleAtomBytes == 0,
                "every tile begins at a swizzle atom");
  static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB");

  explicit __device__ __forceinline__ Ring(const void* dynamic_shared)
      : base_((device::SharedAddress(dynamic_shared) + device::kSwizzleAtomBytes - 1) &
              ~(device::kSwizzleAtomBytes - 1)) {}

  // One thread; a block barrier must follow.
  __device__ __forceinline__ void Init(std::uint32_t consumer_warps) const {
    for (int stage = 0; stage < kStages; ++stage) {
      device::MbarrierInit(Full(stage), 1);
      device::MbarrierInit(Empty(stage), consumer_warps);
    }
    device::FenceMbarrierInit();
  }

  __device__ __forceinline__ std::uint32_t A(int stage) const { return base_ + stage * kStageBytes; }
  __device__ __forceinline__ std::uint32_t B(int stage) const { return A(stage) + kABytes; }
  __device__ __forceinline__ std::uint32_t Full(int stage) const {
    return base_ + kStages * kStageBytes + stage * device::kMbarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t Empty(int stage) const {
    return Full(stage) + kStages * device::kMbarrierBytes;
  }

 private:
  std::uint32_t base_;
};

// Where a thread stands in the ring. `parity` is that of the Full phase of this round; the Empty phase that frees the
// stage for this round is the one before, of the other parity, and counts as over in the first round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1U;
    }
  }
};

}  // namespace tessera::kernels::sm90a
