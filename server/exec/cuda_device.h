// A GPU as a device: its context with every kernel loaded, in-order streams with a workspace each, and one thread that
// sees completions. Serves the backends cuda (our kernels) and, where cuBLASLt loads, vendor.
//
// A launch is made by the thread that enqueues the job. The GPU tells of completion by writing the job's number into
// pinned host memory, which the completer polls: that is seen sooner than an event or a host function
// (docs/decisions/0009-completion-by-pinned-flags.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/exec/cuda_facts.h"
#include "server/exec/device.h"

namespace tessera::server {

struct CudaDeviceOptions {
  std::string device;  // "auto": the first that kernels run on; else an ordinal, or a UUID as nvidia-smi -L
  std::int64_t workspace_bytes_max = 0;
  // Called once, by the completer with no lock held, when the context is lost: every call has been, and will be,
  // answered UNAVAILABLE.
  std::function<void(const absl::Status&)> lost;
};

class CudaDevice : public Device {
 public:
  virtual const CudaFacts& cuda_facts() const = 0;
};

// UNAVAILABLE with the reason, and what to do, where no GPU can be served: no driver, one too old, no device, or only
// devices that this build has no kernels for. Loads every kernel, which takes a fraction of a second.
absl::StatusOr<std::unique_ptr<CudaDevice>> OpenCudaDevice(const CudaDeviceOptions& options);

}  // namespace tessera::server
