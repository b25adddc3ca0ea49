// Matrix products of a warpgroup, four warps in a row of which the first has a multiple of four as its number: operands
// from shared memory, accumulators in registers, running on while the threads go on (PTX ISA, "Asynchronous Warpgroup
// Level Matrix Instructions"). Needs sm_90a.
//
// Order of use, by all 128 threads of the warpgroup:
//   WgmmaFence             after ordinary code touched the accumulators and before the first product that adds to them
//   Multiply, Multiply ..  each D[64, kN] (+)= A[64, 16] * B[kN, 16]^T; they run in order
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

// bf16 x bf16 -> float32. `accumulate` false: D = A B^T, whatever D held.
template <int kN>
struct WgmmaBf16;

template <>
struct WgmmaBf16<128> {
  static __device__ __forceinline__ void Multiply(float (&d)[64], std::uint64_t a, std::uint64_t b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, add, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(accumulate)));
  }
};

template <>
struct WgmmaBf16<256> {
  static __device__ __forceinline__ void Multiply(float (&d)[128], std::uint64_t a, std::uint64_t b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, add, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),
          "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),
          "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),
          "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),
          "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),
          "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),
          "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]),
          "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
          "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(accumulate)));
  }
};

}  // namespace tessera::kernels::device
