#include "kernels/device/tensor_map.h"

#include <cudaTypedefs.h>

namespace tessera::kernels::device {
namespace {

using EncodeTiled = PFN_cuTensorMapEncodeTiled_v12000;
constexpr unsigned kEncodeTiledVersion = 12000;

struct Encoder {
  EncodeTiled encode = nullptr;
  cudaError_t error = cudaSuccess;
};

// Through the runtime, so that the program needs no libcuda to link or to start on a machine without one.
Encoder FindEncoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kEncodeTiledVersion,
                                                             cudaEnableDefault, &found);
  if (error != cudaSuccess) return {.error = error};
  if (found != cudaDriverEntryPointSuccess || function == nullptr) return {.error = cudaErrorNotSupported};
  return {.encode = reinterpret_cast<EncodeTiled>(function)};
}

}  // namespace

cudaError_t EncodeTensorMap(const TensorMapShape& shape, CUtensorMap& map) {
  static const Encoder encoder = FindEncoder();
  if (encoder.error != cudaSuccess) return encoder.error;
  constexpr cuuint32_t kDense[kTensorMapRank] = {1, 1, 1, 1, 1};
  // The driver only stores the address.
  const CUresult result =
      encoder.encode(&map, shape.type, kTensorMapRank, const_cast<void*>(shape.base), shape.extent, shape.stride,
                     shape.box, kDense, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace tessera::kernels::device
