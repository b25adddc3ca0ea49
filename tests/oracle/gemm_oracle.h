// The truth of a GEMM in float64 and the checkers that compare a computed D with it. Host memory only; correct first,
// fast enough for a few 10^9 multiply-adds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "kernels/gemm/gemm_params.h"

namespace tessera::oracle {

// What the sum over K is kept in. The short ones are a tensor core's of fp8 (tests/oracle/short_accumulator.h).
enum class Accumulator : std::uint8_t { kFloat32, kShort, kShortPromoted };

struct GemmTypes {
  DType a = DType::kUnspecified;
  DType b = DType::kUnspecified;
  DType d = DType::kUnspecified;
  Accumulator accumulator = Accumulator::kFloat32;
};

// One entry for each element of D, packed [batch.., m, n].
struct GemmTruth {
  std::vector<double> value;
  std::vector<double> sum_magnitude;  // (sum_k |a| |b|) |a_scale| |b_scale|: what accumulation errors scale with
  std::vector<double> magnitude;      // sum_magnitude + |bias|: what epilogue errors scale with
  // Of fp8, what the short accumulators may lose of the sum, with both scales; else empty.
  std::vector<double> short_loss;
  std::vector<double> promoted_loss;
};

struct Verdict {
  bool ok = true;
  double worst = 0;        // largest error / allowed error; infinity where NaN, infinity or exact bits differ
  std::int64_t wrong = 0;  // elements beyond the allowed error
  std::string first;       // the first wrong element: index, got, want, allowed
};

// Number of matrices in the batch.
std::int64_t BatchCount(const kernels::GemmParams& params);

// Offset in elements of [batch, row, col] from matrix.data; `batch` counts packed, last batch dimension fastest.
std::int64_t ElementOffset(const kernels::GemmParams& params, const kernels::GemmMatrix& matrix, std::int64_t batch,
                           std::int64_t row, std::int64_t col);

// Reads A, B, scales and bias; never D. The sum over K runs in ascending order in double, in int64 for s8 x s8.
GemmTruth ComputeGemm(const kernels::GemmParams& params, const GemmTypes& types);

// D against `truth`, allowing what fp32 accumulation in any order, an fp32 epilogue and one rounding to D's type may
// cost; s8 x s8 accumulates exactly and is allowed the epilogue only. NaN must meet NaN, infinity the same infinity,
// and a value beyond D's finite range must have become infinity.
Verdict CheckGemm(const kernels::GemmParams& params, const GemmTypes& types, const GemmTruth& truth);

// For data whose every intermediate is exact in fp32: D must hold the bits of the value rounded to fp32 and then to
// D's type. Any NaN equals any NaN.
Verdict CheckGemmExact(const kernels::GemmParams& params, const GemmTypes& types, const GemmTruth& truth);

}  // namespace tessera::oracle
