// A 64-bit value that only grows, which work waits for and signals, with the first error that it was signalled with.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace tessera::server {

// An error does not raise the value: it stands at the point that it was signalled for, and whoever waits for that one
// or a later one gets it, while earlier ones are still to come. The error of the smallest point counts.
//
// Thread-safe. Callbacks run on the thread that signals or closes, with no lock held.
class Timeline {
 public:
  using Wake = std::function<void()>;
  // Names one who waits; false: nobody.
  struct Ticket {
    std::uint64_t value = 0;
    std::uint64_t number = 0;
    explicit operator bool() const { return number != 0; }
  };

  explicit Timeline(std::uint64_t value = 0) : value_(value) {}
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  std::uint64_t value() const;

  // OK raises the value to `value`; less than it is leaves it. An error is kept, as above.
  void Signal(std::uint64_t value, const absl::Status& status);
  // The first half of signalling an error: whoever looks sees it, and nobody is woken. For where locks are held; Signal
  // follows.
  void Record(std::uint64_t value, const absl::Status& error);

  // The timeline is nobody's any more: whoever waits, now or later, gets `why`, unless what it waits for is reached.
  void Close(const absl::Status& why);

  // nullopt: `value` is not reached. Else OK, or why whoever waits for it must fail.
  std::optional<absl::Status> Reached(std::uint64_t value) const;

  // Calls `wake` once Reached(value) is no longer nullopt; nobody's ticket, without calling it, if that is so now. Who
  // stops waiting must Forget, so that there are no more than wait.
  Ticket WakeWhenReached(std::uint64_t value, Wake wake);
  void Forget(const Ticket& ticket);

 private:
  struct Failure {
    std::uint64_t value = 0;
    absl::Status status;
  };
  struct Waiting {
    std::uint64_t number = 0;
    Wake wake;
  };

  // With mutex_ held.
  void Keep(std::uint64_t value, const absl::Status& error);
  std::optional<absl::Status> ReachedLocked(std::uint64_t value) const;
  std::vector<Wake> TakeReached();

  mutable std::mutex mutex_;
  std::uint64_t value_;
  std::optional<Failure> failure_;
  absl::Status closed_;  // OK: open
  std::uint64_t last_number_ = 0;
  std::multimap<std::uint64_t, Waiting> waiting_;
};

}  // namespace tessera::server
