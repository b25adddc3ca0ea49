#include "server/exec/cuda_memory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/exec/cuda_driver.h"

namespace tessera::server {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == std::tuple_size_v<LegacyHandle>);
static_assert(sizeof(cudaIpcEventHandle_t) == std::tuple_size_v<LegacyHandle>);

constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// "Unknown" is what the driver answers to some handles and descriptors that are not its own.
bool ContextIsLost(cudaError_t error) {
  return IsSticky(error) && error != cudaErrorUnknown;
}

// A failed runtime call also leaves its error for the next cudaGetLastError of this thread, which may be a launch's:
// taken away here. Errors that end the context stay.
absl::Status RuntimeStatus(cudaError_t error, const char* what, absl::StatusCode code = absl::StatusCode::kInternal) {
  if (error == cudaSuccess) return absl::OkStatus();
  static_cast<void>(cudaGetLastError());
  if (ContextIsLost(error)) code = absl::StatusCode::kUnavailable;
  if (error == cudaErrorMemoryAllocation) code = absl::StatusCode::kResourceExhausted;
  return CudaStatus(error, what, code);
}

// The driver's errors have the numbers of the runtime's.
absl::Status DriverStatus(const CudaDriver& driver, CUresult error, const char* what,
                          absl::StatusCode code = absl::StatusCode::kInternal) {
  if (ContextIsLost(static_cast<cudaError_t>(error))) code = absl::StatusCode::kUnavailable;
  if (error == CUDA_ERROR_OUT_OF_MEMORY) code = absl::StatusCode::kResourceExhausted;
  return driver.ToStatus(error, what, code);
}

// Of clean-up, which nobody waits for: memory that stays mapped is a leak to be told of.
void WarnUnlessOk(const absl::Status& status) {
  if (!status.ok()) spdlog::warn("{}", MessageOf(status));
}

// Owns one reference to an allocation. Mappings and descriptors keep the memory alive without it.
class AllocationHandle {
 public:
  AllocationHandle(const CudaDriver& driver, CUmemGenericAllocationHandle handle) : driver_(driver), handle_(handle) {}
  AllocationHandle(const AllocationHandle&) = delete;
  AllocationHandle& operator=(const AllocationHandle&) = delete;
  ~AllocationHandle() { WarnUnlessOk(DriverStatus(driver_, driver_.mem_release(handle_), "cuMemRelease")); }
  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const CudaDriver& driver_;
  const CUmemGenericAllocationHandle handle_;
};

// Threads come and go, and each has a current device of its own.
absl::Status MakeCurrent(int ordinal) {
  return RuntimeStatus(cudaSetDevice(ordinal), "cudaSetDevice", absl::StatusCode::kUnavailable);
}

// A reserved range of addresses, and the allocation that is mapped there once Map has succeeded.
class AddressRange {
 public:
  AddressRange(const CudaDriver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  AddressRange(AddressRange&& other) noexcept
      : driver_(other.driver_),
        ordinal_(other.ordinal_),
        address_(std::exchange(other.address_, 0)),
        bytes_(other.bytes_),
        mapped_(other.mapped_) {}
  AddressRange& operator=(AddressRange&&) = delete;
  ~AddressRange() {
    if (address_ != 0) WarnUnlessOk(Unmap());
  }

  // The driver refuses a range longer than the allocation.
  absl::Status Map(const AllocationHandle& allocation, std::uint64_t bytes) {
    RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_address_reserve(&address_, bytes, 0, 0, 0), "reserving addresses",
                                 absl::StatusCode::kResourceExhausted));
    bytes_ = bytes;
    RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_map(address_, bytes, 0, allocation.get(), 0),
                                 absl::StrCat("mapping ", bytes, " bytes; the allocation may have fewer").c_str(),
                                 absl::StatusCode::kInvalidArgument));
    mapped_ = true;
    CUmemAccessDesc access{};
    access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal_};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return DriverStatus(driver_, driver_.mem_set_access(address_, bytes, &access, 1), "access from this GPU",
                        absl::StatusCode::kInvalidArgument);
  }

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::uint64_t bytes() const { return bytes_; }

 private:
  absl::Status Unmap() {
    RETURN_IF_ERROR(MakeCurrent(ordinal_));
    if (mapped_) RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_unmap(address_, bytes_), "cuMemUnmap"));
    return DriverStatus(driver_, driver_.mem_address_free(address_, bytes_), "cuMemAddressFree");
  }

  const CudaDriver& driver_;
  const int ordinal_;
  CUdeviceptr address_ = 0;
  std::uint64_t bytes_ = 0;
  bool mapped_ = false;
};

class AllocationMapping final : public Mapping {
 public:
  AllocationMapping(AddressRange range, UniqueFd fd)
      : Mapping(range.data(), range.bytes()), range_(std::move(range)), fd_(std::move(fd)) {}
  int fd() const override { return fd_.get(); }

 private:
  const AddressRange range_;
  const UniqueFd fd_;
};

// cudaIpcOpenMemHandle counts: opening an open handle again gives the same address, and the last close unmaps.
struct IpcCloser {
  int ordinal = 0;
  void operator()(void* address) const {
    WarnUnlessOk(MakeCurrent(ordinal));
    WarnUnlessOk(RuntimeStatus(cudaIpcCloseMemHandle(address), "cudaIpcCloseMemHandle"));
  }
};
using OpenedHandle = std::unique_ptr<void, IpcCloser>;

class LegacyMapping final : public Mapping {
 public:
  LegacyMapping(OpenedHandle opened, std::uint64_t bytes)
      : Mapping(static_cast<std::byte*>(opened.get()), bytes), opened_(std::move(opened)) {}

 private:
  const OpenedHandle opened_;
};

class CudaHostRegistration final : public HostRegistration {
 public:
  CudaHostRegistration(std::uint64_t address, int ordinal, void* memory)
      : HostRegistration(address), ordinal_(ordinal), memory_(memory) {}
  ~CudaHostRegistration() override {
    WarnUnlessOk(MakeCurrent(ordinal_));
    WarnUnlessOk(RuntimeStatus(cudaHostUnregister(memory_), "cudaHostUnregister"));
  }

 private:
  const int ordinal_;
  void* const memory_;
};

class CudaEvent final : public DeviceEvent {
 public:
  // `stream`: for Record behind nothing; it has no other work of length.
  CudaEvent(int ordinal, cudaEvent_t event, cudaStream_t stream) : ordinal_(ordinal), event_(event), stream_(stream) {}
  ~CudaEvent() override {
    WarnUnlessOk(MakeCurrent(ordinal_));
    WarnUnlessOk(RuntimeStatus(cudaEventDestroy(event_), "cudaEventDestroy"));
  }

  absl::StatusOr<bool> Done() override {
    RETURN_IF_ERROR(MakeCurrent(ordinal_));
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    RETURN_IF_ERROR(RuntimeStatus(error, "cudaEventQuery"));
    return true;
  }

  absl::Status Record(void* stream) override {
    RETURN_IF_ERROR(MakeCurrent(ordinal_));
    return RuntimeStatus(cudaEventRecord(event_, stream == nullptr ? stream_ : static_cast<cudaStream_t>(stream)),
                         "cudaEventRecord");
  }

 private:
  const int ordinal_;
  const cudaEvent_t event_;
  const cudaStream_t stream_;
};

// What the driver says where it takes the exporter for this process: "invalid device context", though it is well.
bool TakenForThisProcess(cudaError_t error) {
  if (error != cudaErrorDeviceUninitialized) return false;
  static_cast<void>(cudaGetLastError());
  return true;
}

// The status text is what the client's author sees.
absl::Status OpenStatus(cudaError_t error) {
  if (TakenForThisProcess(error)) {
    return CudaStatus(error,
                      "the driver takes the exporter for the daemon itself, as it does with equal PID numbers; use "
                      "memory that the daemon allocates, or pass cuMemCreate memory as a cuda_descriptor",
                      absl::StatusCode::kFailedPrecondition);
  }
  return RuntimeStatus(error, "not a handle of memory that a living process holds on this GPU",
                       absl::StatusCode::kInvalidArgument);
}

class CudaMemory final : public DeviceMemory {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceMemory>> Open(int ordinal, std::string uuid);

  ~CudaMemory() override {
    if (stream_ == nullptr) return;
    WarnUnlessOk(MakeCurrent(ordinal_));
    WarnUnlessOk(RuntimeStatus(cudaStreamDestroy(stream_), "cudaStreamDestroy"));
  }

  const std::string& uuid() const override { return uuid_; }
  std::uint64_t granularity() const override { return granularity_; }

  absl::StatusOr<std::unique_ptr<Mapping>> Allocate(std::uint64_t bytes) override;
  absl::StatusOr<std::unique_ptr<Mapping>> ImportLegacy(const LegacyHandle& handle) override;
  absl::StatusOr<std::unique_ptr<Mapping>> ImportDescriptor(UniqueFd fd, std::uint64_t allocation_bytes) override;
  absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterHost(std::byte* memory, std::uint64_t bytes) override;
  absl::StatusOr<std::unique_ptr<DeviceEvent>> ImportEvent(const LegacyHandle& handle) override;

 private:
  CudaMemory(const CudaDriver& driver, int ordinal, std::string uuid)
      : driver_(driver), ordinal_(ordinal), uuid_(std::move(uuid)) {}

  CUmemAllocationProp Properties() const;
  absl::Status Zero(const AddressRange& range) const;
  absl::Status CheckImported(const AllocationHandle& allocation) const;  // as our own are: memory of this GPU
  absl::Status CheckOpened(const void* address) const;                   // the same
  absl::StatusOr<std::uint64_t> BytesFrom(const void* address) const;    // to the end of its allocation

  const CudaDriver& driver_;
  const int ordinal_;
  const std::string uuid_;
  std::uint64_t granularity_ = 0;
  cudaStream_t stream_ = nullptr;  // for zeroing; the default stream would wait for other streams
};

absl::StatusOr<std::unique_ptr<DeviceMemory>> CudaMemory::Open(int ordinal, std::string uuid) {
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  RETURN_IF_ERROR(MakeCurrent(ordinal));
  std::unique_ptr<CudaMemory> memory(new CudaMemory(*driver, ordinal, std::move(uuid)));
  const CUmemAllocationProp properties = memory->Properties();
  std::size_t granularity = 0;
  RETURN_IF_ERROR(DriverStatus(
      *driver, driver->mem_get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      "cuMemGetAllocationGranularity"));
  if (granularity == 0) return absl::InternalError("cuMemGetAllocationGranularity: 0");
  memory->granularity_ = granularity;
  RETURN_IF_ERROR(
      RuntimeStatus(cudaStreamCreateWithFlags(&memory->stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"));
  // Where descriptors are not to be had (some virtual GPUs), this fails rather than the first client's call.
  const absl::Status trial = memory->Allocate(granularity).status();
  if (!trial.ok()) return InField(absl::StrCat("allocations with descriptors on ", memory->uuid_), trial);
  return memory;
}

CUmemAllocationProp CudaMemory::Properties() const {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kDescriptor;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal_};
  return properties;
}

absl::Status CudaMemory::Zero(const AddressRange& range) const {
  RETURN_IF_ERROR(RuntimeStatus(cudaMemsetAsync(range.data(), 0, range.bytes(), stream_), "zeroing GPU memory"));
  return RuntimeStatus(cudaStreamSynchronize(stream_), "zeroing GPU memory");
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaMemory::Allocate(std::uint64_t bytes) {
  RETURN_IF_ERROR(MakeCurrent(ordinal_));
  const CUmemAllocationProp properties = Properties();
  CUmemGenericAllocationHandle created = 0;
  RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_create(&created, bytes, &properties, 0),
                               absl::StrCat(bytes, " bytes of ", uuid_).c_str(), absl::StatusCode::kResourceExhausted));
  const AllocationHandle allocation(driver_, created);
  AddressRange range(driver_, ordinal_);
  RETURN_IF_ERROR(range.Map(allocation, bytes));
  RETURN_IF_ERROR(Zero(range));
  int fd = -1;
  RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_export(&fd, allocation.get(), kDescriptor, 0),
                               "cuMemExportToShareableHandle", absl::StatusCode::kResourceExhausted));
  UniqueFd owned(fd);
  // The driver does not say whether it sets this.
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return ErrnoStatus(absl::StatusCode::kInternal, "fcntl of a descriptor");
  return std::make_unique<AllocationMapping>(std::move(range), std::move(owned));
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaMemory::ImportLegacy(const LegacyHandle& handle) {
  RETURN_IF_ERROR(MakeCurrent(ordinal_));
  cudaIpcMemHandle_t raw{};
  std::copy(handle.begin(), handle.end(), raw.reserved);
  void* address = nullptr;
  RETURN_IF_ERROR(OpenStatus(cudaIpcOpenMemHandle(&address, raw, cudaIpcMemLazyEnablePeerAccess)));
  OpenedHandle opened(address, IpcCloser{ordinal_});
  RETURN_IF_ERROR(CheckOpened(address));
  ASSIGN_OR_RETURN(const std::uint64_t bytes, BytesFrom(address));
  return std::make_unique<LegacyMapping>(std::move(opened), bytes);
}

absl::Status CudaMemory::CheckOpened(const void* address) const {
  cudaPointerAttributes attributes{};
  RETURN_IF_ERROR(RuntimeStatus(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes"));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device == ordinal_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the memory is not on ", uuid_));
}

absl::StatusOr<std::uint64_t> CudaMemory::BytesFrom(const void* address) const {
  const auto first = reinterpret_cast<CUdeviceptr>(address);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_get_address_range(&base, &size, first), "cuMemGetAddressRange"));
  if (base > first || first - base >= size) return absl::InternalError("cuMemGetAddressRange: not about this address");
  return size - (first - base);
}

absl::Status CudaMemory::CheckImported(const AllocationHandle& allocation) const {
  CUmemAllocationProp properties{};
  RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_get_allocation_properties(&properties, allocation.get()),
                               "the descriptor's allocation", absl::StatusCode::kInvalidArgument));
  if (properties.type == CU_MEM_ALLOCATION_TYPE_PINNED && properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
      properties.location.id == ordinal_) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("the descriptor's allocation is not memory of ", uuid_));
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaMemory::ImportDescriptor(UniqueFd fd, std::uint64_t allocation_bytes) {
  constexpr char kNotOne[] = "not a descriptor from cuMemExportToShareableHandle";
  // The driver's are of its character device; files, pipes and sockets need not reach it.
  struct stat file {};
  if (::fstat(fd.get(), &file) != 0) return ErrnoStatus(absl::StatusCode::kInvalidArgument, kNotOne);
  if (!S_ISCHR(file.st_mode)) return absl::InvalidArgumentError(kNotOne);

  RETURN_IF_ERROR(MakeCurrent(ordinal_));
  CUmemGenericAllocationHandle imported = 0;
  void* const os_handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd.get()));
  RETURN_IF_ERROR(DriverStatus(driver_, driver_.mem_import(&imported, os_handle, kDescriptor), kNotOne,
                               absl::StatusCode::kInvalidArgument));
  const AllocationHandle allocation(driver_, imported);
  RETURN_IF_ERROR(CheckImported(allocation));
  AddressRange range(driver_, ordinal_);
  RETURN_IF_ERROR(range.Map(allocation, allocation_bytes));
  return std::make_unique<AllocationMapping>(std::move(range), UniqueFd());
}

absl::StatusOr<std::unique_ptr<HostRegistration>> CudaMemory::RegisterHost(std::byte* memory, std::uint64_t bytes) {
  RETURN_IF_ERROR(MakeCurrent(ordinal_));
  RETURN_IF_ERROR(RuntimeStatus(cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
                                "cudaHostRegister"));
  void* address = nullptr;
  const absl::Status found = RuntimeStatus(cudaHostGetDevicePointer(&address, memory, 0), "cudaHostGetDevicePointer");
  auto registration =
      std::make_unique<CudaHostRegistration>(reinterpret_cast<std::uintptr_t>(address), ordinal_, memory);
  RETURN_IF_ERROR(found);
  return registration;
}

absl::StatusOr<std::unique_ptr<DeviceEvent>> CudaMemory::ImportEvent(const LegacyHandle& handle) {
  RETURN_IF_ERROR(MakeCurrent(ordinal_));
  cudaIpcEventHandle_t raw{};
  std::copy(handle.begin(), handle.end(), raw.reserved);
  cudaEvent_t event = nullptr;
  const cudaError_t error = cudaIpcOpenEventHandle(&event, raw);
  if (TakenForThisProcess(error)) {
    return CudaStatus(error,
                      "the driver takes the exporter for the daemon itself, as it does with equal PID numbers; use an "
                      "exported timeline",
                      absl::StatusCode::kFailedPrecondition);
  }
  RETURN_IF_ERROR(RuntimeStatus(error, "not a handle of an event that a living process holds on this GPU",
                                absl::StatusCode::kInvalidArgument));
  return std::make_unique<CudaEvent>(ordinal_, event, stream_);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaMemory(int ordinal, std::string uuid) {
  return CudaMemory::Open(ordinal, std::move(uuid));
}

}  // namespace tessera::server
