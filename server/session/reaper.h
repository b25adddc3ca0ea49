// Does what may block when memory goes, such as closing a mapping, away from the threads that serve: RPC threads, the
// completer and the sockets' loop wait for no driver. A clean-up that takes too long is quarantined: another thread
// takes its place, and it is counted and told of until it ends after all.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

// Exists until the daemon has let go of what its holders stand for; its deleter tells whoever waits for that.
using GoneToken = std::shared_ptr<const void>;

class Reaper {
 public:
  // Threads that may be stuck; the one after them is not replaced when it is stuck, too: a driver that has blocked so
  // many calls takes no more.
  static constexpr std::size_t kStuckMax = 8;

  using Work = absl::AnyInvocable<void()>;
  using Clock = std::chrono::steady_clock;

  struct Counts {
    std::size_t waiting = 0;  // or running, and not stuck
    std::size_t stuck = 0;
  };

  // `patience`: how long a piece of work may take.
  Reaper(std::chrono::milliseconds patience, Metrics& metrics);
  // Does all that was posted. Waits for what is stuck: a process that cannot must end without destructors.
  ~Reaper();
  Reaper(const Reaper&) = delete;
  Reaper& operator=(const Reaper&) = delete;

  // Runs `work` soon, and destroys it, on the reaper's thread, in the order of the calls unless something is stuck.
  // What is posted is bounded by what the limits of buffers and sessions let exist. Thread-safe; `work` may post, too.
  void Post(Work work);

  // Returns once all that was posted has been done, what is stuck included.
  void AwaitIdle();

  // Looks for stuck work. To be called now and then, by one thread.
  void Tick(Clock::time_point now = Clock::now());

  Counts counts() const;
  // Whether nothing is cleaned up any more: as many threads are stuck as may be.
  bool blocked() const;

 private:
  struct Worker {
    std::thread thread;
    std::optional<Clock::time_point> began;  // of the work under way
    bool stuck = false;
    bool replaced = false;  // ends after its work
    bool ended = false;
  };

  void AddWorker();  // with mutex_ held
  void Run(Worker& self);
  void Recovered(Worker& self);  // with mutex_ held

  const std::chrono::milliseconds patience_;
  Metrics& metrics_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Work> queue_;
  std::list<Worker> workers_;
  std::size_t running_ = 0;
  std::size_t stuck_ = 0;  // of those
  bool stopping_ = false;
};

}  // namespace tessera::server
