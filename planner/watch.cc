#include "planner/watch.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::planner {

WatchSubscription::WatchSubscription(WatchHub& hub, WatchOptions options) : hub_(hub), options_(std::move(options)) {
  options_.buffer = std::clamp<std::size_t>(options_.buffer, 1, kWatchBufferMax);
  hub_.Add(this);
}

WatchSubscription::~WatchSubscription() {
  hub_.Remove(this);
}

WatchBatch WatchSubscription::TakeLocked(std::size_t most) {
  WatchBatch batch{.decisions = {}, .lost = lost_};
  const auto count = static_cast<std::ptrdiff_t>(std::min(most, waiting_.size()));
  batch.decisions.assign(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(waiting_.begin() + count));
  waiting_.erase(waiting_.begin(), waiting_.begin() + count);
  return batch;
}

WatchBatch WatchSubscription::Take(std::size_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return TakeLocked(most);
}

WatchBatch WatchSubscription::Wait(std::size_t most, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  some_.wait_for(lock, patience, [&] { return !waiting_.empty(); });
  return TakeLocked(most);
}

void WatchSubscription::Offer(const Decision& decision, std::atomic<std::uint64_t>& lost_of_all) {
  if (decision.cached && !options_.cached) return;
  if (decision.variant_id.substr(0, options_.class_prefix.size()) != options_.class_prefix) return;
  bool first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    first = waiting_.empty();
    if (waiting_.size() == options_.buffer) {
      waiting_.pop_front();
      ++lost_;
      lost_of_all.fetch_add(1, std::memory_order_relaxed);
    }
    waiting_.push_back(decision);
  }
  if (!first) return;
  some_.notify_one();
  if (options_.ready) options_.ready();
}

void WatchHub::Publish(const Decision& decision) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (WatchSubscription* subscription : subscriptions_) subscription->Offer(decision, lost_);
}

void WatchHub::Add(WatchSubscription* subscription) {
  const std::lock_guard<std::mutex> lock(mutex_);
  subscriptions_.push_back(subscription);
  watchers_.fetch_add(1, std::memory_order_relaxed);
  if (subscription->options_.cached) watchers_of_cached_.fetch_add(1, std::memory_order_relaxed);
}

void WatchHub::Remove(WatchSubscription* subscription) {
  const std::lock_guard<std::mutex> lock(mutex_);
  subscriptions_.erase(std::find(subscriptions_.begin(), subscriptions_.end(), subscription));
  watchers_.fetch_sub(1, std::memory_order_relaxed);
  if (subscription->options_.cached) watchers_of_cached_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace tessera::planner
