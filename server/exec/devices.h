// The devices of this machine that this build can serve.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/device_signature.h"
#include "server/exec/device.h"
#include "server/session/device_memory.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

struct DeviceOptions {
  int cpu_threads = 0;              // 0 = one per hardware thread
  std::string cuda_device = "off";  // the setting of that name
  std::string isolation = "auto";   // likewise
  std::int64_t workspace_bytes_max = 0;
  std::function<void(const absl::Status&)> lost;  // see CudaDeviceOptions
};

struct OpenedDevices {
  std::vector<std::unique_ptr<Device>> devices;         // in the order in which calls that name no backend try them
  std::vector<planner::DeviceSignature> signatures;     // of each of them: what measurements on it depend on
  std::map<kernels::Backend, std::string> unavailable;  // backends that are not there, and why
  std::unique_ptr<DeviceMemory> gpu_memory;             // of the GPU that is served; null without one
  std::uint64_t gpu_memory_bytes = 0;                   // that it has
  IsolationMode isolation = IsolationMode::kNone;
};

// An error only where cuda_device names a GPU that cannot be served, or the GPU cannot be served with the isolation
// that is asked for; with "auto" and no GPU the CPU serves alone.
absl::StatusOr<OpenedDevices> OpenDevices(const DeviceOptions& options);

}  // namespace tessera::server
