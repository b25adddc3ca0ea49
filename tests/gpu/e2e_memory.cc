#include "tests/gpu/e2e_memory.h"

#include <cuda.h>
#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::gpu_test {
namespace {

// A program that linked libcuda would not start where there is none.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemRelease) release = nullptr;

  static absl::StatusOr<Driver> Load() {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return absl::UnavailableError(absl::StrCat("no GPU driver: ", ::dlerror()));
    Driver driver;
    const bool all = Find(library, "cuMemGetAllocationGranularity", driver.granularity) &&
                     Find(library, "cuMemCreate", driver.create) &&
                     Find(library, "cuMemAddressReserve", driver.reserve) && Find(library, "cuMemMap", driver.map) &&
                     Find(library, "cuMemSetAccess", driver.set_access) && Find(library, "cuMemUnmap", driver.unmap) &&
                     Find(library, "cuMemAddressFree", driver.address_free) &&
                     Find(library, "cuMemRelease", driver.release);
    if (!all) return absl::UnavailableError("libcuda.so.1 has no virtual memory management");
    return driver;
  }

 private:
  template <typename Function>
  static bool Find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    return function != nullptr;
  }
};

absl::Status ToStatus(CUresult result, std::string_view what) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(Av(what), ": CUDA error ", static_cast<int>(result)));
}

class PlainAllocation final : public DeviceAllocation {
 public:
  using DeviceAllocation::DeviceAllocation;
  ~PlainAllocation() override { static_cast<void>(cudaFree(data())); }  // fails only where the context is lost
};

class PoolAllocation final : public DeviceAllocation {
 public:
  using DeviceAllocation::DeviceAllocation;
  ~PoolAllocation() override {
    static_cast<void>(cudaFreeAsync(data(), nullptr));
    static_cast<void>(cudaStreamSynchronize(nullptr));
  }
};

class VmmAllocation final : public DeviceAllocation {
 public:
  VmmAllocation(const Driver& driver, CUmemGenericAllocationHandle handle, CUdeviceptr address, std::size_t bytes)
      : DeviceAllocation(reinterpret_cast<std::byte*>(address), bytes), driver_(driver), handle_(handle) {}
  ~VmmAllocation() override {
    const auto address = reinterpret_cast<CUdeviceptr>(data());
    driver_.unmap(address, bytes());
    driver_.address_free(address, bytes());
    driver_.release(handle_);
  }

 private:
  const Driver driver_;
  const CUmemGenericAllocationHandle handle_;
};

}  // namespace

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(Av(what), ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocatePlain(std::size_t bytes) {
  void* data = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaMalloc(&data, bytes), absl::StrCat("cudaMalloc of ", bytes, " bytes").c_str()));
  return std::make_unique<PlainAllocation>(static_cast<std::byte*>(data), bytes);
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocateFromPool(std::size_t bytes) {
  void* data = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaMallocAsync(&data, bytes, nullptr), "cudaMallocAsync"));
  RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(nullptr), "cudaMallocAsync"));
  return std::make_unique<PoolAllocation>(static_cast<std::byte*>(data), bytes);
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocateVmm(std::size_t bytes) {
  static const absl::StatusOr<Driver> driver = Driver::Load();
  RETURN_IF_ERROR(driver.status());
  RETURN_IF_ERROR(ToStatus(cudaFree(nullptr), "making the primary context current"));
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
  std::size_t granularity = 0;
  RETURN_IF_ERROR(ToStatus(driver->granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                           "cuMemGetAllocationGranularity"));
  const std::size_t size = (bytes + granularity - 1) / granularity * granularity;

  CUmemGenericAllocationHandle handle = 0;
  RETURN_IF_ERROR(ToStatus(driver->create(&handle, size, &properties, 0), "cuMemCreate"));
  CUdeviceptr address = 0;
  absl::Status status = ToStatus(driver->reserve(&address, size, 0, 0, 0), "cuMemAddressReserve");
  if (status.ok()) {
    status = ToStatus(driver->map(address, size, 0, handle, 0), "cuMemMap");
    if (!status.ok()) driver->address_free(address, size);
  }
  if (!status.ok()) {
    driver->release(handle);
    return status;
  }
  auto allocation = std::make_unique<VmmAllocation>(*driver, handle, address, size);
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  RETURN_IF_ERROR(ToStatus(driver->set_access(address, size, &access, 1), "cuMemSetAccess"));
  return allocation;
}

absl::Status CopyIn(std::byte* to, const void* from, std::size_t bytes) {
  RETURN_IF_ERROR(ToStatus(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the GPU"));
  // From pageable memory the copy returns when the source is read.
  return ToStatus(cudaDeviceSynchronize(), "copying to the GPU");
}

absl::Status CopyOut(void* to, const std::byte* from, std::size_t bytes) {
  return ToStatus(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copying from the GPU");
}

absl::StatusOr<std::uint64_t> FreeDeviceBytes() {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
  return free_bytes;
}

}  // namespace tessera::gpu_test
