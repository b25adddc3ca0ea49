// Launches GEMM variants of the catalogue the way a server would, with scratch of exactly the promised size between
// guards, and reads results back for comparison.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"

namespace tessera::kernels {

// Real threads for a launch: every call of `run` starts them, and tasks are handed out from the last to the first, so
// that a task which relies on an earlier one shows.
class LentThreads {
 public:
  explicit LentThreads(int width) : width_(width) {}

  HostParallel Parallel() { return {.run = &LentThreads::Run, .self = this, .width = width_}; }

 private:
  static void Run(void* self, std::int64_t tasks, void (*body)(void* arg, std::int64_t task), void* arg);

  int width_;
};

// Indices into GemmVariants() of the host variants whose class `accept` takes.
template <typename Accept>
std::vector<std::size_t> CpuVariants(const Accept& accept) {
  std::vector<std::size_t> indices;
  const auto variants = GemmVariants();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    if (variants[i].info.backend == Backend::kCpu && accept(variants[i].gemm_class)) indices.push_back(i);
  }
  return indices;
}

// Splits to try on a problem: 1, and for variants that cut K also 2, 3 and more slices than there are K blocks.
std::vector<int> SplitsFor(const GemmVariant& variant, std::int64_t k);

// Launches with scratch of GemmWorkspaceBytes() filled with NaN; fails the running test if its guards are touched.
LaunchError RunGemm(std::size_t variant, const GemmParams& params, int split, const HostParallel& parallel = {});

// The elements of D, whose rows must be contiguous, packed [batch.., m, n].
std::vector<std::byte> PackedOutput(const GemmParams& params, DType dtype);

}  // namespace tessera::kernels
