// Decisions for whoever watches, in buffers that are bounded: who does not take them in time loses the oldest, counted.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "planner/plan.h"

namespace tessera::planner {

struct Decision {
  std::int64_t time_unix_us = 0;
  std::uint64_t revision = 0;
  std::string_view family;      // such as gemm; of static storage
  std::string_view variant_id;  // catalogue id; likewise
  std::string_view class_name;  // of the variant; likewise
  std::string problem;          // for people: class, and extents by name
  Plan plan;
  bool cached = false;  // the cache of plans had it
};

inline constexpr std::size_t kWatchBuffer = 1024;  // unless asked otherwise
inline constexpr std::size_t kWatchBufferMax = 65'536;

struct WatchOptions {
  std::string class_prefix;           // only decisions whose variant's class begins so; empty = all
  bool cached = false;                // also those that the cache had
  std::size_t buffer = kWatchBuffer;  // clamped to 1 .. kWatchBufferMax
  // Called when there is something to take after there was nothing; on the thread of the call that decided, so it must
  // not block, nor take or end the subscription itself. Never called once the subscription has ended.
  std::function<void()> ready;
};

// What a subscriber takes.
struct WatchBatch {
  std::vector<Decision> decisions;  // oldest first
  std::uint64_t lost = 0;           // since the subscription began, up to the first of `decisions`
};

class WatchHub;

// Ends with the object. Thread-safe.
class WatchSubscription {
 public:
  explicit WatchSubscription(WatchHub& hub, WatchOptions options);
  ~WatchSubscription();
  WatchSubscription(const WatchSubscription&) = delete;
  WatchSubscription& operator=(const WatchSubscription&) = delete;

  // Up to `most` entries, or none.
  WatchBatch Take(std::size_t most);
  // The same, after at most `patience` for the first.
  WatchBatch Wait(std::size_t most, std::chrono::milliseconds patience);
  const WatchOptions& options() const { return options_; }

 private:
  friend class WatchHub;
  void Offer(const Decision& decision, std::atomic<std::uint64_t>& lost_of_all);
  WatchBatch TakeLocked(std::size_t most);

  WatchHub& hub_;
  WatchOptions options_;
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<Decision> waiting_;
  std::uint64_t lost_ = 0;
};

// Must outlive its subscriptions. Thread-safe. A decision costs one relaxed load while nobody watches.
class WatchHub {
 public:
  std::unique_ptr<WatchSubscription> Subscribe(WatchOptions options) {
    return std::make_unique<WatchSubscription>(*this, std::move(options));
  }

  // Whether anybody wants decisions of this kind: ask before making one up.
  bool Wanted(bool cached) const {
    return (cached ? watchers_of_cached_ : watchers_).load(std::memory_order_relaxed) != 0;
  }
  void Publish(const Decision& decision);

  std::uint32_t watchers() const { return watchers_.load(std::memory_order_relaxed); }
  std::uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }  // of all since the start

 private:
  friend class WatchSubscription;
  void Add(WatchSubscription* subscription);
  void Remove(WatchSubscription* subscription);

  std::atomic<std::uint32_t> watchers_{0};
  std::atomic<std::uint32_t> watchers_of_cached_{0};
  std::atomic<std::uint64_t> lost_{0};
  std::mutex mutex_;  // of the list; held while entries are offered, which blocks on nothing but other offers
  std::vector<WatchSubscription*> subscriptions_;
};

}  // namespace tessera::planner
