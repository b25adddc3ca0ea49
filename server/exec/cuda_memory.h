// Buffers on a CUDA GPU: the implementation of DeviceMemory. Only in builds with CUDA.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/session/device_memory.h"

namespace tessera::server {

// The memory of GPU `ordinal` (CUDA's numbering in this process) of that UUID, in its primary context. An error where
// the GPU or its driver has no allocations with descriptors, as some virtual GPUs.
absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaMemory(int ordinal, std::string uuid);

}  // namespace tessera::server
