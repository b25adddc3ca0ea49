// What sessions have of streams, timelines and events: limits, every way to name one wrongly, the pages of exported
// timelines, imports of events, waiting for them, and that nothing of it outlives its session.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/sync_slot.h"
#include "common/text.h"
#include "tests/server/session/table_fixture.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

constexpr char kOtherGpu[] = "GPU-99999999-0000-0000-0000-000000000000";
constexpr char kMig[] = "MIG-11111111-2222-3333-4444-555555555555";
constexpr auto kSoon = 5s;  // a poller looks every millisecond, and a busy machine stalls for longer than that

std::optional<StatusCode> CodeAt(const Timeline& timeline, std::uint64_t value) {
  const std::optional<absl::Status> reached = timeline.Reached(value);
  return reached.has_value() ? std::optional<StatusCode>(reached->code()) : std::nullopt;
}

// What the memory says that a client would map.
std::uint64_t ValueInFile(const Timeline& timeline) {
  std::uint64_t value = 0;
  const auto offset = static_cast<off_t>(timeline.word()->byte_offset());
  EXPECT_EQ(::pread(timeline.word()->page()->fd(), &value, sizeof(value), offset), static_cast<ssize_t>(sizeof(value)));
  return value;
}

ino_t FileOf(const Timeline& timeline) {
  struct stat file {};
  EXPECT_EQ(::fstat(timeline.word()->page()->fd(), &file), 0);
  return file.st_ino;
}

class SyncTableTest : public TableTest {
 protected:
  explicit SyncTableTest(const SessionLimits& limits = RoomyLimits()) : TableTest(limits) {}

  static Id Must(const absl::StatusOr<Id>& made) {
    EXPECT_TRUE(made.ok()) << made.status();
    return made.value_or(Id{});
  }
  Id MakeStream(Session& session) { return Must(table_.OpenStream(session, {})); }
  Id MakeTimeline(Session& session, SessionTable::TimelineSpec spec = {}) {
    return Must(table_.CreateTimeline(session, std::move(spec)));
  }
  Id MakeExported(Session& session, std::uint64_t value = 0) {
    return MakeTimeline(session, {.value = value, .exported = true});
  }
  Id MakeEvent(Session& session) { return Must(table_.ImportEvent(session, GoodImport())); }

  static EventImport GoodImport() {
    return {.handle = std::string(FakeDeviceMemory::kEventHandle.begin(), FakeDeviceMemory::kEventHandle.end()),
            .device_uuid = kFakeGpu,
            .exporter_pid = ::getpid() + 1};
  }

  std::shared_ptr<Timeline> TimelineOf(const Session& session, const Id& id) {
    const auto found = table_.FindPoint(session, id);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->timeline : nullptr;
  }
  std::shared_ptr<DeviceEvent> EventOf(const Session& session, const Id& id) {
    const auto found = table_.FindPoint(session, id);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->event : nullptr;
  }

  // Every call that names a stream, a timeline or an event, in the order FindStream, FindPoint, ReleaseSync.
  std::vector<StatusCode> CodesOf(Session& session, const Id& id) {
    return {CodeOf(table_.FindStream(session, id)), CodeOf(table_.FindPoint(session, id)),
            CodeOf(table_.ReleaseSync(session, id))};
  }
  static std::vector<StatusCode> All(StatusCode code) { return {code, code, code}; }

  int EventsOpen() {
    EXPECT_TRUE(AwaitIdle(reaper_));
    return gpu_.events_open;
  }
};

SessionLimits FewSyncs() {
  SessionLimits limits = RoomyLimits();
  limits.streams_per_session_max = 3;
  limits.timelines_per_session_max = 4;
  return limits;
}

class SyncLimitTest : public SyncTableTest {
 protected:
  explicit SyncLimitTest(const SessionLimits& limits = FewSyncs()) : SyncTableTest(limits) {}

  // Refused by the limit of that name, and nothing is there that was not.
  void ExpectRefused(const std::string& limit, const Session& session,
                     const std::function<absl::StatusOr<Id>()>& call) {
    const int events = EventsOpen();
    const SessionCounts before = Counts();
    const std::size_t lanes = table_.LanesOf(session).size();
    const absl::Status status = call().status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(MessageOf(status), StartsWith(limit + ": "));
    EXPECT_EQ(Metric("tessera_refused_total{limit=\"" + limit + "\"}"), ++refusals_[limit]);
    ExpectCounts(before.streams, before.timelines);
    EXPECT_EQ(table_.LanesOf(session).size(), lanes);
    EXPECT_EQ(EventsOpen(), events);
  }

  void ExpectCounts(std::size_t streams, std::size_t timelines) {
    const SessionCounts counts = Counts();
    EXPECT_EQ(counts.streams, streams);
    EXPECT_EQ(counts.timelines, timelines);
    std::size_t streams_in_rows = 0, timelines_in_rows = 0;
    for (const SessionRow& row : Sessions()) {
      streams_in_rows += row.streams;
      timelines_in_rows += row.timelines;
    }
    EXPECT_EQ(streams_in_rows, streams);
    EXPECT_EQ(timelines_in_rows, timelines);
  }

  std::map<std::string, int> refusals_;
};

TEST_F(SyncLimitTest, StreamsOfASession) {
  const std::shared_ptr<Session> session = Open(kAnn);
  const std::shared_ptr<Session> other = Open(kAnn);
  ASSERT_TRUE(session && other);
  ExpectCounts(0, 0);  // its own stream is none of them
  std::vector<Id> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(MakeStream(*session));
  ExpectCounts(3, 0);
  for (int i = 0; i < 2; ++i) {
    ExpectRefused("streams_per_session_max", *session, [&] { return table_.OpenStream(*session, {}); });
  }
  MakeTimeline(*session);
  MakeStream(*other);
  ExpectCounts(4, 1);
  ASSERT_TRUE(table_.ReleaseSync(*session, streams[1]).ok());
  ExpectCounts(3, 1);
  MakeStream(*session);
  ExpectRefused("streams_per_session_max", *session, [&] { return table_.OpenStream(*session, {}); });
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  ExpectCounts(1, 0);
}

TEST_F(SyncLimitTest, TimelinesAndEventsOfASessionCountTogether) {
  const std::shared_ptr<Session> session = Open(kAnn);
  const std::shared_ptr<Session> other = Open(kAnn);
  ASSERT_TRUE(session && other);
  const std::vector<std::function<absl::StatusOr<Id>()>> kinds = {
      [&] { return table_.CreateTimeline(*session, {}); },
      [&] { return table_.CreateTimeline(*session, {.exported = true}); },
      [&] { return table_.ImportEvent(*session, GoodImport()); }};
  std::vector<Id> made;
  for (const auto& make : kinds) made.push_back(Must(make()));
  made.push_back(MakeTimeline(*session));
  ExpectCounts(0, 4);
  for (const auto& make : kinds) ExpectRefused("timelines_per_session_max", *session, make);
  MakeStream(*session);
  MakeEvent(*other);
  ExpectCounts(1, 5);
  // Any of them makes room for any other.
  for (std::size_t released = 0; released < kinds.size(); ++released) {
    for (const auto& make : kinds) {
      ASSERT_TRUE(table_.ReleaseSync(*session, made[released]).ok());
      ExpectCounts(1, 4);
      made[released] = Must(make());
      ExpectRefused("timelines_per_session_max", *session, kinds[released]);
    }
  }
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  ExpectCounts(0, 1);
  EXPECT_EQ(EventsOpen(), 1);
}

TEST_F(SyncLimitTest, ALimitOfZeroIsALimit) {
  SessionLimits limits = RoomyLimits();
  limits.streams_per_session_max = limits.timelines_per_session_max = 0;
  SessionTable table(7, limits, metrics_, reaper_, MakeIdleLane, {&gpu_});
  const auto lease = table.OpenLease(kAnn);
  ASSERT_TRUE(lease.ok());
  const auto token = table.OpenSession(kAnn, *lease, "");
  ASSERT_TRUE(token.ok());
  const std::shared_ptr<Session> session = *table.FindSession(kAnn, *token);
  EXPECT_EQ(CodeOf(table.OpenStream(*session, {})), StatusCode::kResourceExhausted);
  EXPECT_EQ(CodeOf(table.CreateTimeline(*session, {})), StatusCode::kResourceExhausted);
  EXPECT_EQ(CodeOf(table.ImportEvent(*session, GoodImport())), StatusCode::kResourceExhausted);
  EXPECT_EQ(EventsOpen(), 0);
}

TEST_F(SyncTableTest, AnEndedSessionGetsNothing) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  EXPECT_EQ(CodeOf(table_.OpenStream(*session, {})), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.CreateTimeline(*session, {})), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.CreateTimeline(*session, {.exported = true})), StatusCode::kNotFound);
  EXPECT_EQ(CodeOf(table_.ImportEvent(*session, GoodImport())), StatusCode::kNotFound);
  EXPECT_EQ(Counts().streams, 0U);
  EXPECT_EQ(Counts().timelines, 0U);
  EXPECT_EQ(EventsOpen(), 0);
}

TEST_F(SyncTableTest, EachIsFoundAsWhatItIs) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  const Id stream = MakeStream(*session);
  const Id timeline = MakeTimeline(*session, {.value = 9});
  const Id event = MakeEvent(*session);

  const auto lane = table_.FindStream(*session, stream);
  ASSERT_TRUE(lane.ok()) << lane.status();
  EXPECT_NE(*lane, nullptr);
  EXPECT_NE(*lane, session->lane());
  EXPECT_THAT(table_.LanesOf(*session), ElementsAre(session->lane(), *lane));

  const auto point = table_.FindPoint(*session, timeline);
  ASSERT_TRUE(point.ok()) << point.status();
  ASSERT_NE(point->timeline, nullptr);
  EXPECT_EQ(point->timeline->value(), 9U);
  EXPECT_EQ(point->timeline->word(), nullptr);
  EXPECT_EQ(point->event, nullptr);
  EXPECT_TRUE(point->own);

  const auto imported = table_.FindPoint(*session, event);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->timeline, nullptr);
  ASSERT_NE(imported->event, nullptr);
  EXPECT_TRUE(imported->own);
  ASSERT_TRUE(imported->event->Record(nullptr).ok());
  EXPECT_EQ(gpu_.event_records, 1);
}

TEST_F(SyncTableTest, OneKindIsNotAnother) {
  const Id lease = Lease(kAnn);
  const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  ASSERT_NE(session, nullptr);
  const Id stream = MakeStream(*session);
  const Id timeline = MakeTimeline(*session);
  const Id event = MakeEvent(*session);
  EXPECT_EQ(CodeOf(table_.FindPoint(*session, stream)), StatusCode::kInvalidArgument);
  for (const Id& id : {timeline, event}) {
    EXPECT_EQ(CodeOf(table_.FindStream(*session, id)), StatusCode::kInvalidArgument);
  }
  for (const Id& id : {stream, event}) {
    EXPECT_EQ(CodeOf(table_.ExportTimeline(lease, id)), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(CodeOf(table_.PinBuffer(*session, timeline, BufferAccess::kRead)), StatusCode::kNotFound)
      << "an id of one table answers in another";
}

TEST_F(SyncTableTest, NobodyElsesAnswer) {
  const Id lease = Lease(kAnn);
  const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  const std::shared_ptr<Session> same_user = Open(kAnn);
  const std::shared_ptr<Session> ben = Open(kBen);
  ASSERT_TRUE(session && same_user && ben);
  for (const Id& id : {MakeStream(*session), MakeTimeline(*session), MakeExported(*session), MakeEvent(*session)}) {
    EXPECT_EQ(CodesOf(*same_user, id), All(StatusCode::kPermissionDenied));
    EXPECT_EQ(CodesOf(*ben, id), All(StatusCode::kPermissionDenied));
  }
  EXPECT_EQ(Counts().streams, 1U);
  EXPECT_EQ(Counts().timelines, 3U);
}

TEST_F(SyncTableTest, UnknownAndFormerIds) {
  const Id lease = Lease(kAnn);
  const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  ASSERT_NE(session, nullptr);
  for (const Id& id : {MakeStream(*session), MakeExported(*session), MakeEvent(*session)}) {
    Id wrong = id;
    wrong.epoch ^= 1U;
    EXPECT_EQ(CodesOf(*session, wrong), All(StatusCode::kFailedPrecondition));
    EXPECT_EQ(CodeOf(table_.ExportTimeline(lease, wrong)), StatusCode::kFailedPrecondition);
    for (std::uint32_t Id::*part : {&Id::index, &Id::generation, &Id::nonce}) {
      wrong = id;
      wrong.*part += 100;
      EXPECT_EQ(CodesOf(*session, wrong), All(StatusCode::kNotFound));
      EXPECT_EQ(CodeOf(table_.ExportTimeline(lease, wrong)), StatusCode::kNotFound);
    }
  }
  EXPECT_EQ(CodesOf(*session, Id{}), All(StatusCode::kNotFound));
  EXPECT_EQ(Counts().streams, 1U);
  EXPECT_EQ(Counts().timelines, 2U);
}

TEST_F(SyncTableTest, ReleasedIdsStayDeadWhenTheirSlotIsUsedAgain) {
  const Id lease = Lease(kAnn);
  const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  ASSERT_NE(session, nullptr);
  const auto make = [&](int kind) {
    return kind == 0 ? MakeStream(*session) : kind == 1 ? MakeExported(*session) : MakeEvent(*session);
  };
  std::vector<Id> old;
  for (int i = 0; i < 12; ++i) {
    const Id id = make(i % 3);
    EXPECT_EQ(id.index, 0U) << "the slot is not used again, so this test proves nothing";
    for (const Id& dead : old) {
      EXPECT_EQ(CodesOf(*session, dead), All(StatusCode::kNotFound));
      EXPECT_EQ(CodeOf(table_.ExportTimeline(lease, dead)), StatusCode::kNotFound);
    }
    ASSERT_TRUE(table_.ReleaseSync(*session, id).ok());
    EXPECT_EQ(CodesOf(*session, id), All(StatusCode::kNotFound));
    old.push_back(id);
  }
  EXPECT_EQ(Counts().streams, 0U);
  EXPECT_EQ(Counts().timelines, 0U);
}

TEST_F(SyncTableTest, ASharedTimelineIsForWhomItNames) {
  const Id lease = Lease(kAnn);
  const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  const std::shared_ptr<Session> same_user = Open(kAnn);
  const std::shared_ptr<Session> ben = Open(kBen);
  const Id bens_lease = Lease(kBen);
  const std::shared_ptr<Session> bens_other = OpenOn(bens_lease, kBen);
  const std::shared_ptr<Session> cid = Open(kCid);
  ASSERT_TRUE(session && same_user && ben && bens_other && cid);
  for (const bool exported : {false, true}) {
    const Id id = MakeTimeline(*session, {.shared_with = {"uid:77", kBensPrincipal}, .exported = exported});
    const std::shared_ptr<Timeline> timeline = TimelineOf(*session, id);
    for (Session* friendly : {ben.get(), bens_other.get()}) {
      const auto found = table_.FindPoint(*friendly, id);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->timeline, timeline);
      EXPECT_EQ(found->event, nullptr);
      EXPECT_FALSE(found->own);
      EXPECT_EQ(CodeOf(table_.ReleaseSync(*friendly, id)), StatusCode::kPermissionDenied);
      EXPECT_EQ(CodeOf(table_.FindStream(*friendly, id)), StatusCode::kPermissionDenied);
    }
    EXPECT_EQ(CodeOf(table_.ExportTimeline(bens_lease, id)), StatusCode::kPermissionDenied)
        << "its memory is its session's alone";
    EXPECT_EQ(CodesOf(*same_user, id), All(StatusCode::kPermissionDenied)) << "its own user is not named";
    EXPECT_EQ(CodesOf(*cid, id), All(StatusCode::kPermissionDenied));
    EXPECT_TRUE(table_.FindPoint(*session, id)->own);
  }
  const Id among_ann = MakeTimeline(*session, {.shared_with = {kAnnsPrincipal}});
  ASSERT_TRUE(table_.FindPoint(*same_user, among_ann).ok());
  EXPECT_FALSE(table_.FindPoint(*same_user, among_ann)->own);
  EXPECT_TRUE(table_.FindPoint(*session, among_ann)->own);
  EXPECT_EQ(CodeOf(table_.FindPoint(*ben, among_ann)), StatusCode::kPermissionDenied);
}

TEST_F(SyncTableTest, ASharedTimelineGoesWithItsSession) {
  const std::shared_ptr<Session> session = Open(kAnn);
  const std::shared_ptr<Session> ben = Open(kBen);
  ASSERT_TRUE(session && ben);
  const Id id = MakeTimeline(*session, {.shared_with = {kBensPrincipal}});
  const std::shared_ptr<Timeline> timeline = TimelineOf(*ben, id);
  ASSERT_NE(timeline, nullptr);
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  EXPECT_EQ(CodeOf(table_.FindPoint(*ben, id)), StatusCode::kNotFound);
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(CodeAt(*timeline, 1), StatusCode::kAborted);
}

TEST_F(SyncTableTest, PrincipalsToShareWith) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  std::vector<std::string> principals;
  for (std::size_t i = 0; i < SessionTable::kSharesMax; ++i) principals.push_back("uid:" + std::to_string(i));
  MakeTimeline(*session, {.shared_with = principals});
  principals.push_back(kBensPrincipal);
  const auto expect_refused = [&](const std::vector<std::string>& shared_with) {
    for (const bool exported : {false, true}) {
      const absl::Status status =
          table_.CreateTimeline(*session, {.shared_with = shared_with, .exported = exported}).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(MessageOf(status), StartsWith("shared_with: "));
    }
  };
  expect_refused(principals);
  for (const char* const wrong : {"", "uid", "uid:", "uid:01", "uid:-1", "uid:+1", "uid: 1", "uid:1 ", "UID:1", "1000",
                                  "uid:4294967296", "uid:1x", "cn:ann", "anonymous"}) {
    SCOPED_TRACE(wrong);
    expect_refused({wrong});
    expect_refused({kBensPrincipal, wrong});
  }
  EXPECT_EQ(Counts().timelines, 1U);
}

TEST_F(SyncTableTest, InitialValues) {
  const Id lease = Lease(kAnn);
  const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  ASSERT_NE(session, nullptr);
  constexpr std::uint64_t kMax = ~std::uint64_t{0};
  for (const std::uint64_t value : {kSyncValueMax, kSyncValueMax + 1, kMax}) {
    const absl::Status status = table_.CreateTimeline(*session, {.value = value, .exported = true}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(MessageOf(status), StartsWith("initial_value: "));
  }
  EXPECT_EQ(Counts().timelines, 0U);
  for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{5}, kSyncValueMax - 1}) {
    const Id id = MakeExported(*session, value);
    const auto timeline = table_.ExportTimeline(lease, id);
    ASSERT_TRUE(timeline.ok()) << timeline.status();
    EXPECT_EQ((*timeline)->value(), value);
    EXPECT_EQ(ValueInFile(**timeline), value);
  }
  const Id plain = MakeTimeline(*session, {.value = kMax});
  EXPECT_EQ(TimelineOf(*session, plain)->value(), kMax) << "the bound is of memory alone";
}

TEST_F(SyncTableTest, SixtyFourExportedTimelinesASession) {
  const std::shared_ptr<Session> session = Open(kAnn);
  const std::shared_ptr<Session> other = Open(kAnn);
  ASSERT_TRUE(session && other);
  const auto expect_full = [&] {
    const absl::Status status = table_.CreateTimeline(*session, {.exported = true}).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(MessageOf(status), StartsWith("exported: "));
    EXPECT_EQ(Counts().timelines, 65U);
  };
  std::vector<Id> exported;
  std::set<std::uint64_t> places;
  ino_t file = 0;
  for (std::uint64_t i = 0; i < 64; ++i) {
    exported.push_back(MakeExported(*session, i));
    const std::shared_ptr<Timeline> timeline = TimelineOf(*session, exported.back());
    EXPECT_EQ(timeline->word()->byte_offset() % 64, 0U);
    places.insert(timeline->word()->byte_offset());
    if (i == 0) file = FileOf(*timeline);
    EXPECT_EQ(FileOf(*timeline), file);
  }
  EXPECT_EQ(places.size(), 64U);
  EXPECT_LT(*places.rbegin(), SyncPage::kBytes);
  for (std::uint64_t i = 0; i < 64; ++i) EXPECT_EQ(TimelineOf(*session, exported[i])->value(), i);
  MakeTimeline(*session);  // those are not counted
  expect_full();
  expect_full();
  MakeExported(*other);
  ASSERT_TRUE(table_.ReleaseSync(*other, MakeTimeline(*other)).ok());
  ASSERT_TRUE(table_.EndSession(other->id(), SessionEnd::kClosed).ok());

  // The one that was released in use is not there for others while it is, and nothing of it is left then.
  std::shared_ptr<Timeline> in_use = TimelineOf(*session, exported[40]);
  const std::uint64_t place = in_use->word()->byte_offset();
  in_use->Signal(50, absl::InternalError("failed"));
  ASSERT_TRUE(table_.ReleaseSync(*session, exported[40]).ok());
  EXPECT_EQ(CodeOf(table_.CreateTimeline(*session, {.exported = true})), StatusCode::kResourceExhausted);
  EXPECT_EQ(ValueInFile(*in_use), kSyncValueMax);
  in_use.reset();
  const Id next = MakeExported(*session, 3);
  const std::shared_ptr<Timeline> fresh = TimelineOf(*session, next);
  EXPECT_EQ(fresh->word()->byte_offset(), place);
  EXPECT_EQ(fresh->value(), 3U);
  EXPECT_EQ(CodeAt(*fresh, 4), std::nullopt);
  EXPECT_EQ(ValueInFile(*fresh), 3U);
  char rest[56];
  ASSERT_EQ(::pread(fresh->word()->page()->fd(), rest, sizeof(rest), static_cast<off_t>(place + 8)), 56);
  EXPECT_TRUE(std::all_of(std::begin(rest), std::end(rest), [](char byte) { return byte == 0; }));
  expect_full();
}

class ExportLimitTest : public SyncLimitTest {
 protected:
  static SessionLimits Limits() {
    SessionLimits limits = RoomyLimits();
    limits.timelines_per_session_max = 70;
    return limits;
  }
  ExportLimitTest() : SyncLimitTest(Limits()) {}
};

TEST_F(ExportLimitTest, ARefusedTimelineKeepsNoPlaceOnThePage) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  for (int i = 0; i < 63; ++i) MakeExported(*session);
  Id plain;
  for (int i = 0; i < 7; ++i) plain = MakeTimeline(*session);
  for (int i = 0; i < 3; ++i) {
    ExpectRefused("timelines_per_session_max", *session,
                  [&] { return table_.CreateTimeline(*session, {.exported = true}); });
  }
  ASSERT_TRUE(table_.ReleaseSync(*session, plain).ok());
  MakeExported(*session);
}

TEST_F(SyncTableTest, OnlyTheLeasesOwnSessionIsShownItsMemory) {
  const Id lease = Lease(kAnn);
  const std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  const Id other_lease = Lease(kAnn);
  const std::shared_ptr<Session> other = OpenOn(other_lease, kAnn);
  const Id bare_lease = Lease(kAnn);
  ASSERT_TRUE(session && other);
  const Id id = MakeTimeline(*session, {.shared_with = {kAnnsPrincipal}, .exported = true});
  const auto exported = table_.ExportTimeline(lease, id);
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(*exported, TimelineOf(*session, id));
  EXPECT_GE((*exported)->word()->page()->fd(), 0);
  EXPECT_EQ(CodeOf(table_.ExportTimeline(other_lease, id)), StatusCode::kPermissionDenied);

  const absl::Status bare = table_.ExportTimeline(bare_lease, id).status();
  EXPECT_EQ(bare.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(bare), HasSubstr("session"));
  Id unknown_lease = lease;
  ++unknown_lease.nonce;
  EXPECT_EQ(CodeOf(table_.ExportTimeline(unknown_lease, id)), StatusCode::kNotFound);

  const absl::Status plain = table_.ExportTimeline(lease, MakeTimeline(*session)).status();
  EXPECT_EQ(plain.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(plain), HasSubstr("exported"));

  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  EXPECT_EQ(CodeOf(table_.ExportTimeline(lease, id)), StatusCode::kNotFound);
}

TEST_F(SyncTableTest, SessionsHavePagesOfTheirOwn) {
  const std::shared_ptr<Session> first = Open(kAnn);
  const std::shared_ptr<Session> second = Open(kAnn);
  ASSERT_TRUE(first && second);
  const std::shared_ptr<Timeline> of_first = TimelineOf(*first, MakeExported(*first));
  const std::shared_ptr<Timeline> of_second = TimelineOf(*second, MakeExported(*second));
  EXPECT_EQ(of_first->word()->byte_offset(), of_second->word()->byte_offset());
  EXPECT_NE(of_first->word()->page(), of_second->word()->page());
  EXPECT_NE(FileOf(*of_first), FileOf(*of_second));
  of_first->Signal(9, absl::OkStatus());
  EXPECT_EQ(ValueInFile(*of_first), 9U);
  EXPECT_EQ(ValueInFile(*of_second), 0U);
  EXPECT_EQ(of_second->value(), 0U);
}

TEST_F(SyncTableTest, TheGpuSeesAnExportedTimeline) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  MakeExported(*session);
  const std::shared_ptr<Timeline> timeline = TimelineOf(*session, MakeExported(*session, 5));
  const auto address = timeline->word()->AddressOn(MemorySpace::Gpu(kFakeGpu));
  ASSERT_TRUE(address.has_value());
  EXPECT_EQ(*reinterpret_cast<const std::uint64_t*>(*address), 5U);
  EXPECT_EQ(timeline->word()->AddressOn(MemorySpace()), std::nullopt);
  EXPECT_EQ(timeline->word()->AddressOn(MemorySpace::Gpu(kOtherGpu)), std::nullopt);
}

// A value that a client writes without a call is seen by whoever waits, so the table has a poller.
TEST_F(SyncTableTest, WritesOfAClientWakeWhoeverWaits) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  const std::shared_ptr<Timeline> timeline = TimelineOf(*session, MakeExported(*session));
  std::atomic<bool> woken{false};
  ASSERT_TRUE(timeline->WakeWhenReached(8, [&woken] { woken = true; }));
  const std::uint64_t value = 8;
  const auto written = Clock::now();
  ASSERT_EQ(::pwrite(timeline->word()->page()->fd(), &value, sizeof(value),
                     static_cast<off_t>(timeline->word()->byte_offset())),
            8);
  EXPECT_TRUE(Eventually([&] { return woken.load(); }));
  EXPECT_LT(Clock::now() - written, kSoon);
  EXPECT_EQ(timeline->value(), 8U);
}

TEST_F(SyncTableTest, ReleasingATimelineFailsWhoeverWaits) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  for (const bool exported : {false, true}) {
    const Id id = MakeTimeline(*session, {.value = 2, .exported = exported});
    const std::shared_ptr<Timeline> timeline = TimelineOf(*session, id);
    int woken = 0;
    ASSERT_TRUE(timeline->WakeWhenReached(3, [&woken] { ++woken; }));
    ASSERT_TRUE(table_.ReleaseSync(*session, id).ok());
    EXPECT_EQ(woken, 1);
    EXPECT_EQ(CodeAt(*timeline, 2), StatusCode::kOk);
    EXPECT_EQ(CodeAt(*timeline, 3), StatusCode::kAborted);
    EXPECT_EQ(exported ? ValueInFile(*timeline) : kSyncValueMax, kSyncValueMax);
  }
}

TEST_F(SyncTableTest, TheEndOfASessionClosesItsTimelines) {
  const Id lease = Lease(kAnn);
  std::shared_ptr<Session> session = OpenOn(lease, kAnn);
  ASSERT_NE(session, nullptr);
  const std::shared_ptr<Timeline> plain = TimelineOf(*session, MakeTimeline(*session));
  const std::shared_ptr<Timeline> exported = TimelineOf(*session, MakeExported(*session));
  std::atomic<int> woken{0};
  for (const auto& timeline : {plain, exported}) ASSERT_TRUE(timeline->WakeWhenReached(1, [&woken] { ++woken; }));
  table_.CloseLease(lease);
  session.reset();
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(woken, 2);
  EXPECT_EQ(CodeAt(*plain, 1), StatusCode::kAborted);
  EXPECT_EQ(CodeAt(*exported, 1), StatusCode::kAborted);
  EXPECT_EQ(ValueInFile(*exported), kSyncValueMax);
}

TEST_F(SyncTableTest, AReleasedStreamIsOneOfItsSessionsWhileItHasWork) {
  const std::shared_ptr<Session> session = Open(kAnn);
  const std::shared_ptr<Session> other = Open(kAnn);
  ASSERT_TRUE(session && other);
  const Id kept = MakeStream(*session), released = MakeStream(*session), idle = MakeStream(*session);
  std::shared_ptr<SessionLane> kept_lane = *table_.FindStream(*session, kept);
  std::shared_ptr<SessionLane> released_lane = *table_.FindStream(*session, released);
  ASSERT_TRUE(table_.ReleaseSync(*session, released).ok());
  ASSERT_TRUE(table_.ReleaseSync(*session, idle).ok());
  EXPECT_THAT(table_.LanesOf(*session), ElementsAre(session->lane(), kept_lane, released_lane));
  EXPECT_THAT(table_.LanesOf(*other), ElementsAre(other->lane()));
  EXPECT_EQ(Counts().streams, 1U);
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  EXPECT_TRUE(AwaitIdle(reaper_));
  for (const auto& lane : {session->lane(), kept_lane, released_lane}) {
    EXPECT_EQ(static_cast<WatchedLane&>(*lane).drops(), 1) << "its queued work was not dropped";
  }
  EXPECT_EQ(LaneOf(*other).drops(), 0);
  EXPECT_EQ(Counts().streams, 0U);
}

TEST_F(SyncTableTest, ALaneGoesWithTheLastWhoHasIt) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  const Id stream = MakeStream(*session);
  std::shared_ptr<SessionLane> lane = *table_.FindStream(*session, stream);
  const std::weak_ptr<SessionLane> weak = lane;
  ASSERT_TRUE(table_.ReleaseSync(*session, stream).ok());
  EXPECT_FALSE(weak.expired());
  lane.reset();
  EXPECT_TRUE(weak.expired());
  EXPECT_THAT(table_.LanesOf(*session), ElementsAre(session->lane()));
}

TEST_F(SyncTableTest, ImportsOfEventsThatAreRefused) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  struct Row {
    const char* what;
    std::function<void(EventImport&)> mutate;
    StatusCode code;
    std::string begins;
  };
  const std::vector<Row> rows = {
      {"no handle", [](EventImport& import) { import.handle.clear(); }, StatusCode::kInvalidArgument, "handle: "},
      {"a byte short", [](EventImport& import) { import.handle.pop_back(); }, StatusCode::kInvalidArgument, "handle: "},
      {"a byte long", [](EventImport& import) { import.handle += '\0'; }, StatusCode::kInvalidArgument, "handle: "},
      {"of nothing", [](EventImport& import) { import.handle[9] = 'x'; }, StatusCode::kInvalidArgument, "handle: "},
      {"no GPU named", [](EventImport& import) { import.device_uuid.clear(); }, StatusCode::kInvalidArgument,
       "device_uuid: "},
      {"another GPU", [](EventImport& import) { import.device_uuid = kOtherGpu; }, StatusCode::kInvalidArgument,
       std::string("device_uuid: ") + kOtherGpu},
      {"part of a GPU", [](EventImport& import) { import.device_uuid = kMig; }, StatusCode::kUnimplemented,
       std::string("device_uuid: ") + kMig},
      {"no process", [](EventImport& import) { import.exporter_pid = 0; }, StatusCode::kInvalidArgument,
       "exporter_pid: "},
      {"a negative process", [](EventImport& import) { import.exporter_pid = -3; }, StatusCode::kInvalidArgument,
       "exporter_pid: "},
      {"the daemon's number", [](EventImport& import) { import.exporter_pid = ::getpid(); },
       StatusCode::kFailedPrecondition, "exporter_pid: "},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    EventImport import = GoodImport();
    row.mutate(import);
    const absl::Status status = table_.ImportEvent(*session, import).status();
    EXPECT_EQ(status.code(), row.code) << status;
    EXPECT_THAT(MessageOf(status), StartsWith(row.begins));
    EXPECT_EQ(Counts().timelines, 0U);
    EXPECT_EQ(EventsOpen(), 0);
  }
  MakeEvent(*session);
  EXPECT_EQ(Counts().timelines, 1U);
  EXPECT_EQ(EventsOpen(), 1);
}

TEST_F(SyncTableTest, TheDaemonsOwnProcessCannotImportItsEvent) {
  const Peer self{.pid = ::getpid(), .uid = 1000, .gid = 1000};
  const std::shared_ptr<Session> session = Open(self);
  ASSERT_NE(session, nullptr);
  const absl::Status status = table_.ImportEvent(*session, GoodImport()).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr("exported timeline")) << "it is not told what to do instead";
  EXPECT_EQ(EventsOpen(), 0);
}

TEST_F(SyncTableTest, ADaemonWithoutAGpuHasNoEventsButExportsTimelines) {
  SessionTable table(7, RoomyLimits(), metrics_, reaper_, MakeIdleLane);
  const auto lease = table.OpenLease(kAnn);
  ASSERT_TRUE(lease.ok());
  const auto token = table.OpenSession(kAnn, *lease, "");
  ASSERT_TRUE(token.ok());
  const std::shared_ptr<Session> session = *table.FindSession(kAnn, *token);
  const absl::Status status = table.ImportEvent(*session, GoodImport()).status();
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << status;
  EXPECT_THAT(MessageOf(status), StartsWith("device_uuid: "));
  EXPECT_EQ(table.Counts().timelines, 0U);
  const auto timeline = table.CreateTimeline(*session, {.value = 4, .exported = true});
  ASSERT_TRUE(timeline.ok()) << timeline.status();
  const auto exported = table.ExportTimeline(*lease, *timeline);
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(ValueInFile(**exported), 4U);
  EXPECT_EQ((*exported)->word()->AddressOn(MemorySpace::Gpu(kFakeGpu)), std::nullopt);
}

// Says what the test tells it to, and that it is gone.
class ScriptedEvent final : public DeviceEvent {
 public:
  struct Script {
    std::mutex mutex;
    absl::StatusOr<bool> done = false;
    int asked = 0;
    int gone = 0;
  };
  explicit ScriptedEvent(Script& script) : script_(script) {}
  ~ScriptedEvent() override {
    const std::lock_guard<std::mutex> lock(script_.mutex);
    ++script_.gone;
  }
  absl::StatusOr<bool> Done() override {
    const std::lock_guard<std::mutex> lock(script_.mutex);
    ++script_.asked;
    if (script_.done.ok()) return *script_.done;
    return absl::Status(script_.done.status().code(), script_.done.status().message());
  }
  absl::Status Record(void* /*stream*/) override { return absl::OkStatus(); }

 private:
  Script& script_;
};

int Read(ScriptedEvent::Script& script, int ScriptedEvent::Script::*number) {
  const std::lock_guard<std::mutex> lock(script.mutex);
  return script.*number;
}

TEST_F(SyncTableTest, AwaitIsOverWhenTheEventIsDone) {
  const std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  const std::shared_ptr<DeviceEvent> event = EventOf(*session, MakeEvent(*session));
  ASSERT_NE(event, nullptr);
  std::vector<std::shared_ptr<Timeline>> waits;
  std::atomic<int> woken{0};
  for (int i = 0; i < 20; ++i) {
    waits.push_back(table_.Await(event));
    ASSERT_TRUE(waits.back()->WakeWhenReached(1, [&woken] { ++woken; }));
  }
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(woken, 0);
  for (const auto& wait : waits) EXPECT_EQ(CodeAt(*wait, 1), std::nullopt);
  gpu_.event_done = true;
  const auto since = Clock::now();
  EXPECT_TRUE(Eventually([&] { return woken == 20; }));
  EXPECT_LT(Clock::now() - since, kSoon);
  for (const auto& wait : waits) EXPECT_EQ(CodeAt(*wait, 1), StatusCode::kOk);
  EXPECT_EQ(gpu_.event_records, 0) << "who waits records nothing";
}

TEST_F(SyncTableTest, AnEventThatIsDoneNeedsNoPoll) {
  ScriptedEvent::Script script;
  script.done = true;
  const std::shared_ptr<Timeline> wait = table_.Await(std::make_shared<ScriptedEvent>(script));
  EXPECT_EQ(CodeAt(*wait, 1), StatusCode::kOk);
  EXPECT_EQ(Read(script, &ScriptedEvent::Script::asked), 1);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(Read(script, &ScriptedEvent::Script::asked), 1);
}

TEST_F(SyncTableTest, ErrorsOfAnEventArePassedOn) {
  ScriptedEvent::Script failed;
  failed.done = absl::UnavailableError("the GPU is lost");
  const std::shared_ptr<Timeline> at_once = table_.Await(std::make_shared<ScriptedEvent>(failed));
  EXPECT_EQ(CodeAt(*at_once, 1), StatusCode::kUnavailable);
  EXPECT_EQ(CodeAt(*at_once, 0), StatusCode::kOk);

  ScriptedEvent::Script script;
  const std::shared_ptr<Timeline> later = table_.Await(std::make_shared<ScriptedEvent>(script));
  std::atomic<bool> woken{false};
  ASSERT_TRUE(later->WakeWhenReached(1, [&woken] { woken = true; }));
  {
    const std::lock_guard<std::mutex> lock(script.mutex);
    script.done = absl::UnavailableError("the GPU is lost");
  }
  const auto since = Clock::now();
  EXPECT_TRUE(Eventually([&] { return woken.load(); }));
  EXPECT_LT(Clock::now() - since, kSoon);
  EXPECT_EQ(CodeAt(*later, 1), StatusCode::kUnavailable);
  const int asked = Read(script, &ScriptedEvent::Script::asked);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(Read(script, &ScriptedEvent::Script::asked), asked) << "it is polled though it has failed";
}

TEST_F(SyncTableTest, NobodyPollsForAWaitThatIsGone) {
  ScriptedEvent::Script script;
  std::shared_ptr<Timeline> wait = table_.Await(std::make_shared<ScriptedEvent>(script));
  EXPECT_TRUE(Eventually([&] { return Read(script, &ScriptedEvent::Script::asked) >= 3; }));
  wait.reset();
  EXPECT_TRUE(Eventually([&] { return Read(script, &ScriptedEvent::Script::gone) == 1; }));
}

TEST_F(SyncTableTest, ARevokedEventIsStillWaitedFor) {
  std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  for (const bool ends : {false, true}) {
    SCOPED_TRACE(ends);
    gpu_.event_done = false;
    const Id id = MakeEvent(*session);
    std::shared_ptr<Timeline> wait = table_.Await(EventOf(*session, id));
    if (ends) {
      ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
      session.reset();
    } else {
      ASSERT_TRUE(table_.ReleaseSync(*session, id).ok());
    }
    EXPECT_EQ(EventsOpen(), 1) << "it is closed under whoever waits";
    EXPECT_EQ(CodeAt(*wait, 1), std::nullopt);
    gpu_.event_done = true;
    EXPECT_TRUE(Eventually([&] { return CodeAt(*wait, 1) == StatusCode::kOk; }));
    wait.reset();
    EXPECT_TRUE(Eventually([&] { return EventsOpen() == 0; }));
  }
}

TEST_F(SyncTableTest, AWaitMayOutliveItsTable) {
  ScriptedEvent::Script script;
  std::shared_ptr<Timeline> wait;
  {
    SessionTable table(7, RoomyLimits(), metrics_, reaper_, MakeIdleLane, {&gpu_});
    wait = table.Await(std::make_shared<ScriptedEvent>(script));
    EXPECT_TRUE(Eventually([&] { return Read(script, &ScriptedEvent::Script::asked) >= 3; }));
  }
  const int asked = Read(script, &ScriptedEvent::Script::asked);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(Read(script, &ScriptedEvent::Script::asked), asked);
  EXPECT_EQ(CodeAt(*wait, 1), std::nullopt);
  wait.reset();
  EXPECT_EQ(Read(script, &ScriptedEvent::Script::gone), 1);
}

TEST_F(SyncTableTest, NothingOutlivesItsSession) {
  const std::size_t descriptors = OpenDescriptors();
  for (const bool released : {false, true}) {
    for (const auto reason : {SessionEnd::kClosed, SessionEnd::kStuckWait}) {
      const std::shared_ptr<Session> keeps_its_page = Open(kBen);
      std::shared_ptr<Session> session = Open(kAnn);
      ASSERT_TRUE(session && keeps_its_page);
      std::vector<Id> made;
      for (int i = 0; i < 5; ++i) {
        for (const Id& id :
             {MakeStream(*session), MakeTimeline(*session), MakeExported(*session), MakeEvent(*session)}) {
          made.push_back(id);
        }
      }
      MakeExported(*keeps_its_page);
      EXPECT_EQ(EventsOpen(), 5);
      EXPECT_EQ(OpenDescriptors(), descriptors + 2) << "one page a session";
      if (released) {
        for (const Id& id : made) ASSERT_TRUE(table_.ReleaseSync(*session, id).ok());
        EXPECT_EQ(EventsOpen(), 0);
        EXPECT_EQ(Counts().timelines, 1U);
        EXPECT_EQ(Counts().streams, 0U);
      }
      ASSERT_TRUE(table_.EndSession(session->id(), reason).ok());
      session.reset();
      EXPECT_EQ(EventsOpen(), 0);
      EXPECT_EQ(OpenDescriptors(), descriptors + 1);
      ASSERT_TRUE(table_.EndSession(keeps_its_page->id(), reason).ok());
    }
  }
  EXPECT_TRUE(Eventually([&] { return Counts().ending == 0; }));
  EXPECT_EQ(OpenDescriptors(), descriptors);
  ExpectNothingLeft();
}

// A page is there for whoever has one of its timelines, and for nobody else.
TEST_F(SyncTableTest, APageStaysForItsLastTimeline) {
  const std::size_t descriptors = OpenDescriptors();
  std::shared_ptr<Session> session = Open(kAnn);
  ASSERT_NE(session, nullptr);
  std::shared_ptr<Timeline> last = TimelineOf(*session, MakeExported(*session));
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  session.reset();
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(OpenDescriptors(), descriptors + 1);
  EXPECT_EQ(ValueInFile(*last), kSyncValueMax);
  last->Signal(1, absl::OkStatus());
  last.reset();
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

// Sessions come and go on several threads, each with all kinds, and what each is answered is its own affair alone.
TEST_F(SyncTableTest, ManySessionsAtOnce) {
  const std::size_t descriptors = OpenDescriptors();
  const auto client = [this](const Peer& peer) {
    for (int round = 0; round < 20; ++round) {
      std::shared_ptr<Session> session = Open(peer);
      ASSERT_NE(session, nullptr);
      for (std::uint64_t i = 1; i <= 4; ++i) {
        MakeStream(*session);
        const Id event = MakeEvent(*session);
        const std::shared_ptr<Timeline> wait = table_.Await(EventOf(*session, event));
        const Id exported = MakeExported(*session, i);
        const std::shared_ptr<Timeline> timeline = TimelineOf(*session, exported);
        std::atomic<bool> woken{false};
        const Timeline::Ticket ticket = timeline->WakeWhenReached(i + 1, [&woken] { woken = true; });
        ASSERT_TRUE(ticket);
        timeline->Signal(i + 1, absl::OkStatus());
        ASSERT_TRUE(woken);
        ASSERT_EQ(CodeAt(*wait, 1), std::nullopt);
        ASSERT_TRUE(i % 2 == 0 || table_.ReleaseSync(*session, exported).ok());
      }
      ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
    }
  };
  std::vector<std::thread> threads;
  for (const Peer& peer : {kAnn, kBen, kCid}) threads.emplace_back(client, peer);
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Eventually([&] { return EventsOpen() == 0; }));
  EXPECT_TRUE(Eventually([&] { return Counts().ending == 0; }));
  EXPECT_EQ(Counts().streams, 0U);
  EXPECT_EQ(Counts().timelines, 0U);
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

}  // namespace
}  // namespace tessera::server
