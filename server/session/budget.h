// Limits of buffers, counted while the memory is really held: from before it is mapped until after it is unmapped.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

inline constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

// The limits name the settings that an operator would raise.
struct MemoryLimits {
  Limit bytes_limit = Limit::kBufferBytes;
  std::uint64_t bytes_max = kNoLimit;
  Limit buffers_limit = Limit::kBuffers;
  std::uint64_t buffers_max = kNoLimit;
};

struct MemoryUse {
  std::uint64_t bytes = 0;
  std::uint64_t buffers = 0;
};

// A share of the memory that buffers may hold, within the share of `parent`: session within principal within daemon.
// Thread-safe.
class MemoryBudget {
 public:
  MemoryBudget(const MemoryLimits& limits, Metrics& metrics, std::shared_ptr<MemoryBudget> parent = nullptr);

  MemoryUse used() const;

 private:
  friend class Reservation;

  absl::Status Reserve(std::uint64_t bytes);
  void Return(std::uint64_t bytes);
  absl::Status CheckRoom(std::uint64_t bytes) const;  // with mutex_ held

  const MemoryLimits limits_;
  Metrics& metrics_;
  const std::shared_ptr<MemoryBudget> parent_;
  mutable std::mutex mutex_;  // locked one budget at a time
  MemoryUse used_;
};

// One buffer of some bytes in a budget and all its parents, until the object is gone.
class Reservation {
 public:
  // RESOURCE_EXHAUSTED naming the limit that has no room.
  static absl::StatusOr<Reservation> Make(std::shared_ptr<MemoryBudget> budget, std::uint64_t bytes);

  Reservation(Reservation&& other) noexcept : budget_(std::move(other.budget_)), bytes_(other.bytes_) {}
  Reservation& operator=(Reservation&&) = delete;
  ~Reservation();

 private:
  Reservation(std::shared_ptr<MemoryBudget> budget, std::uint64_t bytes) : budget_(std::move(budget)), bytes_(bytes) {}

  std::shared_ptr<MemoryBudget> budget_;  // null: moved from
  std::uint64_t bytes_;
};

}  // namespace tessera::server
