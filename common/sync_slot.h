// How an exported timeline looks in memory, for the daemon and its clients; side_channel.proto states it for others.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

// All-zero is a timeline at 0 without an error.
struct alignas(64) SyncSlot {
  std::atomic<std::uint64_t> value{0};
  std::atomic<std::uint64_t> error_value{0};  // the point that the error stands at; written before error_code
  std::atomic<std::uint32_t> error_code{0};   // of google.rpc.Code; 0 = none. Written before the value that tells of it
};
static_assert(sizeof(SyncSlot) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

// The greatest value. A GPU's wait compares by the sign of the difference, for which points half the range apart are
// too far from each other.
inline constexpr std::uint64_t kSyncValueMax = (std::uint64_t{1} << 63U) - 1;

// Raises `value` to `to`, unless it is there. What is greater than the greatest was never signalled, and to a GPU's
// wait is less than any point: it is overwritten.
inline void RaiseTo(std::atomic<std::uint64_t>& value, std::uint64_t to) {
  std::uint64_t seen = value.load(std::memory_order_relaxed);
  while ((seen < to || seen > kSyncValueMax) && !value.compare_exchange_weak(seen, to, std::memory_order_acq_rel)) {
  }
}

}  // namespace tessera
