// Plain dot products over decoded operands, eight columns of D at a time so that the compiler can vectorise them.
#include "tests/oracle/gemm_oracle.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/oracle/codec.h"
#include "tests/oracle/short_accumulator.h"

namespace tessera::oracle {
namespace {

using kernels::GemmBias;
using kernels::GemmMatrix;
using kernels::GemmParams;
using kernels::GemmScale;

constexpr int kLanes = 8;  // columns of D summed together

constexpr double kF32HalfUlp = 0x1p-24;        // relative error of one fp32 rounding
constexpr double kF32SubnormalMin = 0x1p-149;  // absolute error where a result underflows
constexpr double kEpilogueRoundings = 4;       // conversion or final store, two scales, bias
constexpr double kRoundingsPerTerm = 2;        // product and addition

const std::byte* ElementAt(const GemmMatrix& matrix, DType dtype, std::int64_t offset) {
  return static_cast<const std::byte*>(matrix.data) + offset * static_cast<std::int64_t>(DTypeBytes(dtype));
}

// One matrix of the batch as [rows / lanes][k][lanes], rows beyond the last as zeros.
template <typename Number>
std::vector<Number> DecodeMatrix(const GemmParams& params, const GemmMatrix& matrix, DType dtype, std::int64_t batch,
                                 std::int64_t rows, int lanes) {
  const std::int64_t groups = (rows + lanes - 1) / lanes;
  std::vector<Number> numbers(static_cast<std::size_t>(groups * params.k * lanes));
  for (std::int64_t row = 0; row < rows; ++row) {
    Number* group = numbers.data() + row / lanes * params.k * lanes + row % lanes;
    for (std::int64_t k = 0; k < params.k; ++k) {
      const std::int64_t offset = ElementOffset(params, matrix, batch, row, k);
      group[k * lanes] = static_cast<Number>(Decode(dtype, ElementAt(matrix, dtype, offset)));
    }
  }
  return numbers;
}

template <typename Number>
struct LaneSums {
  std::array<Number, kLanes> sum{};
  std::array<Number, kLanes> magnitude{};
};

template <typename Number>
LaneSums<Number> SumOverK(const Number* a_row, const Number* b_group, std::int64_t k_end) {
  LaneSums<Number> sums;
  for (std::int64_t k = 0; k < k_end; ++k) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Number product = a_row[k] * b_group[k * kLanes + lane];
      sums.sum[lane] += product;
      sums.magnitude[lane] += std::abs(product);
    }
  }
  return sums;
}

ShortAccumulator<kLanes> LossesOverK(const double* a_row, const double* b_group, std::int64_t k_end) {
  ShortAccumulator<kLanes> losses;
  for (std::int64_t k = 0; k < k_end; ++k) {
    std::array<double, kLanes> products{};
    for (int lane = 0; lane < kLanes; ++lane) products[lane] = a_row[k] * b_group[k * kLanes + lane];
    losses.Add(products);
  }
  losses.Finish();
  return losses;
}

double ScaleAt(const GemmScale& scale, std::int64_t index) {
  return scale.vector == nullptr ? scale.scalar : scale.vector[index * scale.stride];
}

double BiasAt(const GemmBias& bias, std::int64_t n) {
  const auto bytes = static_cast<std::int64_t>(DTypeBytes(bias.dtype));
  return Decode(bias.dtype, static_cast<const std::byte*>(bias.data) + n * bias.stride * bytes);
}

// Applies scales and bias to one sum and stores the three numbers at `index`.
void StoreTruth(const GemmParams& params, std::int64_t m, std::int64_t n, double sum, double sum_magnitude,
                std::size_t index, GemmTruth& truth) {
  const double a_scale = ScaleAt(params.a_scale, m);
  const double b_scale = ScaleAt(params.b_scale, n);
  truth.value[index] = sum * a_scale * b_scale;
  truth.sum_magnitude[index] = sum_magnitude * std::fabs(a_scale) * std::fabs(b_scale);
  truth.magnitude[index] = truth.sum_magnitude[index];
  if (params.bias.data == nullptr) return;
  const double bias = BiasAt(params.bias, n);
  truth.value[index] += bias;
  truth.magnitude[index] += std::fabs(bias);
}

// Where a tensor core may add with few bits.
bool AccumulatesShort(const GemmTypes& types) {
  return IsFp8(types.a) && IsFp8(types.b);
}

template <typename Number>
void ComputeMatrix(const GemmParams& params, const GemmTypes& types, std::int64_t batch, GemmTruth& truth) {
  const auto a = DecodeMatrix<Number>(params, params.a, types.a, batch, params.m, 1);
  const auto b = DecodeMatrix<Number>(params, params.b, types.b, batch, params.n, kLanes);
  for (std::int64_t n0 = 0; n0 < params.n; n0 += kLanes) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, params.n - n0));
    for (std::int64_t m = 0; m < params.m; ++m) {
      const auto sums = SumOverK(a.data() + m * params.k, b.data() + n0 * params.k, params.k);
      for (int lane = 0; lane < lanes; ++lane) {
        const std::int64_t n = n0 + lane;
        StoreTruth(params, m, n, static_cast<double>(sums.sum[lane]), static_cast<double>(sums.magnitude[lane]),
                   static_cast<std::size_t>((batch * params.m + m) * params.n + n), truth);
      }
      if constexpr (std::is_same_v<Number, double>) {
        if (!AccumulatesShort(types)) continue;
        const auto losses = LossesOverK(a.data() + m * params.k, b.data() + n0 * params.k, params.k);
        for (int lane = 0; lane < lanes; ++lane) {
          const std::int64_t n = n0 + lane;
          const double scale = std::fabs(ScaleAt(params.a_scale, m) * ScaleAt(params.b_scale, n));
          const auto index = static_cast<std::size_t>((batch * params.m + m) * params.n + n);
          truth.short_loss[index] = losses.throughout()[lane] * scale;
          truth.promoted_loss[index] = losses.promoted()[lane] * scale;
        }
      }
    }
  }
}

bool AccumulatesExactly(const GemmTypes& types) {
  return types.a == DType::kS8 && types.b == DType::kS8;
}

// Largest relative error of one rounding to the type, half a unit in the last place just above a power of two.
double HalfUlp(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return 0x1p-8;
    case DType::kF16:
      return 0x1p-11;
    default:
      return 0;  // fp32: among the epilogue's roundings
  }
}

double Rounded(DType dtype, double value) {
  std::array<std::byte, sizeof(double)> element{};
  Encode(dtype, value, element.data());
  return Decode(dtype, element.data());
}

// What one element is judged by. `ratio` is error / allowed.
struct Judgement {
  double ratio = 0;
  double allowed = 0;
};

constexpr double kNever = std::numeric_limits<double>::infinity();

// What the accumulator may lose of an element beyond float32.
double LossAt(const GemmTypes& types, const GemmTruth& truth, std::size_t index) {
  switch (types.accumulator) {
    case Accumulator::kFloat32:
      return 0;
    case Accumulator::kShort:
      return truth.short_loss[index];
    case Accumulator::kShortPromoted:
      return truth.promoted_loss[index];
  }
  return 0;
}

Judgement JudgeElement(const GemmTypes& types, std::int64_t k, double got, const GemmTruth& truth, std::size_t index) {
  const double value = truth.value[index];
  if (std::isnan(value)) return {std::isnan(got) ? 0 : kNever, 0};
  if (std::isinf(value)) return {got == value ? 0 : kNever, 0};
  const double terms = AccumulatesExactly(types) ? 0 : kRoundingsPerTerm * static_cast<double>(k);
  const double computing =
      kF32HalfUlp * (terms * truth.sum_magnitude[index] + kEpilogueRoundings * truth.magnitude[index]) +
      LossAt(types, truth, index) + kF32SubnormalMin;
  if (std::isnan(got)) return {kNever, computing};
  if (std::isinf(got)) {
    // Right where the value, or one within the computing error of it, leaves the finite range on that side.
    const bool expected = Rounded(types.d, value + std::copysign(computing, got)) == got;
    return {expected ? 0 : kNever, computing};
  }
  const double nearest_zero = std::copysign(std::max(std::fabs(value) - computing, 0.0), value);
  if (std::isinf(Rounded(types.d, nearest_zero))) return {kNever, computing};
  const double allowed = computing + HalfUlp(types.d) * (std::fabs(value) + computing);
  return {std::fabs(got - value) / allowed, allowed};
}

std::string DescribeElement(const GemmParams& params, std::int64_t batch, std::int64_t m, std::int64_t n, double got,
                            double want, double allowed) {
  const std::int64_t inner = params.batch_shape[2];
  const std::int64_t middle = params.batch_shape[1];
  std::ostringstream text;
  text.precision(9);
  text << "D[" << batch / (inner * middle) << "," << batch / inner % middle << "," << batch % inner << ", " << m << ", "
       << n << "]: got " << got << ", want " << want << ", allowed error " << allowed;
  return text.str();
}

// Walks D and counts the elements that `judge(element, truth index)` puts above 1.
template <typename Judge>
Verdict CheckEach(const GemmParams& params, const GemmTypes& types, const GemmTruth& truth, const Judge& judge) {
  Verdict verdict;
  std::size_t index = 0;
  for (std::int64_t batch = 0; batch < BatchCount(params); ++batch) {
    for (std::int64_t m = 0; m < params.m; ++m) {
      for (std::int64_t n = 0; n < params.n; ++n, ++index) {
        const std::byte* element = ElementAt(params.d, types.d, ElementOffset(params, params.d, batch, m, n));
        const Judgement judgement = judge(element, index);
        verdict.worst = std::max(verdict.worst, judgement.ratio);
        if (judgement.ratio <= 1) continue;
        if (++verdict.wrong > 1) continue;
        verdict.ok = false;
        verdict.first =
            DescribeElement(params, batch, m, n, Decode(types.d, element), truth.value[index], judgement.allowed);
      }
    }
  }
  return verdict;
}

}  // namespace

std::int64_t BatchCount(const GemmParams& params) {
  std::int64_t count = 1;
  for (const std::int64_t extent : params.batch_shape) count *= extent;
  return count;
}

std::int64_t ElementOffset(const GemmParams& params, const GemmMatrix& matrix, std::int64_t batch, std::int64_t row,
                           std::int64_t col) {
  std::int64_t offset = row * matrix.row_stride + col * matrix.col_stride;
  for (int dimension = kernels::kGemmBatchDimsMax - 1; dimension >= 0; --dimension) {
    offset += batch % params.batch_shape[dimension] * matrix.batch_stride[dimension];
    batch /= params.batch_shape[dimension];
  }
  return offset;
}

GemmTruth ComputeGemm(const GemmParams& params, const GemmTypes& types) {
  const auto elements = static_cast<std::size_t>(BatchCount(params) * params.m * params.n);
  GemmTruth truth{.value = std::vector<double>(elements),
                  .sum_magnitude = std::vector<double>(elements),
                  .magnitude = std::vector<double>(elements)};
  if (AccumulatesShort(types)) {
    truth.short_loss.resize(elements);
    truth.promoted_loss.resize(elements);
  }
  for (std::int64_t batch = 0; batch < BatchCount(params); ++batch) {
    if (AccumulatesExactly(types)) {
      ComputeMatrix<std::int64_t>(params, types, batch, truth);
    } else {
      ComputeMatrix<double>(params, types, batch, truth);
    }
  }
  return truth;
}

Verdict CheckGemm(const GemmParams& params, const GemmTypes& types, const GemmTruth& truth) {
  return CheckEach(params, types, truth, [&](const std::byte* element, std::size_t index) {
    return JudgeElement(types, params.k, Decode(types.d, element), truth, index);
  });
}

Verdict CheckGemmExact(const GemmParams& params, const GemmTypes& types, const GemmTruth& truth) {
  return CheckEach(params, types, truth, [&](const std::byte* element, std::size_t index) {
    std::array<std::byte, sizeof(double)> want{};
    Encode(types.d, Rounded(DType::kF32, truth.value[index]), want.data());
    const bool both_nan = std::isnan(Decode(types.d, element)) && std::isnan(truth.value[index]);
    const bool same = both_nan || std::memcmp(element, want.data(), DTypeBytes(types.d)) == 0;
    return Judgement{same ? 0 : kNever, 0};
  });
}

}  // namespace tessera::oracle
