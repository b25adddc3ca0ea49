// The oracle against values worked out by hand, and its checkers against damaged results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/oracle/codec.h"
#include "tests/oracle/gemm_oracle.h"
#include "tests/oracle/short_accumulator.h"
#include "tests/oracle/test_data.h"

namespace tessera::oracle {
namespace {

using kernels::GemmParams;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::uint32_t CodeOf(DType dtype, double value) {
  std::uint32_t code = 0;  // little-endian hosts only, as everything here
  Encode(dtype, value, &code);
  return code;
}

double ValueOf(DType dtype, std::uint32_t code) {
  return Decode(dtype, &code);
}

TEST(Codec, E4m3RoundsToNearestEvenAndSaturates) {
  const std::vector<std::pair<double, std::uint32_t>> known = {
      {448, 0x7e},      {464, 0x7e},       {465, 0x7e},        {500, 0x7e},
      {-1000, 0xfe},    {kInfinity, 0x7e}, {-kInfinity, 0xfe}, {1.0625, 0x38},
      {1.1875, 0x3a},   {17, 0x58},        {19, 0x5a},         {0x1p-9, 0x01},
      {0x1p-10, 0x00},  {0x1.8p-9, 0x02},  {-0.0, 0x80},       {0x1.000001p-10, 0x01},
      {0x1.fp-7, 0x08}, {1e300, 0x7e},     {-1e-300, 0x80}};
  for (const auto& [value, code] : known) EXPECT_EQ(CodeOf(DType::kE4m3, value), code) << value;
  EXPECT_EQ(CodeOf(DType::kE4m3, kNan) & 0x7f, 0x7fU);
}

TEST(Codec, E5m2RoundsToNearestEvenAndSaturates) {
  const std::vector<std::pair<double, std::uint32_t>> known = {
      {57344, 0x7b}, {61439, 0x7b}, {61440, 0x7b},   {65536, 0x7b},   {kInfinity, 0x7b}, {-kInfinity, 0xfb},
      {1.125, 0x3c}, {1.375, 0x3e}, {0x1p-17, 0x00}, {0x1p-16, 0x01}, {-0.0, 0x80}};
  for (const auto& [value, code] : known) EXPECT_EQ(CodeOf(DType::kE5m2, value), code) << value;
  EXPECT_TRUE(std::isnan(ValueOf(DType::kE5m2, CodeOf(DType::kE5m2, kNan))));
  EXPECT_EQ(ValueOf(DType::kE5m2, 0x7c), kInfinity);
  EXPECT_EQ(ValueOf(DType::kE5m2, 0xfc), -kInfinity);
}

TEST(Codec, WideFloatsOverflowToInfinityAndRoundOnce) {
  EXPECT_EQ(CodeOf(DType::kBf16, 1.0), 0x3f80U);
  EXPECT_EQ(CodeOf(DType::kBf16, -1e39), 0xff80U);
  EXPECT_EQ(CodeOf(DType::kBf16, 0x1.ffp127), 0x7f80U);        // halfway to 2^128: even is infinity
  EXPECT_EQ(CodeOf(DType::kBf16, 0x1.fefffp127), 0x7f7fU);     // just below
  EXPECT_EQ(CodeOf(DType::kBf16, 0x1.01p0), 0x3f80U);          // tie to even
  EXPECT_EQ(CodeOf(DType::kBf16, 0x1.0100000001p0), 0x3f81U);  // through fp32 it would be a tie
  EXPECT_EQ(CodeOf(DType::kBf16, 0x1p-133), 0x0001U);
  EXPECT_EQ(CodeOf(DType::kF16, 65504), 0x7bffU);
  EXPECT_EQ(CodeOf(DType::kF16, 65519), 0x7bffU);
  EXPECT_EQ(CodeOf(DType::kF16, 65520), 0x7c00U);
  EXPECT_EQ(CodeOf(DType::kF16, 0x1p-25), 0x0000U);
  EXPECT_EQ(CodeOf(DType::kF16, 0x1.8p-24), 0x0002U);
  EXPECT_EQ(CodeOf(DType::kF32, 1e39), 0x7f800000U);
  EXPECT_EQ(CodeOf(DType::kF32, -0.0), 0x80000000U);
}

TEST(Codec, F32AgreesWithTheHost) {
  Random random(1);
  for (int i = 0; i < 100000; ++i) {
    const double value = std::ldexp(random.Uniform(-1, 1), static_cast<int>(random.Int(-160, 127)));
    const auto host = static_cast<float>(value);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &host, sizeof bits);
    ASSERT_EQ(CodeOf(DType::kF32, value), bits) << value;
    ASSERT_EQ(ValueOf(DType::kF32, bits), static_cast<double>(host));
  }
}

TEST(Codec, IntegersRoundToNearestEvenAndSaturate) {
  const std::vector<std::pair<double, std::int8_t>> known = {{0.5, 0},     {1.5, 2},           {-2.5, -2},
                                                             {127.4, 127}, {127.5, 127},       {-128.5, -128},
                                                             {1e9, 127},   {-kInfinity, -128}, {kNan, 0}};
  for (const auto& [value, want] : known) {
    std::int8_t stored = 99;
    Encode(DType::kS8, value, &stored);
    EXPECT_EQ(stored, want) << value;
  }
  EXPECT_EQ(ValueOf(DType::kS8, 0x80), -128);
  EXPECT_EQ(CodeOf(DType::kS32, 3e9), 0x7fffffffU);
  EXPECT_EQ(CodeOf(DType::kS32, -3e9), 0x80000000U);
  EXPECT_EQ(ValueOf(DType::kS32, 0xfffffffeU), -2);
}

TEST(Codec, EveryCodeSurvivesTheRoundTrip) {
  for (const auto& [dtype, codes] : std::vector<std::pair<DType, std::uint32_t>>{
           {DType::kE4m3, 256}, {DType::kE5m2, 256}, {DType::kS8, 256}, {DType::kBf16, 65536}, {DType::kF16, 65536}}) {
    int num_nan = 0;
    for (std::uint32_t code = 0; code < codes; ++code) {
      const double value = ValueOf(dtype, code);
      const std::uint32_t again = CodeOf(dtype, value);
      if (std::isnan(value)) {
        ++num_nan;
        ASSERT_TRUE(std::isnan(ValueOf(dtype, again))) << DTypeName(dtype) << " " << code;
      } else if (dtype == DType::kE5m2 && std::isinf(value)) {
        ASSERT_EQ(again, code - 1);  // saturates
      } else {
        ASSERT_EQ(again, code) << DTypeName(dtype);
      }
    }
    const int want_nan = dtype == DType::kE4m3   ? 2
                         : dtype == DType::kE5m2 ? 6
                         : dtype == DType::kS8   ? 0
                         : dtype == DType::kBf16 ? 2 * 127
                                                 : 2 * 1023;
    EXPECT_EQ(num_nan, want_nan) << DTypeName(dtype);
  }
}

GemmParams Sized(std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmParams params;
  params.m = m;
  params.n = n;
  params.k = k;
  return params;
}

// A = [[1, 2], [3, -4]], B (rows are n) = [[5, 6], [-7, 8], [0.5, 1]] in fp32, D in `d`.
struct TinyGemm {
  std::array<float, 4> a = {1, 2, 3, -4};
  std::array<float, 6> b = {5, 6, -7, 8, 0.5F, 1};
  std::array<float, 6> d = {};
  GemmTypes types = {DType::kF32, DType::kF32, DType::kF32};

  GemmParams Params() {
    GemmParams params = Sized(2, 3, 2);
    params.a = {.data = a.data(), .row_stride = 2, .col_stride = 1};
    params.b = {.data = b.data(), .row_stride = 2, .col_stride = 1};
    params.d = {.data = d.data(), .row_stride = 3, .col_stride = 1};
    return params;
  }
};

TEST(GemmTruth, PlainProduct) {
  TinyGemm gemm;
  const GemmTruth truth = ComputeGemm(gemm.Params(), gemm.types);
  EXPECT_THAT(truth.value, ElementsAre(17, 9, 2.5, -9, -53, -2.5));
  EXPECT_THAT(truth.magnitude, ElementsAre(17, 23, 2.5, 39, 53, 5.5));
  EXPECT_EQ(truth.sum_magnitude, truth.magnitude);
}

TEST(GemmTruth, ScalesAndBias) {
  TinyGemm gemm;
  GemmParams params = gemm.Params();
  const std::array<float, 3> a_scale = {2, 99, -1};  // stride 2
  const std::array<float, 3> bias = {1, -2, 3};
  params.a_scale = {.vector = a_scale.data(), .stride = 2};
  params.b_scale.scalar = 0.5F;
  params.bias = {.data = bias.data(), .stride = 1, .dtype = DType::kF32};
  const GemmTruth truth = ComputeGemm(params, gemm.types);
  EXPECT_THAT(truth.value, ElementsAre(18, 7, 5.5, 5.5, 24.5, 4.25));
  EXPECT_THAT(truth.sum_magnitude, ElementsAre(17, 23, 2.5, 19.5, 26.5, 2.75));
  EXPECT_THAT(truth.magnitude, ElementsAre(18, 25, 5.5, 20.5, 28.5, 5.75));
}

TEST(GemmTruth, StridesChooseTheLayoutAndBroadcast) {
  TinyGemm gemm;
  GemmParams params = gemm.Params();
  params.n = 2;
  params.batch_shape[2] = 2;
  params.a.row_stride = 1;  // A = [[1, 3], [2, -4]]
  params.a.col_stride = 2;
  params.b.row_stride = 0;       // every channel the same
  params.b.batch_stride[2] = 2;  // [5, 6], then [-7, 8]
  params.a.batch_stride[2] = 0;
  const GemmTruth truth = ComputeGemm(params, gemm.types);
  EXPECT_THAT(truth.value, ElementsAre(23, 23, -14, -14, 17, 17, -46, -46));
}

TEST(GemmTruth, ThreeBatchDimensionsCountLastFastest) {
  TinyGemm gemm;
  GemmParams params = gemm.Params();
  params.m = params.n = params.k = 1;
  std::copy_n(std::array<std::int64_t, 3>{2, 1, 2}.begin(), 3, params.batch_shape);
  params.a.batch_stride[0] = 2;  // 1, 1, 3, 3
  params.b.batch_stride[0] = 3;  // 5, 6, 8, 0.5
  params.b.batch_stride[2] = 1;
  EXPECT_THAT(ComputeGemm(params, gemm.types).value, ElementsAre(5, 6, 24, 1.5));
}

TEST(GemmTruth, NoTermsGiveBiasOrZero) {
  TinyGemm gemm;
  GemmParams params = gemm.Params();
  params.k = 0;
  EXPECT_THAT(ComputeGemm(params, gemm.types).value, ElementsAre(0, 0, 0, 0, 0, 0));
  const std::array<std::uint16_t, 1> bias = {0xc040};  // -3 in bf16
  params.bias = {.data = bias.data(), .stride = 0, .dtype = DType::kBf16};
  EXPECT_THAT(ComputeGemm(params, gemm.types).value, ElementsAre(-3, -3, -3, -3, -3, -3));
  params.m = 0;
  EXPECT_TRUE(ComputeGemm(params, gemm.types).value.empty());
}

TEST(GemmTruth, Int8SumsAreExact) {
  constexpr std::int64_t kTerms = 200'000;  // the sum needs more than 31 bits
  std::vector<std::int8_t> a(kTerms, -128);
  std::vector<std::int8_t> b(kTerms, -128);
  b.back() = 1;
  GemmParams params = Sized(1, 1, kTerms);
  params.a = {.data = a.data(), .row_stride = kTerms, .col_stride = 1};
  params.b = {.data = b.data(), .row_stride = kTerms, .col_stride = 1};
  const GemmTruth truth = ComputeGemm(params, {DType::kS8, DType::kS8, DType::kF32});
  EXPECT_EQ(truth.value[0], (kTerms - 1) * 16384.0 - 128);
  EXPECT_EQ(truth.magnitude[0], (kTerms - 1) * 16384.0 + 128);
}

TEST(GemmTruth, NanAndInfinityPass) {
  TinyGemm gemm;
  gemm.a = {static_cast<float>(kInfinity), 0, static_cast<float>(kNan), 0};
  gemm.b = {1, 1, -1, 1, 0, 1};
  const GemmTruth truth = ComputeGemm(gemm.Params(), gemm.types);
  EXPECT_EQ(truth.value[0], kInfinity);
  EXPECT_EQ(truth.value[1], -kInfinity);
  for (int i = 2; i < 6; ++i) EXPECT_TRUE(std::isnan(truth.value[i])) << i;
}

// The elements of D, one fp32 multiply-add a step: an implementation with the errors that the checker must allow.
void RunPlainF32(const GemmProblem& problem) {
  const GemmParams& p = problem.params();
  const GemmTypes& types = problem.types();
  const auto load = [&](DType dtype, const kernels::GemmMatrix& matrix, std::int64_t batch, std::int64_t row,
                        std::int64_t k) {
    const auto bytes = static_cast<std::int64_t>(DTypeBytes(dtype));
    const auto* data = static_cast<const std::byte*>(matrix.data);
    return static_cast<float>(Decode(dtype, data + ElementOffset(p, matrix, batch, row, k) * bytes));
  };
  const auto scale = [](const kernels::GemmScale& s, std::int64_t i) {
    return s.vector == nullptr ? s.scalar : s.vector[i * s.stride];
  };
  for (std::int64_t batch = 0; batch < BatchCount(p); ++batch) {
    for (std::int64_t m = 0; m < p.m; ++m) {
      for (std::int64_t n = 0; n < p.n; ++n) {
        float sum = 0;
        for (std::int64_t k = 0; k < p.k; ++k) {
          sum += load(types.a, p.a, batch, m, k) * load(types.b, p.b, batch, n, k);
        }
        float value = sum * scale(p.a_scale, m) * scale(p.b_scale, n);
        if (p.bias.data != nullptr) {
          const auto step = p.bias.stride * static_cast<std::int64_t>(DTypeBytes(p.bias.dtype));
          value += static_cast<float>(Decode(p.bias.dtype, static_cast<const std::byte*>(p.bias.data) + n * step));
        }
        auto* data = static_cast<std::byte*>(p.d.data);
        const auto bytes = static_cast<std::int64_t>(DTypeBytes(types.d));
        Encode(types.d, value, data + ElementOffset(p, p.d, batch, m, n) * bytes);
      }
    }
  }
}

void ExpectPlainF32Passes(const GemmCase& problem_case, std::uint64_t seed) {
  SCOPED_TRACE(problem_case.Describe() + " seed=" + std::to_string(seed));
  const GemmProblem problem(problem_case, seed);
  const GemmTruth truth = ComputeGemm(problem.params(), problem.types());
  if (!truth.value.empty()) {
    EXPECT_FALSE(CheckGemm(problem.params(), problem.types(), truth).ok);  // not yet written
  }
  RunPlainF32(problem);
  const Verdict verdict = CheckGemm(problem.params(), problem.types(), truth);
  EXPECT_TRUE(verdict.ok) << verdict.first;
  EXPECT_LE(verdict.worst, 1);
  if (problem_case.fill == Fill::kIntegers) {
    const Verdict exact = CheckGemmExact(problem.params(), problem.types(), truth);
    EXPECT_TRUE(exact.ok) << exact.first;
  }
  std::string where;
  EXPECT_TRUE(problem.GuardsIntact(&where)) << where;
}

const std::vector<std::tuple<DType, DType, DType, const char*>>& Combinations() {
  static const auto* const combinations = new std::vector<std::tuple<DType, DType, DType, const char*>>{
      {DType::kBf16, DType::kBf16, DType::kF32, "NT"},  {DType::kBf16, DType::kBf16, DType::kBf16, "TN"},
      {DType::kE4m3, DType::kE5m2, DType::kBf16, "NN"}, {DType::kE4m3, DType::kE4m3, DType::kF32, "TT"},
      {DType::kS8, DType::kS8, DType::kF32, "NT"},      {DType::kBf16, DType::kS8, DType::kBf16, "TT"},
      {DType::kS8, DType::kBf16, DType::kF32, "NN"}};
  return *combinations;
}

TEST(Cases, PlainF32PassesEveryStandardCase) {
  for (const auto& [a, b, d, layout] : Combinations()) {
    for (const GemmCase& problem_case : StandardCases(a, b, d, layout)) ExpectPlainF32Passes(problem_case, 7);
  }
}

TEST(Cases, PlainF32PassesRandomCases) {
  Random random(20);
  for (const auto& [a, b, d, layout] : Combinations()) {
    for (int i = 0; i < 6; ++i) ExpectPlainF32Passes(RandomCase(random, a, b, d, layout), random.Next());
  }
}

TEST(Cases, AreSmallDistinctAndCoverEveryLegalScale) {
  for (const auto& [a, b, d, layout] : Combinations()) {
    std::set<std::string> texts;
    std::set<std::pair<ScaleMode, ScaleMode>> scales;
    const std::vector<GemmCase> cases = StandardCases(a, b, d, layout);
    for (const GemmCase& c : cases) {
      texts.insert(c.Describe());
      scales.emplace(c.a_scale, c.b_scale);
      EXPECT_LT(c.m * c.n * c.k * c.batch[0] * c.batch[1] * c.batch[2], 1'000'000) << c.Describe();
    }
    EXPECT_EQ(texts.size(), cases.size());
    EXPECT_EQ(scales.size(), LegalScales(a).size() * LegalScales(b).size());
  }
}

TEST(Cases, SpecialFillKeepsFiniteAndOtherResults) {
  const GemmCase problem_case{.layout = "NT", .m = 33, .n = 33, .k = 16, .fill = Fill::kSpecial};
  const GemmProblem problem(problem_case, 3);
  const GemmTruth truth = ComputeGemm(problem.params(), problem.types());
  int num_finite = 0;
  int num_nan = 0;
  int num_infinite = 0;
  for (const double value : truth.value) {
    num_finite += std::isfinite(value) ? 1 : 0;
    num_nan += std::isnan(value) ? 1 : 0;
    num_infinite += std::isinf(value) ? 1 : 0;
  }
  EXPECT_GT(num_finite, 100);
  EXPECT_GT(num_nan, 10);
  EXPECT_GT(num_infinite, 10);
}

TEST(Cases, SameSeedSameProblem) {
  const GemmCase problem_case{.m = 5, .n = 6, .k = 7};
  const GemmProblem one(problem_case, 11);
  const GemmProblem same(problem_case, 11);
  const GemmProblem other(problem_case, 12);
  const auto values = [](const GemmProblem& problem) { return ComputeGemm(problem.params(), problem.types()).value; };
  EXPECT_EQ(values(one), values(same));
  EXPECT_NE(values(one), values(other));
}

// A finished bf16 x bf16 problem with padding, ready to be damaged.
class Damage : public ::testing::Test {
 protected:
  Damage() : problem_(Case(), 5), truth_(ComputeGemm(problem_.params(), problem_.types())) { RunPlainF32(problem_); }

  static GemmCase Case() {
    return {.m = 9, .n = 12, .k = 40, .batch = {1, 1, 2}, .bias = BiasMode::kF32, .padding = 4, .offset = 1};
  }

  float* At(std::int64_t batch, std::int64_t m, std::int64_t n) {
    const GemmParams& p = problem_.params();
    return static_cast<float*>(p.d.data) + ElementOffset(p, p.d, batch, m, n);
  }
  double Truth(std::int64_t batch, std::int64_t m, std::int64_t n) const {
    return truth_.value[static_cast<std::size_t>((batch * 9 + m) * 12 + n)];
  }
  Verdict Check() const { return CheckGemm(problem_.params(), problem_.types(), truth_); }

  GemmProblem problem_;
  GemmTruth truth_;
};

TEST_F(Damage, OneElement) {
  ASSERT_TRUE(Check().ok);
  *At(1, 2, 3) += 1e-3F;
  const Verdict verdict = Check();
  EXPECT_FALSE(verdict.ok);
  EXPECT_EQ(verdict.wrong, 1);
  EXPECT_GT(verdict.worst, 1);
  EXPECT_THAT(verdict.first, HasSubstr("D[0,0,1, 2, 3]"));
}

TEST_F(Damage, NanOrInfinityForANumber) {
  *At(0, 0, 0) = static_cast<float>(kNan);
  *At(1, 8, 11) = static_cast<float>(-kInfinity);
  const Verdict verdict = Check();
  EXPECT_EQ(verdict.wrong, 2);
  EXPECT_EQ(verdict.worst, kInfinity);
  EXPECT_THAT(verdict.first, HasSubstr("D[0,0,0, 0, 0]: got nan"));
}

TEST_F(Damage, NumberOrWrongInfinityForNanAndInfinity) {
  truth_.value[0] = kNan;
  truth_.value[1] = kInfinity;
  truth_.value[2] = kInfinity;
  truth_.value[3] = kInfinity;
  *At(0, 0, 1) = static_cast<float>(-kInfinity);
  *At(0, 0, 3) = static_cast<float>(kInfinity);
  EXPECT_EQ(Check().wrong, 3);
}

TEST_F(Damage, UnwrittenRow) {
  GemmProblem unwritten(Case(), 5);
  std::memcpy(At(1, 4, 0), unwritten.params().d.data, 12 * sizeof(float));
  EXPECT_EQ(Check().wrong, 12);
}

TEST_F(Damage, PoisonOutputUnwritesAll) {
  problem_.PoisonOutput();
  EXPECT_EQ(Check().wrong, 2 * 9 * 12);
}

TEST_F(Damage, StrayWritesBesideTheView) {
  std::string where;
  ASSERT_TRUE(problem_.GuardsIntact(&where)) << where;
  for (float* stray : {At(0, 0, -1), At(0, 3, 12), At(1, 0, -1), At(1, 8, 12), At(1, 8, 12 + 4 + 63)}) {
    const float kept = std::exchange(*stray, 0.0F);
    EXPECT_FALSE(problem_.GuardsIntact(&where));
    EXPECT_THAT(where, HasSubstr("outside the view"));
    *stray = kept;
  }
  EXPECT_TRUE(problem_.GuardsIntact(&where)) << where;
}

TEST_F(Damage, ChangedInput) {
  std::string where;
  static_cast<std::uint8_t*>(problem_.params().b.data)[0] ^= 1;
  EXPECT_FALSE(problem_.GuardsIntact(&where));
  EXPECT_EQ(where, "input B was changed");
}

TEST_F(Damage, ProblemMoves) {
  GemmProblem moved(std::move(problem_));
  std::string where;
  EXPECT_TRUE(moved.GuardsIntact(&where)) << where;
  EXPECT_TRUE(CheckGemm(moved.params(), moved.types(), truth_).ok);
}

TEST(CheckGemm, RangeOfTheOutputDecidesInfinity) {
  TinyGemm gemm;
  gemm.types.d = DType::kF16;
  GemmParams params = Sized(1, 1, 1);
  std::uint16_t d = 0;
  params.a.data = gemm.a.data();
  params.b.data = gemm.b.data();
  params.d.data = &d;
  const auto ok = [&](double value, std::uint16_t code) {
    d = code;
    return CheckGemm(params, gemm.types, GemmTruth{{value}, {std::fabs(value)}, {std::fabs(value)}}).ok;
  };
  EXPECT_TRUE(ok(70000, 0x7c00));
  EXPECT_FALSE(ok(70000, 0x7bff));
  EXPECT_FALSE(ok(65530, 0x7bff));  // within an ulp of the largest, yet rounds to infinity
  EXPECT_FALSE(ok(-70000, 0x7c00));
  EXPECT_TRUE(ok(-70000, 0xfc00));
  EXPECT_TRUE(ok(65519.999, 0x7c00));  // the computing error reaches the tie
  EXPECT_TRUE(ok(65519.999, 0x7bff));
  EXPECT_FALSE(ok(65000, 0x7c00));
}

TEST(CheckGemm, AShortAccumulatorIsAllowedItsLoss) {
  TinyGemm gemm;
  gemm.types.d = DType::kF32;
  GemmParams params = Sized(1, 1, 1);
  float d = 1.5F;
  params.a.data = gemm.a.data();
  params.b.data = gemm.b.data();
  params.d.data = &d;
  const GemmTruth truth = {
      .value = {1.0}, .sum_magnitude = {8.0}, .magnitude = {8.0}, .short_loss = {0.5}, .promoted_loss = {0.25}};
  EXPECT_FALSE(CheckGemm(params, gemm.types, truth).ok);
  gemm.types.accumulator = Accumulator::kShort;
  EXPECT_TRUE(CheckGemm(params, gemm.types, truth).ok);
  gemm.types.accumulator = Accumulator::kShortPromoted;
  EXPECT_FALSE(CheckGemm(params, gemm.types, truth).ok);
}

// Adds as a tensor core of fp8 does: every addend cut toward zero 13 bits below the largest one's exponent.
double AddShort(double accumulator, std::span<const double> products) {
  double largest = std::fabs(accumulator);
  for (const double product : products) largest = std::max(largest, std::fabs(product));
  if (largest == 0) return 0;
  const auto cut = [](double value, double of) {
    const double unit = std::ldexp(kShortUnit, std::ilogb(of));
    return std::trunc(value / unit) * unit;
  };
  double sum = cut(accumulator, largest);
  for (const double product : products) sum += cut(product, largest);
  return sum == 0 ? 0 : cut(sum, sum);
}

TEST(ShortAccumulator, BoundsWhatIsLostAndNotMuchMore) {
  Random random(7);
  for (const double outlier : {0.0, 448.0}) {
    double worst = 0;
    for (int trial = 0; trial < 200; ++trial) {
      std::vector<double> products(static_cast<std::size_t>(random.Int(1, 700)));
      for (double& product : products) product = random.Uniform(-1, 1);
      if (outlier != 0) products[static_cast<std::size_t>(random.Int(0, std::ssize(products) - 1))] = outlier;
      ShortAccumulator<1> bound;
      double throughout = 0;
      double window = 0;
      double promoted = 0;
      double exact = 0;
      for (std::size_t at = 0; at < products.size(); at += kShortStep) {
        const auto step = std::span(products).subspan(at, std::min<std::size_t>(kShortStep, products.size() - at));
        for (const double product : step) {
          bound.Add({product});
          exact += product;
        }
        throughout = AddShort(throughout, step);
        if (at % kShortPromotion == 0) promoted += std::exchange(window, 0);
        window = AddShort(window, step);
      }
      promoted += window;
      bound.Finish();
      EXPECT_LE(std::fabs(throughout - exact), bound.throughout()[0] + 1e-9);
      EXPECT_LE(std::fabs(promoted - exact), bound.promoted()[0] + 1e-9);
      EXPECT_LE(bound.promoted()[0], bound.throughout()[0]);
      worst = std::max(worst, std::fabs(promoted - exact) / bound.promoted()[0]);
    }
    EXPECT_GT(worst, 0.02);
  }
}

TEST(CheckGemm, Int8AllowsOnlyTheEpilogue) {
  const std::array<std::int8_t, 4> ones = {1, 1, 1, 1};
  std::array<std::int8_t, 4> a = ones;
  std::array<std::int8_t, 4> b = ones;
  float d = 0;
  GemmParams params = Sized(1, 1, 4);
  params.a = {.data = a.data(), .row_stride = 4, .col_stride = 1};
  params.b = {.data = b.data(), .row_stride = 4, .col_stride = 1};
  params.d.data = &d;
  const GemmTypes types{DType::kS8, DType::kS8, DType::kF32};
  const GemmTruth truth = ComputeGemm(params, types);
  d = 4 * (1 + 0x1p-22F);  // four roundings
  EXPECT_TRUE(CheckGemm(params, types, truth).ok);
  d = 4 * (1 + 0x1.8p-22F);
  EXPECT_FALSE(CheckGemm(params, types, truth).ok);
  EXPECT_TRUE(CheckGemm(params, {DType::kBf16, DType::kBf16, DType::kF32}, truth).ok);
}

TEST(CheckGemmExact, ComparesBits) {
  TinyGemm gemm;
  const GemmParams params = gemm.Params();
  const GemmTruth truth = ComputeGemm(params, gemm.types);
  gemm.d = {17, 9, 2.5F, -9, -53, -2.5F};
  EXPECT_TRUE(CheckGemmExact(params, gemm.types, truth).ok);
  gemm.d[4] = std::nextafter(-53.0F, 0.0F);
  const Verdict verdict = CheckGemmExact(params, gemm.types, truth);
  EXPECT_FALSE(verdict.ok);
  EXPECT_EQ(verdict.wrong, 1);
  EXPECT_TRUE(CheckGemm(params, gemm.types, truth).ok);
}

}  // namespace
}  // namespace tessera::oracle
