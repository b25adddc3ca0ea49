// A thread-safe map of bounded size that forgets what was not asked for the longest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace tessera::kernels::vendor {

// Keys are words, compared exactly.
template <std::size_t kWords, typename Value>
class BoundedCache {
 public:
  using Key = std::array<std::int64_t, kWords>;

  explicit BoundedCache(std::size_t limit) : limit_(limit) {}

  std::optional<Value> Find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = index_.find(key);
    if (found == index_.end()) return std::nullopt;
    order_.splice(order_.begin(), order_, found->second);
    return found->second->second;
  }

  void Put(const Key& key, const Value& value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = index_.find(key);
    if (found != index_.end()) {
      found->second->second = value;
      order_.splice(order_.begin(), order_, found->second);
      return;
    }
    order_.emplace_front(key, value);
    index_.emplace(key, order_.begin());
    if (order_.size() <= limit_) return;
    index_.erase(order_.back().first);
    order_.pop_back();
  }

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const {
      std::uint64_t hash = 0x9e3779b97f4a7c15U;
      for (const std::int64_t word : key) {
        hash = (hash ^ static_cast<std::uint64_t>(word)) * 0xff51afd7ed558ccdU;
        hash ^= hash >> 32U;
      }
      return static_cast<std::size_t>(hash);
    }
  };
  using Order = std::list<std::pair<Key, Value>>;  // the last asked for first

  const std::size_t limit_;
  std::mutex mutex_;
  Order order_;
  std::unordered_map<Key, typename Order::iterator, Hash> index_;
};

}  // namespace tessera::kernels::vendor
