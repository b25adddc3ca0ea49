#include "server/session/timeline.h"

#include <algorithm>

namespace tessera::server {

Timeline::Timeline(SharedWord word, std::weak_ptr<SyncPoller> poller)
    : word_(std::move(word)), poller_(std::move(poller)), value_(word_->Load()) {}

// After the end the word says nothing any more: it was raised for whoever waits.
void Timeline::Observe() const {
  if (word_.has_value() && closed_.ok()) value_ = std::max(value_, word_->Load());
}

std::uint64_t Timeline::value() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Observe();
  return value_;
}

void Timeline::Keep(std::uint64_t value, const absl::Status& error) {
  if (!failure_.has_value() || value < failure_->value) failure_ = Failure{value, error};
  if (!word_.has_value() || !closed_.ok()) return;
  word_->Fail(value, error.code());
  failed_.insert(value);
}

void Timeline::RaiseFailed() {
  while (!failed_.empty() && (expected_.empty() || *expected_.begin() >= *failed_.begin())) {
    word_->Raise(*failed_.begin());
    failed_.erase(failed_.begin());
  }
}

void Timeline::Record(std::uint64_t value, const absl::Status& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Observe();
  Keep(value, error);
}

void Timeline::Expect(std::uint64_t value) {
  if (!word_.has_value()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  expected_.insert(value);
}

void Timeline::Signal(std::uint64_t value, const absl::Status& status) {
  Apply(value, status, /*expected=*/false);
}

void Timeline::Deliver(std::uint64_t value, const absl::Status& status) {
  Apply(value, status, word_.has_value());
}

void Timeline::Apply(std::uint64_t value, const absl::Status& status, bool expected) {
  std::vector<Wake> reached;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Observe();
    if (!status.ok()) {
      Keep(value, status);
    } else {
      value_ = std::max(value_, value);
      if (word_.has_value()) word_->Raise(value_);  // work on a GPU may have written less
    }
    if (expected) expected_.erase(expected_.find(value));
    if (word_.has_value()) RaiseFailed();
    reached = TakeReached();
  }
  for (const Wake& wake : reached) wake();
}

void Timeline::Close(const absl::Status& why) {
  std::vector<Wake> reached;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Observe();
    if (closed_.ok()) {
      closed_ = why;
      failed_.clear();
      if (word_.has_value()) {
        word_->Fail(value_ + 1, why.code());
        word_->Raise(kSyncValueMax);
      }
    }
    reached = TakeReached();
  }
  for (const Wake& wake : reached) wake();
}

// A client may write without a pause: then a GPU that looks sees one or the other.
void Timeline::RaiseInsistently(std::uint64_t value) {
  constexpr int kTimes = 1000;
  for (int i = 0; i < kTimes; ++i) word_->Raise(value);
}

void Timeline::RaiseClosed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (word_.has_value() && !closed_.ok()) RaiseInsistently(kSyncValueMax);
}

void Timeline::ShowReached(std::uint64_t value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!word_.has_value()) return;
  if (!closed_.ok()) return RaiseInsistently(kSyncValueMax);
  Observe();
  const bool failed =
      failure_.has_value() && failure_->value <= value && (failed_.empty() || *failed_.begin() > failure_->value);
  if (value_ >= value || failed) RaiseInsistently(std::max(value_, value));
}

bool Timeline::Poll() {
  std::vector<Wake> reached;
  bool more = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Observe();
    reached = TakeReached();
    more = polled_ = !waiting_.empty();
  }
  for (const Wake& wake : reached) wake();
  return more;
}

std::optional<absl::Status> Timeline::Reached(std::uint64_t value) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Observe();
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
  Observe();
  if (ReachedLocked(value).has_value()) return {};
  waiting_.emplace(value, Waiting{.number = ++last_number_, .wake = std::move(wake)});
  if (word_.has_value() && !std::exchange(polled_, true)) {
    if (const std::shared_ptr<SyncPoller> poller = poller_.lock(); poller != nullptr) poller->Add(weak_from_this());
  }
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
