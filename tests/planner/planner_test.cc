// The planner that is changed while it serves: chain, changes, history, probes, counts and watchers, on one thread.
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

namespace tessera::planner {
namespace {

using kernels::Arch;
using kernels::GemmVariants;
using ::testing::HasSubstr;

constexpr kernels::GemmClass kBf16 = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16};
const GemmProblem kProblem = {.gemm_class = kBf16, .m = 512, .n = 1024, .k = 2048};

ChangeOptions By(std::string who) {
  return {.who = std::move(who)};
}
const DeviceFacts& Device(std::string_view name) {
  return FindDevice(name)->facts;
}
std::string_view RecipeOf(const absl::StatusOr<Plan>& plan) {
  return plan.ok() ? GemmVariants()[plan->variant].info.recipe : "none";
}
std::string Code(const absl::Status& status) {
  return absl::StatusCodeToString(status.code());
}

// `changed`: the change was accepted and is one.
void ExpectChanged(const absl::StatusOr<ChangeResult>& result) {
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->changed);
}

std::string CpuRow(std::string_view rest) {
  return absl::StrCat("gemm.cpu.bf16_bf16.bf16.fast.NT ", Av(rest), "\n");
}

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

TEST(Planner, RefusedChangesChangeNothing) {
  Planner planner;
  ExpectChanged(planner.SetTable(CpuRow("-> reference"), By("a")));
  const auto before = planner.config();
  ChangeOptions raced = By("a");
  raced.expected_revision = 1;
  const absl::StatusOr<ChangeResult> refused[] = {
      planner.SetPlanner("best", By("a")),
      planner.SetTable("nonsense", By("a")),
      planner.InjectRows("0 1 2", InjectMode::kAppend, By("a")),
      planner.InjectRows(CpuRow("-> reference"), InjectMode::kClear, By("a")),
      planner.SetPlanner("model", raced),
      planner.Rollback(77, By("a")),
  };
  const char* const kCodes[] = {"INVALID_ARGUMENT", "INVALID_ARGUMENT", "INVALID_ARGUMENT",
                                "INVALID_ARGUMENT", "ABORTED",          "NOT_FOUND"};
  for (std::size_t i = 0; i < std::size(refused); ++i) EXPECT_EQ(Code(refused[i].status()), kCodes[i]) << i;
  EXPECT_THAT(MessageOf(refused[1].status()), HasSubstr("text: line 1, column 1, class"));
  EXPECT_THAT(MessageOf(refused[4].status()),
              HasSubstr("expected_revision: is 1, and the configuration has revision 2"));
  EXPECT_EQ(planner.config(), before);
  EXPECT_EQ(planner.State().refused_changes, std::size(refused));
  EXPECT_EQ(planner.Changes(10, 0).entries.size(), 1U);

  std::string rows;
  for (int i = 0; i < 3000; ++i) rows += CpuRow("-> reference");
  ASSERT_TRUE(planner.InjectRows(rows, InjectMode::kAppend, By("a")).ok());
  EXPECT_EQ(Code(planner.InjectRows(rows, InjectMode::kAppend, By("a")).status()), "RESOURCE_EXHAUSTED");
}

TEST(Planner, ADryRunSaysWhatWouldChange) {
  Planner planner;
  const Question kQuestions[] = {{kProblem, CpuFacts(8)}, {kProblem, Device("h200")}};
  ChangeOptions dry = By("a");
  dry.dry_run = true;
  dry.probes = kQuestions;
  const auto result = planner.SetTable(CpuRow("-> reference") + CpuRow("-> blocked_7x7x7"), dry);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->changed);
  EXPECT_TRUE(result->dry_run);
  EXPECT_EQ(result->old_revision, 1U);
  EXPECT_EQ(result->new_revision, 2U);
  ASSERT_EQ(result->probes.size(), 2U);
  EXPECT_TRUE(result->probes[0].changed);
  EXPECT_EQ(RecipeOf(result->probes[0].after), "reference");
  EXPECT_FALSE(result->probes[1].changed);
  EXPECT_EQ(result->rows[0], 2U);
  ASSERT_EQ(result->warnings.size(), 1U);
  EXPECT_THAT(result->warnings[0], HasSubstr("line 2: this build has no recipe blocked_7x7x7"));
  EXPECT_EQ(planner.revision(), 1U);
  EXPECT_EQ(planner.Decide(kProblem, CpuFacts(8))->source, Source::kDegraded);
  EXPECT_TRUE(planner.Changes(10, 0).entries.empty());
}

// Lines of an earlier text mean nothing to whoever sends the next.
TEST(Planner, WarnsOfRowsThatCameWithTheChange) {
  Planner planner;
  const auto stale = planner.InjectRows(CpuRow("-> blocked_7x7x7"), InjectMode::kAppend, By("a"));
  ASSERT_TRUE(stale.ok());
  EXPECT_EQ(stale->warnings.size(), 1U);
  const auto good = planner.InjectRows(CpuRow("-> reference"), InjectMode::kAppend, By("a"));
  ASSERT_TRUE(good.ok());
  EXPECT_THAT(good->warnings, ::testing::IsEmpty());
  const auto back = planner.Rollback(2, By("a"));
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(back->changed);
  EXPECT_THAT(back->warnings, ::testing::IsEmpty());
  const auto repeated = planner.SetTable(CpuRow("-> reference") + CpuRow("-> blocked_7x7x7"), By("a"));
  ASSERT_TRUE(repeated.ok());
  EXPECT_THAT(repeated->warnings, ::testing::ElementsAre(HasSubstr("line 2: this build has no recipe")));
}

TEST(Planner, RollsBackToWhatIsKept) {
  PlannerOptions options;
  options.revisions_max = 3;
  Planner planner(std::move(options));
  ExpectChanged(planner.SetTable(CpuRow("-> reference"), By("a")));  // 2
  ExpectChanged(planner.SetPlanner("table", By("a")));               // 3
  ExpectChanged(planner.SetTable("-", By("a")));                     // 4
  ExpectChanged(planner.SetLog(true, By("a")));                      // 5
  EXPECT_EQ(planner.State().revisions, (std::vector<std::uint64_t>{2, 3, 4}));
  EXPECT_EQ(Code(planner.Rollback(1, By("a")).status()), "NOT_FOUND");
  ExpectChanged(planner.Rollback(2, By("b")));
  EXPECT_EQ(planner.revision(), 6U);
  EXPECT_EQ(planner.config()->mode, Mode::kHybrid);
  EXPECT_FALSE(planner.config()->log);
  EXPECT_EQ(RecipeOf(planner.Decide(kProblem, CpuFacts(8))), "reference");
  const auto itself = planner.Rollback(6, By("b"));
  ASSERT_TRUE(itself.ok());
  EXPECT_FALSE(itself->changed);
  EXPECT_EQ(planner.revision(), 6U) << "a change to what is so makes no revision";
  ExpectChanged(planner.Rollback(5, By("b")));
  EXPECT_TRUE(planner.config()->rows_off && planner.config()->log);
}

TEST(Planner, HistoryIsBoundedInBytes) {
  PlannerOptions options;
  options.revision_bytes_max = 100'000;
  Planner planner(std::move(options));
  std::string rows;
  for (int i = 0; i < 100; ++i) rows += CpuRow("-> reference");
  for (int i = 1; i < 20; ++i) {
    ExpectChanged(planner.SetTable(rows + CpuRow(absl::StrCat("m(0,", i, "] -> reference")), By("a")));
  }
  EXPECT_LT(planner.State().revisions.size(), 8U);
  EXPECT_GE(planner.State().revisions.size(), 1U);
}

TEST(Planner, TheRecordSaysWhoDidWhat) {
  PlannerOptions options;
  options.epoch = "epoch-1";
  Planner planner(std::move(options));
  ExpectChanged(planner.SetPlanner("table", By("uid 0")));
  ExpectChanged(planner.ImportRows(CpuRow("-> reference"), InjectMode::kReplace, By("uid 7")));
  const AuditPage page = planner.Changes(10, 0);
  ASSERT_EQ(page.entries.size(), 2U);
  EXPECT_EQ(page.entries[0].what, "ImportRows");
  EXPECT_EQ(page.entries[0].who, "uid 7");
  EXPECT_EQ(page.entries[0].new_value, CpuRow("-> reference"));
  EXPECT_EQ(page.entries[1].old_value, "hybrid (default)");
  EXPECT_EQ(page.entries[1].new_value, "table");
  EXPECT_EQ(page.entries[1].old_revision, 1U);
  EXPECT_EQ(page.entries[1].revision, 2U);
  EXPECT_EQ(page.entries[1].epoch, "epoch-1");
  EXPECT_GT(page.entries[1].time_unix_ms, 1'600'000'000'000);
}

TEST(Planner, TheRecordCountsTheRowsItDoesNotKeep) {
  Planner planner;
  std::string rows;
  for (int i = 0; i < 4096; ++i) rows += CpuRow(absl::StrCat("m(", i, ",", i + 1, "] -> reference"));
  ExpectChanged(planner.SetTable(rows, By("a")));
  const std::string value = planner.Changes(1, 0).entries[0].new_value;
  EXPECT_LE(value.size(), kAuditValueBytesMax);
  EXPECT_GT(value.size(), kAuditValueBytesMax / 2);
  EXPECT_THAT(value, ::testing::StartsWith(CpuRow("m(0,1] -> reference")));
  EXPECT_THAT(value, ::testing::EndsWith("] -> reference\n... 4096 rows\n"));
}

TEST(Planner, ExportedRowsCanBeImported) {
  Planner planner;
  const std::string table = CpuRow("m(0,16] k(512,*] waves>=2 -> splitk_48x48x512 split=4");
  ExpectChanged(planner.SetTable(table, By("a")));
  ExpectChanged(planner.InjectRows(CpuRow("-> reference"), InjectMode::kReplace, By("a")));
  const ExportedRows all = planner.ExportRows(std::nullopt);
  EXPECT_EQ(all.rows, 2U);
  EXPECT_EQ(planner.ExportRows(Tier::kOverride).text, "# override: 1 rows\n" + table);
  Planner other;
  ExpectChanged(other.ImportRows(all.text, InjectMode::kReplace, By("a")));
  EXPECT_EQ(other.ExportRows(Tier::kInjected).rows, 2U);
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
