// GPU memory of a client: of cudaMalloc, of cuMemCreate and of a pool. Each owns one allocation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera::gpu_test {

absl::Status ToStatus(cudaError_t error, std::string_view what);

class DeviceAllocation {
 public:
  DeviceAllocation(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  DeviceAllocation(const DeviceAllocation&) = delete;
  DeviceAllocation& operator=(const DeviceAllocation&) = delete;
  virtual ~DeviceAllocation() = default;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* const data_;
  const std::size_t bytes_;
};

absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocatePlain(std::size_t bytes);  // cudaMalloc
// cuMemCreate, exportable as a descriptor, mapped for this GPU; `bytes` rounded up to the granularity.
absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocateVmm(std::size_t bytes);
absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocateFromPool(std::size_t bytes);  // cudaMallocAsync

// Complete, for other processes too, on return.
absl::Status CopyIn(std::byte* to, const void* from, std::size_t bytes);
absl::Status CopyOut(void* to, const std::byte* from, std::size_t bytes);

absl::StatusOr<std::uint64_t> FreeDeviceBytes();  // of the whole GPU

}  // namespace tessera::gpu_test
