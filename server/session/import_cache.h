// GPU memory that a session has imported: one mapping an allocation, however many buffers show it. Opening costs
// hundreds of microseconds, and two buffers overlap exactly if they show the same mapping.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "server/session/device_memory.h"

namespace tessera::server {

// Thread-safe. Holds no memory itself: a mapping goes with the last buffer that shows it. One cache serves one session,
// because what a client says about its allocations (their ids) is good for itself only.
class ImportCache {
 public:
  using Open = std::function<absl::StatusOr<std::unique_ptr<Mapping>>()>;

  // The live mapping of `source` (what names the memory to the driver), else what `open` makes. FAILED_PRECONDITION if
  // the live mapping is of another allocation: the client freed memory that is still mapped here, and the driver would
  // give the old memory for the new one. `open` runs under the lock, so that concurrent imports open once.
  absl::StatusOr<std::shared_ptr<Mapping>> Get(const std::string& source, std::uint64_t allocation_id,
                                               const Open& open);

 private:
  struct Entry {
    std::uint64_t allocation_id = 0;
    std::weak_ptr<Mapping> mapping;
  };

  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

}  // namespace tessera::server
