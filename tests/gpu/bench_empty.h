// A kernel that does nothing: what the launch of any kernel costs at least.
#pragma once

#include <cuda_runtime_api.h>

namespace tessera::gpu_test {

cudaError_t LaunchEmpty(cudaStream_t stream);

}  // namespace tessera::gpu_test
