#include "client/cuda_memory.h"

#include <dlfcn.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client {
namespace {

constexpr char kInstead[] =
    "; use memory of Session::AllocateOnDevice, of cudaMalloc, or of cuMemCreate with "
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR";

template <typename Function>
absl::Status FindSymbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("GPU memory: libcuda.so.1 has no ", name, "; update the GPU driver"));
}

absl::StatusOr<CudaDriver> Load() {
  // Never closed: the process's own CUDA code has it, too.
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnimplementedError(absl::StrCat("GPU memory: no GPU driver in this process (", ::dlerror(),
                                                 "); in a container, start it with GPU access"));
  }
  CudaDriver d;
  RETURN_IF_ERROR(FindSymbol(library, "cuInit", d.init));
  RETURN_IF_ERROR(FindSymbol(library, "cuGetErrorString", d.get_error_string));
  RETURN_IF_ERROR(FindSymbol(library, "cuDeviceGetCount", d.device_get_count));
  RETURN_IF_ERROR(FindSymbol(library, "cuDeviceGet", d.device_get));
  RETURN_IF_ERROR(FindSymbol(library, "cuDeviceGetUuid_v2", d.device_get_uuid));
  RETURN_IF_ERROR(FindSymbol(library, "cuDeviceGetUuid", d.device_get_parent_uuid));
  RETURN_IF_ERROR(FindSymbol(library, "cuDevicePrimaryCtxRetain", d.primary_context_retain));
  RETURN_IF_ERROR(FindSymbol(library, "cuCtxGetCurrent", d.context_get_current));
  RETURN_IF_ERROR(FindSymbol(library, "cuCtxGetDevice", d.context_get_device));
  RETURN_IF_ERROR(FindSymbol(library, "cuCtxPushCurrent_v2", d.context_push));
  RETURN_IF_ERROR(FindSymbol(library, "cuCtxPopCurrent_v2", d.context_pop));
  RETURN_IF_ERROR(FindSymbol(library, "cuPointerGetAttribute", d.pointer_get_attribute));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemGetAddressRange_v2", d.mem_get_address_range));
  RETURN_IF_ERROR(FindSymbol(library, "cuIpcGetMemHandle", d.ipc_get_mem_handle));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemRetainAllocationHandle", d.mem_retain));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemGetAllocationPropertiesFromHandle", d.mem_get_properties));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemExportToShareableHandle", d.mem_export));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemImportFromShareableHandle", d.mem_import));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemRelease", d.mem_release));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemAddressReserve", d.mem_reserve));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemAddressFree", d.mem_address_free));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemMap", d.mem_map));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemUnmap", d.mem_unmap));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemSetAccess", d.mem_set_access));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemcpyHtoD_v2", d.memcpy_to_device));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemcpyDtoH_v2", d.memcpy_to_host));
  RETURN_IF_ERROR(FindSymbol(library, "cuStreamSynchronize", d.stream_synchronize));
  RETURN_IF_ERROR(FindSymbol(library, "cuIpcGetEventHandle", d.ipc_get_event_handle));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemHostRegister_v2", d.mem_host_register));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemHostUnregister", d.mem_host_unregister));
  RETURN_IF_ERROR(FindSymbol(library, "cuMemHostGetDevicePointer_v2", d.mem_host_get_device_pointer));
  RETURN_IF_ERROR(d.ToStatus(d.init(0), "GPU memory: the driver does not start; does nvidia-smi work here?",
                             absl::StatusCode::kUnimplemented));
  return d;
}

// An attribute of at most 8 bytes; nullopt-like `fallback` where the driver knows none.
std::uint64_t AttributeOr(const CudaDriver& driver, cu::Attribute attribute, cu::DevicePointer pointer,
                          std::uint64_t fallback) {
  std::uint64_t value = 0;  // wider than the small ones, which the driver writes at its low end
  return driver.pointer_get_attribute(&value, attribute, pointer) == cu::kSuccess ? value : fallback;
}

absl::StatusOr<std::string> UuidOf(const CudaDriver& driver, cu::Device device) {
  cu::Uuid own{};
  cu::Uuid gpu{};
  RETURN_IF_ERROR(driver.ToStatus(driver.device_get_uuid(&own, device), "cuDeviceGetUuid"));
  RETURN_IF_ERROR(driver.ToStatus(driver.device_get_parent_uuid(&gpu, device), "cuDeviceGetUuid"));
  std::string text = own.bytes == gpu.bytes ? "GPU-" : "MIG-";
  for (std::size_t i = 0; i < own.bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppend(&text, absl::Hex(own.bytes[i], absl::kZeroPad2));
  }
  return text;
}

// The allocation of a cuMemCreate mapping, held until the object is gone.
class HeldAllocation {
 public:
  HeldAllocation(const CudaDriver& driver, cu::Allocation allocation) : driver_(driver), allocation_(allocation) {}
  HeldAllocation(const HeldAllocation&) = delete;
  HeldAllocation& operator=(const HeldAllocation&) = delete;
  ~HeldAllocation() { driver_.mem_release(allocation_); }  // fails only where the driver is gone
  cu::Allocation get() const { return allocation_; }

 private:
  const CudaDriver& driver_;
  const cu::Allocation allocation_;
};

// Where `pointer` lies in [base, base + size), and that `bytes` of it are there.
absl::Status Place(std::uint64_t base, std::uint64_t size, cu::DevicePointer pointer, std::uint64_t bytes,
                   ExportedMemory& memory) {
  if (pointer < base || pointer - base >= size)
    return absl::InternalError("GPU memory: the driver names another range");
  memory.byte_offset = pointer - base;
  const std::uint64_t left = size - memory.byte_offset;
  if (bytes > left) {
    return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, "; the pointer's allocation has ", left,
                                                   " from there on (memory of several allocations is imported one by "
                                                   "one)"));
  }
  memory.bytes = bytes == 0 ? left : bytes;
  return absl::OkStatus();
}

absl::Status ExportDescriptor(const CudaDriver& driver, cu::DevicePointer pointer, std::uint64_t bytes,
                              const HeldAllocation& allocation, ExportedMemory& memory) {
  cu::AllocationProperties properties{};
  RETURN_IF_ERROR(driver.ToStatus(driver.mem_get_properties(&properties, allocation.get()),
                                  "descriptor route: cuMemGetAllocationPropertiesFromHandle"));
  if ((properties.requested_handle_types & cu::kPosixFileDescriptor) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("descriptor route: this memory was created without a shareable handle type", kInstead));
  }
  // The mapping, rather than the reservation around it, which may hold several.
  cu::DevicePointer base = AttributeOr(driver, cu::Attribute::kMappingBase, pointer, 0);
  std::size_t size = AttributeOr(driver, cu::Attribute::kMappingSize, pointer, 0);
  if (base == 0 || size == 0) {
    RETURN_IF_ERROR(
        driver.ToStatus(driver.mem_get_address_range(&base, &size, pointer), "descriptor route: cuMemGetAddressRange"));
  }
  RETURN_IF_ERROR(Place(base, size, pointer, bytes, memory));
  // The block is the physical memory, which several mappings may show.
  const std::uint64_t block = AttributeOr(driver, cu::Attribute::kMemoryBlockId, pointer, 0);
  if (block != 0) memory.allocation_id = block;
  int fd = -1;
  RETURN_IF_ERROR(driver.ToStatus(driver.mem_export(&fd, allocation.get(), cu::kPosixFileDescriptor, 0),
                                  "descriptor route: cuMemExportToShareableHandle"));
  memory.route = DescriptorRoute{.fd = UniqueFd(fd), .allocation_bytes = size};
  return absl::OkStatus();
}

absl::Status ExportLegacy(const CudaDriver& driver, cu::DevicePointer pointer, std::uint64_t bytes,
                          ExportedMemory& memory) {
  cu::DevicePointer base = 0;
  std::size_t size = 0;
  RETURN_IF_ERROR(
      driver.ToStatus(driver.mem_get_address_range(&base, &size, pointer), "handle route: cuMemGetAddressRange"));
  RETURN_IF_ERROR(Place(base, size, pointer, bytes, memory));
  cu::IpcMemHandle handle{};
  RETURN_IF_ERROR(driver.ToStatus(driver.ipc_get_mem_handle(&handle, base),
                                  absl::StrCat("handle route: cuIpcGetMemHandle refuses this memory", kInstead),
                                  absl::StatusCode::kFailedPrecondition));
  memory.route = LegacyRoute{.handle = std::string(handle.bytes.begin(), handle.bytes.end())};
  return absl::OkStatus();
}

}  // namespace

const absl::StatusOr<CudaDriver>& CudaDriver::Get() {
  static const absl::StatusOr<CudaDriver> driver = Load();
  return driver;
}

absl::Status CudaDriver::ToStatus(cu::Result result, std::string_view what, absl::StatusCode code) const {
  if (result == cu::kSuccess) return absl::OkStatus();
  const char* text = nullptr;
  if (get_error_string(result, &text) != cu::kSuccess || text == nullptr) text = "unknown error";
  return absl::Status(result == cu::kOutOfMemory ? absl::StatusCode::kResourceExhausted : code,
                      absl::StrCat(Av(what), ": ", text, " (CUDA error ", result, ")"));
}

absl::StatusOr<CurrentContext> CurrentContext::Of(const CudaDriver& driver, cu::Device device) {
  cu::Context current = nullptr;
  RETURN_IF_ERROR(driver.ToStatus(driver.context_get_current(&current), "cuCtxGetCurrent"));
  if (current != nullptr) {
    cu::Device of = -1;
    RETURN_IF_ERROR(driver.ToStatus(driver.context_get_device(&of), "cuCtxGetDevice"));
    if (of == device) return CurrentContext(driver, /*pushed=*/false);
  }
  // Retained for good, as the runtime API does: buffers may outlive every other user.
  cu::Context primary = nullptr;
  RETURN_IF_ERROR(driver.ToStatus(driver.primary_context_retain(&primary, device), "cuDevicePrimaryCtxRetain"));
  RETURN_IF_ERROR(driver.ToStatus(driver.context_push(primary), "cuCtxPushCurrent"));
  return CurrentContext(driver, /*pushed=*/true);
}

CurrentContext::~CurrentContext() {
  cu::Context popped = nullptr;
  if (pushed_) driver_.context_pop(&popped);  // can only fail if nothing was pushed
}

absl::StatusOr<cu::Device> FindDevice(const CudaDriver& driver, std::string_view uuid) {
  int count = 0;
  RETURN_IF_ERROR(driver.ToStatus(driver.device_get_count(&count), "cuDeviceGetCount"));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cu::Device device = -1;
    RETURN_IF_ERROR(driver.ToStatus(driver.device_get(&device, ordinal), "cuDeviceGet"));
    ASSIGN_OR_RETURN(const std::string found, UuidOf(driver, device));
    if (found == uuid) return device;
  }
  return absl::NotFoundError(absl::StrCat("GPU memory: ", Av(uuid), " is the daemon's GPU, and none of the ", count,
                                          " that this process sees; see CUDA_VISIBLE_DEVICES"));
}

absl::StatusOr<ExportedMemory> ExportMemory(const CudaDriver& driver, const void* pointer, std::uint64_t bytes) {
  const auto address = reinterpret_cast<cu::DevicePointer>(pointer);
  if (AttributeOr(driver, cu::Attribute::kMemoryType, address, 0) != cu::kMemoryTypeDevice) {
    return absl::InvalidArgumentError("device_pointer: not GPU memory that CUDA knows in this process");
  }
  if (AttributeOr(driver, cu::Attribute::kIsManaged, address, 0) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "device_pointer: managed memory (cudaMallocManaged) cannot be opened by another process", kInstead));
  }
  ExportedMemory memory;
  int ordinal = -1;
  RETURN_IF_ERROR(driver.ToStatus(driver.pointer_get_attribute(&ordinal, cu::Attribute::kDeviceOrdinal, address),
                                  "device_pointer: its GPU"));
  cu::Device device = -1;
  RETURN_IF_ERROR(driver.ToStatus(driver.device_get(&device, ordinal), "cuDeviceGet"));
  ASSIGN_OR_RETURN(memory.device_uuid, UuidOf(driver, device));
  ASSIGN_OR_RETURN(const CurrentContext context, CurrentContext::Of(driver, device));
  memory.allocation_id = AttributeOr(driver, cu::Attribute::kBufferId, address, 0);

  if (AttributeOr(driver, cu::Attribute::kIsLegacyIpcCapable, address, 0) != 0) {
    RETURN_IF_ERROR(ExportLegacy(driver, address, bytes, memory));
  } else if (AttributeOr(driver, cu::Attribute::kMempoolHandle, address, 0) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "device_pointer: memory of a pool (cudaMallocAsync) has neither a handle nor a descriptor", kInstead));
  } else {
    cu::Allocation retained = 0;
    RETURN_IF_ERROR(
        driver.ToStatus(driver.mem_retain(&retained, reinterpret_cast<void*>(address)),
                        absl::StrCat("device_pointer: memory with neither a handle nor a descriptor", kInstead),
                        absl::StatusCode::kFailedPrecondition));
    const HeldAllocation allocation(driver, retained);
    RETURN_IF_ERROR(ExportDescriptor(driver, address, bytes, allocation, memory));
  }
  if (memory.allocation_id == 0) return absl::InternalError("device_pointer: the driver gives its allocation no id");
  return memory;
}

absl::StatusOr<MappedAllocation> MappedAllocation::Map(const CudaDriver& driver, std::string_view device_uuid,
                                                       UniqueFd fd, std::uint64_t allocation_bytes) {
  ASSIGN_OR_RETURN(const cu::Device device, FindDevice(driver, device_uuid));
  ASSIGN_OR_RETURN(const CurrentContext context, CurrentContext::Of(driver, device));
  cu::Allocation imported = 0;
  void* const handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd.get()));
  RETURN_IF_ERROR(driver.ToStatus(driver.mem_import(&imported, handle, cu::kPosixFileDescriptor),
                                  "mapping the daemon's GPU memory: cuMemImportFromShareableHandle"));
  const HeldAllocation allocation(driver, imported);  // the mapping keeps the memory without it
  MappedAllocation mapped(driver, device);
  RETURN_IF_ERROR(mapped.MapHere(allocation.get(), allocation_bytes));
  return mapped;
}

absl::Status MappedAllocation::MapHere(cu::Allocation allocation, std::uint64_t bytes) {
  RETURN_IF_ERROR(driver_.ToStatus(driver_.mem_reserve(&address_, bytes, 0, 0, 0),
                                   "mapping the daemon's GPU memory: cuMemAddressReserve"));
  bytes_ = bytes;
  RETURN_IF_ERROR(driver_.ToStatus(driver_.mem_map(address_, bytes, 0, allocation, 0),
                                   "mapping the daemon's GPU memory: cuMemMap"));
  mapped_ = true;
  const cu::AccessDescription access{.location = {.type = cu::kLocationDevice, .id = device_},
                                     .flags = cu::kAccessReadWrite};
  return driver_.ToStatus(driver_.mem_set_access(address_, bytes, &access, 1),
                          "mapping the daemon's GPU memory: cuMemSetAccess");
}

MappedAllocation::MappedAllocation(MappedAllocation&& other) noexcept
    : driver_(other.driver_),
      device_(other.device_),
      address_(std::exchange(other.address_, 0)),
      bytes_(other.bytes_),
      mapped_(other.mapped_) {}

MappedAllocation::~MappedAllocation() {
  if (address_ == 0) return;
  // A destructor has nobody to tell; what can fail is a driver that is gone, and the memory with it.
  const absl::StatusOr<CurrentContext> context = CurrentContext::Of(driver_, device_);
  if (!context.ok()) return;
  if (!mapped_ || driver_.mem_unmap(address_, bytes_) == cu::kSuccess) driver_.mem_address_free(address_, bytes_);
}

namespace {

// Of the current context; of the first device that this process sees where there is none.
absl::StatusOr<cu::Device> CurrentDevice(const CudaDriver& driver) {
  cu::Context current = nullptr;
  RETURN_IF_ERROR(driver.ToStatus(driver.context_get_current(&current), "cuCtxGetCurrent"));
  cu::Device device = -1;
  if (current == nullptr) {
    RETURN_IF_ERROR(driver.ToStatus(driver.device_get(&device, 0), "cuDeviceGet"));
  } else {
    RETURN_IF_ERROR(driver.ToStatus(driver.context_get_device(&device), "cuCtxGetDevice"));
  }
  return device;
}

}  // namespace

absl::StatusOr<ExportedEvent> ExportEvent(const CudaDriver& driver, cu::Event event) {
  ASSIGN_OR_RETURN(const cu::Device device, CurrentDevice(driver));
  ASSIGN_OR_RETURN(const CurrentContext context, CurrentContext::Of(driver, device));
  cu::IpcEventHandle handle{};
  RETURN_IF_ERROR(driver.ToStatus(
      driver.ipc_get_event_handle(&handle, event),
      "cuda_event: not one that was made with cudaEventDisableTiming | cudaEventInterprocess on the current device",
      absl::StatusCode::kInvalidArgument));
  ExportedEvent exported{.handle = std::string(handle.bytes.begin(), handle.bytes.end()), .device_uuid = {}};
  ASSIGN_OR_RETURN(exported.device_uuid, UuidOf(driver, device));
  return exported;
}

absl::StatusOr<RegisteredMemory> RegisteredMemory::Register(const CudaDriver& driver, void* memory,
                                                            std::uint64_t bytes) {
  constexpr unsigned kPortableAndMapped = 3;  // CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
  ASSIGN_OR_RETURN(const cu::Device device, CurrentDevice(driver));
  ASSIGN_OR_RETURN(const CurrentContext context, CurrentContext::Of(driver, device));
  RETURN_IF_ERROR(driver.ToStatus(driver.mem_host_register(memory, bytes, kPortableAndMapped), "cuMemHostRegister"));
  RegisteredMemory registered(driver, device, memory);
  RETURN_IF_ERROR(driver.ToStatus(driver.mem_host_get_device_pointer(&registered.address_, memory, 0),
                                  "cuMemHostGetDevicePointer"));
  return registered;
}

RegisteredMemory::RegisteredMemory(RegisteredMemory&& other) noexcept
    : driver_(other.driver_),
      device_(other.device_),
      memory_(std::exchange(other.memory_, nullptr)),
      address_(other.address_) {}

RegisteredMemory::~RegisteredMemory() {
  if (memory_ == nullptr) return;
  // A destructor has nobody to tell; what can fail is a driver that is gone.
  const absl::StatusOr<CurrentContext> context = CurrentContext::Of(driver_, device_);
  if (context.ok()) driver_.mem_host_unregister(memory_);
}

absl::Status CopyToDevice(const CudaDriver& driver, std::string_view device_uuid, std::byte* to, const void* from,
                          std::uint64_t bytes) {
  ASSIGN_OR_RETURN(const cu::Device device, FindDevice(driver, device_uuid));
  ASSIGN_OR_RETURN(const CurrentContext context, CurrentContext::Of(driver, device));
  RETURN_IF_ERROR(driver.ToStatus(driver.memcpy_to_device(reinterpret_cast<cu::DevicePointer>(to), from, bytes),
                                  "copying to the GPU"));
  // From pageable memory the copy returns when the source is read, which may be before the GPU's memory is written.
  return driver.ToStatus(driver.stream_synchronize(nullptr), "copying to the GPU");
}

absl::Status CopyToHost(const CudaDriver& driver, std::string_view device_uuid, void* to, const std::byte* from,
                        std::uint64_t bytes) {
  ASSIGN_OR_RETURN(const cu::Device device, FindDevice(driver, device_uuid));
  ASSIGN_OR_RETURN(const CurrentContext context, CurrentContext::Of(driver, device));
  return driver.ToStatus(driver.memcpy_to_host(to, reinterpret_cast<cu::DevicePointer>(from), bytes),
                         "copying from the GPU");
}

}  // namespace tessera::client
