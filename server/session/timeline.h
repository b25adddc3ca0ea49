// A 64-bit value that only grows, which work waits for and signals, with the first error that it was signalled with.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/session/sync_page.h"
#include "server/session/sync_poller.h"

namespace tessera::server {

// An error does not raise the value: it stands at the point that it was signalled for, and whoever waits for that one
// or a later one gets it, while earlier ones are still to come. The error of the smallest point counts.
//
// An exported timeline shows its value in a word of memory, which others raise, too: whoever looks takes that up, and a
// poller does while somebody waits. Work on a GPU that waits there sees no errors, so an error raises the word in the
// end: once all work that was accepted with smaller points has signalled.
//
// Thread-safe. Callbacks run on the thread that signals, closes or polls, with no lock held.
class Timeline final : public Pollable, public std::enable_shared_from_this<Timeline> {
 public:
  using Wake = std::function<void()>;
  // Names one who waits; false: nobody.
  struct Ticket {
    std::uint64_t value = 0;
    std::uint64_t number = 0;
    explicit operator bool() const { return number != 0; }
  };

  explicit Timeline(std::uint64_t value = 0) : value_(value) {}
  // Exported; owned by a shared_ptr. Points and values are below kSyncValueMax.
  Timeline(SharedWord word, std::weak_ptr<SyncPoller> poller);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  std::uint64_t value() const;
  const SharedWord* word() const { return word_.has_value() ? &*word_ : nullptr; }  // null: not exported

  // OK raises the value to `value`; less than it is leaves it. An error is kept, as above.
  void Signal(std::uint64_t value, const absl::Status& status);
  // The first half of signalling an error: whoever looks sees it, and nobody is woken. For where locks are held; Signal
  // follows.
  void Record(std::uint64_t value, const absl::Status& error);

  // Work that will signal `value` was accepted; Deliver is Signal for it.
  void Expect(std::uint64_t value);
  void Deliver(std::uint64_t value, const absl::Status& status);

  // The timeline is nobody's any more: whoever waits, now or later, gets `why`, unless what it waits for is reached.
  // Work on a GPU that waits for its word goes on.
  void Close(const absl::Status& why);
  // Of a closed one: raises the word again. What still ran when it closed, or its client, may have written less.
  void RaiseClosed();
  // A device waits for `value`, and sees the word alone: raises it again where `value` is reached, or has failed with
  // nothing before the error still to come. Work or a client may have written less, and nobody may signal as much.
  void ShowReached(std::uint64_t value);

  // nullopt: `value` is not reached. Else OK, or why whoever waits for it must fail.
  std::optional<absl::Status> Reached(std::uint64_t value) const;

  // Calls `wake` once Reached(value) is no longer nullopt; nobody's ticket, without calling it, if that is so now. Who
  // stops waiting must Forget, so that there are no more than wait.
  Ticket WakeWhenReached(std::uint64_t value, Wake wake);
  void Forget(const Ticket& ticket);

  bool Poll() override;

 private:
  struct Failure {
    std::uint64_t value = 0;
    absl::Status status;
  };
  struct Waiting {
    std::uint64_t number = 0;
    Wake wake;
  };

  void Apply(std::uint64_t value, const absl::Status& status, bool expected);
  // With mutex_ held.
  void Observe() const;
  void Keep(std::uint64_t value, const absl::Status& error);
  void RaiseFailed();
  void RaiseInsistently(std::uint64_t value);
  std::optional<absl::Status> ReachedLocked(std::uint64_t value) const;
  std::vector<Wake> TakeReached();

  std::optional<SharedWord> word_;
  const std::weak_ptr<SyncPoller> poller_;
  mutable std::mutex mutex_;
  mutable std::uint64_t value_;            // at least what the word was when somebody looked
  std::multiset<std::uint64_t> expected_;  // exported: points of accepted work that has not signalled
  std::set<std::uint64_t> failed_;         // exported: points with an error that the word does not show yet
  bool polled_ = false;
  std::optional<Failure> failure_;
  absl::Status closed_;  // OK: open
  std::uint64_t last_number_ = 0;
  std::multimap<std::uint64_t, Waiting> waiting_;
};

}  // namespace tessera::server
