// Order: streams, timelines, what the gate holds back and lets go, and what Synchronize waits for. Launches are held
// back by a gate in `still_wanted`, or by a device on which the test itself launches and completes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "tests/server/exec/order_world.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::optional<StatusCode> CodeAt(const Timeline& timeline, std::uint64_t value) {
  const std::optional<absl::Status> reached = timeline.Reached(value);
  return reached.has_value() ? std::optional<StatusCode>(reached->code()) : std::nullopt;
}

// Who was answered, in order.
class Log {
 public:
  void Of(Submission& submission, int name) {
    submission.done = [this, name, done = submission.done](const absl::Status& status,
                                                           std::span<const OperationReport> reports) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        names_.push_back(name);
      }
      done(status, reports);
    };
  }
  std::vector<int> names() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return names_;
  }

 private:
  std::mutex mutex_;
  std::vector<int> names_;
};

class OrderTest : public ::testing::Test {
 protected:
  // Holds a stream until `gate` opens.
  void Block(Work& work, Gate& gate, std::shared_ptr<SessionLane> lane = nullptr) {
    Submission held = work.Make(session_, std::move(lane));
    held.still_wanted = [&gate] { return gate.Pass(); };
    world_.Submit(std::move(held));
    ASSERT_TRUE(gate.AwaitArrival());
  }
  Submission Waiting(Work& work, std::shared_ptr<Timeline> timeline, std::uint64_t value,
                     std::shared_ptr<SessionLane> lane = nullptr) {
    Submission made = work.Make(session_, std::move(lane));
    made.wait.push_back({std::move(timeline), value});
    return made;
  }

  OrderWorld world_;
  const std::shared_ptr<Session> session_ = world_.Open();
  const std::shared_ptr<SessionLane> other_ = world_.OpenStream(*session_);
  const std::shared_ptr<Timeline> timeline_ = world_.MakeTimeline(*session_);
};

TEST_F(OrderTest, StreamsRunSideBySideAndEachInOrder) {
  Gate gate;
  Log log, others;
  Work held(kLargeSquare);
  Block(held, gate);
  std::vector<std::unique_ptr<Work>> work, in_other;
  for (int i = 0; i < 20; ++i) {
    const int extent = i % 3 == 0 ? kLargeSquare : kSmallSquare;
    Submission mine = work.emplace_back(std::make_unique<Work>(extent))->Make(session_, session_->lane());
    log.Of(mine, i);
    world_.Submit(std::move(mine));
    Submission theirs = in_other.emplace_back(std::make_unique<Work>(extent))->Make(session_, other_);
    others.Of(theirs, i);
    world_.Submit(std::move(theirs));
  }
  for (const auto& each : in_other) EXPECT_TRUE(each->Await().ok());
  EXPECT_TRUE(log.names().empty()) << "the session's own stream is held";
  EXPECT_EQ(session_->lane()->in_flight(), 21);
  EXPECT_EQ(other_->in_flight(), 0);
  gate.Open(absl::OkStatus());
  std::vector<int> expected;
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(work[i]->Await().ok());
    EXPECT_TRUE(work[i]->right() && in_other[i]->right());
    expected.push_back(i);
  }
  EXPECT_EQ(log.names(), expected);
  EXPECT_EQ(others.names(), expected);
}

TEST_F(OrderTest, AWaitHoldsBackItsStreamAndNoOther) {
  Log log;
  Work head, behind(kLargeSquare), last, beside, of_other_session;
  Submission waits = Waiting(head, timeline_, 2);
  log.Of(waits, 0);
  world_.Submit(std::move(waits));
  Submission follows = behind.Make(session_), ends = last.Make(session_);
  log.Of(follows, 1);
  log.Of(ends, 2);
  world_.Submit(std::move(follows));
  world_.Submit(std::move(ends));
  world_.Submit(beside.Make(session_, other_));
  world_.Submit(of_other_session.Make(world_.Open()));
  EXPECT_TRUE(beside.Await().ok());
  EXPECT_TRUE(of_other_session.Await().ok());
  timeline_->Signal(1, absl::OkStatus());
  world_.executor->Tick();
  EXPECT_TRUE(log.names().empty());
  EXPECT_EQ(session_->lane()->gated(), 3);
  EXPECT_EQ(session_->lane()->in_flight(), 3);
  EXPECT_EQ(other_->gated(), 0);
  EXPECT_EQ(world_.Metric("tessera_gated"), 3);
  timeline_->Signal(2, absl::OkStatus());
  for (Work* work : {&head, &behind, &last}) {
    EXPECT_TRUE(work->Await().ok());
    EXPECT_TRUE(work->right());
    EXPECT_EQ(work->calls(), 1);
  }
  EXPECT_THAT(log.names(), ElementsAre(0, 1, 2));
  EXPECT_EQ(session_->lane()->gated(), 0);
  EXPECT_EQ(world_.Metric("tessera_gate_seconds_count{op=\"gemm\"}"), 3);
  EXPECT_GT(head.reports().at(0).gate_ns, 0U);
  EXPECT_GE(head.reports().at(0).queue_ns, head.reports().at(0).gate_ns);
  EXPECT_EQ(beside.reports().at(0).gate_ns, 0U);
}

TEST_F(OrderTest, WhatIsReachedAlreadyHoldsNothingBack) {
  timeline_->Signal(5, absl::OkStatus());
  Work work;
  world_.Submit(Waiting(work, timeline_, 5));
  EXPECT_EQ(work.calls(), 1) << "small, and done by its caller";
  EXPECT_TRUE(work.Await().ok());
  EXPECT_TRUE(work.right());
}

TEST_F(OrderTest, AllWaitsMustBeReached) {
  const std::vector<std::shared_ptr<Timeline>> timelines = {timeline_, world_.MakeTimeline(*session_),
                                                            world_.MakeTimeline(*session_)};
  std::vector<std::size_t> order = {0, 1, 2};
  std::uint64_t value = 0;
  do {
    ++value;
    Work work;
    Submission all = work.Make(session_);
    for (const auto& timeline : timelines) all.wait.push_back({timeline, value});
    world_.Submit(std::move(all));
    for (const std::size_t i : order) {
      EXPECT_EQ(work.calls(), 0);
      timelines[i]->Signal(value, absl::OkStatus());
    }
    EXPECT_TRUE(work.Await().ok());
    EXPECT_EQ(work.calls(), 1);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(OrderTest, SignalsComeAfterTheOutputAndBeforeTheAnswer) {
  for (const int extent : {kSmallSquare, kLargeSquare}) {
    const auto timeline = world_.MakeTimeline(*session_);
    Work work(extent);
    Submission signals = work.Make(session_);
    signals.signal = {{timeline, 3}, {timeline_, static_cast<std::uint64_t>(extent)}};
    std::optional<StatusCode> at_answer;
    bool right_at_signal = false;
    ASSERT_NE(timeline->WakeWhenReached(3, [&] { right_at_signal = work.right(); }).number, 0U);
    signals.done = [&, done = signals.done](const absl::Status& status, std::span<const OperationReport> reports) {
      at_answer = CodeAt(*timeline, 3);
      done(status, reports);
    };
    world_.Submit(std::move(signals));
    EXPECT_TRUE(work.Await().ok());
    EXPECT_TRUE(right_at_signal);
    EXPECT_EQ(at_answer, StatusCode::kOk);
    EXPECT_EQ(timeline->value(), 3U);
    EXPECT_EQ(timeline_->value(), static_cast<std::uint64_t>(extent));
  }
}

TEST_F(OrderTest, SignalsComeWithTheErrorOfWhatWasDropped) {
  for (const StatusCode code : {StatusCode::kCancelled, StatusCode::kDeadlineExceeded}) {
    for (const int extent : {kSmallSquare, kLargeSquare}) {
      const auto timeline = world_.MakeTimeline(*session_);
      Work work(extent);
      Submission unwanted = work.Make(session_);
      unwanted.signal = {{timeline, 1}};
      unwanted.still_wanted = [code] { return absl::Status(code, "not wanted"); };
      world_.Submit(std::move(unwanted));
      EXPECT_EQ(work.Await().code(), code);
      EXPECT_EQ(CodeAt(*timeline, 1), code);
      EXPECT_TRUE(work.untouched());
    }
  }
}

TEST_F(OrderTest, TheEndOfASessionSignalsWhatItDrops) {
  const auto others = world_.Open();
  const auto seen = world_.MakeTimeline(*others);
  Gate gate;
  Work running(kLargeSquare), queued(kLargeSquare), gated, behind, dependant;
  Block(running, gate, other_);
  Submission in_queue = queued.Make(session_, other_);
  in_queue.signal = {{seen, 1}};
  world_.Submit(std::move(in_queue));
  world_.Submit(Waiting(gated, timeline_, 9));
  Submission follows = behind.Make(session_);
  const auto follows_point = world_.MakeTimeline(*others);
  follows.signal = {{follows_point, 1}};
  world_.Submit(std::move(follows));
  Submission of_others = dependant.Make(others);
  of_others.wait = {{timeline_, 9}};
  world_.Submit(std::move(of_others));
  ASSERT_TRUE(world_.table.EndSession(session_->id(), SessionEnd::kClosed).ok());
  for (Work* work : {&queued, &gated, &behind}) {
    EXPECT_EQ(work->Await().code(), StatusCode::kCancelled);
    EXPECT_TRUE(work->untouched());
  }
  EXPECT_EQ(CodeAt(*seen, 1), StatusCode::kCancelled);
  EXPECT_EQ(CodeAt(*follows_point, 1), StatusCode::kCancelled);
  EXPECT_EQ(dependant.Await().code(), StatusCode::kAborted) << "the timeline went with its session";
  EXPECT_EQ(running.calls(), 0);
  gate.Open(absl::OkStatus());
  EXPECT_TRUE(running.Await().ok()) << "what runs finishes";
  EXPECT_TRUE(running.right());
}

TEST_F(OrderTest, ARefusalSignalsNothing) {
  Work work;
  Submission refused = work.Make(session_);
  refused.backend = kernels::Backend::kCuda;
  refused.signal = {{timeline_, 1}};
  world_.Submit(std::move(refused));
  EXPECT_EQ(work.Await().code(), StatusCode::kUnimplemented);
  world_.executor->StopAccepting();
  Work late;
  Submission draining = late.Make(session_);
  draining.signal = {{timeline_, 1}};
  world_.Submit(std::move(draining));
  EXPECT_EQ(late.Await().code(), StatusCode::kUnavailable);
  EXPECT_EQ(timeline_->value(), 0U);
  EXPECT_EQ(CodeAt(*timeline_, 1), std::nullopt);
}

TEST_F(OrderTest, WhatWaitedForAFailureIsAbortedAndSoIsWhatWaitsForThat) {
  const auto second = world_.MakeTimeline(*session_), third = world_.MakeTimeline(*session_);
  Work first, dependant(kLargeSquare), last, behind, unrelated;
  Submission middle = Waiting(dependant, second, 1, other_);
  middle.signal = {{third, 1}};
  world_.Submit(std::move(middle));
  world_.Submit(unrelated.Make(session_, other_));
  const auto stream = world_.OpenStream(*session_);
  world_.Submit(Waiting(last, third, 1, stream));
  world_.Submit(behind.Make(session_, stream));
  EXPECT_EQ(unrelated.calls() + behind.calls() + dependant.calls() + last.calls(), 0);
  Submission fails = first.Make(session_);
  fails.signal = {{second, 1}};
  fails.still_wanted = [] { return absl::CancelledError("nobody wants it"); };
  world_.Submit(std::move(fails));
  EXPECT_EQ(first.Await().code(), StatusCode::kCancelled);
  for (Work* work : {&dependant, &last}) {
    EXPECT_EQ(work->Await().code(), StatusCode::kAborted);
    EXPECT_THAT(MessageOf(work->Await()), HasSubstr("nobody wants it"));
    EXPECT_TRUE(work->untouched());
    EXPECT_EQ(work->calls(), 1);
  }
  EXPECT_EQ(CodeAt(*third, 1), StatusCode::kAborted);
  for (Work* work : {&unrelated, &behind}) {
    EXPECT_TRUE(work->Await().ok()) << "the stream goes on";
    EXPECT_TRUE(work->right());
  }
  EXPECT_EQ(world_.Outcomes("aborted"), 2);
  EXPECT_EQ(world_.Outcomes("cancelled"), 1);
  EXPECT_EQ(world_.Outcomes("failed"), 0);
}

TEST_F(OrderTest, AReleasedTimelineAbortsWhoeverWaits) {
  const auto id = world_.table.CreateTimeline(*session_, {.value = 4});
  ASSERT_TRUE(id.ok());
  const auto timeline = world_.table.FindPoint(*session_, *id)->timeline;
  Work waiting, later, reached;
  world_.Submit(Waiting(waiting, timeline, 5));
  EXPECT_EQ(waiting.calls(), 0);
  ASSERT_TRUE(world_.table.ReleaseSync(*session_, *id).ok());
  EXPECT_EQ(waiting.Await().code(), StatusCode::kAborted);
  world_.Submit(Waiting(later, timeline, 5));
  EXPECT_EQ(later.Await().code(), StatusCode::kAborted);
  world_.Submit(Waiting(reached, timeline, 4));
  EXPECT_TRUE(reached.Await().ok());
}

TEST_F(OrderTest, TicksDropWhatIsHeldBackTooLongOrNotWanted) {
  for (const bool cancelled : {false, true}) {
    const auto never = world_.MakeTimeline(*session_), point = world_.MakeTimeline(*session_);
    std::atomic<bool> wanted{true};
    Work dropped(kLargeSquare), behind;
    Submission waits = Waiting(dropped, never, 1);
    waits.signal = {{point, 1}};
    if (cancelled) {
      waits.still_wanted = [&wanted] { return wanted ? absl::OkStatus() : absl::CancelledError("by its client"); };
    } else {
      waits.launch_by = Clock::now() + 200ms;
    }
    world_.Submit(std::move(waits));
    world_.Submit(behind.Make(session_));
    world_.executor->Tick();
    EXPECT_EQ(dropped.calls() + behind.calls(), 0);
    if (!cancelled) std::this_thread::sleep_for(220ms);
    wanted = false;
    EXPECT_EQ(dropped.calls(), 0) << "nobody looked";
    world_.executor->Tick();
    EXPECT_EQ(dropped.calls(), 1);
    EXPECT_EQ(dropped.Await().code(), cancelled ? StatusCode::kCancelled : StatusCode::kDeadlineExceeded);
    EXPECT_THAT(MessageOf(dropped.Await()), StartsWith(cancelled ? "by its client" : "options.timeout_ms"));
    EXPECT_TRUE(dropped.untouched());
    EXPECT_EQ(CodeAt(*point, 1), dropped.Await().code());
    EXPECT_TRUE(behind.Await().ok()) << "what was behind it goes on";
    EXPECT_EQ(session_->lane()->gated(), 0);
    never->Signal(1, absl::OkStatus());
    EXPECT_EQ(dropped.calls(), 1);
  }
}

// In its stream it stands behind what has not run yet: whoever waits for that must not be let go by its signal.
TEST_F(OrderTest, WhatIsDroppedOutOfTurnReachesNothingThatIsBeforeIt) {
  const auto never = world_.MakeTimeline(*session_), points = world_.MakeTimeline(*session_);
  std::atomic<bool> wanted{true};
  Work first(kLargeSquare), dropped, last, of_first, of_dropped, of_last;
  const auto submit = [&](Work& work, std::uint64_t value) {
    Submission made = work.Make(session_);
    if (value == 1) made.wait = {{never, 1}};
    if (value == 2) {
      made.still_wanted = [&wanted] { return wanted ? absl::OkStatus() : absl::CancelledError("dropped"); };
    }
    made.signal = {{points, value}};
    world_.Submit(std::move(made));
  };
  submit(first, 1);
  submit(dropped, 2);
  submit(last, 3);
  const std::vector<std::shared_ptr<SessionLane>> lanes = {other_, world_.OpenStream(*session_),
                                                           world_.OpenStream(*session_)};
  world_.Submit(Waiting(of_first, points, 1, lanes[0]));
  world_.Submit(Waiting(of_dropped, points, 2, lanes[1]));
  world_.Submit(Waiting(of_last, points, 3, lanes[2]));
  wanted = false;
  world_.executor->Tick();
  EXPECT_EQ(dropped.Await().code(), StatusCode::kCancelled);
  EXPECT_EQ(of_dropped.Await().code(), StatusCode::kAborted);
  EXPECT_EQ(of_last.Await().code(), StatusCode::kAborted) << "it may rest on what was dropped";
  EXPECT_EQ(of_first.calls(), 0) << "what it waits for has not run";
  EXPECT_EQ(CodeAt(*points, 1), std::nullopt);
  never->Signal(1, absl::OkStatus());
  EXPECT_TRUE(of_first.Await().ok());
  EXPECT_TRUE(first.right());
  EXPECT_TRUE(last.Await().ok());
}

TEST_F(OrderTest, OneFailedWaitIsEnoughToAbort) {
  const auto never = world_.MakeTimeline(*session_);
  for (const bool failed_first : {false, true}) {
    const auto failed = world_.MakeTimeline(*session_);
    Work work;
    Submission both = work.Make(session_);
    both.wait = {{never, 1}, {failed, 1}};
    if (failed_first) std::swap(both.wait[0], both.wait[1]);
    world_.Submit(std::move(both));
    EXPECT_EQ(work.calls(), 0);
    failed->Signal(1, absl::InternalError("failed"));
    EXPECT_EQ(work.Await().code(), StatusCode::kAborted) << "the other will never be reached";
    EXPECT_EQ(session_->lane()->gated(), 0);
  }
}

// Its turn may be long in coming.
TEST_F(OrderTest, TicksDropWhatHasTimedOutInTheDevicesQueue) {
  Gate gate;
  Work held(kLargeSquare), late(kLargeSquare), behind(kLargeSquare);
  Block(held, gate);
  Submission expires = late.Make(session_);
  expires.launch_by = Clock::now() + 100ms;
  world_.Submit(std::move(expires));
  world_.Submit(behind.Make(session_));
  world_.executor->Tick();
  EXPECT_EQ(late.calls(), 0);
  std::this_thread::sleep_for(120ms);
  world_.executor->Tick();
  EXPECT_EQ(late.calls(), 1);
  EXPECT_EQ(late.Await().code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(behind.calls() + held.calls(), 0);
  gate.Open(absl::OkStatus());
  EXPECT_TRUE(behind.Await().ok());
  EXPECT_TRUE(late.untouched());
}

TEST_F(OrderTest, TheTimeToLaunchIsKeptWithoutAGateToo) {
  Work late, in_time;
  Submission expired = late.Make(session_), good = in_time.Make(session_);
  expired.launch_by = Clock::now() - 1ms;
  good.launch_by = Clock::now() + 1h;
  world_.Submit(std::move(expired));
  world_.Submit(std::move(good));
  EXPECT_EQ(late.Await().code(), StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(late.untouched());
  EXPECT_TRUE(in_time.Await().ok());
  EXPECT_EQ(world_.Outcomes("expired"), 1);
}

// Its dependants may be many, but they are not one inside the other.
TEST_F(OrderTest, ALongChainAcrossStreamsNeitherOverflowsTheStackNorTakesLong) {
  constexpr int kLinks = 20'000;
  for (const bool fails : {false, true}) {
    const auto chain = world_.MakeTimeline(*session_);
    Matrix a(kSmallSquare), b(kSmallSquare), d(kSmallSquare);
    std::atomic<int> answered{0}, out_of_order{0}, unexpected{0};
    for (int i = 0; i < kLinks; ++i) {
      Submission link{.session = session_, .lane = i % 2 == 0 ? nullptr : other_};
      link.ops.push_back(BindProduct(a, b, d));
      link.wait = {{chain, static_cast<std::uint64_t>(i) + 1}};
      link.signal = {{chain, static_cast<std::uint64_t>(i) + 2}};
      link.still_wanted = [] { return absl::OkStatus(); };
      link.done = [&, i](const absl::Status& status, std::span<const OperationReport>) {
        if (answered != i && !fails) ++out_of_order;  // a failure reaches both streams at once
        if (status.code() != (fails ? StatusCode::kAborted : StatusCode::kOk)) ++unexpected;
        ++answered;
      };
      world_.Submit(std::move(link));
    }
    ASSERT_EQ(answered, 0);
    const Clock::time_point start = Clock::now();
    chain->Signal(1, fails ? absl::InternalError("the first") : absl::OkStatus());
    ASSERT_TRUE(Eventually([&] { return answered == kLinks; })) << answered;
    EXPECT_LT(Clock::now() - start, 10s);
    EXPECT_EQ(out_of_order, 0);
    EXPECT_EQ(unexpected, 0);
    ASSERT_TRUE(world_.executor->AwaitIdle(kTestPatience));
  }
}

TEST_F(OrderTest, SignalsOfNothingComeAfterWhatWasBeforeIt) {
  Gate gate;
  Work held(kLargeSquare), nothing, silent;
  Block(held, gate);
  Submission signals = nothing.Make(session_, nullptr, /*rows=*/0);
  signals.signal = {{timeline_, 1}};
  world_.Submit(std::move(signals));
  world_.Submit(silent.Make(session_, nullptr, /*rows=*/0));
  EXPECT_EQ(silent.calls(), 1) << "it has nothing to wait for";
  EXPECT_EQ(CodeAt(*timeline_, 1), std::nullopt);
  EXPECT_EQ(nothing.calls(), 0);
  gate.Open(absl::OkStatus());
  EXPECT_TRUE(nothing.Await().ok());
  EXPECT_EQ(held.calls(), 1);
  EXPECT_EQ(CodeAt(*timeline_, 1), StatusCode::kOk);
  EXPECT_TRUE(nothing.untouched());
  EXPECT_TRUE(nothing.reports().at(0).variant.empty());
}

TEST_F(OrderTest, OperationsOfASubmissionFollowEachOtherWithOneAnswer) {
  for (const int extent : {kSmallSquare, kLargeSquare}) {
    const double before = world_.Outcomes("ok");
    Work work(extent);
    Matrix second(extent), third(extent), none(extent);
    Submission many = work.Make(session_);
    many.ops.push_back(BindProduct(work.d(), work.a(), second));
    many.ops.push_back(BindProduct(work.a(), work.b(), none, /*rows=*/0));
    many.ops.push_back(BindProduct(second, work.d(), third));
    many.signal = {{timeline_, static_cast<std::uint64_t>(extent)}};
    world_.Submit(std::move(many));
    EXPECT_TRUE(work.Await().ok());
    EXPECT_EQ(work.calls(), 1);
    const auto d = TrueProduct(work.a().Values(), work.b().Values(), extent);
    const auto expected = TrueProduct(d, work.a().Values(), extent);
    EXPECT_EQ(second.Values(), expected);
    EXPECT_EQ(third.Values(), TrueProduct(expected, d, extent));
    EXPECT_TRUE(none.spoiled());
    const std::vector<OperationReport> reports = work.reports();
    ASSERT_EQ(reports.size(), 4U);
    for (const std::size_t i : {0, 1, 3}) {
      EXPECT_THAT(std::string(reports[i].variant), StartsWith("gemm.cpu.bf16_bf16.bf16.")) << i;
      EXPECT_EQ(reports[i].flops, 2U * static_cast<unsigned>(extent * extent * extent)) << i;
    }
    EXPECT_TRUE(reports[2].variant.empty());
    EXPECT_EQ(reports[2].flops, 0U);
    EXPECT_EQ(world_.Outcomes("ok") - before, 4);
    EXPECT_EQ(timeline_->value(), static_cast<std::uint64_t>(extent));
  }
}

TEST_F(OrderTest, OneOperationWithoutAKernelRefusesAll) {
  Work work;
  Matrix d(kSmallSquare);
  Submission many = work.Make(session_);
  many.ops.push_back(BindProduct(work.a(), work.b(), d));
  many.ops.back().space = MemorySpace::Gpu("GPU-00000000-0000-0000-0000-000000000001");
  many.signal = {{timeline_, 1}};
  world_.Submit(std::move(many));
  EXPECT_EQ(work.calls(), 1);
  EXPECT_EQ(work.Await().code(), StatusCode::kUnimplemented);
  EXPECT_THAT(MessageOf(work.Await()), HasSubstr("ops[1]"));
  EXPECT_TRUE(work.untouched() && d.spoiled());
  EXPECT_EQ(timeline_->value(), 0U);
  EXPECT_EQ(world_.executor->in_flight(), 0U);
}

TEST(OrderLimitsTest, EachOperationTakesAPlace) {
  OrderWorld world(nullptr, {.queue_max = 5, .queue_per_session_max = 4});
  const auto session = world.Open();
  const auto timeline = world.MakeTimeline(*session);
  Work three, two, one;
  const auto with = [&](Work& work, int ops) {
    Submission made = work.Make(session);
    for (int i = 1; i < ops; ++i) made.ops.push_back(BindProduct(work.a(), work.b(), work.d()));
    made.wait = {{timeline, 1}};
    return made;
  };
  world.Submit(with(three, 3));
  EXPECT_EQ(world.executor->in_flight(), 3U);
  EXPECT_EQ(session->lane()->gated(), 3);
  world.Submit(with(two, 2));
  EXPECT_EQ(two.Await().code(), StatusCode::kResourceExhausted);
  world.Submit(with(one, 1));
  EXPECT_EQ(one.calls(), 0) << "there is room for one";
  timeline->Signal(1, absl::OkStatus());
  EXPECT_TRUE(three.Await().ok() && one.Await().ok());
  EXPECT_EQ(world.executor->in_flight(), 0U);
}

// What Synchronize said.
class Synced {
 public:
  std::function<void(const absl::Status&)> Done() {
    return [this](const absl::Status& status) { answer_.Give(status); };
  }
  bool over() { return answer_.calls() > 0; }
  int calls() { return answer_.calls(); }
  StatusCode Code() { return answer_.Await().code(); }

 private:
  Answer answer_;
};

TEST_F(OrderTest, SynchronizeAnswersAtOnceWhereNothingRuns) {
  Synced never, after;
  world_.executor->Synchronize({session_->lane(), other_}, never.Done());
  EXPECT_EQ(never.calls(), 1);
  EXPECT_EQ(never.Code(), StatusCode::kOk);
  Work work(kLargeSquare);
  world_.Submit(work.Make(session_));
  EXPECT_TRUE(work.Await().ok());
  world_.executor->Synchronize({session_->lane()}, after.Done());
  EXPECT_EQ(after.calls(), 1);
}

TEST_F(OrderTest, SynchronizeWaitsForWhatWasBeforeItOnly) {
  Work first, second, third, beside;
  Synced none, one, same, two, both;
  const auto lane = session_->lane();
  world_.Submit(Waiting(first, timeline_, 1));
  world_.executor->Synchronize({other_}, none.Done());
  EXPECT_TRUE(none.over()) << "nothing is in that stream";
  world_.executor->Synchronize({lane}, one.Done());
  world_.executor->Synchronize({lane}, same.Done());
  world_.Submit(Waiting(second, timeline_, 2));
  world_.executor->Synchronize({lane}, two.Done());
  world_.Submit(Waiting(beside, timeline_, 3, other_));
  world_.executor->Synchronize(world_.table.LanesOf(*session_), both.Done());
  world_.Submit(Waiting(third, timeline_, 4));
  EXPECT_FALSE(one.over() || same.over() || two.over() || both.over());
  timeline_->Signal(1, absl::OkStatus());
  EXPECT_TRUE(one.over() && same.over());
  EXPECT_FALSE(two.over() || both.over());
  timeline_->Signal(2, absl::OkStatus());
  EXPECT_TRUE(two.over());
  EXPECT_FALSE(both.over()) << "the other stream still has work";
  timeline_->Signal(3, absl::OkStatus());
  EXPECT_TRUE(both.over());
  EXPECT_EQ(third.calls(), 0);
  timeline_->Signal(4, absl::OkStatus());
  EXPECT_TRUE(third.Await().ok());
  for (Synced* synced : {&none, &one, &same, &two, &both}) EXPECT_EQ(synced->calls(), 1);
}

TEST_F(OrderTest, SynchronizeTellsTheFirstErrorOnce) {
  Work good, cancelled, expired, in_other, later;
  Synced first, second, third;
  world_.Submit(good.Make(session_));
  Submission drop = cancelled.Make(session_);
  drop.still_wanted = [] { return absl::CancelledError("first"); };
  world_.Submit(std::move(drop));
  Submission late = expired.Make(session_);
  late.launch_by = Clock::now() - 1ms;
  world_.Submit(std::move(late));
  Submission refused = later.Make(session_);
  refused.backend = kernels::Backend::kVendor;
  world_.Submit(std::move(refused));
  world_.executor->Synchronize({session_->lane()}, first.Done());
  EXPECT_EQ(first.Code(), StatusCode::kCancelled);
  world_.executor->Synchronize({session_->lane()}, second.Done());
  EXPECT_EQ(second.Code(), StatusCode::kOk) << "told already";
  Submission drop_other = in_other.Make(session_, other_);
  drop_other.still_wanted = [] { return absl::DeadlineExceededError("in the other stream"); };
  world_.Submit(std::move(drop_other));
  world_.executor->Synchronize({session_->lane()}, second.Done());
  EXPECT_EQ(second.Code(), StatusCode::kOk) << "not of this stream";
  world_.executor->Synchronize(world_.table.LanesOf(*session_), third.Done());
  EXPECT_EQ(third.Code(), StatusCode::kDeadlineExceeded);
}

TEST_F(OrderTest, SynchronizeSeesWhatWasDroppedOutOfTurn) {
  Work held, dropped;
  Synced one, two;
  std::atomic<bool> wanted{true};
  world_.Submit(Waiting(held, timeline_, 1));
  world_.executor->Synchronize({session_->lane()}, one.Done());
  Submission drop = dropped.Make(session_);
  drop.still_wanted = [&wanted] { return wanted ? absl::OkStatus() : absl::CancelledError("dropped"); };
  world_.Submit(std::move(drop));
  world_.executor->Synchronize({session_->lane()}, two.Done());
  wanted = false;
  world_.executor->Tick();
  EXPECT_EQ(dropped.calls(), 1);
  EXPECT_FALSE(one.over() || two.over()) << "what was before it still waits";
  timeline_->Signal(1, absl::OkStatus());
  EXPECT_TRUE(one.over() && two.over());
  EXPECT_TRUE(held.Await().ok());
}

TEST_F(OrderTest, TheEndOfASessionEndsItsSynchronize) {
  Work held;
  Synced synced;
  world_.Submit(Waiting(held, timeline_, 1));
  world_.executor->Synchronize({session_->lane()}, synced.Done());
  ASSERT_TRUE(world_.table.EndSession(session_->id(), SessionEnd::kClosed).ok());
  EXPECT_EQ(synced.Code(), StatusCode::kCancelled);
  EXPECT_EQ(held.Await().code(), StatusCode::kCancelled);
}

// The answer to what others wait for comes before theirs, though its signals come before that.
TEST_F(OrderTest, CausesAreAnsweredBeforeTheirConsequences) {
  for (const bool fails : {false, true}) {
    const auto point = world_.MakeTimeline(*session_);
    Gate gate;
    Log log;
    Work cause(kLargeSquare), same_stream, other_stream;
    Submission first = cause.Make(session_);
    first.signal = {{point, 1}};
    first.still_wanted = [&gate] { return gate.Pass(); };
    log.Of(first, 1);
    world_.Submit(std::move(first));
    ASSERT_TRUE(gate.AwaitArrival());
    Submission second = Waiting(same_stream, point, 1), third = Waiting(other_stream, point, 1, other_);
    log.Of(second, 2);
    log.Of(third, 3);
    world_.Submit(std::move(second));
    world_.Submit(std::move(third));
    gate.Open(fails ? absl::CancelledError("by its client") : absl::OkStatus());
    for (Work* work : {&same_stream, &other_stream}) {
      EXPECT_EQ(work->Await().code(), fails ? StatusCode::kAborted : StatusCode::kOk);
    }
    EXPECT_EQ(cause.calls(), 1);
    ASSERT_FALSE(log.names().empty());
    EXPECT_EQ(log.names().front(), 1);
  }
}

// Launches and completes when the test says so; one stream's jobs in order.
class ManualDevice final : public Device {
 public:
  std::span<const planner::DeviceFacts> facts() const override { return facts_; }
  const MemorySpace& space() const override { return space_; }
  std::string Describe() const override { return "manual"; }
  std::shared_ptr<Stream> OpenStream(StreamPriority priority) override {
    priorities.push_back(priority);
    return std::make_shared<ManualStream>(*this);
  }

  // Of all streams, in order; false: the first is not wanted and was dropped.
  bool LaunchNext() {
    Job& job = jobs.front();
    if (const absl::Status status = job.admit(); !status.ok()) {
      TakeNext().done(JobResult{.status = status});
      return false;
    }
    kernels::LaunchContext context;
    EXPECT_EQ(job.launch(context), kernels::kLaunchOk);
    if (job.launched) job.launched();
    return true;
  }
  void CompleteNext(absl::Status status) {
    const Job job = TakeNext();
    job.done(JobResult{.status = std::move(status), .launched = true, .queue_ns = 10, .run_ns = 600});
  }

  std::deque<Job> jobs;
  std::vector<StreamPriority> priorities;

 private:
  class ManualStream final : public Stream {
   public:
    explicit ManualStream(ManualDevice& device) : device_(device) {}
    void Enqueue(Job job) override { device_.jobs.push_back(std::move(job)); }
    void DropUnwanted() override {}

   private:
    ManualDevice& device_;
  };

  Job TakeNext() {
    Job job = std::move(jobs.front());
    jobs.pop_front();
    return job;
  }

  const std::array<planner::DeviceFacts, 1> facts_ = {
      {{.backend = kernels::Backend::kCpu, .archs = {kernels::Arch::kCpu}, .processors = 1, .workspace_bytes_max = 0}}};
  const MemorySpace space_;
};

class LaunchAnswerTest : public ::testing::Test {
 protected:
  LaunchAnswerTest() : LaunchAnswerTest(std::make_unique<ManualDevice>()) {}

  ManualDevice& device_;
  OrderWorld world_;
  const std::shared_ptr<Session> session_ = world_.Open();
  const std::shared_ptr<Timeline> timeline_ = world_.MakeTimeline(*session_);

 private:
  explicit LaunchAnswerTest(std::unique_ptr<ManualDevice> device) : device_(*device), world_(std::move(device)) {}
};

TEST_F(LaunchAnswerTest, TheAnswerComesWithTheLaunchAndOnlyOnce) {
  Work work;
  Synced synced;
  Submission early = work.Make(session_);
  early.answer_when_launched = true;
  early.signal = {{timeline_, 1}};
  world_.Submit(std::move(early));
  EXPECT_EQ(work.calls(), 0);
  ASSERT_TRUE(device_.LaunchNext());
  EXPECT_EQ(work.calls(), 1);
  EXPECT_TRUE(work.Await().ok());
  EXPECT_THAT(std::string(work.reports().at(0).variant), StartsWith("gemm.cpu."));
  EXPECT_EQ(CodeAt(*timeline_, 1), std::nullopt) << "it is not completed";
  EXPECT_EQ(world_.executor->in_flight(), 1U);
  world_.executor->Synchronize({session_->lane()}, synced.Done());
  EXPECT_FALSE(synced.over());
  device_.CompleteNext(absl::OkStatus());
  EXPECT_EQ(work.calls(), 1);
  EXPECT_EQ(CodeAt(*timeline_, 1), StatusCode::kOk);
  EXPECT_EQ(synced.Code(), StatusCode::kOk);
  EXPECT_EQ(world_.Outcomes("ok"), 1);
}

TEST_F(LaunchAnswerTest, AnErrorAfterTheAnswerIsForTheSignalAndSynchronize) {
  Work work, dependant, next;
  Synced synced, again;
  Submission early = work.Make(session_);
  early.answer_when_launched = true;
  early.signal = {{timeline_, 1}};
  world_.Submit(std::move(early));
  Submission waits = dependant.Make(session_);
  waits.wait = {{timeline_, 1}};
  waits.answer_when_launched = true;
  world_.Submit(std::move(waits));
  ASSERT_EQ(device_.jobs.size(), 1U);
  ASSERT_TRUE(device_.LaunchNext());
  EXPECT_TRUE(work.Await().ok());
  device_.CompleteNext(absl::InternalError("the kernel failed"));
  EXPECT_EQ(work.calls(), 1);
  EXPECT_TRUE(work.Await().ok());
  EXPECT_EQ(CodeAt(*timeline_, 1), StatusCode::kInternal);
  EXPECT_EQ(dependant.Await().code(), StatusCode::kAborted);
  EXPECT_TRUE(device_.jobs.empty());
  world_.executor->Synchronize({session_->lane()}, synced.Done());
  EXPECT_EQ(synced.Code(), StatusCode::kInternal) << "the first of both";
  world_.executor->Synchronize({session_->lane()}, again.Done());
  EXPECT_EQ(again.Code(), StatusCode::kOk);
  EXPECT_EQ(world_.Outcomes("failed"), 1);
  EXPECT_EQ(world_.Outcomes("aborted"), 1);
}

TEST_F(LaunchAnswerTest, WhatIsDroppedBeforeTheLaunchAnswersWithThat) {
  Work work;
  std::atomic<bool> wanted{true};
  Submission early = work.Make(session_);
  early.answer_when_launched = true;
  early.still_wanted = [&wanted] { return wanted ? absl::OkStatus() : absl::CancelledError("not wanted"); };
  world_.Submit(std::move(early));
  wanted = false;
  EXPECT_FALSE(device_.LaunchNext());
  EXPECT_EQ(work.Await().code(), StatusCode::kCancelled);
  EXPECT_EQ(work.calls(), 1);
}

TEST_F(LaunchAnswerTest, OthersAreAnsweredWhenTheyAreComplete) {
  Work work;
  world_.Submit(work.Make(session_));
  ASSERT_TRUE(device_.LaunchNext());
  EXPECT_EQ(work.calls(), 0);
  device_.CompleteNext(absl::OkStatus());
  EXPECT_EQ(work.calls(), 1);
  EXPECT_EQ(work.reports().at(0).run_ns, 600U);
  EXPECT_GE(work.reports().at(0).queue_ns, 10U);
}

TEST_F(LaunchAnswerTest, TimeIsSharedByTheOperationsOfASubmission) {
  Work work;
  Submission three = work.Make(session_);
  for (int i = 0; i < 2; ++i) three.ops.push_back(BindProduct(work.a(), work.b(), work.d()));
  world_.Submit(std::move(three));
  ASSERT_EQ(device_.jobs.size(), 1U);
  EXPECT_EQ(device_.jobs.front().scalar_operations, 3U * kSmallSquare * kSmallSquare * kSmallSquare);
  ASSERT_TRUE(device_.LaunchNext());
  device_.CompleteNext(absl::OkStatus());
  ASSERT_EQ(work.reports().size(), 3U);
  for (const OperationReport& report : work.reports()) EXPECT_EQ(report.run_ns, 200U);
}

TEST_F(LaunchAnswerTest, AStreamHasThePriorityThatItWasOpenedWith) {
  device_.priorities.clear();
  ASSERT_TRUE(world_.table.OpenStream(*session_, {.priority = StreamPriority::kHigh}).ok());
  ASSERT_TRUE(world_.table.OpenStream(*session_, {.priority = StreamPriority::kLow}).ok());
  ASSERT_NE(world_.Open(), nullptr);
  EXPECT_THAT(device_.priorities, ElementsAre(StreamPriority::kHigh, StreamPriority::kLow, StreamPriority::kNormal));
}

}  // namespace
}  // namespace tessera::server
