// Why cuBLASLt cannot run a GEMM: asked by the planner before it chooses a vendor variant, and by the launcher again.
#pragma once

#include <string_view>

#include "kernels/gemm/vendor/problem.h"

namespace tessera::kernels {

// Empty if the library can state this problem. It may still have no kernel for it on the device at hand, which only its
// heuristics know; the launch then answers cudaErrorNotSupported and touches nothing.
inline std::string_view VendorIllegal(const GemmParams& params, const GemmClass& gemm_class) {
  vendor::Problem problem;
  return vendor::Describe(gemm_class, params, problem);
}

}  // namespace tessera::kernels
