#include "server/session/account.h"

#include <utility>

namespace tessera::server {

Accounts::Accounts(const MemoryLimits& limits, Metrics& metrics, std::shared_ptr<MemoryBudget> all)
    : limits_(limits), metrics_(metrics), all_(std::move(all)) {}

std::shared_ptr<Account> Accounts::Of(const Peer& peer) {
  const std::string principal = peer.Principal();
  const std::lock_guard<std::mutex> lock(map_->mutex);
  std::weak_ptr<Account>& entry = map_->accounts[principal];
  if (std::shared_ptr<Account> account = entry.lock(); account != nullptr) return account;
  const auto forget = [map = map_](Account* gone) {
    {
      const std::lock_guard<std::mutex> in_map(map->mutex);
      const auto found = map->accounts.find(gone->principal);
      // A new account of the same principal may have taken the place.
      if (found != map->accounts.end() && found->second.expired()) map->accounts.erase(found);
    }
    delete gone;
  };
  std::shared_ptr<Account> account(
      new Account{.principal = principal, .memory = std::make_shared<MemoryBudget>(limits_, metrics_, all_)}, forget);
  entry = account;
  return account;
}

std::size_t Accounts::size() const {
  const std::lock_guard<std::mutex> lock(map_->mutex);
  return map_->accounts.size();
}

}  // namespace tessera::server
