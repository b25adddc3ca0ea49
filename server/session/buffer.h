// Memory that calls compute on, the client's or the daemon's own: sealed memfds on the host, allocations on a GPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/session/budget.h"
#include "server/session/device_memory.h"
#include "server/session/reaper.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

// What a buffer needs beside its memory; all of it outlives the buffer but the budget, which it shares.
struct BufferHome {
  std::shared_ptr<MemoryBudget> budget;
  Reaper* reaper = nullptr;
};

// Which physical memory a mapping shows. Two buffers over the same memfd have the same key, whoever imported them; so
// have two buffers over the same GPU allocation of one session, whose mapping they share (ImportCache).
struct MemoryKey {
  std::uint64_t device = 0;  // 0 and an address for GPU memory; memfds have a device
  std::uint64_t inode = 0;
  friend bool operator==(const MemoryKey&, const MemoryKey&) = default;
};

// A range of one mapping. Immutable but for its user count. With its last shared_ptr its memory goes to the reaper,
// which unmaps it, gives its bytes back to the budget and lets go of its tokens, in this order.
class Buffer {
 public:
  // Maps [byte_offset, byte_offset + bytes) of a client's memfd; bytes 0 = to its end. INVALID_ARGUMENT if the
  // descriptor is not a memfd that is sealed against shrinking and open for writing, RESOURCE_EXHAUSTED over budget.
  static absl::StatusOr<std::shared_ptr<Buffer>> Import(UniqueFd fd, std::uint64_t byte_offset, std::uint64_t bytes,
                                                        const BufferHome& home);

  // New zeroed memory in a sealed memfd that can be handed to the client.
  static absl::StatusOr<std::shared_ptr<Buffer>> Allocate(std::uint64_t bytes, const BufferHome& home);

  // New zeroed memory of a GPU that can be handed to the client. The budget pays for the whole allocation, which is
  // rounded up to the GPU's granularity.
  static absl::StatusOr<std::shared_ptr<Buffer>> AllocateOn(DeviceMemory& device, std::uint64_t bytes,
                                                            const BufferHome& home);

  // [byte_offset, byte_offset + bytes) of a client's GPU allocation; bytes 0 = to its end. INVALID_ARGUMENT if the
  // allocation does not have them, RESOURCE_EXHAUSTED over budget.
  static absl::StatusOr<std::shared_ptr<Buffer>> Show(std::shared_ptr<Mapping> allocation, MemorySpace space,
                                                      std::uint64_t byte_offset, std::uint64_t bytes,
                                                      const BufferHome& home);

  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  std::byte* data() const { return data_; }  // a GPU's address where the space is a GPU's
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t allocation_bytes() const { return mapping_->bytes(); }  // at least bytes(), by the rounding
  const MemorySpace& space() const { return space_; }
  BufferOrigin origin() const { return origin_; }
  const MemoryKey& memory() const { return memory_; }
  std::uint64_t memory_offset() const { return memory_offset_; }  // of data() within that memory
  int fd() const { return mapping_->fd(); }                       // -1 for imported memory
  std::chrono::steady_clock::time_point created() const { return created_; }

  // Held until the memory is gone. By one thread, before it lets go of the buffer.
  void HoldUntilGone(GoneToken token) { gone_ = std::move(token); }

  std::uint32_t users() const { return users_.load(std::memory_order_relaxed); }

 private:
  friend class BufferPin;
  Buffer(std::uint64_t bytes, BufferOrigin origin, Reaper& reaper, Reservation reservation)
      : bytes_(bytes), origin_(origin), reaper_(reaper), reservation_(std::move(reservation)) {}

  const std::uint64_t bytes_;
  const BufferOrigin origin_;
  Reaper& reaper_;
  Reservation reservation_;
  MemorySpace space_;
  std::shared_ptr<Mapping> mapping_;
  std::byte* data_ = nullptr;
  MemoryKey memory_;
  std::uint64_t memory_offset_ = 0;
  GoneToken gone_;
  std::chrono::steady_clock::time_point created_ = std::chrono::steady_clock::now();
  std::atomic<std::uint32_t> users_{0};
};

// A running call's hold on a buffer: the memory stays mapped until the pin is gone.
class BufferPin {
 public:
  BufferPin() = default;
  explicit BufferPin(std::shared_ptr<Buffer> buffer);
  BufferPin(BufferPin&& other) noexcept = default;
  BufferPin& operator=(BufferPin&& other) noexcept;
  ~BufferPin();

  const Buffer* operator->() const { return buffer_.get(); }
  explicit operator bool() const { return buffer_ != nullptr; }

 private:
  void Unpin();
  std::shared_ptr<Buffer> buffer_;
};

}  // namespace tessera::server
