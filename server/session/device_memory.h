// Memory that calls compute on, wherever it is: spaces, mappings, and what a GPU must offer to hold buffers. No CUDA in
// here: the implementation is server/exec/cuda_memory.h, and tests have a fake.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace tessera::server {

// Where memory is: in the host's, or on one GPU.
class MemorySpace {
 public:
  MemorySpace() = default;  // host
  static MemorySpace Gpu(std::string uuid) {
    MemorySpace space;
    space.uuid_ = std::move(uuid);
    return space;
  }

  bool on_gpu() const { return !uuid_.empty(); }
  const std::string& uuid() const { return uuid_; }                    // "GPU-xxxxxxxx-xxxx-..."; empty: host
  std::string Name() const { return uuid_.empty() ? "host" : uuid_; }  // as on the wire
  friend bool operator==(const MemorySpace&, const MemorySpace&) = default;

 private:
  std::string uuid_;
};

// Memory that has an address in this process until the object is gone. Of GPU memory it is an address for kernels:
// the host never reads through it.
class Mapping {
 public:
  Mapping(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  virtual ~Mapping() = default;

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  virtual int fd() const { return -1; }  // shows the memory to another process; -1: it cannot be passed on

 private:
  std::byte* const data_;
  const std::uint64_t bytes_;
};

// What cudaIpcGetMemHandle gives: names one cudaMalloc allocation of another process. cudaIpcGetEventHandle gives the
// like for events.
using LegacyHandle = std::array<char, 64>;

// Memory of this process that a GPU reads and writes, too, until the object is gone.
class HostRegistration {
 public:
  explicit HostRegistration(std::uint64_t address) : address_(address) {}
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  virtual ~HostRegistration() = default;

  std::uint64_t address() const { return address_; }  // for the GPU

 private:
  const std::uint64_t address_;
};

// An event that another process made and records behind its work, or waits for. Thread-safe.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  virtual ~DeviceEvent() = default;

  // Whether all is over that it was last recorded behind. UNAVAILABLE: the GPU is lost.
  virtual absl::StatusOr<bool> Done() = 0;
  // Records it behind the work of a stream (cudaStream_t); null: behind nothing, so that it is done at once.
  virtual absl::Status Record(void* stream) = 0;
};

// The memory of one GPU. Thread-safe. Mappings are of whole allocations, may outlive no DeviceMemory, and are unmapped
// by their destructor, on whatever thread drops the last pin: nothing on the GPU uses them any more by then.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual const std::string& uuid() const = 0;    // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
  virtual std::uint64_t granularity() const = 0;  // allocations are a multiple of this many bytes

  // Zeroed memory of `bytes`, a multiple of the granularity, with a descriptor. RESOURCE_EXHAUSTED if the GPU is full.
  virtual absl::StatusOr<std::unique_ptr<Mapping>> Allocate(std::uint64_t bytes) = 0;

  // Another process's cudaMalloc allocation; Mapping::bytes() is its true size as the driver knows it.
  // INVALID_ARGUMENT: not a handle of live memory of this GPU. FAILED_PRECONDITION: no context takes this handle.
  virtual absl::StatusOr<std::unique_ptr<Mapping>> ImportLegacy(const LegacyHandle& handle) = 0;

  // The allocation that `fd` shows, of which `allocation_bytes` are mapped. INVALID_ARGUMENT: `fd` is no allocation of
  // this GPU, or it is smaller than that.
  virtual absl::StatusOr<std::unique_ptr<Mapping>> ImportDescriptor(UniqueFd fd, std::uint64_t allocation_bytes) = 0;

  // Whole pages, which stay mapped for longer than the result lives.
  virtual absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterHost(std::byte* memory, std::uint64_t bytes) = 0;

  // Another process's event. INVALID_ARGUMENT: not a handle of a live one; FAILED_PRECONDITION as ImportLegacy.
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> ImportEvent(const LegacyHandle& handle) = 0;
};

// `bytes` rounded up to a multiple of `granularity`; the largest number if that has no 64-bit value.
constexpr std::uint64_t AllocationBytes(std::uint64_t bytes, std::uint64_t granularity) {
  const std::uint64_t last = bytes % granularity;
  if (last == 0) return bytes;
  const std::uint64_t more = granularity - last;
  return bytes > std::numeric_limits<std::uint64_t>::max() - more ? std::numeric_limits<std::uint64_t>::max()
                                                                  : bytes + more;
}

}  // namespace tessera::server
