// GPU memory on the client's side: what a pointer of this process is and how another process can open it, and memory of
// the daemon mapped here. Over libcuda.so.1, which is loaded when first needed: the client links no CUDA and needs no
// CUDA header, so that it builds and runs without.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace tessera::client {

// The driver's types, by the ABI that cuda.h has kept since CUDA 11.4.
namespace cu {
using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using DevicePointer = std::uint64_t;
using Allocation = std::uint64_t;  // CUmemGenericAllocationHandle

struct Uuid {
  std::array<unsigned char, 16> bytes;
};
struct IpcMemHandle {
  std::array<char, 64> bytes;
};
struct IpcEventHandle {
  std::array<char, 64> bytes;
};
struct Location {
  int type;  // 1: a device, whose ordinal is `id`
  int id;
};
struct AllocationProperties {
  int type;
  int requested_handle_types;  // bits
  Location location;
  void* win32_metadata;
  std::array<unsigned char, 8> flags;
};
struct AccessDescription {
  Location location;
  int flags;
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(AccessDescription) == 12);

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kPosixFileDescriptor = 1;  // CUmemAllocationHandleType

// CUpointer_attribute
enum class Attribute : int {
  kMemoryType = 2,  // 2: device
  kBufferId = 7,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kIsLegacyIpcCapable = 10,
  kMempoolHandle = 17,
  kMappingSize = 18,
  kMappingBase = 19,
  kMemoryBlockId = 20,
};
inline constexpr std::uint64_t kMemoryTypeDevice = 2;
}  // namespace cu

// The functions of libcuda that are used. Tests fill in their own.
struct CudaDriver {
  cu::Result (*init)(unsigned flags) = nullptr;
  cu::Result (*get_error_string)(cu::Result error, const char** text) = nullptr;
  cu::Result (*device_get_count)(int* count) = nullptr;
  cu::Result (*device_get)(cu::Device* device, int ordinal) = nullptr;
  cu::Result (*device_get_uuid)(cu::Uuid* uuid, cu::Device device) = nullptr;         // of a MIG instance: its own
  cu::Result (*device_get_parent_uuid)(cu::Uuid* uuid, cu::Device device) = nullptr;  // the GPU's
  cu::Result (*primary_context_retain)(cu::Context* context, cu::Device device) = nullptr;
  cu::Result (*context_get_current)(cu::Context* context) = nullptr;
  cu::Result (*context_get_device)(cu::Device* device) = nullptr;
  cu::Result (*context_push)(cu::Context context) = nullptr;
  cu::Result (*context_pop)(cu::Context* context) = nullptr;
  cu::Result (*pointer_get_attribute)(void* data, cu::Attribute attribute, cu::DevicePointer pointer) = nullptr;
  cu::Result (*mem_get_address_range)(cu::DevicePointer* base, std::size_t* bytes, cu::DevicePointer in) = nullptr;
  cu::Result (*ipc_get_mem_handle)(cu::IpcMemHandle* handle, cu::DevicePointer pointer) = nullptr;
  cu::Result (*mem_retain)(cu::Allocation* allocation, void* address) = nullptr;
  cu::Result (*mem_get_properties)(cu::AllocationProperties* properties, cu::Allocation allocation) = nullptr;
  cu::Result (*mem_export)(void* handle, cu::Allocation allocation, int type, unsigned long long flags) = nullptr;
  cu::Result (*mem_import)(cu::Allocation* allocation, void* handle, int type) = nullptr;
  cu::Result (*mem_release)(cu::Allocation allocation) = nullptr;
  cu::Result (*mem_reserve)(cu::DevicePointer* pointer, std::size_t bytes, std::size_t alignment,
                            cu::DevicePointer wanted, unsigned long long flags) = nullptr;
  cu::Result (*mem_address_free)(cu::DevicePointer pointer, std::size_t bytes) = nullptr;
  cu::Result (*mem_map)(cu::DevicePointer pointer, std::size_t bytes, std::size_t offset, cu::Allocation allocation,
                        unsigned long long flags) = nullptr;
  cu::Result (*mem_unmap)(cu::DevicePointer pointer, std::size_t bytes) = nullptr;
  cu::Result (*mem_set_access)(cu::DevicePointer pointer, std::size_t bytes, const cu::AccessDescription* access,
                               std::size_t count) = nullptr;
  cu::Result (*memcpy_to_device)(cu::DevicePointer to, const void* from, std::size_t bytes) = nullptr;
  cu::Result (*memcpy_to_host)(void* to, cu::DevicePointer from, std::size_t bytes) = nullptr;
  cu::Result (*stream_synchronize)(cu::Stream stream) = nullptr;
  cu::Result (*ipc_get_event_handle)(cu::IpcEventHandle* handle, cu::Event event) = nullptr;
  cu::Result (*mem_host_register)(void* memory, std::size_t bytes, unsigned flags) = nullptr;
  cu::Result (*mem_host_unregister)(void* memory) = nullptr;
  cu::Result (*mem_host_get_device_pointer)(cu::DevicePointer* pointer, void* memory, unsigned flags) = nullptr;

  // libcuda of this machine, initialised; loaded once. UNIMPLEMENTED, saying what is missing, where there is none.
  static const absl::StatusOr<CudaDriver>& Get();

  absl::Status ToStatus(cu::Result result, std::string_view what,
                        absl::StatusCode code = absl::StatusCode::kInternal) const;
};

// Makes a context of `device` current for as long as it lives: the thread's own if that is one, else the primary one.
class CurrentContext {
 public:
  static absl::StatusOr<CurrentContext> Of(const CudaDriver& driver, cu::Device device);
  CurrentContext(CurrentContext&& other) noexcept
      : driver_(other.driver_), pushed_(std::exchange(other.pushed_, false)) {}
  CurrentContext& operator=(CurrentContext&&) = delete;
  ~CurrentContext();

 private:
  CurrentContext(const CudaDriver& driver, bool pushed) : driver_(driver), pushed_(pushed) {}
  const CudaDriver& driver_;
  bool pushed_;
};

// The device of that UUID. NOT_FOUND if this process does not see it (CUDA_VISIBLE_DEVICES, or another container).
absl::StatusOr<cu::Device> FindDevice(const CudaDriver& driver, std::string_view uuid);

// How another process gets at memory of this one.
struct LegacyRoute {
  std::string handle;  // 64 bytes
};
struct DescriptorRoute {
  UniqueFd fd;
  std::uint64_t allocation_bytes = 0;
};
struct ExportedMemory {
  std::variant<LegacyRoute, DescriptorRoute> route;
  std::string device_uuid;
  std::uint64_t allocation_id = 0;
  std::uint64_t byte_offset = 0;  // of the pointer within its allocation
  std::uint64_t bytes = 0;        // from the pointer on
};

// The legacy route for cudaMalloc memory, the descriptor route for cuMemCreate memory. bytes 0 = to the allocation's
// end. INVALID_ARGUMENT: not GPU memory, or fewer bytes; FAILED_PRECONDITION: GPU memory that no other process can
// open.
absl::StatusOr<ExportedMemory> ExportMemory(const CudaDriver& driver, const void* pointer, std::uint64_t bytes);

// An allocation of another process, mapped here until the object is gone.
class MappedAllocation {
 public:
  static absl::StatusOr<MappedAllocation> Map(const CudaDriver& driver, std::string_view device_uuid, UniqueFd fd,
                                              std::uint64_t allocation_bytes);
  MappedAllocation(MappedAllocation&& other) noexcept;
  MappedAllocation& operator=(MappedAllocation&&) = delete;
  ~MappedAllocation();

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }  // a GPU's address

 private:
  MappedAllocation(const CudaDriver& driver, cu::Device device) : driver_(driver), device_(device) {}
  absl::Status MapHere(cu::Allocation allocation, std::uint64_t bytes);

  const CudaDriver& driver_;
  const cu::Device device_;
  cu::DevicePointer address_ = 0;
  std::uint64_t bytes_ = 0;
  bool mapped_ = false;
};

// A GPU event of this process, for another to open.
struct ExportedEvent {
  std::string handle;  // 64 bytes
  std::string device_uuid;
};
// On the current device. INVALID_ARGUMENT: the event was not made for other processes.
absl::StatusOr<ExportedEvent> ExportEvent(const CudaDriver& driver, cu::Event event);

// Memory of this process that its GPU uses, too, until the object is gone.
class RegisteredMemory {
 public:
  // In the current context, or else in the primary one of the first device.
  static absl::StatusOr<RegisteredMemory> Register(const CudaDriver& driver, void* memory, std::uint64_t bytes);
  RegisteredMemory(RegisteredMemory&& other) noexcept;
  RegisteredMemory& operator=(RegisteredMemory&&) = delete;
  ~RegisteredMemory();

  cu::DevicePointer address() const { return address_; }

 private:
  RegisteredMemory(const CudaDriver& driver, cu::Device device, void* memory)
      : driver_(driver), device_(device), memory_(memory) {}
  const CudaDriver& driver_;
  cu::Device device_;
  void* memory_;
  cu::DevicePointer address_ = 0;
};

// Copies between this process's memory and a GPU's. The copy is complete, for other processes too, on return.
absl::Status CopyToDevice(const CudaDriver& driver, std::string_view device_uuid, std::byte* to, const void* from,
                          std::uint64_t bytes);
absl::Status CopyToHost(const CudaDriver& driver, std::string_view device_uuid, void* to, const std::byte* from,
                        std::uint64_t bytes);

}  // namespace tessera::client
