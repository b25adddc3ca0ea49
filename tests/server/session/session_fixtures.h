// What tests of sessions share: lanes without an executor, and waiting for the reaper, after which counts of bytes are
// exact.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/session/reaper.h"
#include "server/session/session.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

inline constexpr std::chrono::seconds kTestPatience{30};  // only a broken daemon makes a test wait so long

// Whether `condition` holds within the patience.
template <typename Condition>
bool Eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + kTestPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// Waits until the reaper has done all that was posted but for what is stuck.
inline bool AwaitIdle(const Reaper& reaper) {
  return Eventually([&] { return reaper.counts().waiting == 0; });
}

// The lane of a session that no executor serves.
class IdleLane : public SessionLane {
 public:
  void DropUnwanted() override {}
  std::int64_t in_flight() const override { return 0; }
  std::int64_t gated() const override { return 0; }
};

inline std::shared_ptr<SessionLane> MakeIdleLane(const StreamSpec& /*spec*/) {
  return std::make_shared<IdleLane>();
}

// Holds whoever passes until it is opened.
class Turnstile {
 public:
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    // Longer than a test waits for what must happen meanwhile.
    changed_.wait_for(lock, 2 * kTestPatience, [this] { return open_; });
  }
  bool AwaitArrivals(int number) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kTestPatience, [&] { return arrived_ >= number; });
  }
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

// A token whose end can be seen.
class Watched {
 public:
  std::shared_ptr<const void> Token() {
    return {new int(0), [gone = gone_](const int* value) {
              delete value;
              gone->store(true);
            }};
  }
  bool gone() const { return gone_->load(); }

 private:
  std::shared_ptr<std::atomic<bool>> gone_ = std::make_shared<std::atomic<bool>>(false);
};

// The value of one series of the metrics; -1 if there is none of that name.
inline double MetricValue(const Metrics& metrics, const std::string& series) {
  const std::string text = "\n" + metrics.Serialize();
  const std::size_t at = text.find("\n" + series + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
}

template <typename T>
absl::StatusCode CodeOf(const absl::StatusOr<T>& result) {
  return result.status().code();
}
inline absl::StatusCode CodeOf(const absl::Status& status) {
  return status.code();
}

}  // namespace tessera::server
