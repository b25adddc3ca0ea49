// GEMM truth in float64 on the device, for problems that would keep the host's oracle busy for minutes: one thread a
// element of D, the sum over K in ascending order. It shares no code with the kernels and is itself compared with the
// host's oracle before anything relies on it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "kernels/gemm/gemm_params.h"

namespace tessera::gpu_test {

// The arrays of oracle::GemmTruth in device memory, each packed [batch.., m, n].
struct NaiveTruth {
  double* value = nullptr;
  double* sum_magnitude = nullptr;
  double* magnitude = nullptr;
  double* short_loss = nullptr;  // these two are computed of any types, unless null
  double* promoted_loss = nullptr;
};

// Enqueues on `stream`. Pointers in `params` are device addresses; D is neither read nor written.
cudaError_t NaiveGemm(const kernels::GemmParams& params, DType a, DType b, const NaiveTruth& truth,
                      cudaStream_t stream);

}  // namespace tessera::gpu_test
