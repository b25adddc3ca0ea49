// Arguments of every GEMM variant, CPU and CUDA. Strides are in elements; the launcher trusts them: the server has
// checked bounds, alignment and aliasing before.
//
//   D[.., m, n] = epilogue( sum_k A[.., m, k] * B[.., n, k] )
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tessera::kernels {

inline constexpr int kGemmBatchDimsMax = 3;

// An input matrix, rows x K, or the output, rows x cols.
struct GemmMatrix {
  void* data = nullptr;                                      // element [0, .., 0, 0]; inputs are only read
  std::int64_t row_stride = 0;                               // A, D: of m; B: of n
  std::int64_t col_stride = 0;                               // A, B: of k; D: of n
  std::int64_t batch_stride[kGemmBatchDimsMax] = {0, 0, 0};  // 0 = the same matrix for every index
};

// v * value[i * stride]; `vector` null = v * scalar. Absent scales are scalar 1.
struct GemmScale {
  const float* vector = nullptr;
  std::int64_t stride = 0;  // 0 = one value for all rows or channels
  float scalar = 1.0F;
};

struct GemmBias {
  const void* data = nullptr;  // null = none
  std::int64_t stride = 0;
  DType dtype = DType::kF32;  // kF32 or kBf16
};

struct GemmParams {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t batch_shape[kGemmBatchDimsMax] = {1, 1, 1};  // slowest first; unused dimensions are 1
  GemmMatrix a;
  GemmMatrix b;
  GemmMatrix d;
  GemmScale a_scale;  // indexed by m
  GemmScale b_scale;  // indexed by n
  GemmBias bias;      // indexed by n
};

}  // namespace tessera::kernels
