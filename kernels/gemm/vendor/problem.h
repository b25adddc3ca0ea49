// A GEMM as cuBLASLt states it, and the reasons why some cannot be stated. Free of CUDA, so that the planner can ask.
//
// The library is column-major: a row-major D[M, N] is its N x M matrix, so its first operand is our B, its second our
// A:
//
//   D' (N x M) = alpha * x_scale * y_scale * op(X) (N x K) * op(Y) (K x M) + bias (one value a row of D')
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::vendor {

// Column-major. Strides count elements.
struct StoredMatrix {
  void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t leading = 0;       // from one column to the next
  std::int64_t batch_stride = 0;  // 0 = the same matrix throughout
};

enum class ScaleMode : std::uint8_t {
  kNone,    // alpha says it all
  kScalar,  // one float in device memory
  kVector,  // contiguous floats in device memory, one a row of X, or one a column of op(Y)
};

struct OperandScale {
  ScaleMode mode = ScaleMode::kNone;
  const float* data = nullptr;
};

struct Problem {
  StoredMatrix x;  // B
  StoredMatrix y;  // A
  StoredMatrix d;
  bool x_transposed = false;
  bool y_transposed = false;
  std::int64_t batch = 1;
  float alpha = 1.0F;
  OperandScale x_scale;  // of channels (n)
  OperandScale y_scale;  // of rows (m)
  const void* bias = nullptr;
  DType bias_dtype = DType::kUnspecified;
};

// Alignment that the library's fp8 kernels ask of pointers, columns and matrices, and that bias and scale vectors get.
inline constexpr std::int64_t kNarrowAlignment = 16;

// Classes that the library has no kernel for, whatever the arguments; empty = it has.
constexpr std::string_view IllegalClass(const GemmClass& gemm_class) {
  if (gemm_class.out != DType::kBf16 && gemm_class.out != DType::kF32) return "the output is neither bf16 nor f32";
  if (gemm_class.a == DType::kBf16 && gemm_class.b == DType::kBf16) return {};
  if (gemm_class.a == DType::kS8 && gemm_class.b == DType::kS8) {
    return "cuBLASLt scales no int8 product into bf16 or f32";
  }
  if (!IsFp8(gemm_class.a) || !IsFp8(gemm_class.b)) return "cuBLASLt multiplies no such pair of types";
  if (gemm_class.a == DType::kE5m2 && gemm_class.b == DType::kE5m2) return "cuBLASLt has no e5m2 x e5m2 product";
  if (gemm_class.layout != GemmLayout::kNT) return "cuBLASLt multiplies fp8 in layout NT only";
  return {};
}

namespace internal {

constexpr std::int64_t RoundUp(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// The distance of columns. One column has none: then any legal number does, since the library looks at it all the same.
inline std::int64_t Leading(std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  return cols > 1 ? stride : RoundUp(rows, kNarrowAlignment);
}

inline std::string_view Store(const GemmMatrix& matrix, std::int64_t rows, std::int64_t cols, std::int64_t row_stride,
                              std::int64_t col_stride, StoredMatrix& stored) {
  stored = {.data = matrix.data, .rows = rows, .cols = cols, .leading = Leading(rows, cols, col_stride)};
  if (rows > 1 && row_stride != 1) return "a matrix is contiguous in neither dimension, or not in its layout's";
  if (stored.leading < rows) return "rows or columns of a matrix overlap";
  return {};
}

inline std::string_view StoreAll(const GemmClass& gemm_class, const GemmParams& params, Problem& problem) {
  const bool a_by_k = gemm_class.layout == GemmLayout::kNT || gemm_class.layout == GemmLayout::kNN;
  const bool b_by_k = gemm_class.layout == GemmLayout::kNT || gemm_class.layout == GemmLayout::kTT;
  problem.x_transposed = b_by_k;
  problem.y_transposed = !a_by_k;
  std::string_view reason =
      b_by_k ? Store(params.b, params.k, params.n, params.b.col_stride, params.b.row_stride, problem.x)
             : Store(params.b, params.n, params.k, params.b.row_stride, params.b.col_stride, problem.x);
  if (!reason.empty()) return reason;
  reason = a_by_k ? Store(params.a, params.k, params.m, params.a.col_stride, params.a.row_stride, problem.y)
                  : Store(params.a, params.m, params.k, params.a.row_stride, params.a.col_stride, problem.y);
  if (!reason.empty()) return reason;
  reason = Store(params.d, params.n, params.m, params.d.col_stride, params.d.row_stride, problem.d);
  return reason.empty() ? reason : "the output is not N-contiguous, or its rows overlap";
}

// One count and one stride a matrix for all batch dimensions, if their strides are those of one walk.
inline std::string_view CollapseBatch(const GemmParams& params, Problem& problem) {
  const GemmMatrix* const from[] = {&params.b, &params.a, &params.d};
  StoredMatrix* const to[] = {&problem.x, &problem.y, &problem.d};
  for (int dim = kGemmBatchDimsMax - 1; dim >= 0; --dim) {
    const std::int64_t extent = params.batch_shape[dim];
    if (extent == 1) continue;
    for (int i = 0; i < 3; ++i) {
      const std::int64_t stride = from[i]->batch_stride[dim];
      if (stride < 0) return "a batch stride is negative";
      if (problem.batch == 1) {
        to[i]->batch_stride = stride;
      } else if (stride != to[i]->batch_stride * problem.batch) {
        return "the batch dimensions have no single stride";
      }
    }
    problem.batch *= extent;
    if (problem.batch > std::numeric_limits<std::int32_t>::max()) return "the batch has 2^31 matrices or more";
  }
  return {};
}

inline bool Aligned(const void* pointer, std::int64_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(alignment) == 0;
}

inline bool NarrowAligned(const StoredMatrix& matrix, DType dtype) {
  const auto bytes = static_cast<std::int64_t>(DTypeBytes(dtype));
  return Aligned(matrix.data, kNarrowAlignment) && matrix.leading * bytes % kNarrowAlignment == 0 &&
         matrix.batch_stride * bytes % kNarrowAlignment == 0;
}

// What the library asks of fp8 operands, beyond which its heuristics have the last word.
inline std::string_view IllegalNarrow(const GemmClass& gemm_class, const GemmParams& params, const Problem& problem) {
  if (params.k % kNarrowAlignment != 0 || params.n % kNarrowAlignment != 0) {
    return "fp8: N and K must be multiples of 16";
  }
  if (!NarrowAligned(problem.x, gemm_class.b) || !NarrowAligned(problem.y, gemm_class.a) ||
      !NarrowAligned(problem.d, gemm_class.out)) {
    return "fp8: pointers and strides must be multiples of 16 bytes";
  }
  return {};
}

inline std::string_view TakeBias(const GemmClass& gemm_class, const GemmParams& params, Problem& problem) {
  if (params.bias.data == nullptr) return {};
  // bf16 products take the output's type; fp8 ones bf16 for both outputs.
  const DType wanted = IsFp8(gemm_class.a) ? DType::kBf16 : gemm_class.out;
  if (params.bias.dtype != wanted) return "the bias is not of the type that this output takes";
  if (params.n > 1 && params.bias.stride != 1) return "the bias is not contiguous";
  if (!Aligned(params.bias.data, kNarrowAlignment)) return "the bias is not aligned to 16 bytes";
  problem.bias = params.bias.data;
  problem.bias_dtype = params.bias.dtype;
  return {};
}

// A host scale becomes a factor of alpha, so nothing is copied to the device. alpha multiplies once where the
// definition multiplies twice; within these bounds neither can overflow or lose digits: fp8 sums stay under 2^63 (K <
// 2^31, products at most 2^32). Zero is out because the library skips the product then, and with it any NaN.
inline bool ScalarFits(float scalar) {
  constexpr float kLeast = 0x1p-60F;
  constexpr float kMost = 0x1p60F;
  const float size = std::fabs(scalar);
  return size >= kLeast && size <= kMost;  // false for NaN
}

inline std::string_view TakeScale(const GemmScale& scale, std::int64_t extent, Problem& problem, OperandScale& taken) {
  if (scale.vector == nullptr) {
    if (!ScalarFits(scale.scalar)) return "a scale is outside of 2^-60 .. 2^60";
    problem.alpha *= scale.scalar;
    return {};
  }
  taken.data = scale.vector;
  taken.mode = extent == 1 || scale.stride == 0 ? ScaleMode::kScalar : ScaleMode::kVector;
  if (taken.mode == ScaleMode::kScalar) return {};
  if (scale.stride != 1) return "a scale vector is not contiguous";
  return Aligned(scale.vector, kNarrowAlignment) ? std::string_view() : "a scale vector is not aligned to 16 bytes";
}

inline std::string_view TakeScales(const GemmClass& gemm_class, const GemmParams& params, Problem& problem) {
  std::string_view reason = TakeScale(params.b_scale, params.n, problem, problem.x_scale);
  if (reason.empty()) reason = TakeScale(params.a_scale, params.m, problem, problem.y_scale);
  if (!reason.empty()) return reason;
  const bool in_memory = problem.x_scale.mode != ScaleMode::kNone || problem.y_scale.mode != ScaleMode::kNone;
  const bool scaled = in_memory || params.a_scale.scalar != 1.0F || params.b_scale.scalar != 1.0F;
  if (scaled && !IsFp8(gemm_class.a)) return "cuBLASLt takes scales for fp8 only";
  const bool x_vector = problem.x_scale.mode == ScaleMode::kVector;
  const bool y_vector = problem.y_scale.mode == ScaleMode::kVector;
  if (x_vector != y_vector) return "cuBLASLt takes scale vectors for both operands or for none";
  // One vector serves all matrices here; for the library each would have its own.
  if (x_vector && problem.batch > 1) return "cuBLASLt shares no scale vector among the matrices of a batch";
  return {};
}

}  // namespace internal

// Fills `problem` (default-constructed by the caller) and returns an empty text, or returns why the library cannot
// compute exactly this. M, N and the batch are positive.
inline std::string_view Describe(const GemmClass& gemm_class, const GemmParams& params, Problem& problem) {
  std::string_view reason = IllegalClass(gemm_class);
  if (!reason.empty()) return reason;
  if (params.k == 0) return "K is 0: nothing to multiply";
  reason = internal::StoreAll(gemm_class, params, problem);
  if (reason.empty()) reason = internal::CollapseBatch(params, problem);
  if (reason.empty() && IsFp8(gemm_class.a)) reason = internal::IllegalNarrow(gemm_class, params, problem);
  if (reason.empty()) reason = internal::TakeBias(gemm_class, params, problem);
  if (reason.empty()) reason = internal::TakeScales(gemm_class, params, problem);
  return reason;
}

}  // namespace tessera::kernels::vendor
