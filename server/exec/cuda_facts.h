// Which GPUs the driver shows, what they are, and whether kernels of this build run on them. What is decided is apart
// from the calls that it is decided upon, for tests on machines without such GPUs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/catalog/variant.h"

namespace tessera::server {

// What a GPU says about itself.
struct CudaFacts {
  int ordinal = 0;
  std::string name;
  std::string uuid;            // as nvidia-smi lists it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx
  int compute_capability = 0;  // 90 = sm_90
  int multiprocessors = 0;
  std::int64_t l2_bytes = 0;
  std::int64_t shared_bytes_per_block = 0;  // that a kernel can ask for
  std::int64_t shared_bytes_per_multiprocessor = 0;
  int threads_per_multiprocessor = 0;
  std::uint64_t memory_bytes = 0;
  int driver_version = 0;   // CUDA version that the driver serves, 13000 = 13.0
  int runtime_version = 0;  // that this build has
  bool mps = false;         // a client of the Multi-Process Service
};

// How many GPUs the driver shows. UNAVAILABLE with the reason, and what to do, where that is none.
absl::StatusOr<int> CountCudaDevices();

absl::StatusOr<CudaFacts> CudaFactsOf(int ordinal);

std::string CudaVersionText(int version);  // 13000 is "13.0"

// The trees whose kernels a GPU of this compute capability runs, where the build has an image for it.
kernels::ArchSet ArchsOf(int compute_capability);

// Which of `count` GPUs `wanted` (CudaDeviceOptions::device) means; `facts_of` tells of each. "auto" is the first GPU
// if kernels run on none, for CheckKernels to refuse. UNAVAILABLE if the wanted one is not there.
absl::StatusOr<CudaFacts> ChooseDevice(const std::string& wanted, int count,
                                       const std::function<absl::StatusOr<CudaFacts>(int ordinal)>& facts_of);

// UNAVAILABLE unless the kernels that run on a GPU, `archs`, have those of sm80: they take every problem.
absl::Status CheckKernels(const CudaFacts& facts, kernels::ArchSet archs);

}  // namespace tessera::server
