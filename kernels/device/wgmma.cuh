// Matrix products of a warpgroup, four warps in a row of which the first has a multiple of four as its number: operands
// from shared memory, accumulators in registers, running on while the threads go on (PTX ISA, "Asynchronous Warpgroup
// Level Matrix Instructions"). Needs sm_90a.
//
// Order of use, by all 128 threads of the warpgroup:
//   WgmmaFence             after ordinary code touched the accumulators and before the first product that adds to them
//   Wgmma<kN>::Multiply  (kernels/device/wgmma_product.cuh), each D[64, kN] (+)= A[64, K] * B[kN, K]^T; they run in
//                          order
//   WgmmaCommit            makes them one group
//   WgmmaWait<kPending>    until no more than that many groups run; only then are their operands free to be
//   overwritten,
//                          and accumulators to be read only after WgmmaWait<0>
#pragma once

#include <cstdint>

namespace tessera::kernels::device {

// Operand in shared memory, K-contiguous, as the copy engine leaves it with a 128-byte swizzle: rows of 128 bytes, in
// atoms of 8 rows (1024 bytes, aligned to that), the next 8 rows in the next atom. Within an atom the 16-byte column c
// of row r lies at column c ^ (r % 8); the tensor core and the copy engine both apply this to bits 4..6 of the address
// by its bits 7..9, which is why an atom must be aligned.
//
// The 64-bit descriptor (PTX ISA, "Matrix Descriptor Format"), addresses and offsets in units of 16 bytes:
//   bits  0..13  address of the first element
//   bits 16..29  offset between atoms along K: not used by swizzled K-contiguous operands, 1 by convention
//   bits 32..45  offset between atoms along M or N: 1024 bytes
//   bits 49..51  number of the row of the atom at which the operand begins: 0
//   bits 62..63  1 = swizzled by 128 bytes
// A step along K within the atom is a step of the address alone, since the swizzle is applied to the sum.
inline constexpr std::uint32_t kSwizzleAtomBytes = 1024;
inline constexpr std::uint32_t kSwizzleRowBytes = 128;

__device__ __forceinline__ std::uint64_t SwizzledOperand(std::uint32_t shared_address) {
  constexpr std::uint64_t kFixed =
      std::uint64_t{1} << 62U | std::uint64_t{kSwizzleAtomBytes >> 4U} << 32U | std::uint64_t{1} << 16U;
  return kFixed | (shared_address & 0x3FFFFU) >> 4U;
}

// The same for an operand of 16-bit elements that is contiguous along M or N: rows of 64 elements, one a step of K, in
// atoms of 8 steps. Here bits 32..45 are the offset between atoms along K, 1024 bytes, and bits 16..29 the offset
// between atoms along M or N: a panel of `steps` of K, as one copy leaves it. A step along K is a step over whole
// atoms.
inline constexpr std::uint32_t kPanelElements = 64;

template <std::uint32_t kSteps>
__device__ __forceinline__ std::uint64_t SwizzledPanels(std::uint32_t shared_address) {
  constexpr std::uint64_t kPanelBytes = kSteps * kSwizzleRowBytes;
  static_assert(kPanelBytes % kSwizzleAtomBytes == 0, "whole atoms");
  constexpr std::uint64_t kFixed =
      std::uint64_t{1} << 62U | std::uint64_t{kSwizzleAtomBytes >> 4U} << 32U | (kPanelBytes >> 4U) << 16U;
  return kFixed | (shared_address & 0x3FFFFU) >> 4U;
}

// `bytes`, a multiple of 16, further on. The address has 18 bits and shared memory fewer, so nothing carries over.
__device__ __forceinline__ std::uint64_t AdvanceOperand(std::uint64_t operand, std::uint32_t bytes) {
  return operand + (bytes >> 4U);
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties the accumulators to this place of the program: what stands below cannot be computed above. Emits nothing.
template <int kCount>
__device__ __forceinline__ void PinAccumulators(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void PinAccumulators(std::int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Registers a thread may use from here on, a multiple of 8. All warps of the warpgroup; takes effect only in a kernel
// with __launch_bounds__(threads, 1). Raising waits until other warpgroups of the block have given up enough.
template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Where accumulator i of a thread lies in D[64, kN] (PTX ISA, "Register Fragments: wgmma.mma_async", matrix D): warp w
// has rows 16 w .. 16 w + 15; of these, thread l has row l / 4 and, for i with bit 1 set, the row 8 below, and of every
// 8 columns the two from 2 (l % 4).
struct WgmmaFragment {
  static constexpr int kRows = 64;     // of D
  static constexpr int kRowPairs = 2;  // rows of a thread, kRowStep apart
  static constexpr int kRowStep = 8;
  static constexpr int kColumnStep = 8;  // columns between two pairs of a thread

  static __device__ __forceinline__ int FirstRow(int thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }
  static __device__ __forceinline__ int FirstColumn(int thread) { return thread % 4 * 2; }
  // The accumulator of row FirstRow + kRowStep * row, column FirstColumn + kColumnStep * pair + column.
  static constexpr int Index(int row, int pair, int column) { return pair * 4 + row * 2 + column; }
};

}  // namespace tessera::kernels::device
