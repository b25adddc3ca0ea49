// Limits of principals, which hold over all of their sessions and until memory is really gone, and lists that are read
// page by page while they change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/text.h"
#include "tests/server/session/table_fixture.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::StartsWith;

SessionLimits PrincipalLimits() {
  SessionLimits limits = RoomyLimits();
  limits.sessions_max = 4;
  limits.sessions_per_principal_max = 3;
  limits.leases_max = 6;
  limits.leases_per_principal_max = 4;
  limits.buffers_max = 5;
  limits.buffers_per_principal_max = 4;
  limits.buffers_per_session_max = 3;
  limits.principal_buffer_bytes_max = 1'000;
  return limits;
}

class SessionQuotaTest : public TableTest {
 protected:
  SessionQuotaTest() : TableTest(PrincipalLimits()) {}

  // Refused by the limit of that name, with nothing changed.
  void ExpectRefused(const std::string& limit, const absl::Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(MessageOf(status), StartsWith(limit + ": "));
    ++refusals_[limit];
    EXPECT_EQ(Metric("tessera_refused_total{limit=\"" + limit + "\"}"), refusals_[limit]);
  }

  std::map<std::string, int> refusals_;
};

TEST_F(SessionQuotaTest, BuffersOfAPrincipal) {
  const std::shared_ptr<Session> first = Open(kAnn);
  const std::shared_ptr<Session> second = Open(kAnn);
  const std::shared_ptr<Session> bens = Open(kBen);
  ASSERT_TRUE(first && second && bens);
  const Id released = Allocate(*first, 1);
  Allocate(*first, 1);
  Allocate(*first, 1);
  ExpectRefused("buffers_per_session_max", table_.AllocateBuffer(*first, 1).status());
  Allocate(*second, 1);
  ExpectRefused("buffers_per_principal_max", table_.AllocateBuffer(*second, 1).status());
  ExpectRefused("buffers_per_principal_max", table_.AllocateBuffer(*second, 1, "cuda").status());
  EXPECT_EQ(Counts().buffers, 4U);
  EXPECT_EQ(Counts().bytes_held, 4U);
  Allocate(*bens, 1);
  ExpectRefused("buffers_max", table_.AllocateBuffer(*bens, 1).status());

  BufferPin pin = Pin(*first, released);
  ASSERT_TRUE(table_.ReleaseBuffer(*first, released).ok());
  ASSERT_TRUE(AwaitIdle(reaper_));
  ExpectRefused("buffers_per_principal_max", table_.AllocateBuffer(*second, 1).status());
  pin = BufferPin();
  ASSERT_TRUE(AwaitIdle(reaper_));
  Allocate(*second, 1);
}

TEST_F(SessionQuotaTest, BytesOfAPrincipal) {
  const std::shared_ptr<Session> first = Open(kAnn);
  const std::shared_ptr<Session> second = Open(kAnn);
  const std::shared_ptr<Session> bens = Open(kBen);
  ASSERT_TRUE(first && second && bens);
  const Id half = Allocate(*first, 500);
  ExpectRefused("buffer_bytes_per_principal_max", table_.AllocateBuffer(*second, 501).status());
  Allocate(*second, 500);
  Allocate(*bens, 1'000);
  ExpectRefused("buffer_bytes_per_principal_max", table_.AllocateBuffer(*bens, 1).status());
  EXPECT_EQ(Counts().bytes_held, 2'000U);
  ASSERT_TRUE(table_.ReleaseBuffer(*first, half).ok());
  ASSERT_TRUE(AwaitIdle(reaper_));
  Allocate(*second, 500);
}

TEST_F(SessionQuotaTest, SharedBuffersCountForTheirOwner) {
  const std::shared_ptr<Session> anns = Open(kAnn);
  const std::shared_ptr<Session> bens = Open(kBen);
  ASSERT_TRUE(anns && bens);
  const Id shared = Allocate(*anns, 1'000);
  MustShare(*anns, shared, kBensPrincipal, BufferAccess::kRead);
  const BufferPin pin = Pin(*bens, shared, BufferAccess::kRead);
  Allocate(*bens, 1'000);
  ExpectRefused("buffer_bytes_per_principal_max", table_.AllocateBuffer(*anns, 1).status());
}

// Else a principal could hold any number of bytes by ending sessions whose memory others use.
TEST_F(SessionQuotaTest, MemoryOfEndedSessionsCounts) {
  const Id lease = Lease(kAnn);
  std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  const std::shared_ptr<Session> bens = Open(kBen);
  ASSERT_TRUE(session && bens);
  const Id shared = Allocate(*session, 800);
  MustShare(*session, shared, kBensPrincipal, BufferAccess::kRead);
  BufferPin running = Pin(*bens, shared, BufferAccess::kRead);
  table_.CloseLease(lease);
  session.reset();
  EXPECT_EQ(Counts().bytes_held, 800U);
  const std::shared_ptr<Session> next = Open(kAnn);
  ASSERT_NE(next, nullptr);
  ExpectRefused("buffer_bytes_per_principal_max", table_.AllocateBuffer(*next, 201).status());
  Allocate(*next, 200);
  running = BufferPin();
  EXPECT_EQ(Counts().bytes_held, 200U);
  Allocate(*next, 800);
}

TEST_F(SessionQuotaTest, SessionsOfAPrincipal) {
  std::vector<std::shared_ptr<Session>> sessions = {Open(kAnn), OpenFor(std::chrono::seconds(10)),
                                                    OpenOn(Lease(kAnn, LeaseKind::kAttach), kAnn)};
  for (const auto& session : sessions) ASSERT_NE(session, nullptr);
  const Id lease = Lease(kAnn);
  ExpectRefused("sessions_per_principal_max", table_.OpenSession(kAnn, lease, "").status());
  ExpectRefused("sessions_per_principal_max", table_.OpenSession(kAnn, std::chrono::seconds(10), "").status());
  EXPECT_EQ(Metric("tessera_sessions"), 3);
  const std::shared_ptr<Session> bens = Open(kBen);
  ASSERT_NE(bens, nullptr);
  ExpectRefused("sessions_max", table_.OpenSession(kBen, std::chrono::seconds(10), "").status());
  ASSERT_TRUE(table_.EndSession(sessions[1]->id(), SessionEnd::kClosed).ok());
  EXPECT_NE(OpenOn(lease, kAnn), nullptr) << "open ones are limited; and the refusal did not use the lease up";
}

TEST_F(SessionQuotaTest, LeasesOfAPrincipal) {
  std::vector<Id> leases;
  for (const LeaseKind kind :
       {LeaseKind::kSideChannel, LeaseKind::kAttach, LeaseKind::kAttach, LeaseKind::kSideChannel}) {
    leases.push_back(Lease(kAnn, kind));
  }
  for (const LeaseKind kind : {LeaseKind::kSideChannel, LeaseKind::kAttach}) {
    ExpectRefused("connections_per_principal_max", table_.OpenLease(kAnn, kind).status());
  }
  EXPECT_NE(OpenFor(std::chrono::seconds(10)), nullptr) << "a time to live is no connection";
  Lease(kBen);
  Lease(kBen);
  ExpectRefused("side_connections_max", table_.OpenLease(kCid).status());
  table_.CloseLease(leases[1]);
  table_.CloseLease(leases[1]);
  Lease(kAnn);
  ExpectRefused("connections_per_principal_max", table_.OpenLease(kAnn).status());
  EXPECT_EQ(Metric("tessera_leases{kind=\"side_channel\"}"), 5);
  EXPECT_EQ(Metric("tessera_leases{kind=\"attach\"}"), 1);
}

class PagingTest : public TableTest {
 protected:
  // Pages of `limit` from the beginning: how many rows each has. Rows must rise, none comes twice.
  template <typename List>
  std::vector<std::size_t> Walk(const List& list, std::size_t limit, std::vector<Id>* ids = nullptr) {
    std::vector<std::size_t> sizes;
    PageRequest request{.after = std::nullopt, .limit = limit};
    while (true) {
      const auto page = list(request);
      sizes.push_back(page.rows.size());
      for (const auto& row : page.rows) {
        if (request.after.has_value()) {
          EXPECT_TRUE(std::pair(row.id.index, row.id.generation) >
                      std::pair(request.after->index, request.after->generation));
        }
        request.after = row.id;
        if (ids != nullptr) ids->push_back(row.id);
      }
      if (!page.more) return sizes;
      if (page.rows.empty()) {
        ADD_FAILURE() << "more, and yet nothing";
        return sizes;
      }
    }
  }
  auto SessionPages() {
    return [this](const PageRequest& request) { return table_.ListSessions(Everybody, request); };
  }
  auto BufferPages() {
    return [this](const PageRequest& request) { return table_.ListBuffers(Everybody, {}, request); };
  }
};

TEST_F(PagingTest, EveryRowOnceWhateverTheLimit) {
  EXPECT_THAT(Walk(SessionPages(), 2), ElementsAre(0));
  EXPECT_THAT(Walk(BufferPages(), 2), ElementsAre(0));
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<Id> ids, buffers;
  for (int i = 0; i < 4; ++i) {
    sessions.push_back(Open(i % 2 == 0 ? kAnn : kBen));
    ASSERT_NE(sessions.back(), nullptr);
    ids.push_back(sessions.back()->id());
    buffers.push_back(Allocate(*sessions.back()));
  }
  std::vector<Id> seen;
  EXPECT_THAT(Walk(SessionPages(), 1, &seen), ElementsAre(1, 1, 1, 1));
  EXPECT_EQ(seen, ids);
  EXPECT_THAT(Walk(SessionPages(), 2), ElementsAre(2, 2)) << "an exact multiple";
  EXPECT_THAT(Walk(SessionPages(), 3), ElementsAre(3, 1));
  EXPECT_THAT(Walk(SessionPages(), 4), ElementsAre(4));
  EXPECT_THAT(Walk(SessionPages(), 1'000), ElementsAre(4));
  seen.clear();
  EXPECT_THAT(Walk(BufferPages(), 1, &seen), ElementsAre(1, 1, 1, 1));
  EXPECT_EQ(seen, buffers);
  EXPECT_THAT(Walk(BufferPages(), 2), ElementsAre(2, 2));
  EXPECT_THAT(Walk(BufferPages(), 3), ElementsAre(3, 1));
  const auto of_ann = [this](const PageRequest& request) {
    return table_.ListBuffers([](const Peer& owner) { return owner.uid == kAnn.uid; }, {}, request);
  };
  EXPECT_THAT(Walk(of_ann, 1), ElementsAre(1, 1)) << "what is left out takes no place";
}

TEST_F(PagingTest, EndedAndOpenSessionsOfOneSlotAreBothThere) {
  std::vector<BufferPin> pins;
  std::vector<Id> ids;
  for (int i = 0; i < 3; ++i) {
    const Id lease = Lease(kAnn);
    const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
    ASSERT_NE(session, nullptr);
    EXPECT_EQ(session->id().index, 0U) << "the slot is not re-used, so this test proves nothing";
    pins.push_back(Pin(*session, Allocate(*session)));
    ids.push_back(session->id());
    table_.CloseLease(lease);
  }
  ids.push_back(Open(kAnn)->id());
  ASSERT_TRUE(AwaitIdle(reaper_));
  for (const std::size_t limit : {1U, 2U, 3U, 4U}) {
    std::vector<Id> seen;
    Walk(SessionPages(), limit, &seen);
    EXPECT_EQ(seen, ids) << limit;
  }
}

TEST_F(PagingTest, EndsBetweenPagesHideNobody) {
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<Id> buffers;
  for (int i = 0; i < 6; ++i) {
    sessions.push_back(Open(kAnn));
    ASSERT_NE(sessions.back(), nullptr);
    buffers.push_back(Allocate(*sessions.back()));
  }
  const auto first_page = table_.ListSessions(Everybody, {.after = std::nullopt, .limit = 2});
  const auto first_buffers = table_.ListBuffers(Everybody, {}, {.after = std::nullopt, .limit = 2});
  ASSERT_EQ(first_page.rows.size(), 2U);
  ASSERT_EQ(first_buffers.rows.size(), 2U);
  // Among them the one after which the next page begins; a new one takes over a slot before it.
  for (int i : {0, 1, 3}) {
    ASSERT_TRUE(table_.EndSession(sessions[i]->id(), SessionEnd::kClosed).ok());
    sessions[i].reset();
  }
  ASSERT_TRUE(AwaitIdle(reaper_));
  const std::shared_ptr<Session> next = Open(kBen);
  ASSERT_NE(next, nullptr);
  std::vector<Id> seen;
  for (const SessionRow& row : table_.ListSessions(Everybody, {.after = first_page.rows[1].id, .limit = 9}).rows) {
    if (!(row.id == next->id())) seen.push_back(row.id);
  }
  EXPECT_THAT(seen, ElementsAre(sessions[2]->id(), sessions[4]->id(), sessions[5]->id()));
  seen.clear();
  for (const BufferRow& row : table_.ListBuffers(Everybody, {}, {.after = first_buffers.rows[1].id, .limit = 9}).rows) {
    seen.push_back(row.id);
  }
  EXPECT_THAT(seen, ElementsAre(buffers[2], buffers[4], buffers[5]));
}

}  // namespace
}  // namespace tessera::server
