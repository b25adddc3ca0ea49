#include "server/exec/cuda_driver.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace tessera::server {
namespace {

// Entry points as of CUDA 12.0: what a driver of any later version has under the same names.
constexpr unsigned kEntryPointVersion = 12000;

template <typename Function>
absl::Status Find(const char* name, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, kEntryPointVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    return absl::UnavailableError(absl::StrCat("the CUDA driver has no ", name, "; update it"));
  }
  function = reinterpret_cast<Function>(address);
  return absl::OkStatus();
}

absl::StatusOr<CudaDriver> FindAll() {
  CudaDriver driver;
  RETURN_IF_ERROR(Find("cuStreamWaitValue64", driver.stream_wait_value64));
  RETURN_IF_ERROR(Find("cuStreamWriteValue64", driver.stream_write_value64));
  RETURN_IF_ERROR(Find("cuMemCreate", driver.mem_create));
  RETURN_IF_ERROR(Find("cuMemRelease", driver.mem_release));
  RETURN_IF_ERROR(Find("cuMemAddressReserve", driver.mem_address_reserve));
  RETURN_IF_ERROR(Find("cuMemAddressFree", driver.mem_address_free));
  RETURN_IF_ERROR(Find("cuMemMap", driver.mem_map));
  RETURN_IF_ERROR(Find("cuMemUnmap", driver.mem_unmap));
  RETURN_IF_ERROR(Find("cuMemSetAccess", driver.mem_set_access));
  RETURN_IF_ERROR(Find("cuMemGetAllocationGranularity", driver.mem_get_allocation_granularity));
  RETURN_IF_ERROR(Find("cuMemGetAllocationPropertiesFromHandle", driver.mem_get_allocation_properties));
  RETURN_IF_ERROR(Find("cuMemExportToShareableHandle", driver.mem_export));
  RETURN_IF_ERROR(Find("cuMemImportFromShareableHandle", driver.mem_import));
  RETURN_IF_ERROR(Find("cuMemGetAddressRange", driver.mem_get_address_range));
  RETURN_IF_ERROR(Find("cuGetErrorName", driver.get_error_name));
  RETURN_IF_ERROR(Find("cuGetErrorString", driver.get_error_string));
  return driver;
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, const char* what, absl::StatusCode code) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::Status(code, absl::StrCat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

bool IsSticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorMpsClientTerminated:
    case cudaErrorMpsConnectionFailed:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
    case cudaErrorUnknown:
    case static_cast<cudaError_t>(226):  // cudaErrorContained, of later toolkits
    case static_cast<cudaError_t>(911):  // cudaErrorExternalDevice, likewise
      return true;
    default:
      return false;
  }
}

const absl::StatusOr<CudaDriver>& CudaDriver::Get() {
  static const absl::StatusOr<CudaDriver> driver = FindAll();
  return driver;
}

absl::Status CudaDriver::ToStatus(CUresult result, const char* what, absl::StatusCode code) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown CUresult";
  if (get_error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no description";
  return absl::Status(code, absl::StrCat(what, ": ", text, " (", name, ")"));
}

}  // namespace tessera::server
