// One session: who it belongs to, what keeps it alive, and what it may use. Sessions are made and ended by the
// SessionTable.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/session/account.h"
#include "server/session/budget.h"
#include "server/session/id.h"
#include "server/session/import_cache.h"
#include "server/session/peer.h"
#include "server/session/reaper.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

// What the executor keeps for a session (its streams, its queue); opaque here.
class SessionLane {
 public:
  virtual ~SessionLane() = default;
  // Answers queued operations that are refused now, as all of an ended session are, without waiting for their turn.
  virtual void DropUnwanted() = 0;
  virtual std::int64_t in_flight() const = 0;  // operations that wait or run
};

class Session {
 public:
  using Clock = std::chrono::steady_clock;

  const Id& id() const { return id_; }
  const Peer& peer() const { return peer_; }
  const std::string& label() const { return label_; }
  SessionLane* lane() const { return lane_.get(); }
  const std::shared_ptr<Account>& account() const { return account_; }

  // Once true it stays true: queued work must not start.
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  // A call of it begins, which starts its time to live anew.
  void Touch() { last_call_.store(Clock::now().time_since_epoch(), std::memory_order_relaxed); }

 private:
  friend class SessionTable;
  Session() = default;

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
  std::atomic<Clock::duration> last_call_{Clock::now().time_since_epoch()};
  ImportCache imports_;      // a client's names for its allocations are good for itself only
  std::vector<Id> buffers_;  // guarded by SessionTable::mutex_

  // Whoever waits for the session's end waits for buffers that were released before it and are not gone, too: each of
  // them holds this object, which gets the token of the end. Guarded by SessionTable::mutex_; null once it has ended.
  struct TokenOfEnd {
    GoneToken gone;
  };
  std::shared_ptr<TokenOfEnd> token_of_end_ = std::make_shared<TokenOfEnd>();
};

}  // namespace tessera::server
