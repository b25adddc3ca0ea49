// The planner changed while an executor computes, without gRPC: for ThreadSanitizer as much as for the results. Every
// product is right, none fails, and several kernels have computed them.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "planner/planner.h"
#include "server/exec/cpu_device.h"
#include "server/exec/executor.h"
#include "tests/oracle/gemm_oracle.h"
#include "tests/oracle/test_data.h"

namespace tessera::server {
namespace {

using namespace std::chrono_literals;

constexpr int kComputing = 16;
constexpr int kChanges = 10'000;
constexpr char kClass[] = "gemm.cpu.bf16_bf16.f32.fast.NT";
constexpr std::array<const char*, 3> kRecipes = {"reference", "splitk_48x48x512", "blocked_96x96x256"};
// K is more than one block of the recipe that splits it.
const oracle::GemmCase kCase = {.m = 9, .n = 17, .k = 600};

// One product after the other, each awaited.
class Computing {
 public:
  explicit Computing(std::uint64_t seed)
      : problem_(kCase, seed), truth_(oracle::ComputeGemm(problem_.params(), problem_.types())) {}

  void ComputeOne(Executor& executor) {
    Submission submission;
    submission.ops.resize(1);
    const kernels::GemmParams& params = problem_.params();
    submission.ops[0].params = params;
    submission.ops[0].problem = {
        .gemm_class = {.a = kCase.a, .b = kCase.b, .out = kCase.d}, .m = params.m, .n = params.n, .k = params.k};
    submission.still_wanted = [] { return absl::OkStatus(); };
    submission.done = [this](const absl::Status& status, std::span<const OperationReport> reports) {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_ = status;
      if (status.ok()) variants_.emplace(reports.front().variant);
      done_ = true;
      changed_.notify_all();
    };
    executor.Submit(std::move(submission));
    std::unique_lock<std::mutex> lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, 60s, [this] { return done_; }));
    done_ = false;
    ASSERT_TRUE(status_.ok()) << status_;
    const oracle::Verdict verdict = oracle::CheckGemm(problem_.params(), problem_.types(), truth_);
    ASSERT_TRUE(verdict.ok) << verdict.wrong << " wrong, first " << verdict.first;
  }

  const std::set<std::string>& variants() const { return variants_; }

 private:
  oracle::GemmProblem problem_;
  const oracle::GemmTruth truth_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
  std::set<std::string> variants_;
};

TEST(PlannerLiveTest, ResultsStayRightWhileThePlannerChanges) {
  Metrics metrics{MetricsOptions{.version = "test", .variants = {}}};
  planner::Planner planner;
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(MakeCpuDevice({.threads = 2, .workspace_bytes_max = 1 << 24}));
  Executor executor(std::move(devices), std::nullopt, ExecutorOptions{.queue_max = 64}, metrics, &planner);

  std::atomic<bool> stop{false};
  std::vector<std::unique_ptr<Computing>> computing;
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < kComputing; ++i) {
    computing.push_back(std::make_unique<Computing>(i + 1));
    threads.emplace_back([&executor, &stop, each = computing.back().get()] {
      while (!stop.load() && !::testing::Test::HasFailure()) each->ComputeOne(executor);
    });
  }
  // One who watches and one who probes meanwhile, and a metrics scrape's worth of looking.
  threads.emplace_back([&] {
    const auto watch = planner.Watch({.cached = true, .buffer = 8});
    while (!stop.load()) {
      watch->Wait(64, 5ms);
      planner.State();
    }
  });
  threads.emplace_back([&] {
    planner::Question question{
        .gemm = {.gemm_class = {.a = kCase.a, .b = kCase.b, .out = kCase.d}, .m = kCase.m, .n = kCase.n, .k = kCase.k},
        .facts = executor.Facts().front()};
    while (!stop.load()) EXPECT_TRUE(planner.ProbePlan(question).plan.ok());
  });

  const std::uint64_t first = planner.revision();
  for (int i = 0; i < kChanges; ++i) {
    const std::string row =
        std::string(kClass) + " -> " + kRecipes[static_cast<std::size_t>(i) % kRecipes.size()] + "\n";
    const auto changed = planner.SetTable(row, {.who = "test"});
    ASSERT_TRUE(changed.ok()) << changed.status();
    EXPECT_TRUE(changed->changed);
    if (i % 50 == 49) {
      ASSERT_TRUE(planner.Rollback(changed->old_revision, {.who = "test"}).ok());
    }
    std::this_thread::sleep_for(200us);
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(executor.AwaitIdle(60s));
  EXPECT_GE(planner.revision() - first, std::uint64_t{kChanges});
  std::set<std::string> variants;
  for (const auto& each : computing) variants.insert(each->variants().begin(), each->variants().end());
  EXPECT_GE(variants.size(), 3U);
}

}  // namespace
}  // namespace tessera::server
