#include "server/session/sync_poller.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/shared_thread.h"

namespace tessera::server {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Between looks it sleeps an eighth of the time that nothing has happened for: a wait is seen late by an eighth of
// itself at the most, and one that lasts costs next to nothing.
constexpr int kShareOfQuiet = 8;
constexpr auto kSleepMin = 10us;
constexpr auto kSleepMax = 1ms;

Clock::duration SleepAfter(Clock::duration quiet) {
  return std::clamp<Clock::duration>(quiet / kShareOfQuiet, kSleepMin, kSleepMax);
}

}  // namespace

SyncPoller::~SyncPoller() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void SyncPoller::Add(std::weak_ptr<Pollable> pollable) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    new_.push_back(std::move(pollable));
    if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { Run(); });
  }
  changed_.notify_one();
}

void SyncPoller::Run() {
  on_shared_thread = true;
  std::vector<std::weak_ptr<Pollable>> watched;
  Clock::time_point progress = Clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const auto called = [this] { return stopping_ || !new_.empty(); };
    if (watched.empty()) {
      changed_.wait(lock, called);
    } else {
      changed_.wait_for(lock, SleepAfter(Clock::now() - progress), called);
    }
    if (stopping_) return;
    bool any = !new_.empty();
    std::move(new_.begin(), new_.end(), std::back_inserter(watched));
    new_.clear();
    lock.unlock();
    const std::size_t before = watched.size();
    std::erase_if(watched, [](const std::weak_ptr<Pollable>& weak) {
      const std::shared_ptr<Pollable> pollable = weak.lock();
      return pollable == nullptr || !pollable->Poll();
    });
    any = any || watched.size() != before;
    if (any) progress = Clock::now();
    lock.lock();
  }
}

}  // namespace tessera::server
