// What keeps a session alive, how it ends, and what is told of it until the last of it is gone. Ticks get their time
// from the test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "common/text.h"
#include "tests/server/session/table_fixture.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

class SessionEndTest : public TableTest {};

TEST_F(SessionEndTest, TimesToLiveHaveARange) {
  for (const auto ttl : {0ms, 99ms, 60'001ms, std::chrono::milliseconds::max(), std::chrono::milliseconds(-1)}) {
    const auto refused = table_.OpenSession(kAnn, ttl, "");
    EXPECT_EQ(CodeOf(refused), StatusCode::kInvalidArgument) << ttl.count();
    EXPECT_THAT(MessageOf(refused.status()), StartsWith("ttl_ms: "));
    EXPECT_THAT(MessageOf(refused.status()), HasSubstr("lease_ttl_max_s"));
  }
  EXPECT_EQ(Metric("tessera_leases{kind=\"ttl\"}"), 0);
  EXPECT_NE(OpenFor(100ms), nullptr);
  EXPECT_NE(OpenFor(60'000ms), nullptr);
  EXPECT_EQ(Metric("tessera_leases{kind=\"ttl\"}"), 2);
  EXPECT_EQ(CodeOf(table_.OpenSession(kAnn, 100ms, "new\nline")), StatusCode::kInvalidArgument);
}

TEST_F(SessionEndTest, TimeToLiveEnds) {
  const auto before = Clock::now();
  std::shared_ptr<Session> timed = OpenFor(10s);
  const std::shared_ptr<Session> longer = OpenFor(20s);
  const std::shared_ptr<Session> on_a_lease = Open(kAnn);
  ASSERT_TRUE(timed && longer && on_a_lease);
  const auto after = Clock::now();
  Allocate(*timed);
  table_.Tick(before + 10s);
  EXPECT_FALSE(timed->ended()) << "before its time is over";
  table_.Tick(after + 10s + 1ms);
  EXPECT_TRUE(timed->ended());
  EXPECT_FALSE(longer->ended());
  EXPECT_EQ(CodeOf(table_.FindSession(kAnn, timed->id())), StatusCode::kNotFound);
  EXPECT_EQ(Metric("tessera_session_ends_total{reason=\"expired\"}"), 1);
  EXPECT_EQ(Metric("tessera_leases{kind=\"ttl\"}"), 1);
  ASSERT_EQ(Sessions().size(), 3U);
  EXPECT_EQ(Sessions()[0].end, SessionEnd::kExpired);
  timed.reset();
  EXPECT_EQ(Counts().bytes_held, 0U);
  table_.Tick(after + 1000h);
  EXPECT_TRUE(longer->ended());
  EXPECT_FALSE(on_a_lease->ended()) << "its lease is a connection";
}

TEST_F(SessionEndTest, EveryCallStartsTheTimeAnew) {
  const std::shared_ptr<Session> session = OpenFor(10s);
  ASSERT_NE(session, nullptr);
  std::this_thread::sleep_for(2ms);
  const auto called = Clock::now();
  ASSERT_TRUE(table_.FindSession(kAnn, session->id()).ok());
  table_.Tick(called + 10s);
  EXPECT_FALSE(session->ended()) << "its call is forgotten";
  std::this_thread::sleep_for(2ms);
  const auto called_by_stranger = Clock::now();
  EXPECT_EQ(CodeOf(table_.FindSession(kBen, session->id())), StatusCode::kPermissionDenied);
  table_.Tick(called_by_stranger + 10s);
  EXPECT_TRUE(session->ended()) << "a stranger's call counts";
}

TEST_F(SessionEndTest, KeepAliveIsForTimesToLive) {
  const std::shared_ptr<Session> timed = OpenFor(10s);
  const std::shared_ptr<Session> connected = Open(kAnn);
  const std::shared_ptr<Session> attached = OpenOn(Lease(kAnn, LeaseKind::kAttach), kAnn);
  ASSERT_TRUE(timed && connected && attached);
  const auto left = table_.KeepAlive(*timed);
  ASSERT_TRUE(left.ok()) << left.status();
  EXPECT_EQ(*left, 10s);
  EXPECT_EQ(CodeOf(table_.KeepAlive(*connected)), StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(table_.KeepAlive(*connected).status()), HasSubstr("side channel"));
  EXPECT_EQ(CodeOf(table_.KeepAlive(*attached)), StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(table_.KeepAlive(*attached).status()), HasSubstr("Attach"));
}

TEST_F(SessionEndTest, ListTellsTheLeaseAndWhatIsLeftOfIt) {
  const std::shared_ptr<Session> timed = OpenFor(10s);
  const std::shared_ptr<Session> connected = Open(kBen, "trainer");
  const std::shared_ptr<Session> attached = OpenOn(Lease(kAnn, LeaseKind::kAttach), kAnn);
  ASSERT_TRUE(timed && connected && attached);
  LaneOf(*connected).SetInFlight(3);
  Allocate(*connected, 70);
  const auto rows = Sessions();
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0].lease, LeaseKind::kTtl);
  EXPECT_GT(rows[0].ttl_left, 5s);
  EXPECT_LE(rows[0].ttl_left, 10s);
  EXPECT_EQ(rows[1].lease, LeaseKind::kSideChannel);
  EXPECT_EQ(rows[1].ttl_left, 0s);
  EXPECT_EQ(rows[1].label, "trainer");
  EXPECT_EQ(rows[1].owner.uid, kBen.uid);
  EXPECT_EQ(rows[1].id, connected->id());
  EXPECT_EQ(rows[1].in_flight, 3);
  EXPECT_EQ(rows[1].memory.bytes, 70U);
  EXPECT_EQ(rows[1].memory.buffers, 1U);
  EXPECT_EQ(rows[1].state, SessionState::kOpen);
  EXPECT_FALSE(rows[1].end.has_value());
  EXPECT_LE(rows[1].idle, rows[1].age);
  EXPECT_EQ(rows[2].lease, LeaseKind::kAttach);
  EXPECT_EQ(table_.ListSessions([](const Peer& owner) { return owner.uid == kBen.uid; }).rows.size(), 1U);
  EXPECT_TRUE(table_.ListSessions(Nobody).rows.empty());
}

TEST_F(SessionEndTest, AttachLeasesCarryNoDescriptors) {
  const Id lease = Lease(kAnn, LeaseKind::kAttach);
  EXPECT_EQ(Metric("tessera_leases{kind=\"attach\"}"), 1);
  EXPECT_EQ(Metric("tessera_leases{kind=\"side_channel\"}"), 0);
  std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  const std::shared_ptr<Session> timed = OpenFor(10s);
  ASSERT_TRUE(session && timed);
  for (const auto& without : {session, timed}) {
    const auto imported = table_.ImportBuffer(*without, 1, 0, 0);
    EXPECT_EQ(CodeOf(imported), StatusCode::kFailedPrecondition);
    EXPECT_THAT(MessageOf(imported.status()), StartsWith("descriptor_ticket: "));
    DescriptorImport of_gpu{.ticket = 1, .device_uuid = kFakeGpu, .allocation_id = 1, .allocation_bytes = 4096};
    EXPECT_EQ(CodeOf(table_.ImportDescriptor(*without, of_gpu)), StatusCode::kFailedPrecondition);
  }
  Allocate(*session);
  table_.CloseLease(lease);
  EXPECT_TRUE(session->ended());
  EXPECT_EQ(Metric("tessera_leases{kind=\"attach\"}"), 0);
  EXPECT_EQ(Metric("tessera_session_ends_total{reason=\"lease_lost\"}"), 1);
  session.reset();
  EXPECT_EQ(Counts().bytes_held, 0U);
}

TEST_F(SessionEndTest, EndedSessionIsListedUntilItsMemoryIsGone) {
  std::shared_ptr<Session> session = Open(kAnn, "trainer");
  ASSERT_NE(session, nullptr);
  const Id in_use = Allocate(*session, 1'000);
  const Id released = Allocate(*session, 300);
  Allocate(*session, 500);
  BufferPin pin = Pin(*session, in_use);
  BufferPin pin_of_released = Pin(*session, released);
  ASSERT_TRUE(table_.ReleaseBuffer(*session, released).ok());
  const Id id = session->id();
  const auto before = Clock::now();
  ASSERT_TRUE(table_.EndSession(id, SessionEnd::kClosed).ok());
  const auto after = Clock::now();
  session.reset();
  SessionCounts counts = Counts();
  EXPECT_EQ(counts.sessions, 0U);
  EXPECT_EQ(counts.buffers, 0U);
  EXPECT_EQ(counts.ending, 1U);
  EXPECT_EQ(counts.quarantined, 0U);
  EXPECT_EQ(counts.bytes_held, 1'300U);
  auto rows = Sessions();
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].id, id);
  EXPECT_EQ(rows[0].label, "trainer");
  EXPECT_EQ(rows[0].owner.uid, kAnn.uid);
  EXPECT_EQ(rows[0].state, SessionState::kEnding);
  EXPECT_EQ(rows[0].end, SessionEnd::kClosed);
  EXPECT_EQ(rows[0].memory.bytes, 1'300U);
  EXPECT_EQ(rows[0].memory.buffers, 2U);
  EXPECT_EQ(rows[0].in_flight, 0);
  EXPECT_TRUE(table_.ListSessions(Nobody).rows.empty());

  table_.Tick(before + kCleanupPatience);
  EXPECT_EQ(table_.Counts().quarantined, 0U);
  table_.Tick(after + kCleanupPatience + 1ms);
  table_.Tick(after + 2 * kCleanupPatience);
  EXPECT_EQ(table_.Counts().quarantined, 1U);
  EXPECT_EQ(table_.Counts().ending, 1U);
  EXPECT_EQ(Sessions()[0].state, SessionState::kQuarantined);
  EXPECT_EQ(Metric("tessera_quarantines_total"), 1) << "counted at each tick";

  pin_of_released = BufferPin();
  EXPECT_EQ(Counts().bytes_held, 1'000U);
  EXPECT_EQ(Sessions()[0].memory.buffers, 1U);
  pin->data()[999] = std::byte{1};
  pin = BufferPin();
  ExpectNothingLeft();
}

TEST_F(SessionEndTest, EndedSessionIsListedUntilItsCallsAreDone) {
  std::shared_ptr<Session> call = Open(kAnn);
  ASSERT_NE(call, nullptr);
  LaneOf(*call).SetInFlight(2);
  ASSERT_TRUE(table_.EndSession(call->id(), SessionEnd::kDrained).ok());
  EXPECT_EQ(Counts().ending, 1U);
  ASSERT_EQ(Sessions().size(), 1U);
  EXPECT_EQ(Sessions()[0].in_flight, 2);
  EXPECT_EQ(Sessions()[0].memory.buffers, 0U);
  call.reset();
  ExpectNothingLeft();
}

TEST_F(SessionEndTest, QueuedWorkIsDroppedOnTheReapersThread) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(LaneOf(*session).drops(), 1);
  EXPECT_NE(LaneOf(*session).dropped_on(), std::this_thread::get_id());
}

// A driver that does not return holds up neither the caller nor the ends of other sessions.
TEST_F(SessionEndTest, StuckEndDelaysNobody) {
  Turnstile turnstile;
  std::shared_ptr<Session> stuck = Open(kAnn);
  std::shared_ptr<Session> other = Open(kBen);
  ASSERT_TRUE(stuck && other);
  Allocate(*stuck, 1'000);
  Allocate(*other, 500);
  LaneOf(*stuck).BlockAt(&turnstile);
  Watched stuck_gone, other_gone;
  ASSERT_TRUE(table_.EndSession(stuck->id(), SessionEnd::kClosed, stuck_gone.Token()).ok());
  ASSERT_TRUE(turnstile.AwaitArrivals(1));
  ASSERT_TRUE(table_.EndSession(other->id(), SessionEnd::kClosed, other_gone.Token()).ok());
  stuck.reset();
  other.reset();
  EXPECT_EQ(table_.Counts().ending, 2U);
  EXPECT_EQ(table_.Counts().bytes_held, 1'500U);
  const auto late = Clock::now() + kCleanupPatience + 1s;
  reaper_.Tick(late);
  EXPECT_EQ(Counts().ending, 1U) << "the other one is done by another thread";
  EXPECT_TRUE(other_gone.gone());
  table_.Tick(late);
  EXPECT_EQ(table_.Counts().quarantined, 1U);
  EXPECT_EQ(Metric("tessera_quarantines_total"), 2) << "the clean-up and the session";
  EXPECT_FALSE(stuck_gone.gone());
  turnstile.Open();
  EXPECT_TRUE(Eventually([&] { return stuck_gone.gone(); }));
  EXPECT_TRUE(Eventually([&] { return reaper_.counts().stuck == 0; }));
  ExpectNothingLeft();
}

TEST_F(SessionEndTest, EndByName) {
  const std::shared_ptr<Session> session = Open(kAnn);
  const std::shared_ptr<Session> other = Open(kAnn);
  ASSERT_TRUE(session && other);
  Allocate(*session);
  Allocate(*session);
  const Id id = session->id();
  for (const auto& [index, generation] : {std::pair{id.index, id.generation + 1},
                                          {id.index, id.generation - 1},
                                          {id.index + 7, id.generation},
                                          {~0U, ~0U}}) {
    EXPECT_EQ(CodeOf(table_.EndSession(index, generation, SessionEnd::kEvicted)), StatusCode::kNotFound);
  }
  EXPECT_EQ(table_.Counts().sessions, 2U);
  const auto ended = table_.EndSession(id.index, id.generation, SessionEnd::kEvicted);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(*ended, 2U);
  EXPECT_TRUE(session->ended());
  EXPECT_FALSE(other->ended());
  EXPECT_EQ(Metric("tessera_session_ends_total{reason=\"evicted\"}"), 1);
  EXPECT_EQ(Sessions()[0].end, SessionEnd::kEvicted);
  EXPECT_EQ(CodeOf(table_.EndSession(id.index, id.generation, SessionEnd::kEvicted)), StatusCode::kNotFound)
      << "it is listed, but open no more";
}

TEST_F(SessionEndTest, ReleaseIsDoneWhenTheMemoryIs) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  const Id buffer = Allocate(*session, 100, "cuda");
  BufferPin pin = Pin(*session, buffer);
  Watched token;
  int mapped_when_gone = -1;
  std::uint64_t bytes_when_gone = 99;
  {
    GoneToken gone(&token, [&, held = token.Token()](const void*) mutable {
      mapped_when_gone = gpu_.mapped();
      bytes_when_gone = table_.Counts().bytes_held;
      held.reset();
    });
    ASSERT_TRUE(table_.ReleaseBuffer(*session, buffer, std::move(gone)).ok());
  }
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_FALSE(token.gone()) << "a call uses it";
  pin = BufferPin();
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_TRUE(token.gone());
  EXPECT_EQ(mapped_when_gone, 0) << "told before it was unmapped";
  EXPECT_EQ(bytes_when_gone, 0U) << "told before its bytes were free";
}

TEST_F(SessionEndTest, RefusedReleaseHoldsNothing) {
  const std::shared_ptr<Session> session = Open(kAnn);
  const std::shared_ptr<Session> other = Open(kAnn);
  ASSERT_TRUE(session && other);
  const Id buffer = Allocate(*session);
  Watched of_stranger, of_unknown, of_ended;
  EXPECT_EQ(table_.ReleaseBuffer(*other, buffer, of_stranger.Token()).code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(table_.ReleaseBuffer(*other, Id{.epoch = 7, .index = 9}, of_unknown.Token()).code(), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.EndSession(Id{.epoch = 7, .index = 9}, SessionEnd::kClosed, of_ended.Token())),
            StatusCode::kNotFound);
  for (const Watched* token : {&of_stranger, &of_unknown, &of_ended}) EXPECT_TRUE(token->gone());
}

TEST_F(SessionEndTest, EndIsDoneWhenAllItsMemoryIs) {
  std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  BufferPin first = Pin(*session, Allocate(*session, 100, "cuda"));
  BufferPin second = Pin(*session, Allocate(*session, 100));
  Allocate(*session, 100);
  Watched token;
  const auto dropped = table_.EndSession(session->id(), SessionEnd::kClosed, token.Token());
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(*dropped, 3U);
  for (BufferPin* pin : {&first, &second}) {
    ASSERT_TRUE(AwaitIdle(reaper_));
    EXPECT_FALSE(token.gone());
    *pin = BufferPin();
  }
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_TRUE(token.gone());
  session.reset();
  ExpectNothingLeft();
}

TEST_F(SessionEndTest, EndIsDoneWhenWhatWasReleasedBeforeIsGone) {
  std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  const Id with_token = Allocate(*session, 100, "cuda");
  const Id without = Allocate(*session, 100);
  BufferPin first = Pin(*session, with_token);
  BufferPin second = Pin(*session, without);
  Watched released, ended;
  ASSERT_TRUE(table_.ReleaseBuffer(*session, with_token, released.Token()).ok());
  ASSERT_TRUE(table_.ReleaseBuffer(*session, without).ok());
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed, ended.Token()).ok());
  session.reset();
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_FALSE(ended.gone());
  first = BufferPin();
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_TRUE(released.gone()) << "it waits for its own memory alone";
  EXPECT_FALSE(ended.gone());
  second = BufferPin();
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_TRUE(ended.gone());
  ExpectNothingLeft();
}

TEST_F(SessionEndTest, EndWithoutMemoryIsDoneWhenItsWorkIsDropped) {
  Turnstile turnstile;
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  LaneOf(*session).BlockAt(&turnstile);
  Watched token;
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed, token.Token()).ok());
  ASSERT_TRUE(turnstile.AwaitArrivals(1));
  EXPECT_FALSE(token.gone());
  turnstile.Open();
  EXPECT_TRUE(Eventually([&] { return token.gone(); }));
}

}  // namespace
}  // namespace tessera::server
