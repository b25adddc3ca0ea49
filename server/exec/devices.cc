#include "server/exec/devices.h"

#include <spdlog/spdlog.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/exec/cpu_device.h"

#ifdef TESSERA_HAVE_CUDA
#include "server/exec/cuda_device.h"
#include "server/exec/cuda_memory.h"
#endif

namespace tessera::server {
namespace {

// As /proc/cpuinfo has it; "CPU" where that names none.
std::string CpuModel() {
  constexpr std::size_t kLinesMax = 1000;
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  for (std::size_t i = 0; i < kLinesMax && std::getline(info, line); ++i) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

planner::DeviceSignature CpuSignature(int threads) {
  return {.device = CpuModel(), .capability = "-", .processors = std::to_string(threads), .driver = "-", .cuda = "-"};
}

#ifdef TESSERA_HAVE_CUDA
// Where MPS runs, a process becomes its client by its first CUDA call, unless it is told of a place where none runs.
constexpr char kNoMps[] = "/nonexistent/tessera-strict-isolation";

planner::DeviceSignature SignatureOf(const CudaFacts& facts) {
  return {.device = facts.name,
          .capability = absl::StrCat(facts.compute_capability / 10, ".", facts.compute_capability % 10),
          .processors = absl::StrCat(facts.multiprocessors),
          .driver = CudaVersionText(facts.driver_version),
          .cuda = CudaVersionText(facts.runtime_version)};
}

absl::Status CheckIsolation(const std::string& wanted, bool mps) {
  if (wanted == "shared" && !mps) {
    return absl::FailedPreconditionError(
        "isolation: shared, and this process is no client of the Multi-Process Service; start nvidia-cuda-mps-control "
        "-d as the daemon's user, with the CUDA_MPS_PIPE_DIRECTORY that the daemon sees");
  }
  if (wanted == "strict" && mps) {
    return absl::FailedPreconditionError(
        "isolation: strict, and this process is a client of the Multi-Process Service all the same");
  }
  return absl::OkStatus();
}

absl::Status OpenGpu(const DeviceOptions& options, OpenedDevices& opened) {
  if (options.isolation == "strict") ::setenv("CUDA_MPS_PIPE_DIRECTORY", kNoMps, /*overwrite=*/1);
  ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> gpu, OpenCudaDevice({.device = options.cuda_device,
                                                                    .workspace_bytes_max = options.workspace_bytes_max,
                                                                    .lost = options.lost}));
  const CudaFacts& facts = gpu->cuda_facts();
  RETURN_IF_ERROR(CheckIsolation(options.isolation, facts.mps));
  ASSIGN_OR_RETURN(opened.gpu_memory, OpenCudaMemory(facts.ordinal, facts.uuid));
  // A client of MPS shares its GPU's faults with all others; without MPS, contexts are apart.
  opened.isolation = facts.mps ? IsolationMode::kShared : IsolationMode::kStrict;
  opened.gpu_memory_bytes = facts.memory_bytes;
  opened.unavailable.erase(kernels::Backend::kCuda);
  if (gpu->facts().size() > 1) opened.unavailable.erase(kernels::Backend::kVendor);
  opened.signatures.push_back(SignatureOf(facts));
  opened.devices.push_back(std::move(gpu));
  return absl::OkStatus();
}
constexpr char kVendorReason[] = "cuBLASLt does not load; the log says why";
#else
absl::Status OpenGpu(const DeviceOptions& /*options*/, OpenedDevices& /*opened*/) {
  return absl::UnavailableError("this build has no CUDA code; configure it with TESSERA_CUDA_ARCHS");
}
constexpr char kVendorReason[] = "this build has no CUDA code";
#endif

}  // namespace

absl::StatusOr<OpenedDevices> OpenDevices(const DeviceOptions& options) {
  OpenedDevices opened;
  opened.unavailable = {{kernels::Backend::kCuda, "the setting cuda_device is off"},
                        {kernels::Backend::kVendor, "the setting cuda_device is off"}};
  if (options.cuda_device != "off") {
    opened.unavailable[kernels::Backend::kVendor] = kVendorReason;
    const absl::Status status = OpenGpu(options, opened);
    if (status.code() == absl::StatusCode::kFailedPrecondition) return status;
    if (!status.ok() && options.cuda_device != "auto") return InField("cuda_device", status);
    if (!status.ok()) {
      spdlog::info("backend cuda is off: {}", MessageOf(status));
      opened.unavailable[kernels::Backend::kCuda] = MessageOf(status);
      opened.unavailable[kernels::Backend::kVendor] = MessageOf(status);
    }
  }
  opened.devices.push_back(
      MakeCpuDevice({.threads = options.cpu_threads, .workspace_bytes_max = options.workspace_bytes_max}));
  opened.signatures.push_back(CpuSignature(opened.devices.back()->facts().front().processors));
  return opened;
}

}  // namespace tessera::server
