// What the life-cycle tests share: a session table and an executor on the CPU, products whose results can be checked
// from the seeds of their operands, and answers that are counted.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/exec/bind.h"
#include "server/exec/cpu_device.h"
#include "server/exec/executor.h"
#include "server/session/session_table.h"
#include "tests/oracle/codec.h"
#include "tests/server/exec/bound_memory.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {

inline constexpr std::int64_t kInner = 24;  // K of all products
// M = N: small enough for the caller, and large enough for the device's threads.
inline constexpr std::int64_t kSmallExtent = 8;
inline constexpr std::int64_t kLargeExtent = 40;
inline constexpr std::uint64_t kOutputBytes = kLargeExtent * kLargeExtent * 4;
inline constexpr std::uint64_t kOperandBytes = kLargeExtent * kInner * 2;
static_assert(kOperandBytes <= kOutputBytes, "any buffer of the tests has room for both");

// An exact bf16, and so are sums of products of them in f32.
inline int ElementOf(std::uint32_t seed, std::int64_t i) {
  return static_cast<int>((seed * 31 + static_cast<std::uint32_t>(i) * 7) % 9) - 4;
}

inline void FillOperand(std::uint32_t seed, std::byte* data) {
  for (std::int64_t i = 0; i < kLargeExtent * kInner; ++i) {
    oracle::Encode(DType::kBf16, ElementOf(seed, i), data + 2 * i);
  }
}

// Not a result of any product.
inline void SpoilOutput(std::byte* data) {
  std::memset(data, 0xff, kOutputBytes);
}
inline bool IsSpoiled(const std::byte* data) {
  return std::all_of(data, data + kOutputBytes, [](std::byte b) { return b == std::byte{0xff}; });
}

inline bool IsProduct(std::uint32_t a_seed, std::uint32_t b_seed, std::int64_t extent, const std::byte* data) {
  for (std::int64_t m = 0; m < extent; ++m) {
    for (std::int64_t n = 0; n < extent; ++n) {
      int sum = 0;
      for (std::int64_t k = 0; k < kInner; ++k)
        sum += ElementOf(a_seed, m * kInner + k) * ElementOf(b_seed, n * kInner + k);
      float seen = 0;
      std::memcpy(&seen, data + 4 * (m * extent + n), sizeof(seen));
      if (seen != static_cast<float>(sum)) return false;
    }
  }
  return true;
}

// D = A B^T of tensors at the beginning of the buffers a, b, d.
inline GemmCall ProductOf(const std::array<Id, 3>& buffers, std::int64_t extent) {
  GemmCall call;
  call.a = BufferView("op.a", buffers[0], DType::kBf16, {extent, kInner});
  call.b = BufferView("op.b", buffers[1], DType::kBf16, {extent, kInner});
  call.d = BufferView("op.d", buffers[2], DType::kF32, {extent, extent});
  return call;
}

// What became of an operation.
class Answer {
 public:
  void Give(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    // A copy that shares nothing: ThreadSanitizer does not see how the installed Abseil counts references.
    status_ = absl::Status(status.code(), status.message());
    given_.notify_all();
  }
  absl::Status Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!given_.wait_for(lock, kTestPatience, [this] { return calls_ > 0; })) return absl::UnknownError("no answer");
    return status_;
  }
  int calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable given_;
  int calls_ = 0;
  absl::Status status_;
};

// Holds an operation right before its launch until it is told what to say.
class Gate {
 public:
  absl::Status Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_ = true;
    changed_.notify_all();
    const bool open = changed_.wait_for(lock, kTestPatience, [this] { return verdict_.has_value(); });
    return open ? *verdict_ : absl::UnknownError("the gate stayed shut");
  }
  bool AwaitArrival() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kTestPatience, [this] { return arrived_; });
  }
  void Open(absl::Status verdict) {
    const std::lock_guard<std::mutex> lock(mutex_);
    verdict_ = std::move(verdict);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<absl::Status> verdict_;
  bool arrived_ = false;
};

// Random unless TESSERA_TEST_SEED says otherwise; printed either way.
inline std::uint64_t TestSeed() {
  const char* const given = std::getenv("TESSERA_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "TESSERA_TEST_SEED=" << seed << "\n";
  return seed;
}

struct LifecycleWorld {
  LifecycleWorld(const SessionLimits& limits, const ExecutorOptions& options, int threads)
      : executor(std::make_unique<Executor>(Devices(threads), std::nullopt, options, metrics)),
        table(1, limits, metrics, reaper, [this](const StreamSpec& spec) { return executor->MakeLane(spec); }) {}
  ~LifecycleWorld() {
    table.EndAllSessions(SessionEnd::kDrained);
    AwaitIdle(reaper);  // until then it drops queued work of the executor
    executor.reset();
  }
  LifecycleWorld(const LifecycleWorld&) = delete;
  LifecycleWorld& operator=(const LifecycleWorld&) = delete;

  static std::vector<std::unique_ptr<Device>> Devices(int threads) {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeCpuDevice({.threads = threads, .workspace_bytes_max = 1 << 24}));
    return devices;
  }

  BindScope Scope(const Session* session, std::string* inline_result = nullptr) {
    return {.sessions = &table,
            .session = session,
            .inline_result = inline_result,
            .inline_bytes_max = 1U << 20U,
            .metrics = &metrics};
  }

  Metrics metrics{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper{std::chrono::hours(1), metrics};
  std::unique_ptr<Executor> executor;
  SessionTable table;
};

}  // namespace tessera::server
