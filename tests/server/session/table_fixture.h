// A session table with a fake GPU, a lane that tells what was asked of it, and the calls that tests of sessions repeat.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "server/session/session_table.h"
#include "tests/server/session/fake_device_memory.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {

inline const Peer kAnn{.pid = 10, .uid = 1000, .gid = 1000};
inline const Peer kBen{.pid = 20, .uid = 2000, .gid = 2000};
inline const Peer kCid{.pid = 30, .uid = 3000, .gid = 3000};
inline constexpr char kAnnsPrincipal[] = "uid:1000";
inline constexpr char kBensPrincipal[] = "uid:2000";

inline constexpr std::chrono::hours kCleanupPatience{1};  // ticks are told that it is over

inline SessionLimits RoomyLimits() {
  return {.sessions_max = 100,
          .leases_max = 100,
          .buffers_per_session_max = 100,
          .buffer_bytes_max = 1U << 24U,
          .cleanup_patience = kCleanupPatience};
}

inline bool Everybody(const Peer& /*owner*/) {
  return true;
}
inline bool Nobody(const Peer& /*owner*/) {
  return false;
}

// Says that it has `in_flight` operations, and when they were dropped, on which thread.
class WatchedLane : public SessionLane {
 public:
  void DropUnwanted() override {
    if (blocks_ != nullptr) blocks_->Pass();
    dropped_on_ = std::this_thread::get_id();
    ++drops_;
  }
  std::int64_t in_flight() const override { return in_flight_; }
  std::int64_t gated() const override { return 0; }

  void BlockAt(Turnstile* blocks) { blocks_ = blocks; }
  void SetInFlight(std::int64_t operations) { in_flight_ = operations; }
  int drops() const { return drops_; }
  std::thread::id dropped_on() const { return dropped_on_; }

 private:
  Turnstile* blocks_ = nullptr;
  std::atomic<std::int64_t> in_flight_{0};
  std::atomic<int> drops_{0};
  std::atomic<std::thread::id> dropped_on_{std::thread::id()};
};

class TableTest : public ::testing::Test {
 protected:
  using Clock = SessionTable::Clock;

  explicit TableTest(const SessionLimits& limits = RoomyLimits())
      : table_(7, limits, metrics_, reaper_, [](const StreamSpec& /*spec*/) { return std::make_shared<WatchedLane>(); },
               {&gpu_}) {}

  Id Lease(const Peer& peer, LeaseKind kind = LeaseKind::kSideChannel) {
    auto lease = table_.OpenLease(peer, kind);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return lease.value_or(Id{});
  }
  std::shared_ptr<Session> Find(const Peer& peer, const absl::StatusOr<Id>& token) {
    EXPECT_TRUE(token.ok()) << token.status();
    return token.ok() ? table_.FindSession(peer, *token).value_or(nullptr) : nullptr;
  }
  std::shared_ptr<Session> OpenOn(const Id& lease, const Peer& peer, std::string_view label = "") {
    return Find(peer, table_.OpenSession(peer, lease, label));
  }
  std::shared_ptr<Session> Open(const Peer& peer, std::string_view label = "") {
    return OpenOn(Lease(peer), peer, label);
  }
  std::shared_ptr<Session> OpenFor(std::chrono::milliseconds ttl, const Peer& peer = kAnn) {
    return Find(peer, table_.OpenSession(peer, ttl, "timed"));
  }

  Id Allocate(Session& session, std::uint64_t bytes = 100, std::string_view space = {}) {
    auto made = table_.AllocateBuffer(session, bytes, space);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? made->id : Id{};
  }
  BufferPin Pin(const Session& session, const Id& buffer, BufferAccess access = BufferAccess::kReadWrite) {
    auto pin = table_.PinBuffer(session, buffer, access);
    EXPECT_TRUE(pin.ok()) << pin.status();
    return pin.ok() ? *std::move(pin) : BufferPin();
  }
  absl::StatusCode PinCode(const Session& session, const Id& buffer, BufferAccess access = BufferAccess::kRead) {
    return CodeOf(table_.PinBuffer(session, buffer, access));
  }
  void MustShare(const Session& owner, const Id& buffer, const std::string& principal, BufferAccess access) {
    const auto shared = table_.ShareBuffer(owner, buffer, principal, access);
    EXPECT_TRUE(shared.ok()) << shared.status();
  }

  static WatchedLane& LaneOf(const Session& session) { return static_cast<WatchedLane&>(*session.lane()); }

  std::vector<SessionRow> Sessions() { return table_.ListSessions(Everybody).rows; }

  double Metric(const std::string& series) const { return MetricValue(metrics_, series); }

  // Once what went has been cleaned up.
  SessionCounts Counts() {
    EXPECT_TRUE(AwaitIdle(reaper_));
    return table_.Counts();
  }
  void ExpectNothingLeft() {
    const SessionCounts counts = Counts();
    EXPECT_EQ(counts.sessions, 0U);
    EXPECT_EQ(counts.ending, 0U);
    EXPECT_EQ(counts.quarantined, 0U);
    EXPECT_EQ(counts.buffers, 0U);
    EXPECT_EQ(counts.bytes_held, 0U);
    EXPECT_EQ(gpu_.mapped(), 0);
    EXPECT_TRUE(Sessions().empty());
  }

  FakeDeviceMemory gpu_;
  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper_{kCleanupPatience, metrics_};
  SessionTable table_;
};

}  // namespace tessera::server
