// Timelines: when a value is reached and with what, and that whoever waits is woken once, outside the lock.
#include "server/session/timeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace tessera::server {
namespace {

using absl::StatusCode;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

// nullopt: not reached.
std::optional<StatusCode> CodeAt(const Timeline& timeline, std::uint64_t value) {
  const std::optional<absl::Status> reached = timeline.Reached(value);
  return reached.has_value() ? std::optional<StatusCode>(reached->code()) : std::nullopt;
}

bool Waits(Timeline& timeline, std::uint64_t value, Timeline::Wake wake) {
  return timeline.WakeWhenReached(value, std::move(wake)).number != 0;
}

TEST(TimelineTest, BeginsAtItsValue) {
  const Timeline zero;
  EXPECT_EQ(zero.value(), 0U);
  EXPECT_EQ(CodeAt(zero, 0), StatusCode::kOk);
  EXPECT_EQ(CodeAt(zero, 1), std::nullopt);
  const Timeline later(7);
  EXPECT_EQ(later.value(), 7U);
  EXPECT_EQ(CodeAt(later, 7), StatusCode::kOk);
  EXPECT_EQ(CodeAt(later, 8), std::nullopt);
}

TEST(TimelineTest, OnlyGrows) {
  Timeline timeline;
  timeline.Signal(10, absl::OkStatus());
  EXPECT_EQ(timeline.value(), 10U);
  timeline.Signal(4, absl::OkStatus());
  EXPECT_EQ(timeline.value(), 10U);
  EXPECT_EQ(CodeAt(timeline, 10), StatusCode::kOk);
  EXPECT_EQ(CodeAt(timeline, 11), std::nullopt);
  timeline.Signal(kMax, absl::OkStatus());
  EXPECT_EQ(CodeAt(timeline, kMax), StatusCode::kOk);
}

TEST(TimelineTest, AnErrorIsForItsPointAndLaterOnes) {
  Timeline timeline;
  timeline.Signal(5, absl::InternalError("first"));
  timeline.Signal(6, absl::OkStatus());
  EXPECT_EQ(timeline.value(), 6U);
  EXPECT_EQ(CodeAt(timeline, 4), StatusCode::kOk);
  EXPECT_EQ(CodeAt(timeline, 5), StatusCode::kInternal);
  EXPECT_EQ(CodeAt(timeline, 6), StatusCode::kInternal) << "what follows may rest on what has failed";
}

// What stands before it is still to come, and what comes after can only fail.
TEST(TimelineTest, AnErrorLeavesEarlierPointsToCome) {
  Timeline timeline;
  int two = 0, five = 0, nine = 0;
  EXPECT_TRUE(Waits(timeline, 2, [&] { ++two; }));
  EXPECT_TRUE(Waits(timeline, 5, [&] { ++five; }));
  EXPECT_TRUE(Waits(timeline, 9, [&] { ++nine; }));
  timeline.Signal(5, absl::DeadlineExceededError("dropped"));
  EXPECT_EQ(timeline.value(), 0U);
  EXPECT_EQ(CodeAt(timeline, 2), std::nullopt);
  EXPECT_EQ(two, 0);
  EXPECT_EQ(five, 1);
  EXPECT_EQ(nine, 1);
  EXPECT_EQ(CodeAt(timeline, 5), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(CodeAt(timeline, 9), StatusCode::kDeadlineExceeded);
  timeline.Signal(2, absl::OkStatus());
  EXPECT_EQ(two, 1);
  EXPECT_EQ(CodeAt(timeline, 2), StatusCode::kOk);
  EXPECT_EQ(CodeAt(timeline, 3), std::nullopt);
}

TEST(TimelineTest, ARecordedErrorIsSeenAndWakesNobodyYet) {
  Timeline timeline;
  int woken = 0;
  EXPECT_TRUE(Waits(timeline, 3, [&] { ++woken; }));
  timeline.Record(3, absl::CancelledError("dropped"));
  EXPECT_EQ(woken, 0);
  EXPECT_EQ(CodeAt(timeline, 2), std::nullopt);
  EXPECT_EQ(CodeAt(timeline, 3), StatusCode::kCancelled);
  EXPECT_FALSE(Waits(timeline, 4, [&] { ++woken; }));
  timeline.Signal(3, absl::CancelledError("dropped"));
  EXPECT_EQ(woken, 1);
}

TEST(TimelineTest, WhoeverForgetsIsNotWoken) {
  Timeline timeline;
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> weak = held;
  int other = 0;
  const Timeline::Ticket before = timeline.WakeWhenReached(4, [&] { ++other; });
  const Timeline::Ticket ticket = timeline.WakeWhenReached(4, [held] { ++*held; });
  const Timeline::Ticket after = timeline.WakeWhenReached(4, [&] { ++other; });
  EXPECT_NE(ticket.number, before.number);
  EXPECT_NE(ticket.number, after.number);
  held.reset();
  timeline.Forget(ticket);
  EXPECT_TRUE(weak.expired());
  timeline.Forget(ticket);
  timeline.Forget({});
  timeline.Signal(4, absl::OkStatus());
  EXPECT_EQ(other, 2);
  timeline.Forget(before);
}

// Streams signal one timeline side by side: which error there is must not depend on who came first.
TEST(TimelineTest, TheErrorOfTheLowestPointIsKept) {
  for (const bool lowest_first : {false, true}) {
    Timeline timeline;
    if (lowest_first) timeline.Signal(3, absl::CancelledError("three"));
    timeline.Signal(5, absl::InternalError("five"));
    timeline.Signal(5, absl::DataLossError("five again"));
    if (!lowest_first) timeline.Signal(3, absl::CancelledError("three"));
    timeline.Signal(9, absl::OkStatus());
    EXPECT_EQ(CodeAt(timeline, 2), StatusCode::kOk);
    EXPECT_EQ(CodeAt(timeline, 3), StatusCode::kCancelled);
    EXPECT_EQ(CodeAt(timeline, 5), StatusCode::kCancelled);
  }
  Timeline timeline;
  timeline.Signal(5, absl::InternalError("five"));
  timeline.Signal(5, absl::DataLossError("five again"));
  EXPECT_EQ(CodeAt(timeline, 5), StatusCode::kInternal) << "the first of one point";
}

TEST(TimelineTest, ClosingFailsWhatIsNotReached) {
  Timeline timeline(4);
  timeline.Close(absl::AbortedError("gone"));
  timeline.Close(absl::InternalError("again"));
  EXPECT_EQ(CodeAt(timeline, 4), StatusCode::kOk) << "reached before";
  EXPECT_EQ(CodeAt(timeline, 5), StatusCode::kAborted);
  EXPECT_EQ(CodeAt(timeline, kMax), StatusCode::kAborted);
  EXPECT_FALSE(Waits(timeline, 5, [] { FAIL() << "nobody waits for what is known"; }));
}

TEST(TimelineTest, WhoeverWaitsIsWokenOnceAtItsPoint) {
  Timeline timeline;
  int five = 0, six = 0;
  EXPECT_TRUE(Waits(timeline, 5, [&] { ++five; }));
  EXPECT_TRUE(Waits(timeline, 5, [&] { ++five; }));
  EXPECT_TRUE(Waits(timeline, 6, [&] { ++six; }));
  timeline.Signal(4, absl::OkStatus());
  EXPECT_EQ(five, 0);
  timeline.Signal(5, absl::OkStatus());
  EXPECT_EQ(five, 2);
  EXPECT_EQ(six, 0);
  timeline.Signal(5, absl::OkStatus());
  timeline.Signal(100, absl::InternalError("failed"));
  timeline.Close(absl::AbortedError("gone"));
  EXPECT_EQ(five, 2);
  EXPECT_EQ(six, 1);
  EXPECT_FALSE(Waits(timeline, 5, [&] { ++five; }));
  EXPECT_EQ(five, 2) << "not called for what is reached";
}

TEST(TimelineTest, AnErrorAndTheCloseWakeToo) {
  Timeline timeline;
  std::optional<StatusCode> at_error, at_close;
  EXPECT_TRUE(Waits(timeline, 2, [&] { at_error = CodeAt(timeline, 2); }));
  EXPECT_TRUE(Waits(timeline, 1, [] {}));
  timeline.Signal(2, absl::InternalError("failed"));
  EXPECT_EQ(at_error, StatusCode::kInternal);
  Timeline closed;
  EXPECT_TRUE(Waits(closed, kMax, [&] { at_close = CodeAt(closed, kMax); }));
  closed.Close(absl::AbortedError("gone"));
  EXPECT_EQ(at_close, StatusCode::kAborted);
}

// With the lock held, each of these calls would never return.
TEST(TimelineTest, WokenWithoutTheLock) {
  Timeline timeline;
  int woken = 0;
  EXPECT_TRUE(Waits(timeline, 1, [&] {
    EXPECT_EQ(timeline.value(), 1U);
    EXPECT_TRUE(Waits(timeline, 2, [&] {
      ++woken;
      timeline.Close(absl::AbortedError("gone"));
    }));
    ++woken;
    timeline.Signal(2, absl::OkStatus());
  }));
  timeline.Signal(1, absl::OkStatus());
  EXPECT_EQ(woken, 2);
  EXPECT_EQ(CodeAt(timeline, 3), StatusCode::kAborted);
}

TEST(TimelineTest, KeepsNothingOfThoseItHasWoken) {
  Timeline timeline;
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> weak = held;
  EXPECT_TRUE(Waits(timeline, 1, [held] { ++*held; }));
  EXPECT_FALSE(Waits(timeline, 0, [held] { ++*held; }));
  EXPECT_TRUE(Waits(timeline, 3, [] {}));
  held.reset();
  EXPECT_FALSE(weak.expired()) << "it waits";
  timeline.Signal(1, absl::OkStatus());
  EXPECT_TRUE(weak.expired());
}

TEST(TimelineTest, ManyThreadsWakeEveryWaiterOnce) {
  constexpr std::uint64_t kValues = 2'000;
  constexpr int kSignallers = 3;
  constexpr int kWaiters = 3;
  Timeline timeline;
  std::vector<std::atomic<int>> known(kValues + 1);  // by value: woken, or told that it need not wait
  std::atomic<int> too_early{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kSignallers; ++t) {
      threads.emplace_back([&, t] {
        for (std::uint64_t value = 1 + static_cast<std::uint64_t>(t); value <= kValues; value += kSignallers) {
          timeline.Signal(value, value % 97 == 0 ? absl::InternalError("failed") : absl::OkStatus());
        }
      });
    }
    for (int t = 0; t < kWaiters; ++t) {
      threads.emplace_back([&] {
        for (std::uint64_t value = 1; value <= kValues; ++value) {
          const auto told = [&, value] {
            if (!timeline.Reached(value).has_value()) ++too_early;
            ++known[value];
          };
          if (!Waits(timeline, value, told)) told();
        }
      });
    }
  }
  timeline.Signal(kValues, absl::OkStatus());
  EXPECT_EQ(too_early, 0);
  for (std::uint64_t value = 1; value <= kValues; ++value) EXPECT_EQ(known[value], kWaiters) << value;
  EXPECT_EQ(CodeAt(timeline, 96), StatusCode::kOk);
  EXPECT_EQ(CodeAt(timeline, 97), StatusCode::kInternal);
}

}  // namespace
}  // namespace tessera::server
