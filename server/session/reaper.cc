#include "server/session/reaper.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::server {

Reaper::Reaper(std::chrono::milliseconds patience, Metrics& metrics) : patience_(patience), metrics_(metrics) {
  const std::lock_guard<std::mutex> lock(mutex_);
  AddWorker();
}

Reaper::~Reaper() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (Worker& worker : workers_) worker.thread.join();  // Tick, which alone changes the list, is called no more
}

void Reaper::AddWorker() {
  Worker& worker = workers_.emplace_back();
  worker.thread = std::thread([this, &worker] { Run(worker); });
}

void Reaper::Post(Work work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void Reaper::Run(Worker& self) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!self.replaced || stopping_) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) break;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    self.began = Clock::now();
    ++running_;
    lock.unlock();
    work();
    work = nullptr;  // what it holds is part of the work
    lock.lock();
    self.began.reset();
    --running_;
    metrics_.CleanupDone();
    if (self.stuck) Recovered(self);
    if (queue_.empty() && running_ == 0) idle_.notify_all();
  }
  self.ended = true;
}

void Reaper::Recovered(Worker& self) {
  if (stuck_ > kStuckMax && self.replaced) {
    // Nobody has taken the place of the last one: this one does.
    const auto last = std::find_if(workers_.begin(), workers_.end(),
                                   [](const Worker& worker) { return worker.stuck && !worker.replaced; });
    last->replaced = true;
    self.replaced = false;
  }
  self.stuck = false;
  --stuck_;
  spdlog::warn("a clean-up that was stuck has ended; {} are still stuck", stuck_);
}

void Reaper::Tick(Clock::time_point now) {
  std::list<Worker> ended;  // joined without the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t replacements = 0;
    for (auto worker = workers_.begin(); worker != workers_.end();) {
      const auto next = std::next(worker);
      if (worker->ended) ended.splice(ended.end(), workers_, worker);
      if (worker->began.has_value() && !worker->stuck && now - *worker->began > patience_) {
        worker->stuck = true;
        ++stuck_;
        metrics_.Quarantined();
        worker->replaced = stuck_ <= kStuckMax;
        if (worker->replaced) ++replacements;
        spdlog::error("a clean-up of memory is stuck for {} ms and is quarantined; {} are",
                      std::chrono::duration_cast<std::chrono::milliseconds>(now - *worker->began).count(), stuck_);
      }
      worker = next;
    }
    for (; replacements > 0; --replacements) AddWorker();
  }
  for (Worker& worker : ended) worker.thread.join();
}

void Reaper::AwaitIdle() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return queue_.empty() && running_ == 0; });
}

Reaper::Counts Reaper::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {.waiting = queue_.size() + running_ - stuck_, .stuck = stuck_};
}

bool Reaper::blocked() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stuck_ > kStuckMax;
}

}  // namespace tessera::server
