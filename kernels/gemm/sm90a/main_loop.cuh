// One consumer warpgroup's products: 64 rows of the first operand by all rows of the second, over a range of K.
#pragma once

#include <cstdint>

#include "kernels/device/mbarrier.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/device/wgmma_product.cuh"
#include "kernels/gemm/sm90a/operand.cuh"
#include "kernels/gemm/sm90a/ring.cuh"

namespace tessera::kernels::sm90a {

inline constexpr int kWarpgroupThreads = 128;

// The products of one tile of K, as one group, by kWidth rows of the second operand. `fresh`: whatever `acc` held
// counts as 0.
template <typename Pair, typename First, typename Second, int kWidth = Second::kRows, typename Accumulator, int kCount>
__device__ __forceinline__ void MultiplyStage(std::uint32_t first, std::uint32_t second, bool fresh,
                                              Accumulator (&acc)[kCount]) {
  const std::uint64_t a = First::Descriptor(first);
  const std::uint64_t b = Second::Descriptor(second);
  device::WgmmaFence();
#pragma unroll
  for (std::uint32_t step = 0; step < kStepsOfK; ++step) {
    device::Wgmma<kWidth>::template Multiply<Pair>(acc, device::AdvanceOperand(a, step * First::kStepBytes),
                                                   device::AdvanceOperand(b, step * Second::kStepBytes),
                                                   !(fresh && step == 0));
  }
  device::WgmmaCommit();
}

// For `beside` below, of those who have nothing to do beside the products.
struct Nothing {
  __device__ __forceinline__ void operator()(std::uint32_t) const {}
};

// Sums in the tensor core throughout. The products of a stage run while the stage before is given back, so that the
// tensor cores always have the next ones waiting. `release(stage)` gives it back, by all threads of the warpgroup.
// `beside(k)` runs after the products of step k have been asked for, and takes no time as long as it takes less than
// they do; it must leave `acc` alone.
template <typename Pair, typename First, typename Second, typename Stages, typename Accumulator, int kCount,
          typename Release, typename Beside>
__device__ __forceinline__ void AddProductsThroughout(const Stages& ring, RingPosition<Stages::kStages>& at,
                                                      std::uint32_t first_offset, std::uint32_t k_tiles,
                                                      const Release& release, const Beside& beside,
                                                      Accumulator (&acc)[kCount]) {
  int previous = 0;
  for (std::uint32_t k = 0; k < k_tiles; ++k) {
    device::MbarrierWait(ring.Full(at.stage), at.parity);
    MultiplyStage<Pair, First, Second>(ring.A(at.stage) + first_offset, ring.B(at.stage), false, acc);
    device::WgmmaWait<1>();
    if (k > 0) release(previous);
    previous = at.stage;
    at.Advance();
    beside(k);
  }
  device::WgmmaWait<0>();
  device::PinAccumulators(acc);
  if (k_tiles > 0) release(previous);
}

// Sums each tile of K in the tensor core, whose accumulator for fp8 is short, and adds the tile's sums in float32. The
// tensor cores meanwhile have the other warpgroup's products.
template <typename Pair, typename First, typename Second, typename Stages, int kCount, typename Release,
          typename Beside>
__device__ __forceinline__ void AddProductsInTwoLevels(const Stages& ring, RingPosition<Stages::kStages>& at,
                                                       std::uint32_t first_offset, std::uint32_t k_tiles,
                                                       const Release& release, const Beside& beside,
                                                       float (&acc)[kCount]) {
  float part[kCount];
  for (std::uint32_t k = 0; k < k_tiles; ++k) {
    device::MbarrierWait(ring.Full(at.stage), at.parity);
    MultiplyStage<Pair, First, Second>(ring.A(at.stage) + first_offset, ring.B(at.stage), true, part);
    beside(k);
    device::WgmmaWait<0>();
    device::PinAccumulators(part);
    release(at.stage);
    at.Advance();
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] = __fadd_rn(acc[i], part[i]);
  }
}

template <int kCount, int kPart>
__device__ __forceinline__ void AddPart(float (&acc)[kCount], int first, const float (&part)[kPart]) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) acc[first + i] = __fadd_rn(acc[first + i], part[i]);
}

// kSteps steps of K from `k` on, each in two halves of the second operand's rows: the tensor cores have one half's
// products while the other half's sums are added. Nothing is under way when it returns, as the assembler puts
// instructions in order, at a cost, where it does not see which products are over.
template <int kSteps, typename Pair, typename First, typename Second, typename Stages, int kCount, typename Release,
          typename Beside>
__device__ __forceinline__ void AddStepsInHalves(const Stages& ring, RingPosition<Stages::kStages>& at,
                                                 std::uint32_t first_offset, std::uint32_t k, const Release& release,
                                                 const Beside& beside, float (&acc)[kCount]) {
  constexpr int kHalfRows = Second::kRows / 2;
  constexpr int kHalf = kCount / 2;
  float left[kHalf];
  float right[kHalf];
  const auto multiply_left = [&] {
    device::MbarrierWait(ring.Full(at.stage), at.parity);
    MultiplyStage<Pair, First, Second, kHalfRows>(ring.A(at.stage) + first_offset, ring.B(at.stage), true, left);
  };
  const auto multiply_right = [&] {
    MultiplyStage<Pair, First, Second, kHalfRows>(ring.A(at.stage) + first_offset,
                                                  ring.B(at.stage) + kHalfRows * device::kSwizzleRowBytes, true, right);
  };
  multiply_left();
  multiply_right();
  beside(k);
#pragma unroll
  for (int step = 1; step < kSteps; ++step) {
    const int previous = at.stage;
    at.Advance();
    device::WgmmaWait<1>();
    device::PinAccumulators(left);
    AddPart(acc, 0, left);
    multiply_left();
    device::WgmmaWait<1>();
    release(previous);
    device::PinAccumulators(right);
    AddPart(acc, kHalf, right);
    multiply_right();
    beside(k + step);
  }
  device::WgmmaWait<1>();
  device::PinAccumulators(left);
  AddPart(acc, 0, left);
  device::WgmmaWait<0>();
  release(at.stage);
  device::PinAccumulators(right);
  AddPart(acc, kHalf, right);
  at.Advance();
}

template <typename Pair, typename First, typename Second, typename Stages, int kCount, typename Release,
          typename Beside>
__device__ __forceinline__ void AddProductsInHalves(const Stages& ring, RingPosition<Stages::kStages>& at,
                                                    std::uint32_t first_offset, std::uint32_t k_tiles,
                                                    const Release& release, const Beside& beside,
                                                    float (&acc)[kCount]) {
  constexpr std::uint32_t kSteps = 4;
  std::uint32_t k = 0;
  for (; k + kSteps <= k_tiles; k += kSteps) {
    AddStepsInHalves<kSteps, Pair, First, Second>(ring, at, first_offset, k, release, beside, acc);
  }
  for (; k < k_tiles; ++k) AddStepsInHalves<1, Pair, First, Second>(ring, at, first_offset, k, release, beside, acc);
}

// Adds the products of `k_tiles` steps to `acc`, in the way of `Config`.
template <typename Config, typename First, typename Second, typename Release, typename Beside>
__device__ __forceinline__ void AddProducts(const typename Config::Stages& ring,
                                            RingPosition<Config::Stages::kStages>& at, std::uint32_t first_offset,
                                            std::uint32_t k_tiles, const Release& release, const Beside& beside,
                                            typename Config::Accumulator (&acc)[Config::kAccumulators]) {
  using Pair = typename Config::Pair;
  if constexpr (Config::kInHalves) {
    AddProductsInHalves<Pair, First, Second>(ring, at, first_offset, k_tiles, release, beside, acc);
  } else if constexpr (Config::kInTwoLevels) {
    AddProductsInTwoLevels<Pair, First, Second>(ring, at, first_offset, k_tiles, release, beside, acc);
  } else {
    AddProductsThroughout<Pair, First, Second>(ring, at, first_offset, k_tiles, release, beside, acc);
  }
}

// The same from 0. A first product that ignores what the accumulators hold would spare these moves, but then K = 0 is a
// second source of the accumulators, and merging the two costs more moves or spills.
template <typename Config, typename First, typename Second, typename Release, typename Beside>
__device__ __forceinline__ void Multiply(const typename Config::Stages& ring, RingPosition<Config::Stages::kStages>& at,
                                         std::uint32_t first_offset, std::uint32_t k_tiles, const Release& release,
                                         const Beside& beside,
                                         typename Config::Accumulator (&acc)[Config::kAccumulators]) {
#pragma unroll
  for (typename Config::Accumulator& value : acc) value = 0;
  AddProducts<Config, First, Second>(ring, at, first_offset, k_tiles, release, beside, acc);
}

}  // namespace tessera::kernels::sm90a
