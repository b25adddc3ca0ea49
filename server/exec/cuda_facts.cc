#include "server/exec/cuda_facts.h"

#include <cuda_runtime_api.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/exec/cuda_driver.h"

namespace tessera::server {
namespace {

absl::Status Unavailable(cudaError_t error, const char* what) {
  return CudaStatus(error, what, absl::StatusCode::kUnavailable);
}

absl::StatusOr<int> Attribute(cudaDeviceAttr attribute, int ordinal) {
  int value = 0;
  RETURN_IF_ERROR(Unavailable(cudaDeviceGetAttribute(&value, attribute, ordinal), "cudaDeviceGetAttribute"));
  return value;
}

std::string UuidText(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppend(&text, absl::Hex(static_cast<unsigned char>(uuid.bytes[i]), absl::kZeroPad2));
  }
  return text;
}

// What may help when the driver is there and does not start.
const char* AdviceFor(cudaError_t error) {
  switch (error) {
    case cudaErrorSystemNotReady:
      return "on a machine with NVSwitch, the NVIDIA Fabric Manager must run";
    case cudaErrorSystemDriverMismatch:
      return "the driver's library and its kernel module are of different versions; reboot after an update, and give a "
             "container the library of its host";
    case cudaErrorCompatNotSupportedOnDevice:
      return "take the forward-compatibility libcuda (package cuda-compat) out of the loader's path, or update the "
             "driver";
    default:
      return "nvidia-smi and the kernel's log say more";
  }
}

// As TESSERA_CUDA_ARCHS has it: from Hopper on, with the architecture's own instructions.
std::string ArchToken(int compute_capability) {
  return absl::StrCat(compute_capability, compute_capability >= 90 ? "a" : "");
}

}  // namespace

std::string CudaVersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::StatusOr<CudaFacts> CudaFactsOf(int ordinal) {
  cudaDeviceProp properties;
  RETURN_IF_ERROR(Unavailable(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties"));
  CudaFacts facts{.ordinal = ordinal,
                  .name = properties.name,
                  .uuid = UuidText(properties.uuid),
                  .compute_capability = properties.major * 10 + properties.minor,
                  .multiprocessors = properties.multiProcessorCount,
                  .l2_bytes = properties.l2CacheSize,
                  .shared_bytes_per_block = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin),
                  .shared_bytes_per_multiprocessor = static_cast<std::int64_t>(properties.sharedMemPerMultiprocessor),
                  .threads_per_multiprocessor = properties.maxThreadsPerMultiProcessor,
                  .memory_bytes = properties.totalGlobalMem};
  RETURN_IF_ERROR(Unavailable(cudaDriverGetVersion(&facts.driver_version), "cudaDriverGetVersion"));
  RETURN_IF_ERROR(Unavailable(cudaRuntimeGetVersion(&facts.runtime_version), "cudaRuntimeGetVersion"));
  ASSIGN_OR_RETURN(const int mps, Attribute(cudaDevAttrMpsEnabled, ordinal));
  facts.mps = mps != 0;
  return facts;
}

absl::StatusOr<int> CountCudaDevices() {
  int driver = 0;
  int runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return absl::UnavailableError(
        "no NVIDIA driver on this machine: libcuda.so.1 does not load; install the driver, and in a container use the "
        "NVIDIA runtime");
  }
  RETURN_IF_ERROR(Unavailable(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion"));
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    return absl::UnavailableError(absl::StrCat("the driver serves CUDA ", CudaVersionText(driver),
                                               " and this build needs ", CudaVersionText(runtime),
                                               "; update the driver"));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return absl::UnavailableError(
        "the driver shows no GPU; CUDA_VISIBLE_DEVICES, and in a container the runtime's GPU options, decide what it "
        "shows");
  }
  if (error != cudaSuccess) {
    const absl::Status status = Unavailable(error, "the driver does not start");
    return absl::UnavailableError(absl::StrCat(MessageOf(status), "; ", AdviceFor(error)));
  }
  return count;
}

kernels::ArchSet ArchsOf(int compute_capability) {
  kernels::ArchSet archs = {kernels::Arch::kVendor};
  if (compute_capability >= 80) archs.Add(kernels::Arch::kSm80);
  if (compute_capability >= 89) archs.Add(kernels::Arch::kSm89);
  if (compute_capability == 90) archs.Add(kernels::Arch::kSm90a);
  return archs;
}

absl::StatusOr<CudaFacts> ChooseDevice(const std::string& wanted, int count,
                                       const std::function<absl::StatusOr<CudaFacts>(int ordinal)>& facts_of) {
  int number = 0;
  if (absl::SimpleAtoi(wanted, &number)) {
    if (number >= 0 && number < count) return facts_of(number);
    return absl::UnavailableError(absl::StrCat("no GPU ", number, "; the driver shows ", count,
                                               ", numbered from 0; CUDA_VISIBLE_DEVICES decides which"));
  }
  std::string shown;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    ASSIGN_OR_RETURN(CudaFacts facts, facts_of(ordinal));
    const bool runs_kernels = ArchsOf(facts.compute_capability).Has(kernels::Arch::kSm80);
    if (wanted == "auto" ? runs_kernels : facts.uuid == wanted) return facts;
    absl::StrAppend(&shown, ordinal == 0 ? "" : ", ", facts.uuid);
  }
  if (wanted == "auto") return facts_of(0);
  return absl::UnavailableError(absl::StrCat("no GPU ", wanted, " among those that the driver shows (", shown,
                                             "); CUDA_VISIBLE_DEVICES decides which"));
}

absl::Status CheckKernels(const CudaFacts& facts, kernels::ArchSet archs) {
  if (archs.Has(kernels::Arch::kSm80)) return absl::OkStatus();
  const bool could = ArchsOf(facts.compute_capability).Has(kernels::Arch::kSm80);
  return absl::UnavailableError(absl::StrCat(
      facts.name, " (sm_", facts.compute_capability, ") is none of the GPUs that this build has kernels for; ",
      could ? absl::StrCat("configure it with ", ArchToken(facts.compute_capability), " in TESSERA_CUDA_ARCHS")
            : "kernels need sm_80 or later"));
}

}  // namespace tessera::server
