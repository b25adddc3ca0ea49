// mma.sync: one product on the tensor cores by a whole warp, sm_80 and later.
#pragma once

#include <cstdint>

namespace tessera::kernels::device {

// d += a * b for bf16 a [16 x 16], bf16 b [16 x 8], float32 d [16 x 8]. With g = lane / 4 and t = lane % 4, a lane
// holds
//   a[0]: (g, 2t..2t+1)       a[1]: (g + 8, 2t..2t+1)
//   a[2]: (g, 2t + 8..2t + 9) a[3]: (g + 8, 2t + 8..2t + 9)     (row m, column k)
//   b[0]: (2t..2t+1, g)       b[1]: (2t + 8..2t + 9, g)         (row k, column n)
//   d[0..1]: (g, 2t..2t+1)    d[2..3]: (g + 8, 2t..2t+1)        (row m, column n)
// the lower index in the lower half of a register.
__device__ __forceinline__ void MmaBf16M16N8K16(float (&d)[4], const std::uint32_t (&a)[4],
                                                const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace tessera::kernels::device
