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
#include "kernels/catalog/variant.h"
#include "server/exec/device.h"

namespace tessera::server {

struct CudaDeviceOptions {
  std::string device;  // "auto": the first that kernels run on; else an ordinal, or a UUID as nvidia-smi -L
  std::int64_t workspace_bytes_max = 0;
  // Called once, by the completer with no lock held, when the context is lost: every call has been, and will be,
  // answered UNAVAILABLE.
  std::function<void(const absl::Status&)> lost;
};

// What a GPU says about itself.
struct CudaFacts {
  int ordinal = 0;
  std::string name;
  std::string uuid;            // as nvidia-smi lists it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx
  int compute_capability = 0;  // 90 = sm_90
  int multiprocessors = 0;
  std::uint64_t memory_bytes = 0;
  int driver_version = 0;   // CUDA version that the driver serves, 13000 = 13.0
  int runtime_version = 0;  // that this build has
  bool mps = false;         // a client of the Multi-Process Service
};

class CudaDevice : public Device {
 public:
  virtual const CudaFacts& cuda_facts() const = 0;
};

// UNAVAILABLE with the reason, and what to do, where no GPU can be served: no driver, one too old, no device, or only
// devices that this build has no kernels for. Loads every kernel, which takes a fraction of a second.
absl::StatusOr<std::unique_ptr<CudaDevice>> OpenCudaDevice(const CudaDeviceOptions& options);

// What OpenCudaDevice decides, apart from the calls that it decides upon, for tests on machines without such GPUs.

// The trees whose kernels a GPU of this compute capability runs, where the build has an image for it.
kernels::ArchSet ArchsOf(int compute_capability);

// Which of `count` GPUs `wanted` (CudaDeviceOptions::device) means; `facts_of` tells of each. "auto" is the first GPU
// if kernels run on none, for CheckKernels to refuse. UNAVAILABLE if the wanted one is not there.
absl::StatusOr<CudaFacts> ChooseDevice(const std::string& wanted, int count,
                                       const std::function<absl::StatusOr<CudaFacts>(int ordinal)>& facts_of);

// UNAVAILABLE unless the kernels that run on a GPU, `archs`, have those of sm80: they take every problem.
absl::Status CheckKernels(const CudaFacts& facts, kernels::ArchSet archs);

}  // namespace tessera::server
