#include "server/session/timeline.h"

#include <algorithm>

namespace tessera::server {

std::uint64_t Timeline::value() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return value_;
}

void Timeline::Keep(std::uint64_t value, const absl::Status& error) {
  if (!failure_.has_value() || value < failure_->value) failure_ = Failure{value, error};
}

void Timeline::Record(std::uint64_t value, const absl::Status& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Keep(value, error);
}

void Timeline::Signal(std::uint64_t value, const absl::Status& status) {
  std::vector<Wake> reached;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status.ok()) {
      value_ = std::max(value_, value);
    } else {
      Keep(value, status);
    }
    reached = TakeReached();
  }
  for (const Wake& wake : reached) wake();
}

void Timeline::Close(const absl::Status& why) {
  std::vector<Wake> reached;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.ok()) closed_ = why;
    reached = TakeReached();
  }
  for (const Wake& wake : reached) wake();
}

std::optional<absl::Status> Timeline::Reached(std::uint64_t value) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ReachedLocked(value);
}

std::optional<absl::Status> Timeline::ReachedLocked(std::uint64_t value) const {
  if (failure_.has_value() && failure_->value <= value) return failure_->status;
  if (value_ >= value) return absl::OkStatus();
  if (!closed_.ok()) return closed_;
  return std::nullopt;
}

Timeline::Ticket Timeline::WakeWhenReached(std::uint64_t value, Wake wake) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ReachedLocked(value).has_value()) return {};
  waiting_.emplace(value, Waiting{.number = ++last_number_, .wake = std::move(wake)});
  return {.value = value, .number = last_number_};
}

void Timeline::Forget(const Ticket& ticket) {
  Wake forgotten;  // may hold the last of something: let go of without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [begin, end] = waiting_.equal_range(ticket.value);
  const auto found =
      std::find_if(begin, end, [&](const auto& waiting) { return waiting.second.number == ticket.number; });
  if (found == end) return;
  forgotten = std::move(found->second.wake);
  waiting_.erase(found);
}

std::vector<Timeline::Wake> Timeline::TakeReached() {
  std::vector<Wake> reached;
  const auto take = [&](auto begin, auto end) {
    for (auto each = begin; each != end; ++each) reached.push_back(std::move(each->second.wake));
    waiting_.erase(begin, end);
  };
  if (!closed_.ok()) {
    take(waiting_.begin(), waiting_.end());
    return reached;
  }
  take(waiting_.begin(), waiting_.upper_bound(value_));
  if (failure_.has_value()) take(waiting_.lower_bound(failure_->value), waiting_.end());
  return reached;
}

}  // namespace tessera::server
