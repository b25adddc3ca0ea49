// Accumulator -> output for all CUDA trees, the same arithmetic as kernels/gemm/cpu/epilogue.h: v * a_scale, * b_scale,
// + bias in float32, each rounded on its own (no contraction into fused multiply-adds), then one rounding to the
// output.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::cuda {

__device__ __forceinline__ float ScaleAt(const GemmScale& scale, std::int64_t index) {
  return scale.vector == nullptr ? scale.scalar : scale.vector[index * scale.stride];
}

__device__ __forceinline__ float BiasAt(const GemmBias& bias, std::int64_t index) {
  if (bias.dtype == DType::kBf16)
    return __bfloat162float(static_cast<const __nv_bfloat16*>(bias.data)[index * bias.stride]);
  return static_cast<const float*>(bias.data)[index * bias.stride];
}

// The value of D[m, n] before it is rounded to the output type.
__device__ __forceinline__ float Finish(const GemmParams& params, std::int64_t m, std::int64_t n, float accumulator) {
  float value = __fmul_rn(__fmul_rn(accumulator, ScaleAt(params.a_scale, m)), ScaleAt(params.b_scale, n));
  if (params.bias.data != nullptr) value = __fadd_rn(value, BiasAt(params.bias, n));
  return value;
}

template <DType kOut>
struct Output;
template <>
struct Output<DType::kBf16> {
  using Element = __nv_bfloat16;
  static __device__ __forceinline__ Element Round(float value) { return __float2bfloat16_rn(value); }
};
template <>
struct Output<DType::kF32> {
  using Element = float;
  static __device__ __forceinline__ Element Round(float value) { return value; }
};

// Elements from matrix [0, 0, 0] to the matrix of `batch`, which counts through batch_shape, last dimension fastest.
__device__ __forceinline__ std::int64_t BatchOffset(const GemmParams& params, const GemmMatrix& matrix,
                                                    std::int64_t batch) {
  const std::int64_t i2 = batch % params.batch_shape[2];
  const std::int64_t rest = batch / params.batch_shape[2];
  return i2 * matrix.batch_stride[2] + rest % params.batch_shape[1] * matrix.batch_stride[1] +
         rest / params.batch_shape[1] * matrix.batch_stride[0];
}

}  // namespace tessera::kernels::cuda
