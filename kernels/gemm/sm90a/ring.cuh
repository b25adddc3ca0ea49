// Shared memory of the Hopper GEMMs: a ring of stages, each a tile of A and a tile of B of one step along K, with a
// pair of barriers a stage. The producer waits for `Empty`, asks the copy engine to fill the stage and count into
// `Full`; every consumer warp waits for `Full`, multiplies, and arrives at `Empty` when its products have been read.
// Stages are used in turn, without regard to where one output tile ends and the next begins, so the producer runs ahead
// across tiles. Behind the stages lies an area for the epilogue.
#pragma once

#include <cstdint>

#include "kernels/device/mbarrier.cuh"
#include "kernels/device/wgmma.cuh"

namespace tessera::kernels::sm90a {

template <std::uint32_t kTileABytes, std::uint32_t kTileBBytes, int kStageCount, std::uint32_t kAreaBytes>
class Ring {
 public:
  static constexpr int kStages = kStageCount;
  static constexpr std::uint32_t kABytes = kTileABytes;
  static constexpr std::uint32_t kStageBytes = kTileABytes + kTileBBytes;
  static constexpr int kOtherBarriers = 2;
  // The runtime aligns dynamic shared memory less than a swizzle atom needs; Ring rounds up within this.
  static constexpr std::uint32_t kSharedBytes = device::kSwizzleAtomBytes + kStages * kStageBytes + kAreaBytes +
                                                (2 * kStages + kOtherBarriers) * device::kMbarrierBytes;
  static_assert(kTileABytes % device::kSwizzleAtomBytes == 0 && kTileBBytes % device::kSwizzleAtomBytes == 0,
                "every tile begins at a swizzle atom");
  static_assert(kAreaBytes % device::kMbarrierBytes == 0, "barriers are aligned");
  static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB");

  explicit __device__ __forceinline__ Ring(const void* dynamic_shared)
      : base_((device::SharedAddress(dynamic_shared) + device::kSwizzleAtomBytes - 1) &
              ~(device::kSwizzleAtomBytes - 1)) {}

  // One thread; device::FenceMbarrierInit and a barrier of all who use them must follow.
  __device__ __forceinline__ void Init(std::uint32_t arrivals_when_empty) const {
    for (int stage = 0; stage < kStages; ++stage) {
      device::MbarrierInit(Full(stage), 1);
      device::MbarrierInit(Empty(stage), arrivals_when_empty);
    }
  }

  __device__ __forceinline__ std::uint32_t A(int stage) const { return base_ + stage * kStageBytes; }
  __device__ __forceinline__ std::uint32_t B(int stage) const { return A(stage) + kABytes; }
  __device__ __forceinline__ std::uint32_t Area() const { return base_ + kStages * kStageBytes; }
  __device__ __forceinline__ std::uint32_t Full(int stage) const {
    return Area() + kAreaBytes + stage * device::kMbarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t Empty(int stage) const {
    return Full(stage) + kStages * device::kMbarrierBytes;
  }
  __device__ __forceinline__ std::uint32_t Other(int barrier) const { return Empty(kStages + barrier); }

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
