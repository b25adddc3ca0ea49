// A matrix product, as far as it matters for planning.
#pragma once

#include <cstdint>

#include "kernels/catalog/gemm_class.h"
#include "kernels/catalog/variant.h"

namespace tessera::planner {

struct GemmProblem {
  kernels::GemmClass gemm_class;
  std::int64_t batch = 1;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  // Trees of variants whose loaders can address the operands: their strides and alignment.
  kernels::ArchSet addressable = {kernels::Arch::kCpu, kernels::Arch::kSm80, kernels::Arch::kSm89,
                                  kernels::Arch::kSm90a, kernels::Arch::kVendor};
};

}  // namespace tessera::planner
