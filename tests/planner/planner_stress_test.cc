// Threads that plan while others change the configuration: every plan is legal and one that a configuration of that
// time gives, nothing is torn, and what a change's caller plans afterwards is by that change. For ThreadSanitizer, too.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "planner/planner.h"
#include "tests/planner/plan_checks.h"

namespace tessera::planner {
namespace {

constexpr kernels::GemmClass kBf16 = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16};
constexpr char kReference[] = "gemm.cpu.bf16_bf16.bf16.fast.NT -> reference";
constexpr char kBlocked[] = "gemm.cpu.bf16_bf16.bf16.fast.NT -> blocked_96x96x256";

std::string_view RecipeOf(const Plan& plan) {
  return kernels::GemmVariants()[plan.variant].info.recipe;
}

TEST(PlannerStress, PlansAreWholeWhileEverythingChanges) {
  constexpr int kPlanners = 3;
  constexpr int kChanges = 2000;
  PlannerOptions options;
  options.cached_plans_max = 64;  // small, so that entries are overwritten all the time
  std::atomic<int> logged{0};
  options.log = [&](const Decision&) { logged.fetch_add(1); };
  Planner planner(std::move(options));
  std::atomic<bool> over{false};
  std::atomic<std::int64_t> planned{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kPlanners; ++i) {
    threads.emplace_back([&, i] {
      GemmProblem problem{.gemm_class = kBf16, .n = 64};
      std::uint64_t at = static_cast<std::uint64_t>(i) * 1000;
      while (!over.load()) {
        // Extents tell their own plan: a cache that mixed two entries up would show.
        problem.m = 1 + static_cast<std::int64_t>(at++ % 200);
        problem.k = 1000 + problem.m * 48;
        const DeviceFacts facts = CpuFacts(1 + static_cast<int>(at % 4));
        const auto plan = planner.Decide(problem, facts);
        if (!plan.ok() || !WhyIllegalPlan(*plan, problem, facts).empty() || RecipeOf(*plan).empty()) ++wrong;
        planned.fetch_add(1);
      }
    });
  }
  threads.emplace_back([&] {
    while (!over.load()) {
      const auto watch = planner.Watch({.cached = true, .buffer = 16, .ready = [] {}});
      for (int i = 0; i < 20; ++i) watch->Take(8);
      planner.State();
      planner.Decisions();
      planner.Changes(10, 0);
      if (!planner.ProbePlan({{.gemm_class = kBf16, .m = 9, .n = 9, .k = 9}, CpuFacts(2)}).plan.ok()) ++wrong;
    }
  });

  const GemmProblem mine = {.gemm_class = kBf16, .m = 300, .n = 300, .k = 300};
  for (int i = 0; i < kChanges; ++i) {
    const bool odd = i % 2 != 0;
    const ChangeOptions by = {.who = "test"};
    ASSERT_TRUE(planner.SetTable(odd ? kReference : kBlocked, by).ok());
    const auto plan = planner.Decide(mine, CpuFacts(2));
    ASSERT_TRUE(plan.ok());
    ASSERT_EQ(RecipeOf(*plan), odd ? "reference" : "blocked_96x96x256") << "planned after the change";
    if (i % 10 == 0) {
      ASSERT_TRUE(planner.SetPlanner(i % 20 == 0 ? "table" : "", by).ok());
    }
    if (i % 50 == 0) {
      ASSERT_TRUE(planner.SetLog(i % 100 == 0, by).ok());
    }
  }
  // On a machine of few cores the others may have had no turn yet.
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (planned.load() < 1000 && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
  over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_GE(planned.load(), 1000);
  EXPECT_GE(planner.revision(), static_cast<std::uint64_t>(kChanges));
  const PlannerState state = planner.State();
  EXPECT_EQ(state.cache_hits + state.cache_misses, static_cast<std::uint64_t>(planned.load()) + kChanges);
}

TEST(PlannerStress, ChangesOfManyAreSerialised) {
  constexpr int kThreads = 4;
  constexpr int kEach = 100;
  Planner planner;
  std::vector<std::thread> threads;
  std::atomic<int> lost_races{0};
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int done = 0; done < kEach;) {
        const ChangeOptions by = {.who = "test", .expected_revision = planner.revision()};
        const auto result = planner.InjectRows(kReference, InjectMode::kAppend, by);
        if (result.ok()) {
          ++done;
        } else {
          ASSERT_EQ(result.status().code(), absl::StatusCode::kAborted);
          ++lost_races;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(planner.revision(), 1U + kThreads * kEach);
  EXPECT_EQ(planner.config()->tier(Tier::kInjected).rows().size(), static_cast<std::size_t>(kThreads * kEach));
  EXPECT_EQ(planner.State().refused_changes, static_cast<std::uint64_t>(lost_races.load()));
  const AuditPage page = planner.Changes(1000, 0);
  for (std::size_t i = 0; i + 1 < page.entries.size(); ++i) {
    EXPECT_EQ(page.entries[i].old_revision, page.entries[i + 1].revision);
  }
}

}  // namespace
}  // namespace tessera::planner
