// Buffers on a CUDA GPU: the implementation of DeviceMemory. Only in builds with CUDA.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/session/device_memory.h"

namespace tessera::server {

// The memory of GPU `ordinal` (CUDA's numbering in this process), in its primary context. UNIMPLEMENTED: a MIG
// instance, or a GPU or driver without shareable allocations.
absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaMemory(int ordinal);

}  // namespace tessera::server
