// What must hold for any rows, any problem and any device: there is a plan wherever a kernel is, it is legal, and it is
// the one that a slow reading of the rules gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/gemm_planner.h"
#include "planner/planner.h"
#include "tests/planner/plan_checks.h"
#include "tests/planner/slow_reading.h"

namespace tessera::planner {
namespace {

using kernels::Arch;
using kernels::Backend;
using kernels::GemmVariant;
using kernels::GemmVariants;
using Random = std::mt19937_64;

std::int64_t Below(Random& random, std::int64_t limit) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
}

template <typename T, std::size_t kCount>
const T& OneOf(Random& random, const T (&of)[kCount]) {
  return of[random() % kCount];
}

std::int64_t RandomExtent(Random& random) {
  constexpr std::int64_t kEdges[] = {0, 1, 15, 16, 17, 64, 96, 128, 129, 511, 512, 513, 4096, 65'537};
  return Below(random, 3) == 0 ? OneOf(random, kEdges) : Below(random, std::int64_t{1} << (1 + Below(random, 14)));
}

DeviceFacts RandomFacts(Random& random) {
  if (Below(random, 3) == 0) {
    DeviceFacts facts = CpuFacts(static_cast<int>(1 + Below(random, 16)));
    facts.workspace_bytes_max = Below(random, 1 << 20);
    return facts;
  }
  DeviceFacts facts = KnownDevices()[random() % KnownDevices().size()].facts;
  if (Below(random, 4) == 0) facts.shared_bytes_per_block = 65'536 + Below(random, 170'000);
  if (Below(random, 4) == 0) facts.l2_bytes = Below(random, 1 << 26);
  if (Below(random, 4) == 0) facts.processors = static_cast<int>(1 + Below(random, 200));
  if (Below(random, 8) == 0) {
    facts.backend = Backend::kVendor;
    facts.archs.Add(Arch::kVendor);
  }
  return facts;
}

// Of a few classes, so that rows meet problems.
const GemmVariant& RandomVariant(Random& random, Backend backend) {
  for (;;) {
    const GemmVariant& variant = GemmVariants()[random() % GemmVariants().size()];
    const bool bf16 = variant.gemm_class.a == DType::kBf16 && variant.gemm_class.out == DType::kBf16;
    const bool fp8 = variant.gemm_class.a == DType::kE4m3 && variant.gemm_class.b == DType::kE4m3;
    if (variant.info.backend == backend && (bf16 || fp8) && variant.gemm_class.layout == kernels::GemmLayout::kNT) {
      return variant;
    }
  }
}

Row RandomRow(Random& random, Backend backend) {
  Row row;
  row.class_name = RandomVariant(random, backend).info.class_name;
  // Mostly a recipe of that class; now and then one of another, which is stale.
  std::vector<std::string_view> recipes;
  for (const GemmVariant& variant : GemmVariants()) {
    if (variant.info.class_name == row.class_name) recipes.push_back(variant.info.recipe);
  }
  row.recipe = Below(random, 8) == 0 ? RandomVariant(random, backend).info.recipe : recipes[random() % recipes.size()];
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (Below(random, 2) == 0) continue;
    Band& band = row.bands[axis];
    band.min = Below(random, 2) == 0 ? -1 : RandomExtent(random);
    if (Below(random, 2) == 0) band.max = std::max<std::int64_t>(band.min, 0) + 1 + RandomExtent(random);
  }
  if (Below(random, 6) == 0) row.waves = 1 + Below(random, 4);
  if (Below(random, 6) == 0) row.blocks = 1 + Below(random, 4);
  if (Below(random, 3) == 0) row.knobs[0] = static_cast<int>(1 + Below(random, 16));
  if (Below(random, 3) == 0) row.knobs[1] = static_cast<int>(1 + Below(random, 9));
  return row;
}

std::string Told(const std::vector<Row>& rows, const GemmProblem& problem, const DeviceFacts& facts) {
  const RowSchema* const schemas[] = {&GemmFamily::Schema()};
  return absl::StrCat(GemmFamily::ToText(problem), " on ", facts.processors, " processors of ",
                      Av(kernels::BackendName(facts.backend)), "\n", ToText(rows, schemas));
}

TEST(PlanProperties, ThePlanIsTheFirstRowsThatCan) {
  Random random(20260715);
  const RowSchema* const schemas[] = {&GemmFamily::Schema()};
  const GemmPlanner rowless(GemmVariants());
  int by_rows = 0;
  int otherwise = 0;
  for (int round = 0; round < 4000; ++round) {
    const DeviceFacts facts = RandomFacts(random);
    std::vector<Row> tiers[2];
    for (std::vector<Row>& tier : tiers) {
      for (std::int64_t i = Below(random, 12); i > 0; --i) tier.push_back(RandomRow(random, facts.backend));
    }
    Planner planner;
    ASSERT_TRUE(planner.SetTable(ToText(tiers[0], schemas), {.who = "test"}).ok());
    ASSERT_TRUE(planner.InjectRows(ToText(tiers[1], schemas), InjectMode::kReplace, {.who = "test"}).ok());
    for (int i = 0; i < 8; ++i) {
      GemmProblem problem{.gemm_class = RandomVariant(random, facts.backend).gemm_class,
                          .batch = Below(random, 4) == 0 ? RandomExtent(random) : 1,
                          .m = RandomExtent(random),
                          .n = RandomExtent(random),
                          .k = RandomExtent(random)};
      if (Below(random, 4) == 0) problem.addressable = {Arch::kCpu, Arch::kSm80, Arch::kSm89, Arch::kVendor};
      std::optional<Plan> expected;
      for (std::size_t tier = 0; tier < 2 && !expected.has_value(); ++tier) {
        for (const Row& row : tiers[tier]) {
          expected = ReadRow(row, problem, facts);
          if (!expected.has_value()) continue;
          expected->source = static_cast<Source>(tier);
          break;
        }
      }
      const auto plan = planner.Decide(problem, facts);
      if (!expected.has_value()) {
        const auto plain = rowless.Decide(problem, facts);
        ASSERT_EQ(plan.ok(), plain.ok()) << Told(tiers[0], problem, facts);
        if (plan.ok()) {
          ASSERT_EQ(*plan, *plain) << Told(tiers[0], problem, facts);
          ++otherwise;
        }
      } else {
        ASSERT_TRUE(plan.ok()) << plan.status() << Told(tiers[0], problem, facts);
        Plan decided = *plan;
        if (expected->raster == 0) decided.raster = 0;
        ASSERT_EQ(decided, *expected) << Told(tiers[0], problem, facts) << Told(tiers[1], problem, facts);
        ++by_rows;
      }
      const Probe probe = planner.ProbePlan({problem, facts});
      ASSERT_EQ(probe.plan.ok(), plan.ok());
      const auto again = planner.Decide(problem, facts);
      ASSERT_EQ(again.ok(), plan.ok());
      if (!plan.ok()) continue;
      ASSERT_EQ(WhyIllegalPlan(*plan, problem, facts), "") << Told(tiers[0], problem, facts);
      ASSERT_EQ(*again, *plan) << "from the cache";
      ASSERT_EQ(*probe.plan, *plan);
    }
  }
  EXPECT_GT(by_rows, 3000);
  EXPECT_GT(otherwise, 3000);
}

// A choice that is legal for most sizes and not for one between them is the kind of error that a sample misses.
TEST(PlanProperties, EveryStepOfNHasALegalPlan) {
  std::vector<kernels::GemmClass> classes;
  for (const GemmVariant& variant : GemmVariants()) {
    const bool seen = std::any_of(classes.begin(), classes.end(),
                                  [&](const kernels::GemmClass& other) { return other == variant.gemm_class; });
    if (variant.info.backend == Backend::kCuda && !seen) classes.push_back(variant.gemm_class);
  }
  ASSERT_FALSE(classes.empty());
  const GemmPlanner planner(GemmVariants());
  std::int64_t plans = 0;
  for (const kernels::GemmClass& gemm_class : classes) {
    for (const DeviceFacts& facts : {FindDevice("h200")->facts, CpuFacts(8)}) {
      for (std::int64_t n = 16; n <= 4096; n += 16) {
        for (const std::int64_t k : {128, 2048, 4096}) {
          for (const std::int64_t m : {1, 128, 2048}) {
            const GemmProblem problem = {.gemm_class = gemm_class, .m = m, .n = n, .k = k};
            const auto plan = planner.Decide(problem, facts);
            ASSERT_TRUE(plan.ok()) << plan.status();
            ASSERT_EQ(WhyIllegalPlan(*plan, problem, facts), "") << GemmFamily::ToText(problem);
            ++plans;
          }
        }
      }
    }
  }
  EXPECT_GE(plans, 256 * 9 * 2);
}

}  // namespace
}  // namespace tessera::planner
