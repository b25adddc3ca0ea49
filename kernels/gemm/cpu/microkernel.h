// The inner loop of the packed CPU variants: a kMicroM x kMicroN block of float32 outputs held in registers.
#pragma once

namespace tessera::kernels::cpu {

// 6 x 16: twelve 8-wide accumulators, which with two B vectors and one broadcast of A fill AVX2's sixteen registers.
inline constexpr int kMicroM = 6;
inline constexpr int kMicroN = 16;

// c[i * c_stride + j] += sum over p < k of a[p * kMicroM + i] * b[p * kMicroN + j].
// `a`, `b`: packed panels. `c`: float32, row-major. Uses AVX2 and FMA where the processor has them.
void MultiplyMicroTile(const float* a, const float* b, int k, float* c, int c_stride);

}  // namespace tessera::kernels::cpu
