// The CUDA driver's own functions, for what the runtime API does not offer. They are looked up at run time: a binary
// that linked libcuda would not start on a machine without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera::server {

// OK, or `code` with what failed and the runtime's word for it: "cudaMalloc: out of memory
// (cudaErrorMemoryAllocation)".
absl::Status CudaStatus(cudaError_t error, const char* what, absl::StatusCode code = absl::StatusCode::kInternal);

// An error after which the context is of no use any more.
bool IsSticky(cudaError_t error);

struct CudaDriver {
  decltype(&cuStreamWaitValue64) stream_wait_value64 = nullptr;
  decltype(&cuStreamWriteValue64) stream_write_value64 = nullptr;
  decltype(&cuMemCreate) mem_create = nullptr;
  decltype(&cuMemRelease) mem_release = nullptr;
  decltype(&cuMemAddressReserve) mem_address_reserve = nullptr;
  decltype(&cuMemAddressFree) mem_address_free = nullptr;
  decltype(&cuMemMap) mem_map = nullptr;
  decltype(&cuMemUnmap) mem_unmap = nullptr;
  decltype(&cuMemSetAccess) mem_set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) mem_get_allocation_granularity = nullptr;
  decltype(&cuMemGetAllocationPropertiesFromHandle) mem_get_allocation_properties = nullptr;
  decltype(&cuMemExportToShareableHandle) mem_export = nullptr;
  decltype(&cuMemImportFromShareableHandle) mem_import = nullptr;
  decltype(&cuMemGetAddressRange) mem_get_address_range = nullptr;
  decltype(&cuGetErrorName) get_error_name = nullptr;
  decltype(&cuGetErrorString) get_error_string = nullptr;

  // Looked up once. UNAVAILABLE if the driver lacks one of them, naming it.
  static const absl::StatusOr<CudaDriver>& Get();

  // OK, or `code` with what failed and the driver's word for it.
  absl::Status ToStatus(CUresult result, const char* what, absl::StatusCode code = absl::StatusCode::kInternal) const;
};

}  // namespace tessera::server
