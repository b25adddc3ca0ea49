// The reaper: order, what counts as done, stuck work and what becomes of the rest. Time is injected: patience is an
// hour, and ticks are told that it is over.
#include "server/session/reaper.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using namespace std::chrono_literals;
using Clock = Reaper::Clock;

constexpr auto kPatienceOfReaper = 1h;
constexpr auto kStuckAll = Reaper::kStuckMax + 1;

std::size_t Threads() {
  const std::filesystem::directory_iterator entries("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

class ReaperTest : public ::testing::Test {
 protected:
  // Says that whatever runs now has taken too long.
  void TickLate() { reaper_->Tick(Clock::now() + kPatienceOfReaper + 1s); }

  // Work that holds its thread until the turnstile opens, and is stuck by now.
  void GetStuck(Turnstile& turnstile, int arrivals) {
    reaper_->Post([&turnstile] { turnstile.Pass(); });
    ASSERT_TRUE(turnstile.AwaitArrivals(arrivals));
    TickLate();
  }

  double Metric(const std::string& series) const { return MetricValue(metrics_, series); }

  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  const std::unique_ptr<Reaper> reaper_ = std::make_unique<Reaper>(kPatienceOfReaper, metrics_);
};

TEST_F(ReaperTest, RunsWhatIsPostedInOrder) {
  std::vector<int> ran;
  for (int i = 0; i < 1'000; ++i) {
    reaper_->Post([&ran, i] { ran.push_back(i); });
  }
  ASSERT_TRUE(AwaitIdle(*reaper_));
  std::vector<int> expected(1'000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(ran, expected);
  EXPECT_EQ(Metric("tessera_cleanups_total"), 1'000);
  EXPECT_EQ(Metric("tessera_quarantines_total"), 0);
}

TEST_F(ReaperTest, KeepsTheOrderOfEachOfManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2'000;
  std::array<std::vector<int>, kThreads> ran;  // touched by the reaper's thread alone
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t, &ran] {
      for (int i = 0; i < kEach; ++i) reaper_->Post([&ran, t, i] { ran[t].push_back(i); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(AwaitIdle(*reaper_));
  std::vector<int> expected(kEach);
  std::iota(expected.begin(), expected.end(), 0);
  for (const std::vector<int>& of_thread : ran) EXPECT_EQ(of_thread, expected);
  EXPECT_EQ(Metric("tessera_cleanups_total"), kThreads * kEach);
}

TEST_F(ReaperTest, WorkMayPostAndIsCountedWithoutAGap) {
  std::atomic<int> ran{0};
  reaper_->Post([this, &ran] {
    for (int i = 0; i < 3; ++i) {
      reaper_->Post([this, &ran] {
        ++ran;
        reaper_->Post([&ran] { ++ran; });
      });
    }
  });
  ASSERT_TRUE(AwaitIdle(*reaper_));
  EXPECT_EQ(ran, 6) << "idle before all that came of the work was done";
}

TEST_F(ReaperTest, WhatTheWorkHoldsGoesOnTheReapersThreadAndIsPartOfIt) {
  Turnstile turnstile;
  std::atomic<std::thread::id> gone_on{std::thread::id()};
  auto held = std::shared_ptr<const void>(nullptr, [&](const void*) {
    gone_on = std::this_thread::get_id();
    turnstile.Pass();
  });
  reaper_->Post([held = std::move(held)] {});
  ASSERT_TRUE(turnstile.AwaitArrivals(1));
  EXPECT_NE(gone_on.load(), std::this_thread::get_id());
  EXPECT_EQ(reaper_->counts().waiting, 1U);
  EXPECT_EQ(Metric("tessera_cleanups_total"), 0);
  TickLate();
  EXPECT_EQ(reaper_->counts().stuck, 1U) << "a destructor may be stuck as well";
  turnstile.Open();
  EXPECT_TRUE(Eventually([&] { return reaper_->counts().stuck == 0; }));
  EXPECT_EQ(Metric("tessera_cleanups_total"), 1);
}

TEST_F(ReaperTest, StuckWorkIsQuarantinedOnceAndTheRestGoesOn) {
  Turnstile turnstile;
  const auto before = Clock::now();
  reaper_->Post([&] { turnstile.Pass(); });
  std::atomic<int> ran{0};
  reaper_->Post([&] { ++ran; });
  ASSERT_TRUE(turnstile.AwaitArrivals(1));
  reaper_->Tick(before + kPatienceOfReaper);
  EXPECT_EQ(reaper_->counts().stuck, 0U) << "before its patience is over";
  EXPECT_EQ(reaper_->counts().waiting, 2U);
  EXPECT_EQ(ran, 0);

  TickLate();
  EXPECT_EQ(reaper_->counts().stuck, 1U);
  ASSERT_TRUE(AwaitIdle(*reaper_));
  EXPECT_EQ(ran, 1);
  TickLate();
  TickLate();
  EXPECT_EQ(reaper_->counts().stuck, 1U);
  EXPECT_EQ(Metric("tessera_quarantines_total"), 1) << "counted each time that it is seen";
  EXPECT_EQ(Metric("tessera_cleanups_total"), 1);
  EXPECT_FALSE(reaper_->blocked());

  turnstile.Open();
  EXPECT_TRUE(Eventually([&] { return reaper_->counts().stuck == 0; }));
  EXPECT_EQ(Metric("tessera_cleanups_total"), 2);
  reaper_->Post([&] { ++ran; });
  ASSERT_TRUE(AwaitIdle(*reaper_));
  EXPECT_EQ(ran, 2);
}

TEST_F(ReaperTest, OrderHoldsAfterARecovery) {
  Turnstile turnstile;
  GetStuck(turnstile, 1);
  turnstile.Open();
  ASSERT_TRUE(Eventually([&] { return reaper_->counts().stuck == 0; }));
  std::vector<int> ran;  // two threads that worked side by side would race on it
  for (int i = 0; i < 10'000; ++i) {
    reaper_->Post([&ran, i] { ran.push_back(i); });
  }
  ASSERT_TRUE(AwaitIdle(*reaper_));
  EXPECT_EQ(ran.size(), 10'000U);
  EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end()));
}

TEST_F(ReaperTest, ThreadsOfRecoveredWorkAreGone) {
  const std::size_t threads = Threads();
  for (int round = 0; round < 20; ++round) {
    Turnstile turnstile;
    GetStuck(turnstile, 1);
    EXPECT_EQ(Threads(), threads + 1);
    turnstile.Open();
    ASSERT_TRUE(Eventually([&] {
      reaper_->Tick();
      return Threads() == threads;
    }));
  }
  EXPECT_EQ(Metric("tessera_quarantines_total"), 20);
}

TEST_F(ReaperTest, TooMuchStuckWorkBlocksItUntilAllRecovers) {
  Turnstile turnstile;
  for (std::size_t i = 0; i < kStuckAll; ++i) {
    EXPECT_FALSE(reaper_->blocked()) << i;
    GetStuck(turnstile, static_cast<int>(i) + 1);
    EXPECT_EQ(reaper_->counts().stuck, i + 1);
  }
  EXPECT_TRUE(reaper_->blocked());
  const std::size_t threads = Threads();
  std::atomic<int> ran{0};
  reaper_->Post([&] { ++ran; });
  TickLate();
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(Threads(), threads) << "threads grow without a limit";
  EXPECT_EQ(reaper_->counts().waiting, 1U);
  EXPECT_EQ(Metric("tessera_quarantines_total"), kStuckAll);
  turnstile.Open();
  EXPECT_TRUE(Eventually([&] { return reaper_->counts().stuck == 0 && ran == 1; }));
  EXPECT_FALSE(reaper_->blocked());
}

// Whoever recovers first takes up the work: what is not blocked cleans up.
TEST_F(ReaperTest, OneRecoveryOfMakesItGoOn) {
  std::array<Turnstile, kStuckAll> turnstiles;
  for (Turnstile& turnstile : turnstiles) GetStuck(turnstile, 1);
  ASSERT_TRUE(reaper_->blocked());
  std::vector<int> ran;
  for (int i = 0; i < 100; ++i) {
    reaper_->Post([&ran, i] { ran.push_back(i); });
  }
  turnstiles.front().Open();
  EXPECT_TRUE(Eventually([&] { return !reaper_->blocked(); }));
  EXPECT_TRUE(AwaitIdle(*reaper_)) << "not blocked, and yet nobody works";
  for (Turnstile& turnstile : turnstiles) turnstile.Open();
  ASSERT_TRUE(Eventually([&] { return reaper_->counts().stuck == 0; }));
  for (int i = 100; i < 10'000; ++i) {
    reaper_->Post([&ran, i] { ran.push_back(i); });
  }
  ASSERT_TRUE(AwaitIdle(*reaper_));
  EXPECT_EQ(ran.size(), 10'000U);
  EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end())) << "more than one thread works";
}

TEST_F(ReaperTest, DestructionDoesAllThatWasPosted) {
  Turnstile turnstile;
  std::atomic<int> ran{0};
  auto owner = std::make_unique<Reaper>(kPatienceOfReaper, metrics_);
  Reaper& reaper = *owner;
  reaper.Post([&] { turnstile.Pass(); });
  for (int i = 0; i < 100; ++i) {
    reaper.Post([&] {
      ++ran;
      reaper.Post([&] { ++ran; });
    });
  }
  std::thread opens([&] {
    std::this_thread::sleep_for(5ms);
    turnstile.Open();
  });
  owner.reset();
  EXPECT_EQ(ran, 200);
  opens.join();
}

// The end of a session is such work: what it drops posts its memory.
TEST_F(ReaperTest, DestructionDoesWhatStuckWorkPosts) {
  Turnstile turnstile;
  std::atomic<bool> ran{false};
  auto owner = std::make_unique<Reaper>(kPatienceOfReaper, metrics_);
  Reaper& reaper = *owner;
  reaper.Post([&] {
    turnstile.Pass();
    reaper.Post([&] { ran = true; });
  });
  ASSERT_TRUE(turnstile.AwaitArrivals(1));
  reaper.Tick(Clock::now() + kPatienceOfReaper + 1s);
  const std::size_t threads = Threads();
  std::atomic<bool> destroying{false};
  std::thread destroys([&] {
    destroying = true;
    owner.reset();
  });
  // The thread that destroys has come, and the one that has nothing to do goes.
  EXPECT_TRUE(Eventually([&] { return destroying && Threads() == threads; }));
  turnstile.Open();
  destroys.join();
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace tessera::server
