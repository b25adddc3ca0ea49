// Memory that calls compute on, the client's or the daemon's own: sealed memfds on the host, allocations on a GPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/session/device_memory.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

// Bytes that a limit allows, reserved before memory is mapped and returned when the mapping is gone. Thread-safe.
class ByteBudget {
 public:
  // `limit` names the setting that an operator would raise. `parent` (may be null) must agree, too.
  ByteBudget(Limit limit, std::uint64_t bytes_max, Metrics& metrics, std::shared_ptr<ByteBudget> parent);

  // RESOURCE_EXHAUSTED naming the limit.
  absl::Status Reserve(std::uint64_t bytes);
  void Return(std::uint64_t bytes);
  std::uint64_t used() const;

 private:
  const Limit limit_;
  const std::uint64_t bytes_max_;
  Metrics& metrics_;
  const std::shared_ptr<ByteBudget> parent_;
  mutable std::mutex mutex_;
  std::uint64_t used_ = 0;
};

// Which physical memory a mapping shows. Two buffers over the same memfd have the same key, whoever imported them; so
// have two buffers over the same GPU allocation of one session, whose mapping they share (ImportCache).
struct MemoryKey {
  std::uint64_t device = 0;  // 0 and an address for GPU memory; memfds have a device
  std::uint64_t inode = 0;
  friend bool operator==(const MemoryKey&, const MemoryKey&) = default;
};

// A range of one mapping. Immutable but for its user count; freed with its last shared_ptr.
class Buffer {
 public:
  // Maps [byte_offset, byte_offset + bytes) of a client's memfd; bytes 0 = to its end. INVALID_ARGUMENT if the
  // descriptor is not a memfd that is sealed against shrinking and open for writing, RESOURCE_EXHAUSTED over budget.
  static absl::StatusOr<std::shared_ptr<Buffer>> Import(UniqueFd fd, std::uint64_t byte_offset, std::uint64_t bytes,
                                                        std::shared_ptr<ByteBudget> budget);

  // New zeroed memory in a sealed memfd that can be handed to the client.
  static absl::StatusOr<std::shared_ptr<Buffer>> Allocate(std::uint64_t bytes, std::shared_ptr<ByteBudget> budget);

  // New zeroed memory of a GPU that can be handed to the client. The budget pays for the whole allocation, which is
  // rounded up to the GPU's granularity.
  static absl::StatusOr<std::shared_ptr<Buffer>> AllocateOn(DeviceMemory& device, std::uint64_t bytes,
                                                            std::shared_ptr<ByteBudget> budget);

  // [byte_offset, byte_offset + bytes) of a client's GPU allocation; bytes 0 = to its end. INVALID_ARGUMENT if the
  // allocation does not have them, RESOURCE_EXHAUSTED over budget.
  static absl::StatusOr<std::shared_ptr<Buffer>> Show(std::shared_ptr<Mapping> allocation, MemorySpace space,
                                                      std::uint64_t byte_offset, std::uint64_t bytes,
                                                      std::shared_ptr<ByteBudget> budget);

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

  std::uint32_t users() const { return users_.load(std::memory_order_relaxed); }

 private:
  friend class BufferPin;
  Buffer(std::uint64_t bytes, BufferOrigin origin, std::shared_ptr<ByteBudget> budget, std::uint64_t reserved)
      : bytes_(bytes), origin_(origin), budget_(std::move(budget)), reserved_(reserved) {}

  const std::uint64_t bytes_;
  const BufferOrigin origin_;
  MemorySpace space_;
  std::shared_ptr<Mapping> mapping_;
  std::byte* data_ = nullptr;
  MemoryKey memory_;
  std::uint64_t memory_offset_ = 0;
  const std::shared_ptr<ByteBudget> budget_;
  const std::uint64_t reserved_;  // of the budget
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
