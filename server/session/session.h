// One session: who it belongs to, what keeps it alive, and what it may use. Sessions are made and ended by the
// SessionTable.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/session/account.h"
#include "server/session/budget.h"
#include "server/session/id.h"
#include "server/session/import_cache.h"
#include "server/session/peer.h"
#include "server/session/reaper.h"
#include "server/session/sync_page.h"
#include "server/session/timeline.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

enum class StreamPriority { kLow, kNormal, kHigh };

// What a session asks of a stream.
struct StreamSpec {
  StreamPriority priority = StreamPriority::kNormal;
  // Waits for exported timelines of the session's own are left to the GPU, where there is one.
  bool gpu_waits = false;
};

// What the executor keeps for an in-order stream of a session; opaque here.
class SessionLane {
 public:
  virtual ~SessionLane() = default;
  // Answers operations that wait and are refused now, as all of an ended session are, without waiting for their turn.
  virtual void DropUnwanted() = 0;
  virtual std::int64_t in_flight() const = 0;  // operations that wait or run
  virtual std::int64_t gated() const = 0;      // of those, the ones that are held back by what they wait for
};

class Session {
 public:
  using Clock = std::chrono::steady_clock;

  const Id& id() const { return id_; }
  const Peer& peer() const { return peer_; }
  const std::string& label() const { return label_; }
  const std::shared_ptr<SessionLane>& lane() const { return lane_; }  // its own stream
  const std::shared_ptr<Account>& account() const { return account_; }

  // Closed, with CANCELLED, when the session ends: for whoever waits for something else meanwhile.
  Timeline& end() { return end_; }

  // Once true it stays true: queued work must not start.
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  std::int64_t in_flight = 0;  // operations that wait or run, of all its streams; guarded by the executor's mutex

  // A place among the waits (Memory.Synchronize) that are open, until it goes; whoever waited may have left long
  // before. RESOURCE_EXHAUSTED.
  absl::StatusOr<std::shared_ptr<const void>> BeginWait();

  // A call of it begins, which starts its time to live anew.
  void Touch() { last_call_.store(Clock::now().time_since_epoch(), std::memory_order_relaxed); }

 private:
  friend class SessionTable;
  Session() = default;

  static constexpr int kWaitsMax = 256;

  Clock::time_point last_call() const { return Clock::time_point(last_call_.load(std::memory_order_relaxed)); }

  // Fixed once it is open.
  Id id_;
  Id lease_;  // all zero: it has a time to live instead
  LeaseKind lease_kind_ = LeaseKind::kSideChannel;
  std::chrono::milliseconds ttl_{0};
  Peer peer_;
  std::string label_;
  Clock::time_point opened_ = Clock::now();
  std::shared_ptr<SessionLane> lane_;
  std::shared_ptr<Account> account_;
  std::shared_ptr<MemoryBudget> memory_;

  std::atomic<bool> ended_{false};
  Timeline end_;
  const std::shared_ptr<std::atomic<int>> waits_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<Clock::duration> last_call_{Clock::now().time_since_epoch()};
  ImportCache imports_;      // a client's names for its allocations are good for itself only
  std::vector<Id> buffers_;  // guarded by SessionTable::mutex_, as the next two
  std::vector<Id> syncs_;    // streams, timelines and events
  std::size_t num_streams_ = 0;
  std::vector<std::weak_ptr<SessionLane>> released_lanes_;  // of streams given back; there while work of theirs is

  std::mutex page_mutex_;
  std::shared_ptr<SyncPage> page_;  // of its exported timelines; null until the first

  // Whoever waits for the session's end waits for buffers that were released before it and are not gone, too: each of
  // them holds this object, which gets the token of the end. Guarded by SessionTable::mutex_; null once it has ended.
  struct TokenOfEnd {
    GoneToken gone;
  };
  std::shared_ptr<TokenOfEnd> token_of_end_ = std::make_shared<TokenOfEnd>();
};

inline absl::StatusOr<std::shared_ptr<const void>> Session::BeginWait() {
  if (waits_->fetch_add(1) >= kWaitsMax) {
    waits_->fetch_sub(1);
    return absl::ResourceExhaustedError("256 calls of Synchronize already wait in this session");
  }
  return std::shared_ptr<const void>(waits_.get(), [waits = waits_](const void*) { waits->fetch_sub(1); });
}

}  // namespace tessera::server
