// Which trees of GEMM variants can address the operands of a problem: what the planner is told of strides and
// alignment.
#pragma once

#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels {

// Never without kCpu and the portable CUDA trees, which take any view.
ArchSet AddressableBy(const GemmClass& gemm_class, const GemmParams& params);

}  // namespace tessera::kernels
