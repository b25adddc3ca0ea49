// The planner that is changed while it serves: chain, cache, probes, counts and watchers, on one thread. Changes and
// history are in planner_changes_test.cc.
#include "planner/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/gemm_planner.h"
#include "tests/planner/plan_checks.h"
#include "tests/planner/planner_cases.h"

namespace tessera::planner {
namespace {

using kernels::Arch;
using kernels::GemmVariants;
using ::testing::HasSubstr;

TEST(Planner, PlansAsTheBandsDoAtFirst) {
  Planner planner;
  const GemmPlanner plain(GemmVariants());
  for (const DeviceFacts& facts : {CpuFacts(8), Device("h200"), Device("a100")}) {
    const auto plan = planner.Decide(kProblem, facts);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(*plan, *plain.Decide(kProblem, facts));
    EXPECT_EQ(*plan, *planner.Decide(kProblem, facts)) << "and from the cache";
  }
  EXPECT_EQ(planner.revision(), 1U);
}

TEST(Planner, TiersAreAskedInOrder) {
  Planner planner;
  const DeviceFacts facts = CpuFacts(8);
  ExpectChanged(planner.InjectRows(CpuRow("-> reference"), InjectMode::kAppend, By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->source, Source::kInjected);
  EXPECT_EQ(RecipeOf(planner.Decide(kProblem, facts)), "reference");
  ExpectChanged(planner.InjectRows(CpuRow("-> splitk_48x48x512 split=3"), InjectMode::kAppend, By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->split, 3) << "what comes later wins";
  ExpectChanged(planner.SetTable(CpuRow("m(0,100] -> reference") + CpuRow("m(100,*] -> blocked_96x96x256"), By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->source, Source::kOverride);
  EXPECT_EQ(RecipeOf(planner.Decide(kProblem, facts)), "blocked_96x96x256");

  ExpectChanged(planner.SetPlanner("model", By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->source, Source::kDegraded) << "no rows, and the model knows no CPU";
  ExpectChanged(planner.SetPlanner("table", By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->source, Source::kOverride);
  ExpectChanged(planner.SetTable("-", By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->source, Source::kDegraded) << "rows of all tiers are off";
  ExpectChanged(planner.SetTable("", By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->source, Source::kInjected) << "and on again";
  ExpectChanged(planner.InjectRows("", InjectMode::kClear, By("a")));
  EXPECT_EQ(planner.Decide(kProblem, facts)->source, Source::kDegraded);
  ExpectChanged(planner.SetPlanner("", By("a")));
  EXPECT_TRUE(planner.config()->mode_is_default);
  EXPECT_EQ(planner.config()->mode, Mode::kHybrid);
}

TEST(Planner, BuiltInRowsAreBelowInjectedOnes) {
  const RowSchema* const schemas[] = {&GemmFamily::Schema()};
  auto rows = ParseRows(CpuRow("-> reference"), schemas);
  ASSERT_TRUE(rows.ok());
  PlannerOptions options;
  options.start.tier_ptr(Tier::kBuiltin) = std::make_shared<const RowSet>(*std::move(rows));
  Planner planner(std::move(options));
  EXPECT_EQ(planner.Decide(kProblem, CpuFacts(8))->source, Source::kBuiltin);
  ExpectChanged(planner.InjectRows(CpuRow("-> blocked_96x96x256"), InjectMode::kReplace, By("a")));
  EXPECT_EQ(planner.Decide(kProblem, CpuFacts(8))->source, Source::kInjected);
}

// Each row is passed over for the reason that it is here for, counted, and the next one answers.
TEST(Planner, StaleRowsFallThroughWithTheReason) {
  struct Case {
    std::string row;
    DeviceFacts facts;
    Reason reason;
    kernels::ArchSet addressable = GemmProblem{}.addressable;
  };
  DeviceFacts small = Device("h200");
  small.shared_bytes_per_block = 100 * 1024;
  DeviceFacts no_scratch = CpuFacts(4);
  no_scratch.workspace_bytes_max = 0;
  const std::string hopper = "gemm.sm90a.bf16_bf16.bf16.fast.NT ";
  const Case kCases[] = {
      {CpuRow("-> blocked_1x1x1"), CpuFacts(4), Reason::kUnknownRecipe},
      {CpuRow("-> reference raster=2"), CpuFacts(4), Reason::kRaster},
      {CpuRow("-> reference split=2"), CpuFacts(4), Reason::kSplit},
      {CpuRow("-> splitk_48x48x512 split=5"), CpuFacts(4), Reason::kSplit},
      {CpuRow("-> splitk_48x48x512 split=2"), no_scratch, Reason::kWorkspace},
      {hopper + "-> 128x128x64_s6", Device("a100"), Reason::kNotOnDevice},
      {hopper + "-> 128x128x64_s6", Device("h200"), Reason::kAlignment, {Arch::kSm80, Arch::kSm89}},
      {hopper + "-> 128x128x64_s6", small, Reason::kSharedMemory},
      {hopper + "-> slices_128x128x64_s5 split=5", Device("h200"), Reason::kSplit},
  };
  for (const Case& of : kCases) {
    Planner planner;
    GemmProblem problem = kProblem;
    problem.addressable = of.addressable;
    ASSERT_TRUE(planner.SetTable(of.row, By("a")).ok()) << of.row;
    const auto plan = planner.Decide(problem, of.facts);
    ASSERT_TRUE(plan.ok()) << of.row << plan.status();
    EXPECT_NE(plan->source, Source::kOverride) << of.row;
    EXPECT_EQ(WhyIllegalPlan(*plan, problem, of.facts), "") << of.row;
    const auto counts = planner.State().passed_over;
    for (std::size_t i = 0; i < kCountedReasons; ++i) {
      EXPECT_EQ(counts[i], static_cast<Reason>(i) == of.reason ? 1U : 0U) << of.row << kReasonNames[i];
    }
    const Probe probe = planner.ProbePlan({problem, of.facts});
    ASSERT_FALSE(probe.candidates.empty()) << of.row;
    EXPECT_EQ(probe.candidates.front().reason, of.reason) << of.row;
    EXPECT_EQ(probe.candidates.front().source, Source::kOverride);
    ASSERT_TRUE(probe.candidates.front().row.has_value());
    EXPECT_EQ(probe.candidates.front().row->line, 1);
    EXPECT_EQ(planner.State().passed_over, counts) << "probes count nothing";
  }
}

TEST(Planner, GatesPriceTheRowsOwnTiles) {
  Planner planner;
  const DeviceFacts h200 = Device("h200");  // 132 processors, one block each of this recipe
  ASSERT_TRUE(planner.SetTable("gemm.sm90a.bf16_bf16.bf16.fast.NT waves>=2 -> 128x128x64_s6", By("a")).ok());
  GemmProblem problem = kProblem;
  problem.n = 128;
  for (const auto& [tiles, source] : {std::pair{263, Source::kDegraded}, std::pair{264, Source::kOverride}}) {
    problem.m = tiles * 128;
    EXPECT_EQ(planner.Decide(problem, h200)->source, source) << tiles;
  }
  // Two blocks of 64 KiB fit a processor of an A100.
  ASSERT_TRUE(planner.SetTable("gemm.sm80.bf16_bf16.bf16.fast.NT waves>=1 -> 128x128x32_s4", By("a")).ok());
  for (const auto& [tiles, source] : {std::pair{215, Source::kDegraded}, std::pair{216, Source::kOverride}}) {
    problem.m = tiles * 128;
    EXPECT_EQ(planner.Decide(problem, Device("a100"))->source, source) << tiles;
  }
  ASSERT_TRUE(planner.SetTable("gemm.sm80.bf16_bf16.bf16.fast.NT blocks>=1 -> 128x128x32_s4", By("a")).ok());
  for (const auto& [tiles, source] : {std::pair{107, Source::kDegraded}, std::pair{108, Source::kOverride}}) {
    problem.m = tiles * 128;
    EXPECT_EQ(planner.Decide(problem, Device("a100"))->source, source) << tiles;
  }
  EXPECT_EQ(planner.State().passed_over, decltype(PlannerState{}.passed_over){}) << "a gate is no staleness";
}

TEST(Planner, StagingLeavesTheHopperTreeOut) {
  Planner planner;
  const DeviceFacts h200 = Device("h200");
  ASSERT_EQ(GemmVariants()[planner.Decide(kProblem, h200)->variant].info.arch, Arch::kSm90a);
  ExpectChanged(planner.SetStaging(false, std::nullopt, By("a")));
  EXPECT_EQ(GemmVariants()[planner.Decide(kProblem, h200)->variant].info.arch, Arch::kSm80);
  const Probe probe = planner.ProbePlan({kProblem, h200});
  EXPECT_TRUE(std::any_of(probe.candidates.begin(), probe.candidates.end(),
                          [](const Candidate& candidate) { return candidate.reason == Reason::kStagingOff; }));
  const auto unchanged = planner.SetStaging(std::nullopt, std::nullopt, By("a"));
  ASSERT_TRUE(unchanged.ok());
  EXPECT_FALSE(unchanged->changed);
  for (const bool on : {true, false}) {
    const auto mx = planner.SetStaging(std::nullopt, on, By("a"));
    EXPECT_EQ(Code(mx.status()), "UNIMPLEMENTED");
    EXPECT_THAT(MessageOf(mx.status()), HasSubstr("mx"));
  }
  // What only that tree has is refused, with what to do.
  const GemmProblem fp8 = {
      .gemm_class = {.a = DType::kE4m3, .b = DType::kE4m3, .out = DType::kBf16}, .m = 64, .n = 64, .k = 64};
  const auto off = planner.Decide(fp8, h200);
  EXPECT_EQ(Code(off.status()), "UNIMPLEMENTED");
  EXPECT_THAT(MessageOf(off.status()), HasSubstr("switched off; see `tessera plan staging`"));
  const auto elsewhere = planner.Decide(fp8, Device("a100"));
  EXPECT_EQ(Code(elsewhere.status()), "UNIMPLEMENTED");
  EXPECT_THAT(MessageOf(elsewhere.status()), HasSubstr("runs on this device; this build has them for sm90a alone"));

  ExpectChanged(planner.SetStaging(true, std::nullopt, By("a")));
  EXPECT_TRUE(planner.Decide(fp8, h200).ok());
  EXPECT_EQ(GemmVariants()[planner.Decide(kProblem, h200)->variant].info.arch, Arch::kSm90a);
}

TEST(Planner, CountsDecisionsAndTheCache) {
  Planner planner;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(planner.Decide(kProblem, CpuFacts(8)).ok());
  ASSERT_FALSE(planner.Decide({.gemm_class = {.a = DType::kF16}}, CpuFacts(8)).ok());
  PlannerState state = planner.State();
  EXPECT_EQ(state.cache_hits, 4U);
  EXPECT_EQ(state.cache_misses, 2U);
  EXPECT_EQ(state.refusals, 1U);
  EXPECT_EQ(state.cached_plans, 1U);
  ASSERT_EQ(planner.Decisions().size(), 1U);
  EXPECT_EQ(planner.Decisions().front().count, 5U);
  const auto plan = planner.Decide(kProblem, CpuFacts(8));
  EXPECT_EQ(planner.Decisions(plan->variant, plan->source), 6U);
  ExpectChanged(planner.SetLog(true, By("a")));
  EXPECT_EQ(planner.State().cached_plans, 0U) << "plans of an old revision are none";
}

// A key that lacked one of these would hand out a plan for another problem.
TEST(Planner, TheCacheTellsProblemsAndDevicesApart) {
  Planner cached;
  PlannerOptions no_cache;
  no_cache.cached_plans_max = 0;
  Planner plain(std::move(no_cache));
  std::vector<Question> questions;
  for (const KnownDevice& device : KnownDevices()) questions.push_back({kProblem, device.facts});
  for (const int threads : {1, 2, 8})
    questions.push_back({{.gemm_class = kBf16, .m = 1, .n = 1, .k = 9999}, CpuFacts(threads)});
  for (const std::int64_t scratch : {0, 100, 1000}) {
    questions.push_back({{.gemm_class = kBf16, .m = 1, .n = 1, .k = 9999}, CpuFacts(8)});
    questions.back().facts.workspace_bytes_max = scratch;
  }
  questions.push_back({kProblem, Device("h200")});
  questions.back().gemm.addressable = {Arch::kSm80, Arch::kSm89};
  questions.push_back({{.gemm_class = kBf16, .batch = 64, .m = 96, .n = 96, .k = 9999}, CpuFacts(8)});
  questions.push_back({{.gemm_class = kBf16, .batch = 1, .m = 96, .n = 96, .k = 9999}, CpuFacts(8)});
  for (int round = 0; round < 2; ++round) {
    for (const Question& question : questions) {
      EXPECT_EQ(*cached.Decide(question.gemm, question.facts), *plain.Decide(question.gemm, question.facts));
    }
  }
  EXPECT_GT(cached.State().cache_hits, 0U);
  EXPECT_EQ(plain.State().cache_hits, 0U);
}

TEST(PlanCache, HasEachPlanOnce) {
  PlanCache<1> cache(4);
  const auto key = [](std::uint64_t problem, const DeviceFacts& facts) {
    return PlanCache<1>::KeyOf({problem}, facts, 1);
  };
  const DeviceFacts facts = CpuFacts(8);
  for (int i = 0; i < 10; ++i) cache.Insert(key(7, facts), Plan{.variant = 3});
  EXPECT_EQ(cache.Count(1), 1U);
  for (const std::uint64_t problem : {8, 9, 10}) cache.Insert(key(problem, facts), Plan{.variant = problem});
  EXPECT_EQ(cache.Count(1), 4U);
  for (const std::uint64_t problem : {8, 9, 10}) EXPECT_EQ(cache.Find(key(problem, facts))->variant, problem);
  EXPECT_EQ(cache.Find(key(7, facts))->variant, 3U);
}

// Each field alone, in its highest bits, too.
TEST(PlanCache, KeysOfOtherFactsAreOthers) {
  const DeviceFacts base = Device("l20");
  std::vector<DeviceFacts> facts(9, base);
  facts[0].backend = kernels::Backend::kVendor;
  facts[1].archs.Add(Arch::kSm90a);
  facts[2].processors |= 1 << 30;
  facts[3].workspace_bytes_max |= std::int64_t{1} << 62;
  facts[4].l2_bytes |= std::int64_t{1} << 62;
  facts[5].shared_bytes_per_block |= std::int64_t{1} << 62;
  facts[6].shared_bytes_per_processor |= std::int64_t{1} << 62;
  facts[7].threads_per_processor |= 1 << 30;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(FactsKey(facts[i]), FactsKey(facts[j])) << i << " and " << j;
  }
}

TEST(Planner, TheCacheIsBounded) {
  PlannerOptions options;
  options.cached_plans_max = 64;
  Planner planner(std::move(options));
  GemmProblem problem = kProblem;
  for (problem.m = 1; problem.m < 1000; ++problem.m) ASSERT_TRUE(planner.Decide(problem, CpuFacts(8)).ok());
  const PlannerState state = planner.State();
  EXPECT_EQ(state.cached_plans_max, 64U);
  EXPECT_LE(state.cached_plans, 64U);
  EXPECT_GT(state.cached_plans, 32U);
}

TEST(Planner, AProbeSaysWhyEachOtherLost) {
  Planner planner;
  ASSERT_TRUE(planner.SetTable(CpuRow("m(0,16] -> reference") + CpuRow("-> blocked_96x96x256"), By("a")).ok());
  const Probe probe = planner.ProbePlan({kProblem, CpuFacts(8)});
  ASSERT_TRUE(probe.plan.ok());
  EXPECT_EQ(probe.plan->source, Source::kOverride);
  ASSERT_TRUE(probe.row.has_value());
  EXPECT_EQ(probe.row->line, 2);
  ASSERT_EQ(probe.candidates.size(), 3U);
  EXPECT_EQ(probe.candidates[0].reason, Reason::kBands);
  EXPECT_EQ(probe.candidates[1].reason, Reason::kRowDecided);
  EXPECT_EQ(probe.candidates[2].reason, Reason::kRowDecided);
  EXPECT_FALSE(probe.more);
  const Probe short_probe = planner.ProbePlan({kProblem, CpuFacts(8)}, 1);
  EXPECT_EQ(short_probe.candidates.size(), 1U);
  EXPECT_TRUE(short_probe.more);

  const Probe hopper = planner.ProbePlan({kProblem, Device("h200")});
  EXPECT_EQ(hopper.plan->source, Source::kDegraded);
  EXPECT_THAT(hopper.detail, HasSubstr("abstains"));
  EXPECT_EQ(planner.State().cached_plans, 0U) << "probes leave the cache alone";
  for (const Reason reason : {Reason::kUnknownRecipe, Reason::kRowDecided}) EXPECT_FALSE(Explain(reason).empty());
}

TEST(Planner, TheLogHasWhatIsMade) {
  std::vector<Decision> logged;
  PlannerOptions options;
  options.log = [&](const Decision& decision) { logged.push_back(decision); };
  Planner planner(std::move(options));
  ASSERT_TRUE(planner.Decide(kProblem, CpuFacts(8)).ok());
  EXPECT_TRUE(logged.empty());
  ExpectChanged(planner.SetLog(true, By("a")));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(planner.Decide(kProblem, CpuFacts(8)).ok());
  ASSERT_EQ(logged.size(), 1U);
  EXPECT_EQ(logged[0].revision, 2U);
  EXPECT_EQ(logged[0].family, "gemm");
  EXPECT_EQ(logged[0].problem, "gemm bf16_bf16.bf16.fast.NT m=512 n=1024 k=2048");
  EXPECT_EQ(logged[0].class_name, "gemm.cpu.bf16_bf16.bf16.fast.NT");
}

TEST(Planner, WatchersGetDecisionsAndLoseTheOldest) {
  Planner planner;
  int woken = 0;
  const auto all = planner.Watch({.cached = true, .buffer = 4, .ready = [&] { ++woken; }});
  const auto made = planner.Watch({.class_prefix = "gemm.cpu."});
  const auto others = planner.Watch({.class_prefix = "gemm.sm90a."});
  EXPECT_EQ(planner.State().watchers, 3U);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(planner.Decide(kProblem, CpuFacts(8)).ok());
  const WatchBatch last = all->Take(100);
  EXPECT_EQ(last.decisions.size(), 4U);
  EXPECT_EQ(last.lost, 6U);
  EXPECT_TRUE(last.decisions.front().cached);
  EXPECT_EQ(woken, 1);
  const WatchBatch first = made->Wait(100, std::chrono::seconds(10));
  ASSERT_EQ(first.decisions.size(), 1U);
  EXPECT_FALSE(first.decisions.front().cached);
  EXPECT_EQ(first.lost, 0U);
  EXPECT_TRUE(others->Take(100).decisions.empty());
  EXPECT_EQ(planner.State().watch_entries_lost, 6U);
  ASSERT_TRUE(planner.Decide(kProblem, CpuFacts(8)).ok());
  EXPECT_EQ(woken, 2);
}

TEST(Planner, NamesTheRecipesOfThisBuild) {
  const Planner planner;
  const std::vector<Recipe> recipes = planner.TileVocabulary();
  ASSERT_EQ(recipes.size(), GemmVariants().size());
  for (const Recipe& recipe : recipes) {
    EXPECT_EQ(recipe.info.id, GemmVariants()[recipe.variant].info.id);
    EXPECT_EQ(recipe.family, "gemm");
    EXPECT_EQ(recipe.threads > 0, recipe.info.backend == kernels::Backend::kCuda) << recipe.info.id;
  }
}

}  // namespace
}  // namespace tessera::planner
