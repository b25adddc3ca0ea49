// What a GEMM variant is to the launch table: one constant object a variant, named by its symbol.
#pragma once

#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"

namespace tessera::kernels {

struct GemmEntry {
  LaunchError (*launch)(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) = nullptr;
  // CUDA variants: loads the kernel into the current context and allows it its shared memory; once a context, before
  // the first launch. Null for variants with nothing to load.
  LaunchError (*prepare)(KernelFacts& facts) = nullptr;
};

}  // namespace tessera::kernels
