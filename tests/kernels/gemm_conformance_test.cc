// Every GEMM variant of the catalogue that runs on the host, against the oracle: a new row is tested by existing. The
// mutation controls show that the same checkers catch damaged launches of every variant's algorithm.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/launch/gemm_launch.h"
#include "tests/kernels/gemm_runner.h"
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

constexpr std::uint64_t kSeed = 20240611;
constexpr int kRandomCases = 4;
constexpr int kThreads = 3;

std::string LayoutName(GemmLayout layout) {
  return std::string(kGemmLayoutNames[static_cast<int>(layout)]);
}

// What one oracle run serves: the variants of a pair and layout, whatever their accumulation and recipe.
struct PairLayout {
  DType a;
  DType b;
  GemmLayout layout;

  auto Fields() const { return std::tie(a, b, layout); }
  friend bool operator==(const PairLayout& x, const PairLayout& y) { return x.Fields() == y.Fields(); }
  friend bool operator<(const PairLayout& x, const PairLayout& y) { return x.Fields() < y.Fields(); }
  std::string Name() const {
    return std::string(DTypeName(a)) + "_" + std::string(DTypeName(b)) + "_" + LayoutName(layout);
  }
};

void PrintTo(const PairLayout& group, std::ostream* out) {
  *out << group.Name();
}

std::vector<PairLayout> PairLayouts() {
  std::vector<PairLayout> groups;
  for (const std::size_t index : CpuVariants([](const GemmClass&) { return true; })) {
    const GemmClass& c = GemmVariants()[index].gemm_class;
    groups.push_back({c.a, c.b, c.layout});
  }
  std::sort(groups.begin(), groups.end());
  groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
  return groups;
}

// Launches on a poisoned D and returns what it holds afterwards.
std::vector<std::byte> LaunchPoisoned(std::size_t variant, GemmProblem& problem, int split,
                                      const HostParallel& parallel) {
  problem.PoisonOutput();
  EXPECT_EQ(RunGemm(variant, problem.params(), split, parallel), kLaunchOk);
  std::string where;
  EXPECT_TRUE(problem.GuardsIntact(&where)) << where;
  return PackedOutput(problem.params(), problem.types().d);
}

void CheckVariant(std::size_t variant, int split, GemmProblem& problem, const GemmTruth& truth, Fill fill) {
  const std::vector<std::byte> alone = LaunchPoisoned(variant, problem, split, {});
  const Verdict verdict = CheckGemm(problem.params(), problem.types(), truth);
  EXPECT_TRUE(verdict.ok) << verdict.wrong << " wrong, first " << verdict.first;
  if (fill == Fill::kIntegers) {
    const Verdict exact = CheckGemmExact(problem.params(), problem.types(), truth);
    EXPECT_TRUE(exact.ok) << exact.wrong << " inexact, first " << exact.first;
  }
  EXPECT_TRUE(LaunchPoisoned(variant, problem, split, {}) == alone) << "a second launch gave other bits";
  LentThreads threads(kThreads);
  EXPECT_TRUE(LaunchPoisoned(variant, problem, split, threads.Parallel()) == alone) << "threads gave other bits";
}

void CheckCase(const GemmCase& problem_case, GemmLayout layout, std::uint64_t seed) {
  GemmProblem problem(problem_case, seed);
  const GemmTruth truth = ComputeGemm(problem.params(), problem.types());
  const auto same_class = [&](const GemmClass& c) {
    return c.a == problem_case.a && c.b == problem_case.b && c.out == problem_case.d && c.layout == layout;
  };
  for (const std::size_t index : CpuVariants(same_class)) {
    const GemmVariant& variant = GemmVariants()[index];
    for (const int split : SplitsFor(variant, problem_case.k)) {
      SCOPED_TRACE(std::string(variant.info.id) + " split=" + std::to_string(split) + " seed=" + std::to_string(seed) +
                   " " + problem_case.Describe());
      CheckVariant(index, split, problem, truth, problem_case.fill);
    }
  }
}

class GemmConformance : public ::testing::TestWithParam<PairLayout> {};

TEST_P(GemmConformance, StandardAndRandomCasesMatchTheOracle) {
  const PairLayout& group = GetParam();
  for (const DType out : {DType::kBf16, DType::kF32}) {
    std::vector<GemmCase> cases = oracle::StandardCases(group.a, group.b, out, LayoutName(group.layout));
    oracle::Random random(kSeed + static_cast<std::uint64_t>(out));
    for (int i = 0; i < kRandomCases; ++i) {
      cases.push_back(oracle::RandomCase(random, group.a, group.b, out, LayoutName(group.layout)));
    }
    for (std::size_t i = 0; i < cases.size() && !HasFailure(); ++i) CheckCase(cases[i], group.layout, kSeed + i);
  }
}

INSTANTIATE_TEST_SUITE_P(Catalogue, GemmConformance, ::testing::ValuesIn(PairLayouts()),
                         [](const auto& test) { return test.param.Name(); });

// --- Mutation controls -----------------------------------------------------------------------------------------------

constexpr std::int64_t kShortK = 16;   // short enough that a bias stands out of the allowed error
constexpr std::int64_t kLongK = 1040;  // several K blocks of every variant

// A launch damaged on purpose, on a problem of `k`. `k_block` is the K that the variant's tile handles at once.
struct Damage {
  std::string name;
  std::int64_t k;
  std::function<void(GemmParams& params, int k_block)> apply;
};

// Every column gets its neighbour's bias, from memory that the caller keeps.
void RotateBias(GemmParams& params, std::vector<float>& rotated) {
  const auto* bias = static_cast<const float*>(params.bias.data);
  rotated.assign(bias, bias + params.n);
  std::rotate(rotated.begin(), rotated.begin() + 1, rotated.end());
  params.bias.data = rotated.data();
}

std::vector<Damage> Damages(std::vector<float>& rotated_bias) {
  return {
      {"a_scale is 1 % off", kLongK, [](GemmParams& params, int) { params.a_scale.scalar *= 1.01F; }},
      {"b_scale is 1 % off", kLongK, [](GemmParams& params, int) { params.b_scale.scalar *= 1.01F; }},
      {"the last K block is dropped", kLongK, [](GemmParams& params, int k_block) { params.k -= k_block; }},
      {"the last row is not written", kLongK, [](GemmParams& params, int) { params.m -= 1; }},
      {"the last column is not written", kLongK, [](GemmParams& params, int) { params.n -= 1; }},
      {"every row is the first of A", kLongK, [](GemmParams& params, int) { params.a.row_stride = 0; }},
      {"biases are swapped", kShortK, [&](GemmParams& params, int) { RotateBias(params, rotated_bias); }},
      {"bias is not added", kShortK, [](GemmParams& params, int) { params.bias.data = nullptr; }},
  };
}

bool IsControlClass(const GemmClass& c) {
  return c.out == DType::kF32 && c.layout == GemmLayout::kNT;
}

GemmCase ControlCase(const GemmClass& c, std::int64_t k = kLongK, Fill fill = Fill::kUniform) {
  return {.a = c.a,
          .b = c.b,
          .d = c.out,
          .layout = LayoutName(c.layout),
          .m = 33,
          .n = 50,
          .k = k,
          .a_scale = ScaleMode::kScalar,
          .b_scale = ScaleMode::kScalar,
          .bias = BiasMode::kF32,
          .fill = fill,
          .padding = 3};
}

// The checker that the fill allows must pass the variant and refuse each of its damages of this K.
void ExpectDamagesCaught(std::size_t index, int split, GemmProblem& problem, const GemmTruth& truth, Fill fill) {
  std::vector<float> rotated_bias;
  CheckVariant(index, split, problem, truth, fill);
  for (const Damage& damage : Damages(rotated_bias)) {
    GemmParams damaged = problem.params();
    if (damage.k != damaged.k) continue;
    damage.apply(damaged, GemmVariants()[index].tile.k);
    problem.PoisonOutput();
    ASSERT_EQ(RunGemm(index, damaged, split), kLaunchOk);
    const Verdict verdict = fill == Fill::kIntegers ? CheckGemmExact(problem.params(), problem.types(), truth)
                                                    : CheckGemm(problem.params(), problem.types(), truth);
    EXPECT_FALSE(verdict.ok) << damage.name;
    EXPECT_GT(verdict.wrong, 0) << damage.name;
  }
}

TEST(GemmMutation, DamagedLaunchesAreCaught) {
  for (const std::size_t index : CpuVariants(IsControlClass)) {
    const GemmVariant& variant = GemmVariants()[index];
    for (const Fill fill : {Fill::kUniform, Fill::kIntegers}) {
      for (const std::int64_t k : {kShortK, kLongK}) {
        const GemmCase control = ControlCase(variant.gemm_class, k, fill);
        GemmProblem problem(control, kSeed);
        const GemmTruth truth = ComputeGemm(problem.params(), problem.types());
        for (const int split : SplitsFor(variant, k)) {
          SCOPED_TRACE(std::string(variant.info.id) + " split=" + std::to_string(split) + " " + control.Describe());
          ExpectDamagesCaught(index, split, problem, truth, fill);
        }
      }
    }
  }
}

TEST(GemmMutation, OneWrongBitFailsTheExactChecker) {
  for (const std::size_t index : CpuVariants(IsControlClass)) {
    const GemmVariant& variant = GemmVariants()[index];
    SCOPED_TRACE(variant.info.id);
    const GemmCase control = ControlCase(variant.gemm_class, kLongK, Fill::kIntegers);
    GemmProblem problem(control, kSeed);
    const GemmTruth truth = ComputeGemm(problem.params(), problem.types());
    LaunchPoisoned(index, problem, 1, {});
    ASSERT_TRUE(CheckGemmExact(problem.params(), problem.types(), truth).ok);
    auto* last = static_cast<std::byte*>(problem.params().d.data) +
                 oracle::ElementOffset(problem.params(), problem.params().d, 0, control.m - 1, control.n - 1) * 4;
    *last ^= std::byte{1};
    EXPECT_EQ(CheckGemmExact(problem.params(), problem.types(), truth).wrong, 1);
  }
}

TEST(GemmMutation, WritesOutsideTheViewAreCaught) {
  for (const std::size_t index : CpuVariants(IsControlClass)) {
    const GemmVariant& variant = GemmVariants()[index];
    SCOPED_TRACE(variant.info.id);
    GemmProblem problem(ControlCase(variant.gemm_class), kSeed);
    GemmParams shifted = problem.params();
    shifted.d.data = static_cast<float*>(shifted.d.data) + 1;
    ASSERT_EQ(RunGemm(index, shifted, 1), kLaunchOk);
    std::string where;
    EXPECT_FALSE(problem.GuardsIntact(&where));
  }
}

// --- The launch contract ---------------------------------------------------------------------------------------------

TEST(GemmLaunch, RefusesWhatTheVariantCannotTakeAndTouchesNothing) {
  for (const std::size_t index : CpuVariants(IsControlClass)) {
    const GemmVariant& variant = GemmVariants()[index];
    SCOPED_TRACE(variant.info.id);
    GemmProblem problem(ControlCase(variant.gemm_class), kSeed);
    const std::vector<std::byte> before = PackedOutput(problem.params(), DType::kF32);
    for (const int split : {0, -1}) {
      EXPECT_EQ(LaunchGemm(index, problem.params(), {.split = split}, {}), kLaunchInvalidValue) << split;
    }
    if (variant.info.workspace == WorkspaceRule::kNone) {
      EXPECT_EQ(LaunchGemm(index, problem.params(), {.split = 2}, {}), kLaunchInvalidValue);
    } else {
      const auto needed =
          GemmWorkspaceBytes(variant, 1, problem.params().m, problem.params().n, problem.params().k, 2).value();
      std::vector<std::byte> scratch(static_cast<std::size_t>(needed));
      const Workspace short_by_one = {.scratch = scratch.data(), .bytes = scratch.size() - 1};
      EXPECT_EQ(LaunchGemm(index, problem.params(), {.split = 2}, {.workspace = short_by_one}), kLaunchInvalidValue);
    }
    EXPECT_TRUE(PackedOutput(problem.params(), DType::kF32) == before);
  }
}

TEST(GemmLaunch, AnIndexBeyondTheCatalogueIsInvalid) {
  GemmProblem problem(ControlCase({.a = DType::kBf16, .b = DType::kBf16, .out = DType::kF32}), kSeed);
  for (const std::size_t index : {GemmVariants().size(), GemmVariants().size() + 1, static_cast<std::size_t>(-1)}) {
    EXPECT_EQ(LaunchGemm(index, problem.params(), {}, {}), kLaunchInvalidValue) << index;
  }
}

TEST(GemmLaunch, AnEmptyBatchIsOkAndWritesNothing) {
  for (const std::size_t index : CpuVariants(IsControlClass)) {
    GemmProblem problem(ControlCase(GemmVariants()[index].gemm_class), kSeed);
    const std::vector<std::byte> before = PackedOutput(problem.params(), DType::kF32);
    GemmParams empty = problem.params();
    empty.batch_shape[1] = 0;
    EXPECT_EQ(LaunchGemm(index, empty, {}, {}), kLaunchOk) << GemmVariants()[index].info.id;
    EXPECT_TRUE(PackedOutput(problem.params(), DType::kF32) == before) << GemmVariants()[index].info.id;
  }
}

}  // namespace
}  // namespace tessera::kernels
