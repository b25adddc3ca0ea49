// Launches a GEMM variant by its index in the catalogue.
#pragma once

#include <cstddef>

#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"

namespace tessera::kernels {

// Runs variant `index` of GemmVariants() on checked parameters (bounds, alignment, no aliasing; see gemm_params.h).
// CPU variants finish before they return; CUDA variants are enqueued on context.stream. An empty output is kLaunchOk
// without a launch; an index, split or workspace that the variant cannot take is kLaunchInvalidValue.
LaunchError LaunchGemm(std::size_t index, const GemmParams& params, const LaunchShape& shape,
                       const LaunchContext& context);

}  // namespace tessera::kernels
