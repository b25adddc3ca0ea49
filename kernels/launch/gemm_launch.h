// Launches a GEMM variant by its index in the catalogue.
#pragma once

#include <cstddef>

#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"

namespace tessera::kernels {

// Whether this build has compiled variant `index`. The catalogue lists variants of all trees.
bool GemmBuilt(std::size_t index);

// Loads a variant into the current CUDA context and reports what it takes: once a context, before its first launch,
// since a kernel that is loaded at its first launch can wait for all that runs. Nothing to do, and no facts, for CPU
// variants.
LaunchError PrepareGemm(std::size_t index, KernelFacts& facts);

// Runs variant `index` of GemmVariants() on checked parameters (bounds, alignment, no aliasing; see gemm_params.h).
// CPU variants finish before they return; CUDA variants are enqueued on context.stream. An empty output is kLaunchOk
// without a launch; a variant that is not built and an index, split or workspace that it cannot take are
// kLaunchInvalidValue.
LaunchError LaunchGemm(std::size_t index, const GemmParams& params, const LaunchShape& shape,
                       const LaunchContext& context);

}  // namespace tessera::kernels
