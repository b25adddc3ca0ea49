// The vendor backend: cuBLASLt, loaded by name at run time, so that the daemon starts where the library is not
// installed. Defined in CUDA builds only; this header is free of CUDA.
#pragma once

#include <string>

#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"

namespace tessera::kernels {

// Why the library cannot be used by this process; empty if it can. Loads it at the first call; thread-safe.
const std::string& VendorUnavailable();

namespace vendor {

struct CublasLt {
  // Enqueues one product on context.stream, with the whole of context.workspace at the library's disposal (none is
  // legal). cudaErrorNotSupported, and nothing enqueued, for what the library cannot compute (vendor/legality.h) or has
  // no kernel for. The first launch of a problem times the library's proposals on the caller's tensors and waits for
  // them, and for all that is on the stream before; where that may not be (context.may_wait, a stream that is being
  // captured) it takes the first proposal instead.
  static LaunchError Launch(const GemmClass& gemm_class, const GemmParams& params, const LaunchContext& context);

  // cudaErrorNotSupported if the library is not usable (VendorUnavailable says why). The library loads its kernels
  // itself when they are first launched, so there are no facts.
  static LaunchError Prepare(KernelFacts& facts);
};

}  // namespace vendor
}  // namespace tessera::kernels
