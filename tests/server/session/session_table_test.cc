// Who owns what: leases, sessions and buffers, every way to name one wrongly, every limit, and a model under four
// threads.
#include "server/session/session_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/text.h"
#include "tests/server/session/posix_fixtures.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint32_t kEpoch = 0x51u;
const Peer kAlice{.pid = 10, .uid = 1000, .gid = 1000};
const Peer kAlicesOther{.pid = 11, .uid = 1000, .gid = 100};
const Peer kBob{.pid = 20, .uid = 2000, .gid = 2000};

constexpr SessionLimits kLimits{.sessions_max = 3,
                                .leases_max = 4,
                                .buffers_per_session_max = 3,
                                .buffer_bytes_max = 10'000,
                                .session_buffer_bytes_max = 6'000};

class CountedLane : public IdleLane {
 public:
  explicit CountedLane(std::atomic<int>& alive) : alive_(alive) { ++alive_; }
  ~CountedLane() override { --alive_; }

 private:
  std::atomic<int>& alive_;
};

class SessionTableTest : public ::testing::Test {
 protected:
  Id Lease(const Peer& peer) {
    auto lease = table_.OpenLease(peer);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return lease.value_or(Id{});
  }

  std::shared_ptr<Session> OpenOn(const Id& lease, const Peer& peer, std::string_view label = "") {
    auto token = table_.OpenSession(peer, lease, label);
    EXPECT_TRUE(token.ok()) << token.status();
    if (!token.ok()) return nullptr;
    auto session = table_.FindSession(peer, *token);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *session : nullptr;
  }

  std::shared_ptr<Session> Open(const Peer& peer) { return OpenOn(Lease(peer), peer); }

  Id Allocate(Session& session, std::uint64_t bytes = 100) {
    auto made = table_.AllocateBuffer(session, bytes);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? made->id : Id{};
  }

  double Metric(const std::string& series) const { return MetricValue(metrics_, series); }

  // Once what went has been cleaned up.
  std::uint64_t BytesHeld() {
    EXPECT_TRUE(AwaitIdle(reaper_));
    return table_.Counts().bytes_held;
  }

  void ExpectRefusedBy(const std::string& limit, const absl::Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr(limit));
    EXPECT_EQ(Metric("tessera_refused_total{limit=\"" + limit + "\"}"), 1);
  }

  std::atomic<int> lanes_{0};
  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper_{std::chrono::seconds(10), metrics_};
  SessionTable table_{kEpoch, kLimits, metrics_, reaper_,
                      [this](const StreamSpec& /*spec*/) { return std::make_shared<CountedLane>(lanes_); }};
};

TEST_F(SessionTableTest, IdsSurviveTheWire) {
  const Id lease = Lease(kAlice);
  Id parsed;
  ASSERT_TRUE(Id::Parse(lease.Bytes(), parsed));
  EXPECT_EQ(parsed, lease);
  EXPECT_EQ(lease.Bytes().size(), Id::kBytes);
  EXPECT_FALSE(Id::Parse(lease.Bytes() + "x", parsed));
  EXPECT_FALSE(Id::Parse(lease.Bytes().substr(1), parsed));
  EXPECT_FALSE(Id::Parse("", parsed));
}

TEST_F(SessionTableTest, SessionKnowsItsOwner) {
  const std::shared_ptr<Session> session = OpenOn(Lease(kAlice), kAlicesOther, "trainer 7");
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->peer().uid, kAlice.uid);
  EXPECT_EQ(session->label(), "trainer 7");
  EXPECT_EQ(session->id().epoch, kEpoch);
  EXPECT_FALSE(session->ended());
  EXPECT_NE(session->lane(), nullptr);
  EXPECT_EQ(table_.Counts().sessions, 1U);
  EXPECT_EQ(Metric("tessera_sessions"), 1);
}

TEST_F(SessionTableTest, SessionNeedsALiveLeaseOfItsOwner) {
  const Id lease = Lease(kAlice);
  EXPECT_EQ(CodeOf(table_.OpenSession(kBob, lease, "")), StatusCode::kPermissionDenied);
  EXPECT_EQ(CodeOf(table_.OpenSession(kAlice, Id{.epoch = kEpoch, .index = 99}, "")), StatusCode::kNotFound);
  Id former = lease;
  former.epoch += 1;
  EXPECT_EQ(CodeOf(table_.OpenSession(kAlice, former, "")), StatusCode::kFailedPrecondition);
  table_.CloseLease(lease);
  EXPECT_EQ(CodeOf(table_.OpenSession(kAlice, lease, "")), StatusCode::kNotFound);
  EXPECT_EQ(table_.Counts().sessions, 0U);
  EXPECT_EQ(Metric("tessera_sessions"), 0);
  EXPECT_EQ(lanes_, 0);
}

TEST_F(SessionTableTest, OneSessionALease) {
  const Id lease = Lease(kAlice);
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(CodeOf(table_.OpenSession(kAlice, lease, "")), StatusCode::kAlreadyExists);
  EXPECT_EQ(lanes_, 1);
}

TEST_F(SessionTableTest, ForeignAndUnknownTokens) {
  const std::shared_ptr<Session> session = Open(kAlice);
  ASSERT_NE(session, nullptr);
  EXPECT_TRUE(table_.FindSession(kAlicesOther, session->id()).ok()) << "same uid, other process";
  EXPECT_EQ(CodeOf(table_.FindSession(kBob, session->id())), StatusCode::kPermissionDenied);
  Id token = session->id();
  token.epoch ^= 1;
  EXPECT_EQ(CodeOf(table_.FindSession(kAlice, token)), StatusCode::kFailedPrecondition);
  EXPECT_EQ(CodeOf(table_.EndSession(token, SessionEnd::kClosed)), StatusCode::kFailedPrecondition);
  for (std::uint32_t Id::*part : {&Id::index, &Id::generation, &Id::nonce}) {
    token = session->id();
    token.*part += 1;
    EXPECT_EQ(CodeOf(table_.FindSession(kAlice, token)), StatusCode::kNotFound);
    EXPECT_EQ(CodeOf(table_.EndSession(token, SessionEnd::kClosed)), StatusCode::kNotFound);
  }
  EXPECT_EQ(table_.Counts().sessions, 1U);
}

TEST_F(SessionTableTest, LabelRules) {
  const Id lease = Lease(kAlice);
  const std::string longest(SessionTable::kLabelBytesMax, 'x');
  const std::string bad[] = {longest + "x", "new\nline", std::string("nul\0", 4), "caf\xc3\xa9", "\x7f", "\t"};
  for (const std::string& label : bad) {
    const auto session = table_.OpenSession(kAlice, lease, label);
    EXPECT_EQ(CodeOf(session), StatusCode::kInvalidArgument) << label;
    EXPECT_THAT(MessageOf(session.status()), testing::StartsWith("label: "));
  }
  EXPECT_NE(OpenOn(lease, kAlice, longest), nullptr);
  EXPECT_NE(OpenOn(Lease(kAlice), kAlice, " ~\"\\{}"), nullptr);
}

TEST_F(SessionTableTest, BuffersAnswerOnlyToTheirSession) {
  const std::shared_ptr<Session> alice = Open(kAlice);
  const std::shared_ptr<Session> alices_other = Open(kAlice);
  const std::shared_ptr<Session> bob = Open(kBob);
  ASSERT_TRUE(alice && alices_other && bob);
  const Id buffer = Allocate(*alice);
  EXPECT_TRUE(table_.PinBuffer(*alice, buffer, BufferAccess::kReadWrite).ok());
  for (const auto& stranger : {alices_other, bob}) {
    EXPECT_EQ(CodeOf(table_.PinBuffer(*stranger, buffer, BufferAccess::kReadWrite)), StatusCode::kPermissionDenied);
    EXPECT_EQ(table_.ReleaseBuffer(*stranger, buffer).code(), StatusCode::kPermissionDenied);
  }
  Id wrong = buffer;
  wrong.epoch ^= 1;
  EXPECT_EQ(CodeOf(table_.PinBuffer(*alice, wrong, BufferAccess::kReadWrite)), StatusCode::kFailedPrecondition);
  EXPECT_EQ(table_.ReleaseBuffer(*alice, wrong).code(), StatusCode::kFailedPrecondition);
  for (std::uint32_t Id::*part : {&Id::index, &Id::generation, &Id::nonce}) {
    wrong = buffer;
    wrong.*part += 1;
    EXPECT_EQ(CodeOf(table_.PinBuffer(*alice, wrong, BufferAccess::kReadWrite)), StatusCode::kNotFound);
    EXPECT_EQ(table_.ReleaseBuffer(*alice, wrong).code(), StatusCode::kNotFound);
  }
  EXPECT_EQ(table_.Counts().buffers, 1U);
}

TEST_F(SessionTableTest, ReusedSlotsNeverAnswerToOldIds) {
  const std::shared_ptr<Session> session = Open(kAlice);
  ASSERT_NE(session, nullptr);
  std::vector<Id> old;
  for (int i = 0; i < 50; ++i) {
    const Id buffer = Allocate(*session);
    EXPECT_EQ(buffer.index, 0U) << "the slot is not re-used, so this test proves nothing";
    for (const Id& id : old) {
      ASSERT_EQ(CodeOf(table_.PinBuffer(*session, id, BufferAccess::kReadWrite)), StatusCode::kNotFound);
      ASSERT_EQ(table_.ReleaseBuffer(*session, id).code(), StatusCode::kNotFound);
    }
    ASSERT_TRUE(table_.ReleaseBuffer(*session, buffer).ok());
    ASSERT_EQ(BytesHeld(), 0U);
    old.push_back(buffer);
  }
  const Id ended = session->id();
  ASSERT_TRUE(table_.EndSession(ended, SessionEnd::kClosed).ok());
  const std::shared_ptr<Session> next = Open(kAlice);
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(next->id().index, ended.index);
  EXPECT_EQ(CodeOf(table_.FindSession(kAlice, ended)), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.EndSession(ended, SessionEnd::kClosed)), StatusCode::kNotFound);
}

TEST_F(SessionTableTest, LeasesAreLimited) {
  std::vector<Id> leases;
  for (std::uint64_t i = 0; i < kLimits.leases_max; ++i) leases.push_back(Lease(kAlice));
  ExpectRefusedBy("side_connections_max", table_.OpenLease(kBob).status());
  table_.CloseLease(leases.back());
  table_.CloseLease(leases.back());  // once more changes nothing
  EXPECT_TRUE(table_.OpenLease(kBob).ok());
  EXPECT_FALSE(table_.OpenLease(kBob).ok());
}

TEST_F(SessionTableTest, SessionsAreLimited) {
  std::vector<std::shared_ptr<Session>> sessions;
  for (std::uint64_t i = 0; i < kLimits.sessions_max; ++i) sessions.push_back(Open(kAlice));
  const Id lease = Lease(kAlice);
  ExpectRefusedBy("sessions_max", table_.OpenSession(kAlice, lease, "").status());
  ASSERT_TRUE(table_.EndSession(sessions.back()->id(), SessionEnd::kClosed).ok());
  EXPECT_NE(OpenOn(lease, kAlice), nullptr) << "the refusal used the lease up";
}

TEST_F(SessionTableTest, OnePrincipalLeavesRoomForOthers) {
  SessionLimits limits = kLimits;
  limits.sessions_max = 10;
  limits.sessions_per_principal_max = 2;
  limits.leases_max = 10;
  limits.leases_per_principal_max = 3;
  SessionTable table(kEpoch, limits, metrics_, reaper_, MakeIdleLane);
  std::vector<Id> leases;
  std::vector<Id> sessions;
  for (int i = 0; i < 3; ++i) leases.push_back(*table.OpenLease(i == 0 ? kAlice : kAlicesOther));
  ExpectRefusedBy("connections_per_principal_max", table.OpenLease(kAlice).status());
  for (int i = 0; i < 2; ++i) sessions.push_back(*table.OpenSession(kAlice, leases[i], ""));
  ExpectRefusedBy("sessions_per_principal_max", table.OpenSession(kAlice, leases[2], "").status());

  const auto bobs = table.OpenLease(kBob);
  ASSERT_TRUE(bobs.ok());
  EXPECT_TRUE(table.OpenSession(kBob, *bobs, "").ok());

  ASSERT_TRUE(table.EndSession(sessions[0], SessionEnd::kClosed).ok());
  EXPECT_TRUE(table.OpenSession(kAlice, leases[2], "").ok());
  table.CloseLease(leases[1]);  // with its session
  const auto lease = table.OpenLease(kAlice);
  ASSERT_TRUE(lease.ok());
  EXPECT_TRUE(table.OpenSession(kAlice, *lease, "").ok());
}

TEST_F(SessionTableTest, BuffersOfASessionAreLimited) {
  const std::shared_ptr<Session> session = Open(kAlice);
  const std::shared_ptr<Session> other = Open(kAlice);
  ASSERT_TRUE(session && other);
  Id last;
  for (std::uint64_t i = 0; i < kLimits.buffers_per_session_max; ++i) last = Allocate(*session);
  ExpectRefusedBy("buffers_per_session_max", table_.AllocateBuffer(*session, 1).status());
  EXPECT_EQ(BytesHeld(), 300U);
  EXPECT_TRUE(table_.AllocateBuffer(*other, 1).ok());
  auto pin = table_.PinBuffer(*session, last, BufferAccess::kRead);
  ASSERT_TRUE(pin.ok());
  ASSERT_TRUE(table_.ReleaseBuffer(*session, last).ok());
  EXPECT_EQ(CodeOf(table_.AllocateBuffer(*session, 1)), StatusCode::kResourceExhausted) << "it is in use yet";
  *pin = BufferPin();
  EXPECT_EQ(BytesHeld(), 201U);
  EXPECT_TRUE(table_.AllocateBuffer(*session, 1).ok());
}

TEST_F(SessionTableTest, BytesOfASessionAreLimited) {
  const std::shared_ptr<Session> session = Open(kAlice);
  ASSERT_NE(session, nullptr);
  Allocate(*session, 5'000);
  ExpectRefusedBy("session_buffer_bytes_max", table_.AllocateBuffer(*session, 1'001).status());
  EXPECT_TRUE(table_.AllocateBuffer(*session, 1'000).ok());
}

TEST_F(SessionTableTest, BytesOfAllSessionsAreLimited) {
  const std::shared_ptr<Session> first = Open(kAlice);
  const std::shared_ptr<Session> second = Open(kBob);
  ASSERT_TRUE(first && second);
  Allocate(*first, 6'000);
  ExpectRefusedBy("buffer_bytes_max", table_.AllocateBuffer(*second, 4'001).status());
  EXPECT_EQ(BytesHeld(), 6'000U);
  EXPECT_TRUE(table_.AllocateBuffer(*second, 4'000).ok());
}

TEST_F(SessionTableTest, TicketImportsOnce) {
  const Id lease = Lease(kAlice);
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  ASSERT_NE(session, nullptr);
  const auto ticket = table_.KeepDescriptor(lease, MakeMemfd(500));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(CodeOf(table_.ImportBuffer(*session, *ticket + 1, 0, 0)), StatusCode::kNotFound);
  const auto buffer = table_.ImportBuffer(*session, *ticket, 100, 0);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ(buffer->bytes, 400U);
  const auto again = table_.ImportBuffer(*session, *ticket, 100, 0);
  EXPECT_EQ(CodeOf(again), StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(again.status()), testing::StartsWith("descriptor_ticket: "));
  EXPECT_EQ(table_.Counts().buffers, 1U);
  EXPECT_EQ(Metric("tessera_buffers{origin=\"imported\"}"), 1);
  EXPECT_EQ(Metric("tessera_buffer_bytes{origin=\"imported\"}"), 400);
}

TEST_F(SessionTableTest, TicketsBelongToTheirLease) {
  const Id lease = Lease(kAlice);
  const Id other_lease = Lease(kAlice);
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  ASSERT_NE(session, nullptr);
  const auto ticket = table_.KeepDescriptor(other_lease, MakeMemfd(500));
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(CodeOf(table_.ImportBuffer(*session, *ticket, 0, 0)), StatusCode::kNotFound);
  const std::shared_ptr<Session> owner = OpenOn(other_lease, kAlice);
  ASSERT_NE(owner, nullptr);
  EXPECT_TRUE(table_.ImportBuffer(*owner, *ticket, 0, 0).ok());
  EXPECT_EQ(CodeOf(table_.KeepDescriptor(Id{.epoch = kEpoch, .index = 50}, MakeMemfd(1))), StatusCode::kNotFound);
}

TEST_F(SessionTableTest, FailedImportCostsNothing) {
  const Id lease = Lease(kAlice);
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  ASSERT_NE(session, nullptr);
  const std::size_t descriptors = OpenDescriptors();
  for (int round = 0; round < 3; ++round) {
    const auto unsealed = table_.KeepDescriptor(lease, MakeMemfd(500, 0));
    const auto huge = table_.KeepDescriptor(lease, MakeMemfd(1'000'000));
    ASSERT_TRUE(unsealed.ok() && huge.ok());
    EXPECT_EQ(CodeOf(table_.ImportBuffer(*session, *unsealed, 0, 0)), StatusCode::kInvalidArgument);
    EXPECT_EQ(CodeOf(table_.ImportBuffer(*session, *huge, 0, 0)), StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(BytesHeld(), 0U);
  EXPECT_EQ(table_.Counts().buffers, 0U);
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(SessionTableTest, WaitingDescriptorsAreLimitedAndCloseWithTheLease) {
  const std::size_t descriptors = OpenDescriptors();
  const Id lease = Lease(kAlice);
  std::vector<std::uint64_t> tickets;
  for (std::size_t i = 0; i < SessionTable::kWaitingDescriptorsMax; ++i) {
    const auto ticket = table_.KeepDescriptor(lease, MakeMemfd(10));
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    tickets.push_back(*ticket);
  }
  EXPECT_EQ(std::set<std::uint64_t>(tickets.begin(), tickets.end()).size(), tickets.size());
  const auto refused = table_.KeepDescriptor(lease, MakeMemfd(10));
  EXPECT_EQ(CodeOf(refused), StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(refused.status()), HasSubstr("16"));
  EXPECT_EQ(OpenDescriptors(), descriptors + SessionTable::kWaitingDescriptorsMax) << "the refused one stays open";
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(table_.ImportBuffer(*session, tickets[3], 0, 0).ok());
  EXPECT_TRUE(table_.KeepDescriptor(lease, MakeMemfd(10)).ok());
  table_.CloseLease(lease);
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(SessionTableTest, EndingDropsBuffersButPinnedMemoryStaysUntilItsPinGoes) {
  std::shared_ptr<Session> session = Open(kAlice);
  ASSERT_NE(session, nullptr);
  const Id pinned = Allocate(*session, 1'000);
  Allocate(*session, 2'000);
  auto pin = table_.PinBuffer(*session, pinned, BufferAccess::kReadWrite);
  ASSERT_TRUE(pin.ok());
  const auto dropped = table_.EndSession(session->id(), SessionEnd::kClosed);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(*dropped, 2U);
  EXPECT_TRUE(session->ended());
  EXPECT_EQ(table_.Counts().sessions, 0U);
  EXPECT_EQ(table_.Counts().buffers, 0U);
  EXPECT_EQ(BytesHeld(), 1'000U);
  EXPECT_EQ(Metric("tessera_buffers{origin=\"allocated\"}"), 0);
  EXPECT_EQ(Metric("tessera_buffer_bytes{origin=\"allocated\"}"), 0);
  EXPECT_EQ(Metric("tessera_session_ends_total{reason=\"closed\"}"), 1);
  EXPECT_EQ(CodeOf(table_.PinBuffer(*session, pinned, BufferAccess::kReadWrite)), StatusCode::kNotFound);
  (*pin)->data()[999] = std::byte{1};
  EXPECT_EQ((*pin)->data()[999], std::byte{1});
  *pin = BufferPin();
  EXPECT_EQ(BytesHeld(), 0U);
  EXPECT_EQ(lanes_, 1);
  session.reset();
  EXPECT_EQ(lanes_, 0);
}

TEST_F(SessionTableTest, EndedSessionTakesNothingNew) {
  const Id lease = Lease(kAlice);
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  ASSERT_NE(session, nullptr);
  const auto ticket = table_.KeepDescriptor(lease, MakeMemfd(10));
  ASSERT_TRUE(ticket.ok());
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  EXPECT_EQ(CodeOf(table_.AllocateBuffer(*session, 10)), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.ImportBuffer(*session, *ticket, 0, 0)), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.FindSession(kAlice, session->id())), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.EndSession(session->id(), SessionEnd::kClosed)), StatusCode::kNotFound);
  EXPECT_EQ(BytesHeld(), 0U);
  EXPECT_EQ(Metric("tessera_sessions"), 0);
}

TEST_F(SessionTableTest, ReleasedBufferStaysForItsPins) {
  const std::shared_ptr<Session> session = Open(kAlice);
  ASSERT_NE(session, nullptr);
  const Id buffer = Allocate(*session, 700);
  auto pin = table_.PinBuffer(*session, buffer, BufferAccess::kReadWrite);
  ASSERT_TRUE(pin.ok());
  ASSERT_TRUE(table_.ReleaseBuffer(*session, buffer).ok());
  EXPECT_EQ(table_.ReleaseBuffer(*session, buffer).code(), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.PinBuffer(*session, buffer, BufferAccess::kReadWrite)), StatusCode::kNotFound);
  EXPECT_EQ(table_.Counts().buffers, 0U);
  EXPECT_EQ(BytesHeld(), 700U);
  (*pin)->data()[0] = std::byte{1};
  *pin = BufferPin();
  EXPECT_EQ(BytesHeld(), 0U);
}

TEST_F(SessionTableTest, ClosingTheLeaseEndsItsSession) {
  const Id lease = Lease(kAlice);
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  ASSERT_NE(session, nullptr);
  Allocate(*session);
  table_.CloseLease(lease);
  EXPECT_TRUE(session->ended());
  EXPECT_EQ(table_.Counts().sessions, 0U);
  EXPECT_EQ(BytesHeld(), 0U);
  EXPECT_EQ(Metric("tessera_session_ends_total{reason=\"lease_lost\"}"), 1);
}

TEST_F(SessionTableTest, EndAllSessionsEndsAll) {
  const std::shared_ptr<Session> first = Open(kAlice);
  const std::shared_ptr<Session> second = Open(kBob);
  ASSERT_TRUE(first && second);
  Allocate(*first);
  table_.EndAllSessions(SessionEnd::kDrained);
  EXPECT_TRUE(first->ended() && second->ended());
  EXPECT_EQ(table_.Counts().sessions, 0U);
  EXPECT_EQ(table_.Counts().buffers, 0U);
  EXPECT_EQ(Metric("tessera_session_ends_total{reason=\"drained\"}"), 2);
}

TEST_F(SessionTableTest, ExportGivesAllocatedMemoryOfTheLeasesSession) {
  const Id lease = Lease(kAlice);
  const std::shared_ptr<Session> session = OpenOn(lease, kAlice);
  const Id other_lease = Lease(kAlice);
  const std::shared_ptr<Session> other = OpenOn(other_lease, kAlice);
  ASSERT_TRUE(session && other);
  const Id buffer = Allocate(*session);
  auto pin = table_.ExportBuffer(lease, buffer);
  ASSERT_TRUE(pin.ok()) << pin.status();
  EXPECT_GE((*pin)->fd(), 0);
  EXPECT_EQ(CodeOf(table_.ExportBuffer(other_lease, buffer)), StatusCode::kPermissionDenied);
  EXPECT_EQ(CodeOf(table_.ExportBuffer(lease, Id{.epoch = kEpoch, .index = 7})), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.ExportBuffer(lease, Id{.epoch = kEpoch + 1})), StatusCode::kFailedPrecondition);
  const auto ticket = table_.KeepDescriptor(lease, MakeMemfd(10));
  ASSERT_TRUE(ticket.ok());
  const auto imported = table_.ImportBuffer(*session, *ticket, 0, 0);
  ASSERT_TRUE(imported.ok());
  EXPECT_EQ(CodeOf(table_.ExportBuffer(lease, imported->id)), StatusCode::kFailedPrecondition);
}

TEST_F(SessionTableTest, ExportWithoutASessionSaysSo) {
  const Id lease = Lease(kAlice);
  const absl::Status status = table_.ExportBuffer(lease, Id{.epoch = kEpoch}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(MessageOf(status), HasSubstr("session"));
  EXPECT_THAT(MessageOf(status), Not(HasSubstr("former daemon"))) << "nothing here is of another epoch";
}

TEST_F(SessionTableTest, ListShowsWhatItIsAskedToInclude) {
  const std::shared_ptr<Session> alice = OpenOn(Lease(kAlice), kAlice, "one");
  const std::shared_ptr<Session> bob = OpenOn(Lease(kBob), kBob, "two");
  ASSERT_TRUE(alice && bob);
  const Id of_alice = Allocate(*alice, 11);
  Allocate(*bob, 22);
  const auto pin = table_.PinBuffer(*alice, of_alice, BufferAccess::kReadWrite);
  ASSERT_TRUE(pin.ok());
  const auto rows = table_.ListBuffers([](const Peer& owner) { return owner.uid == kAlice.uid; }).rows;
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].id, of_alice);
  EXPECT_EQ(rows[0].bytes, 11U);
  EXPECT_EQ(rows[0].users, 1U);
  EXPECT_EQ(rows[0].owner.uid, kAlice.uid);
  EXPECT_EQ(rows[0].session_label, "one");
  EXPECT_EQ(rows[0].origin, BufferOrigin::kAllocated);
  EXPECT_GE(rows[0].age.count(), 0);
  EXPECT_EQ(table_.ListBuffers([](const Peer&) { return true; }).rows.size(), 2U);
  EXPECT_TRUE(table_.ListBuffers([](const Peer&) { return false; }).rows.empty());
}

constexpr std::size_t kBuffersMax = 8;  // of a session, released ones that are in use included

// Each thread plays one client with sessions and buffers of its own, and knows what every call must answer. The ids of
// all threads are published, so that each can also ask for what is not its own.
class Client {
 public:
  Client(SessionTable& table, const Peer& peer, std::uint64_t seed, std::mutex& mutex, std::vector<Id>& published)
      : table_(table), peer_(peer), random_(seed), mutex_(mutex), published_(published) {}

  void Run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) Step();
    End();
  }

 private:
  struct Held {
    std::uint64_t bytes = 0;
    std::vector<BufferPin> pins;
  };

  std::uint64_t Below(std::uint64_t bound) { return random_() % bound; }

  void Step() {
    if (session_ == nullptr) return Begin();
    switch (Below(10)) {
      case 0:
      case 1:
        return Allocate();
      case 2:
        return Import();
      case 3:
        return Release();
      case 4:
      case 5:
        return Pin();
      case 6:
        return Unpin();
      case 7:
        return UseOthersBuffer();
      case 8:
        return UseOldBuffer();
      default:
        if (Below(8) == 0) End();
    }
  }

  void Begin() {
    auto lease = table_.OpenLease(peer_);
    ASSERT_TRUE(lease.ok()) << lease.status();
    lease_ = *lease;
    auto token = table_.OpenSession(peer_, lease_, "client");
    ASSERT_TRUE(token.ok()) << token.status();
    auto session = table_.FindSession(peer_, *token);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *session;
  }

  // `going`: released buffers that were not gone before the call.
  void Add(const absl::StatusOr<SessionTable::NewBuffer>& made, std::uint64_t bytes, std::size_t going) {
    if (held_.size() + orphans_.size() >= kBuffersMax) {
      ASSERT_EQ(CodeOf(made), StatusCode::kResourceExhausted);
      return;
    }
    if (held_.size() + going >= kBuffersMax && CodeOf(made) == StatusCode::kResourceExhausted) return;
    ASSERT_TRUE(made.ok()) << made.status();
    ASSERT_EQ(made->bytes, bytes);
    ASSERT_TRUE(held_.emplace(made->id.Bytes(), Held{.bytes = bytes, .pins = {}}).second) << "an id was given twice";
    const std::lock_guard<std::mutex> lock(mutex_);
    published_.push_back(made->id);
  }

  void Allocate() {
    const std::uint64_t bytes = 1 + Below(5'000);
    const std::size_t going = *going_;
    Add(table_.AllocateBuffer(*session_, bytes), bytes, going);
  }

  void Import() {
    const std::uint64_t bytes = 1 + Below(5'000);
    auto ticket = table_.KeepDescriptor(lease_, MakeMemfd(bytes));
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    const std::size_t going = *going_;
    Add(table_.ImportBuffer(*session_, *ticket, 0, 0), bytes, going);
    ASSERT_EQ(CodeOf(table_.ImportBuffer(*session_, *ticket, 0, 0)), StatusCode::kNotFound);
  }

  std::map<std::string, Held>::iterator Any() {
    return std::next(held_.begin(), static_cast<std::ptrdiff_t>(Below(held_.size())));
  }

  static Id IdOf(const std::string& bytes) {
    Id id;
    EXPECT_TRUE(Id::Parse(bytes, id));
    return id;
  }

  void Release() {
    if (held_.empty()) return;
    const auto chosen = Any();
    ++*going_;
    const GoneToken gone(new int(0), [going = going_](const int* value) {
      delete value;
      --*going;
    });
    const absl::Status status = table_.ReleaseBuffer(*session_, IdOf(chosen->first), gone);
    ASSERT_TRUE(status.ok()) << status;
    old_.push_back(IdOf(chosen->first));
    if (!chosen->second.pins.empty()) orphans_.push_back(std::move(chosen->second.pins));
    held_.erase(chosen);
  }

  void Pin() {
    if (held_.empty()) return;
    auto& [bytes, held] = *Any();
    auto pin = table_.PinBuffer(*session_, IdOf(bytes), BufferAccess::kReadWrite);
    ASSERT_TRUE(pin.ok()) << pin.status();
    ASSERT_EQ((*pin)->bytes(), held.bytes);
    ASSERT_EQ((*pin)->users(), held.pins.size() + 1);
    (*pin)->data()[held.bytes - 1] = std::byte{1};
    held.pins.push_back(*std::move(pin));
  }

  void Unpin() {
    if (!orphans_.empty()) {
      orphans_.back().back()->data()[0] = std::byte{2};  // still mapped
      orphans_.back().pop_back();
      if (orphans_.back().empty()) orphans_.pop_back();
      return;
    }
    if (held_.empty()) return;
    auto& pins = Any()->second.pins;
    if (!pins.empty()) pins.pop_back();
  }

  void UseOthersBuffer() {
    Id id;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (published_.empty()) return;
      id = published_[Below(published_.size())];
    }
    if (held_.contains(id.Bytes())) return;
    // Its owner may have released it meanwhile.
    ASSERT_THAT(CodeOf(table_.PinBuffer(*session_, id, BufferAccess::kReadWrite)),
                testing::AnyOf(StatusCode::kPermissionDenied, StatusCode::kNotFound));
    ASSERT_THAT(table_.ReleaseBuffer(*session_, id).code(),
                testing::AnyOf(StatusCode::kPermissionDenied, StatusCode::kNotFound));
  }

  void UseOldBuffer() {
    if (old_.empty()) return;
    ASSERT_EQ(CodeOf(table_.PinBuffer(*session_, old_[Below(old_.size())], BufferAccess::kReadWrite)),
              StatusCode::kNotFound);
  }

  void End() {
    if (session_ == nullptr) return;
    if (Below(2) == 0) {
      const auto dropped = table_.EndSession(session_->id(), SessionEnd::kClosed);
      ASSERT_TRUE(dropped.ok()) << dropped.status();
      ASSERT_EQ(*dropped, held_.size());
    }
    table_.CloseLease(lease_);
    ASSERT_TRUE(session_->ended());
    held_.clear();
    old_.clear();
    orphans_.clear();
    // Until its buffers are gone it may be full as well.
    ASSERT_TRUE(Eventually([&] { return CodeOf(table_.AllocateBuffer(*session_, 1)) == StatusCode::kNotFound; }));
    session_.reset();
    going_ = std::make_shared<std::atomic<std::size_t>>(0);  // of the next session
  }

  SessionTable& table_;
  const Peer peer_;
  std::mt19937_64 random_;
  std::mutex& mutex_;
  std::vector<Id>& published_;
  Id lease_;
  std::shared_ptr<Session> session_;
  std::map<std::string, Held> held_;
  std::vector<Id> old_;
  std::vector<std::vector<BufferPin>> orphans_;  // pins of released buffers, by buffer
  std::shared_ptr<std::atomic<std::size_t>> going_ = std::make_shared<std::atomic<std::size_t>>(0);
};

TEST(SessionTableConcurrencyTest, RandomOperationsMatchTheModel) {
  constexpr std::uint64_t kSeed = 20240717;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Metrics metrics{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper(std::chrono::seconds(10), metrics);
  SessionTable table(kEpoch,
                     {.sessions_max = 100,
                      .leases_max = 100,
                      .buffers_per_session_max = kBuffersMax,
                      .buffer_bytes_max = 1U << 30U,
                      .session_buffer_bytes_max = 1U << 28U},
                     metrics, reaper, MakeIdleLane);
  std::mutex mutex;
  std::vector<Id> published;
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Client(table, Peer{.pid = static_cast<pid_t>(t), .uid = 1000 + t, .gid = 0}, kSeed + t, mutex, published)
          .Run(5'000);
    });
  }
  bool counts_ok = true;
  for (int i = 0; i < 200; ++i) {
    const SessionCounts counts = table.Counts();
    counts_ok = counts_ok && counts.sessions <= 4 && counts.buffers <= 32;
    for (const BufferRow& row : table.ListBuffers([](const Peer&) { return true; }).rows) {
      counts_ok = counts_ok && row.bytes > 0 && row.session_label == "client";
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(counts_ok);
  EXPECT_GT(published.size(), 1'000U);
  EXPECT_TRUE(AwaitIdle(reaper));
  EXPECT_EQ(table.Counts().ending, 0U);
  EXPECT_EQ(table.Counts().sessions, 0U);
  EXPECT_EQ(table.Counts().buffers, 0U);
  EXPECT_EQ(table.Counts().bytes_held, 0U);
  const std::string text = metrics.Serialize();
  EXPECT_THAT(text, HasSubstr("\ntessera_sessions 0\n"));
  EXPECT_THAT(text, HasSubstr("\ntessera_buffer_bytes{origin=\"allocated\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("\ntessera_buffer_bytes{origin=\"imported\"} 0\n"));
}

}  // namespace
}  // namespace tessera::server
