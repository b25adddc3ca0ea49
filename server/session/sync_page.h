// The page on which a session's exported timelines show their values: memory that the daemon, the session's client and
// the GPU read and write. Its layout is a contract (SideRequest.FetchTimeline in side_channel.proto).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/sync_slot.h"
#include "common/unique_fd.h"
#include "server/session/device_memory.h"

namespace tessera::server {

class SharedWord;

// Thread-safe. Held by its words, by a shared_ptr.
class SyncPage : public std::enable_shared_from_this<SyncPage> {
 public:
  static constexpr std::size_t kBytes = 4096;
  static constexpr std::size_t kSlots = kBytes / sizeof(SyncSlot);

  // Registers the page with every device, which outlives it. Unregistering may wait for the device.
  static absl::StatusOr<std::unique_ptr<SyncPage>> Make(const std::vector<DeviceMemory*>& devices);

  SyncPage(const SyncPage&) = delete;
  SyncPage& operator=(const SyncPage&) = delete;
  ~SyncPage();

  // nullopt: all kSlots are taken.
  std::optional<SharedWord> Take(std::uint64_t value);

  int fd() const { return fd_.get(); }  // sealed: it can be neither shrunk nor grown

 private:
  friend class SharedWord;
  struct OnDevice {
    MemorySpace space;
    std::unique_ptr<HostRegistration> registration;
  };

  SyncPage(UniqueFd fd, SyncSlot* slots) : fd_(std::move(fd)), slots_(slots) {}

  const UniqueFd fd_;
  SyncSlot* const slots_;  // kSlots
  std::vector<OnDevice> devices_;

  std::mutex mutex_;
  std::array<bool, kSlots> taken_{};
};

// One slot of a page, given back with the object. Whatever the client writes there is its own affair: no value that it
// finds can harm the daemon.
class SharedWord {
 public:
  SharedWord(SharedWord&& other) noexcept = default;
  SharedWord& operator=(SharedWord&&) = delete;
  ~SharedWord();

  std::uint64_t Load() const;  // 0 where the client wrote more than kSyncValueMax
  void Raise(std::uint64_t value);
  // To be raised later: whoever finds the value looks for an error behind it. The smallest `value` counts.
  void Fail(std::uint64_t value, absl::StatusCode code);

  const std::shared_ptr<SyncPage>& page() const { return page_; }
  std::uint64_t byte_offset() const { return index_ * sizeof(SyncSlot); }
  // Of the value, for work on that device; nullopt: the device does not see it.
  std::optional<std::uint64_t> AddressOn(const MemorySpace& space) const;

 private:
  friend class SyncPage;
  SharedWord(std::shared_ptr<SyncPage> page, std::size_t index) : page_(std::move(page)), index_(index) {}
  SyncSlot& slot() const { return page_->slots_[index_]; }

  std::shared_ptr<SyncPage> page_;  // null: moved from
  std::size_t index_ = 0;
};

}  // namespace tessera::server
