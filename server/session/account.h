// What one principal has of the daemon, however many sessions and connections it has.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "server/session/budget.h"
#include "server/session/peer.h"

namespace tessera::server {

struct Account {
  std::string principal;
  std::shared_ptr<MemoryBudget> memory;
  std::uint64_t leases = 0;    // guarded by the session table's mutex
  std::uint64_t sessions = 0;  // likewise
  std::int64_t in_flight = 0;  // operations that wait or run; guarded by the executor's mutex
};

// The accounts of principals that have anything: one goes with its last user. Thread-safe.
class Accounts {
 public:
  Accounts(const MemoryLimits& limits, Metrics& metrics, std::shared_ptr<MemoryBudget> all);

  std::shared_ptr<Account> Of(const Peer& peer);
  std::size_t size() const;

 private:
  // Outlives the Accounts with the last account.
  struct Map {
    std::mutex mutex;
    std::unordered_map<std::string, std::weak_ptr<Account>> accounts;
  };

  const MemoryLimits limits_;
  Metrics& metrics_;
  const std::shared_ptr<MemoryBudget> all_;
  const std::shared_ptr<Map> map_ = std::make_shared<Map>();
};

}  // namespace tessera::server
