// Numbers for the GEMM benchmark, made and compared on the device: some cells have gigabytes of them. All of it is
// enqueued on `stream`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace tessera::gpu_test {

// Every element drawn for itself: zeros and repeated numbers let the card draw less power and run faster. Floats (bf16,
// e4m3, e5m2) uniform in [-1, 1), s8 over its whole range.
cudaError_t FillRandom(void* data, DType dtype, std::int64_t elements, std::uint64_t seed, cudaStream_t stream);

// Uniform in [0.5, 1.5).
cudaError_t FillScales(float* scales, std::int64_t count, std::uint64_t seed, cudaStream_t stream);

// bf16 out[rows, cols] = sums[rows, cols] * row_scale[row] * col_scale[col], all packed and aligned to 16 bytes: what
// must follow an int8 product that ends in s32. `cols` is a multiple of 8, `rows` at most 65535.
struct DequantiseParams {
  const std::int32_t* sums = nullptr;
  const float* row_scale = nullptr;
  const float* col_scale = nullptr;
  void* out = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};
cudaError_t Dequantise(const DequantiseParams& params, cudaStream_t stream);

// Counts into `wrong`, zeroed before, the elements with |x - y| > relative * max(|x|, |y|) + absolute; NaN is wrong.
// `dtype` is kBf16 or kF32.
struct CompareParams {
  const void* x = nullptr;
  const void* y = nullptr;
  DType dtype = DType::kBf16;
  std::int64_t elements = 0;
  float relative = 0;
  float absolute = 0;
};
cudaError_t CountDifferences(const CompareParams& params, unsigned long long* wrong, cudaStream_t stream);

}  // namespace tessera::gpu_test
