// Changes of the planner's configuration: what is refused, told, recorded and undone, on one thread.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/planner.h"
#include "tests/planner/plan_checks.h"
#include "tests/planner/planner_cases.h"

namespace tessera::planner {
namespace {

using ::testing::HasSubstr;

TEST(PlannerChanges, RefusedChangesChangeNothing) {
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

TEST(PlannerChanges, ADryRunSaysWhatWouldChange) {
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
TEST(PlannerChanges, WarnsOfRowsThatCameWithTheChange) {
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

TEST(PlannerChanges, RollsBackToWhatIsKept) {
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

TEST(PlannerChanges, HistoryIsBoundedInBytes) {
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

TEST(PlannerChanges, TheRecordSaysWhoDidWhat) {
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

TEST(PlannerChanges, TheRecordCountsTheRowsItDoesNotKeep) {
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

TEST(PlannerChanges, ExportedRowsCanBeImported) {
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

}  // namespace
}  // namespace tessera::planner
