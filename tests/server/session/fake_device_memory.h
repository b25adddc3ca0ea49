// A GPU's memory without a GPU: allocations are memfds, descriptors show them, handles name them, and every open and
// close is counted. Addresses are the host's, so that a test can look where a kernel would; the daemon must not.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/session/device_memory.h"
#include "tests/server/session/posix_fixtures.h"

namespace tessera::server {

inline constexpr char kFakeGpu[] = "GPU-11111111-2222-3333-4444-555555555555";
inline constexpr std::uint64_t kFakeGranularity = 4096;

class FakeDeviceMemory final : public DeviceMemory {
 public:
  struct Counts {
    int opened = 0;  // mappings made, by whichever way
    int closed = 0;
  };

  explicit FakeDeviceMemory(std::string uuid = kFakeGpu) : uuid_(std::move(uuid)) {}

  const std::string& uuid() const override { return uuid_; }
  std::uint64_t granularity() const override { return kFakeGranularity; }

  absl::StatusOr<std::unique_ptr<Mapping>> Allocate(std::uint64_t bytes) override {
    UniqueFd fd = bytes <= kBytesMax ? MakeMemfd(bytes) : UniqueFd();
    if (!fd) return absl::ResourceExhaustedError("the fake GPU is full");
    const int number = fd.get();
    return Map(number, bytes, std::move(fd));
  }

  absl::StatusOr<std::unique_ptr<Mapping>> ImportLegacy(const LegacyHandle& handle) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = exported_.find(std::string(handle.begin(), handle.end()));
    if (found == exported_.end()) return absl::InvalidArgumentError("not a handle");
    return Map(found->second.get(), SizeOf(found->second), UniqueFd());
  }

  absl::StatusOr<std::unique_ptr<Mapping>> ImportDescriptor(UniqueFd fd, std::uint64_t allocation_bytes) override {
    if (SizeOf(fd) == 0) return absl::InvalidArgumentError("not an allocation");
    if (allocation_bytes > SizeOf(fd)) return absl::InvalidArgumentError("the allocation is smaller");
    return Map(fd.get(), allocation_bytes, UniqueFd());
  }

  absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterHost(std::byte* memory, std::uint64_t /*bytes*/) override {
    return std::make_unique<HostRegistration>(reinterpret_cast<std::uintptr_t>(memory));
  }

  absl::StatusOr<std::unique_ptr<DeviceEvent>> ImportEvent(const LegacyHandle& handle) override {
    if (handle != kEventHandle) return absl::InvalidArgumentError("not a handle");
    return std::make_unique<FakeEvent>(*this);
  }

  // Of the one event that there is, which a client records and lets be done.
  static constexpr LegacyHandle kEventHandle = {'e'};
  std::atomic<bool> event_done{false};
  std::atomic<int> event_records{0};
  std::atomic<int> events_open{0};

  // What a client's cudaIpcGetMemHandle would give for an allocation of `bytes`.
  std::string ExportLegacy(std::uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string handle(std::tuple_size_v<LegacyHandle>, '\0');
    handle[5] = static_cast<char>(exported_.size() + 1);
    exported_.emplace(handle, MakeMemfd(bytes));
    return handle;
  }

  Counts counts() const {
    const std::lock_guard<std::mutex> lock(count_mutex_);
    return counts_;
  }
  int mapped() const {
    const Counts now = counts();
    return now.opened - now.closed;
  }

 private:
  static constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 30;

  class FakeMapping final : public Mapping {
   public:
    FakeMapping(void* start, std::uint64_t bytes, UniqueFd fd, FakeDeviceMemory& device)
        : Mapping(static_cast<std::byte*>(start), bytes), fd_(std::move(fd)), device_(device) {}
    ~FakeMapping() override {
      ::munmap(data(), bytes());
      const std::lock_guard<std::mutex> lock(device_.count_mutex_);
      ++device_.counts_.closed;
    }
    int fd() const override { return fd_.get(); }

   private:
    const UniqueFd fd_;
    FakeDeviceMemory& device_;
  };

  class FakeEvent final : public DeviceEvent {
   public:
    explicit FakeEvent(FakeDeviceMemory& device) : device_(device) { ++device_.events_open; }
    ~FakeEvent() override { --device_.events_open; }
    absl::StatusOr<bool> Done() override { return device_.event_done.load(); }
    absl::Status Record(void* /*stream*/) override {
      ++device_.event_records;
      return absl::OkStatus();
    }

   private:
    FakeDeviceMemory& device_;
  };

  static std::uint64_t SizeOf(const UniqueFd& fd) {
    struct stat file {};
    return ::fstat(fd.get(), &file) == 0 ? static_cast<std::uint64_t>(file.st_size) : 0;
  }

  absl::StatusOr<std::unique_ptr<Mapping>> Map(int fd, std::uint64_t bytes, UniqueFd keep) {
    void* const start = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (start == MAP_FAILED) return absl::ResourceExhaustedError("mmap");
    const std::lock_guard<std::mutex> lock(count_mutex_);
    ++counts_.opened;
    return std::make_unique<FakeMapping>(start, bytes, std::move(keep), *this);
  }

  const std::string uuid_;
  std::mutex mutex_;  // guards exported_
  std::map<std::string, UniqueFd> exported_;
  mutable std::mutex count_mutex_;  // guards counts_
  Counts counts_;
};

}  // namespace tessera::server
