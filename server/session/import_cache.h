// GPU memory that was imported: one mapping an allocation, however many buffers show it. Opening costs hundreds of
// microseconds, and two buffers overlap exactly if they show the same mapping.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "server/session/device_memory.h"

namespace tessera::server {

// Thread-safe. Holds no memory itself: a mapping goes with the last buffer that shows it, which may be after the cache.
class ImportCache {
 public:
  static constexpr std::chrono::milliseconds kClosingWait{100};  // closing takes a millisecond unless it is stuck

  using Open = std::function<absl::StatusOr<std::unique_ptr<Mapping>>()>;

  // The live mapping of `source` (what names the memory to the driver), else what `open` makes.
  // FAILED_PRECONDITION if the live mapping is of another allocation: the client freed memory that is still mapped
  // here, and the driver would give the old memory for the new one. For the same reason a mapping that is being closed
  // is waited for, and the answer is ABORTED if that takes longer than kClosingWait. `open` runs under the lock, so
  // that concurrent imports open once.
  absl::StatusOr<std::shared_ptr<Mapping>> Get(const std::string& source, std::uint64_t allocation_id,
                                               const Open& open);

 private:
  struct Entry {
    std::uint64_t allocation_id = 0;
    std::weak_ptr<Mapping> mapping;  // expired: being closed
  };
  struct State {
    std::mutex mutex;
    std::condition_variable closed;
    std::map<std::string, Entry> entries;  // until the mapping is closed
  };

  absl::StatusOr<std::shared_ptr<Mapping>> OpenNew(const std::string& source, std::uint64_t allocation_id,
                                                   const Open& open);  // with the mutex held

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace tessera::server
