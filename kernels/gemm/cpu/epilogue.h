// Accumulator -> output, shared by all CPU variants: v * a_scale, * b_scale, + bias in float32, one rounding to the
// output type. Plain comparisons and clamps are absent on purpose: NaN and infinities pass as IEEE says.
#pragma once

#include <cstdint>

#include "kernels/gemm/cpu/element.h"
#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::cpu {

inline float ScaleAt(const GemmScale& scale, std::int64_t index) {
  return scale.vector == nullptr ? scale.scalar : scale.vector[index * scale.stride];
}

inline float BiasAt(const GemmBias& bias, std::int64_t index) {
  if (bias.dtype == DType::kBf16) return DecodeBf16(static_cast<const std::uint16_t*>(bias.data)[index * bias.stride]);
  return static_cast<const float*>(bias.data)[index * bias.stride];
}

template <DType kOut>
inline void StoreAt(void* base, std::int64_t offset, float value) {
  if constexpr (kOut == DType::kBf16) {
    static_cast<std::uint16_t*>(base)[offset] = EncodeBf16(value);
  } else {
    static_assert(kOut == DType::kF32, "outputs are bf16 or f32");
    static_cast<float*>(base)[offset] = value;
  }
}

// Writes D[m, n .. n + count) of the batch whose first element is `d_offset` from the accumulators at `acc`.
template <DType kOut, typename Acc>
void StoreRow(const GemmParams& params, std::int64_t d_offset, std::int64_t m, std::int64_t n, std::int64_t count,
              const Acc* acc) {
  const float a_scale = ScaleAt(params.a_scale, m);
  const std::int64_t row = d_offset + m * params.d.row_stride;
  for (std::int64_t i = 0; i < count; ++i) {
    float value = static_cast<float>(acc[i]) * a_scale * ScaleAt(params.b_scale, n + i);
    if (params.bias.data != nullptr) value += BiasAt(params.bias, n + i);
    StoreAt<kOut>(params.d.data, row + (n + i) * params.d.col_stride, value);
  }
}

}  // namespace tessera::kernels::cpu
