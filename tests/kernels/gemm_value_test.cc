// GEMMs whose results are known by arithmetic, through every variant that can be asked for them: the places where
// kernels are usually wrong (scales in K slices, narrow accumulators, NaN in the epilogue, empty K, odd sizes, views
// with a huge leading dimension).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/launch/gemm_launch.h"
#include "tests/kernels/gemm_runner.h"
#include "tests/oracle/codec.h"
#include "tests/oracle/gemm_oracle.h"
#include "tests/oracle/test_data.h"

namespace tessera::kernels {
namespace {

using oracle::BiasMode;
using oracle::Fill;
using oracle::GemmCase;
using oracle::GemmProblem;
using oracle::GemmTruth;
using oracle::ScaleMode;
using oracle::Verdict;
using ValueAt = std::function<double(std::int64_t row, std::int64_t col)>;

constexpr std::uint64_t kSeed = 7;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double One(std::int64_t, std::int64_t) {
  return 1;
}

bool IsPair(const GemmClass& c, DType a, DType b) {
  return c.a == a && c.b == b;
}

// A case of the class, to be filled by hand.
GemmCase CaseOf(const GemmClass& c, std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.a = c.a,
          .b = c.b,
          .d = c.out,
          .layout = std::string(kGemmLayoutNames[static_cast<int>(c.layout)]),
          .m = m,
          .n = n,
          .k = k};
}

std::byte* ElementAt(const GemmMatrix& matrix, DType dtype, std::int64_t row, std::int64_t col) {
  const std::int64_t element = row * matrix.row_stride + col * matrix.col_stride;
  return static_cast<std::byte*>(matrix.data) + element * static_cast<std::int64_t>(DTypeBytes(dtype));
}

void SetMatrix(const GemmMatrix& matrix, DType dtype, std::int64_t rows, std::int64_t cols, const ValueAt& value) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      oracle::Encode(dtype, value(row, col), ElementAt(matrix, dtype, row, col));
    }
  }
}

// A is (m, k), B is (n, k): both are indexed [row, k].
void SetOperands(const GemmParams& params, const GemmClass& c, const ValueAt& a, const ValueAt& b) {
  SetMatrix(params.a, c.a, params.m, params.k, a);
  SetMatrix(params.b, c.b, params.n, params.k, b);
}

// The classes of the host variants that `accept` takes, each once.
template <typename Accept>
std::vector<GemmClass> CpuClasses(const Accept& accept) {
  std::vector<GemmClass> classes;
  for (const std::size_t index : CpuVariants(accept)) {
    const GemmClass& c = GemmVariants()[index].gemm_class;
    if (std::find(classes.begin(), classes.end(), c) == classes.end()) classes.push_back(c);
  }
  EXPECT_FALSE(classes.empty());
  return classes;
}

// Launches every variant of the class and every split, each on a poisoned D, and calls check() after it.
void ForEachLaunch(const GemmClass& c, GemmProblem& problem, const GemmParams& params,
                   const std::function<void()>& check) {
  for (const std::size_t index : CpuVariants([&](const GemmClass& other) { return other == c; })) {
    const GemmVariant& variant = GemmVariants()[index];
    for (const int split : SplitsFor(variant, params.k)) {
      SCOPED_TRACE(std::string(variant.info.id) + " split=" + std::to_string(split));
      problem.PoisonOutput();
      ASSERT_EQ(RunGemm(index, params, split), kLaunchOk);
      check();
    }
  }
}

// Every element of D must be want(m, n); any NaN is NaN.
void ExpectValues(const GemmParams& params, DType out, const ValueAt& want) {
  std::int64_t wrong = 0;
  for (std::int64_t m = 0; m < params.m; ++m) {
    for (std::int64_t n = 0; n < params.n; ++n) {
      const double got = oracle::Decode(out, ElementAt(params.d, out, m, n));
      const double expected = want(m, n);
      if (got == expected || (std::isnan(got) && std::isnan(expected))) continue;
      if (++wrong == 1) ADD_FAILURE() << "D[" << m << ", " << n << "]: got " << got << ", want " << expected;
    }
  }
  EXPECT_EQ(wrong, 0);
}

void ExpectExact(const GemmProblem& problem, const GemmParams& params, const GemmTruth& truth) {
  const Verdict verdict = CheckGemmExact(params, problem.types(), truth);
  EXPECT_TRUE(verdict.ok) << verdict.wrong << " wrong, first " << verdict.first;
}

// A scale that is applied once a K slice, or to partial sums with the bias, gives another number.
TEST(GemmValues, ScalesAndBiasAreAppliedOnceWhateverTheSplit) {
  for (const GemmClass& c : CpuClasses([](const GemmClass&) { return true; })) {
    const bool scaled = c.a != DType::kBf16;
    GemmCase problem_case = CaseOf(c, 64, 64, 1024);
    problem_case.bias = BiasMode::kF32;
    GemmProblem problem(problem_case, kSeed);
    GemmParams params = problem.params();
    SetOperands(params, c, One, One);
    params.a_scale.scalar = scaled ? 0.5F : 1.0F;
    const std::vector<float> bias(64, 8.0F);
    params.bias.data = bias.data();
    ForEachLaunch(c, problem, params, [&] {
      ExpectValues(params, c.out, [&](std::int64_t, std::int64_t) { return scaled ? 520 : 1032; });
    });
  }
}

// The sum before the scale is 33,292,288, beyond float16 and beyond exact bf16.
TEST(GemmValues, WeightOnlyInt8KeepsTheUnscaledSumWide) {
  for (const GemmClass& c : CpuClasses([](const GemmClass& c) { return IsPair(c, DType::kBf16, DType::kS8); })) {
    GemmProblem problem(CaseOf(c, 4, 8, 32768), kSeed);
    GemmParams params = problem.params();
    SetOperands(
        params, c, [](std::int64_t, std::int64_t) { return 8; }, [](std::int64_t, std::int64_t) { return 127; });
    params.b_scale.scalar = 0x1p-20F;
    ForEachLaunch(c, problem, params,
                  [&] { ExpectValues(params, c.out, [](std::int64_t, std::int64_t) { return 31.75; }); });
  }
}

// 8 x 8 x 16 of ones and bias 1, with A[3, k=5] and B[k=5, n=2] replaced: D is 17 elsewhere.
struct SpecialCase {
  double a;
  double b;
  double row;       // D[3, n], n != 2
  double column;    // D[m, 2], m != 3
  double crossing;  // D[3, 2]
};

TEST(GemmValues, NanAndInfinityPassThroughSumAndEpilogue) {
  const SpecialCase cases[] = {
      {kNan, 1, kNan, 17, kNan},
      {kInfinity, 1, kInfinity, 17, kInfinity},
      {1, -kInfinity, 17, -kInfinity, -kInfinity},
      {kInfinity, -kInfinity, kInfinity, -kInfinity, -kInfinity},
      {kInfinity, 0, kInfinity, 16, kNan},
  };
  for (const GemmClass& c : CpuClasses([](const GemmClass& c) { return IsPair(c, DType::kBf16, DType::kBf16); })) {
    GemmProblem problem(CaseOf(c, 8, 8, 16), kSeed);
    GemmParams params = problem.params();
    const std::vector<float> bias(8, 1.0F);
    params.bias = {.data = bias.data(), .stride = 1, .dtype = DType::kF32};
    for (const SpecialCase& special : cases) {
      SetOperands(
          params, c, [&](std::int64_t m, std::int64_t k) { return m == 3 && k == 5 ? special.a : 1; },
          [&](std::int64_t n, std::int64_t k) { return n == 2 && k == 5 ? special.b : 1; });
      ForEachLaunch(c, problem, params, [&] {
        ExpectValues(params, c.out, [&](std::int64_t m, std::int64_t n) {
          if (m == 3) return n == 2 ? special.crossing : special.row;
          return n == 2 ? special.column : 17;
        });
      });
    }
  }
}

// An empty sum is 0, or the bias: never what the output held before.
TEST(GemmValues, EmptyKGivesZerosOrBias) {
  constexpr std::int64_t kN = 43'200;
  for (const GemmClass& c : CpuClasses([](const GemmClass& c) { return c.layout == GemmLayout::kNT; })) {
    GemmCase problem_case = CaseOf(c, 1, kN, 0);
    problem_case.batch = {1, 1, 10};
    problem_case.bias = BiasMode::kBf16;
    GemmProblem problem(problem_case, kSeed);
    GemmParams params = problem.params();
    const std::size_t row_bytes = kN * DTypeBytes(c.out);
    std::vector<std::byte> row(row_bytes);  // of every batch entry, which D holds one after the other
    const auto expect_rows = [&] {
      for (std::size_t batch = 0; batch < 10; ++batch) {
        const auto* got = static_cast<const std::byte*>(params.d.data) + batch * row_bytes;
        EXPECT_EQ(std::memcmp(got, row.data(), row_bytes), 0) << "batch " << batch;
      }
    };
    for (std::int64_t n = 0; n < kN; ++n) {
      const double bias = oracle::Decode(DType::kBf16, static_cast<const std::byte*>(params.bias.data) + n * 2);
      oracle::Encode(c.out, bias, row.data() + n * static_cast<std::int64_t>(DTypeBytes(c.out)));
    }
    ForEachLaunch(c, problem, params, expect_rows);
    params.bias.data = nullptr;
    std::fill(row.begin(), row.end(), std::byte{0});
    ForEachLaunch(c, problem, params, expect_rows);
  }
}

// int8 problems of one layout and output, all recipes, full-range values and scale 1: exact integers.
void CheckIntegers(GemmLayout layout, DType out, std::int64_t m, std::int64_t n) {
  const GemmClass c = {.a = DType::kS8, .b = DType::kS8, .out = out, .layout = layout};
  SCOPED_TRACE(CaseOf(c, m, n, 64).Describe() + " seed=" + std::to_string(kSeed));
  GemmProblem problem(CaseOf(c, m, n, 64), kSeed);  // scale 1: the case asks for none
  const GemmTruth truth = ComputeGemm(problem.params(), problem.types());
  ForEachLaunch(c, problem, problem.params(), [&] { ExpectExact(problem, problem.params(), truth); });
  std::string where;
  EXPECT_TRUE(problem.GuardsIntact(&where)) << where;
}

TEST(GemmValues, Int8IsExactForEveryM) {
  for (const GemmLayout layout : {GemmLayout::kNT, GemmLayout::kNN, GemmLayout::kTN, GemmLayout::kTT}) {
    for (const DType out : {DType::kBf16, DType::kF32}) {
      for (const std::int64_t m : {0, 1, 2, 8, 15, 16, 17, 31}) CheckIntegers(layout, out, m, 64);
    }
  }
}

TEST(GemmValues, Int8IsExactForOddN) {
  for (const std::int64_t m : {1, 5, 17}) {
    for (const GemmLayout layout : {GemmLayout::kNT, GemmLayout::kNN, GemmLayout::kTN, GemmLayout::kTT}) {
      for (const DType out : {DType::kBf16, DType::kF32}) CheckIntegers(layout, out, m, 37);
    }
    CheckIntegers(GemmLayout::kNT, DType::kF32, m, 51'865);
    CheckIntegers(GemmLayout::kNN, DType::kBf16, m, 51'865);
  }
}

// 300,000 * 2^14 = 4,915,200,000: beyond 32 bits, and exact in float32.
TEST(GemmValues, Int8SumsBeyond32BitsAreExact) {
  for (const GemmClass& c : CpuClasses([](const GemmClass& c) { return IsPair(c, DType::kS8, DType::kS8); })) {
    GemmProblem problem(CaseOf(c, 3, 17, 300'000), kSeed);
    const GemmParams& params = problem.params();
    std::memset(params.a.data, 0x80, static_cast<std::size_t>(params.m * params.k));
    std::memset(params.b.data, 0x80, static_cast<std::size_t>(params.n * params.k));
    std::array<std::byte, 4> rounded{};
    oracle::Encode(c.out, 4'915'200'000.0, rounded.data());
    const double want = oracle::Decode(c.out, rounded.data());
    ForEachLaunch(c, problem, params,
                  [&] { ExpectValues(params, c.out, [&](std::int64_t, std::int64_t) { return want; }); });
  }
}

// Sums climb to 2,419,350,000 and back to a small integer: what float32 partial sums would round away.
TEST(GemmValues, Int8SumsThatCancelAreExact) {
  constexpr std::int64_t kHalf = 150'000;
  for (const GemmClass& c : CpuClasses([](const GemmClass& x) { return IsPair(x, DType::kS8, DType::kS8); })) {
    GemmProblem problem(CaseOf(c, 3, 17, 2 * kHalf + 1), kSeed);
    const GemmParams& params = problem.params();
    SetOperands(
        params, c, [](std::int64_t m, std::int64_t k) { return k == 2 * kHalf ? static_cast<double>(m + 1) : 127; },
        [](std::int64_t n, std::int64_t k) {
          if (k == 2 * kHalf) return static_cast<double>(n - 8);
          return k < kHalf ? 127.0 : -127.0;
        });
    ForEachLaunch(c, problem, params, [&] {
      ExpectValues(params, c.out,
                   [](std::int64_t m, std::int64_t n) { return static_cast<double>((m + 1) * (n - 8)); });
    });
  }
}

// B is 2,400 columns of a parent with 25,272; what lies outside the view decodes as NaN (s8: 123).
TEST(GemmValues, ColumnsOfAWideParentAreExact) {
  constexpr std::int64_t kParent = 25'272;
  constexpr std::int64_t kFirst = 21'940;
  constexpr std::int64_t kN = 2'400;
  constexpr std::int64_t kK = 64;
  for (const GemmClass& c :
       CpuClasses([](const GemmClass& c) { return c.layout == GemmLayout::kNN && c.out == DType::kF32; })) {
    GemmCase problem_case = CaseOf(c, 128, kN, kK);
    problem_case.bias = BiasMode::kF32;
    problem_case.fill = Fill::kIntegers;
    GemmProblem problem(problem_case, kSeed);
    GemmParams params = problem.params();
    std::vector<std::byte> parent(kParent * kK * DTypeBytes(c.b),
                                  std::byte{c.b == DType::kS8 ? std::uint8_t{123} : std::uint8_t{0xff}});
    params.b = {.data = parent.data() + kFirst * static_cast<std::int64_t>(DTypeBytes(c.b)),
                .row_stride = 1,
                .col_stride = kParent};
    oracle::Random random(kSeed);
    SetMatrix(params.b, c.b, kN, kK, [&](std::int64_t, std::int64_t) { return random.Int(-3, 3); });
    const GemmTruth truth = ComputeGemm(params, problem.types());
    ForEachLaunch(c, problem, params, [&] { ExpectExact(problem, params, truth); });
  }
}

}  // namespace
}  // namespace tessera::kernels
