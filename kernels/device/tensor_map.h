// Tensor maps: what the copy engine knows of a tensor in device memory, 128 opaque bytes that the driver encodes on the
// host and a kernel takes as a `const __grid_constant__` parameter.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::kernels::device {

inline constexpr int kTensorMapRank = 5;

// Fastest dimension first. A dimension that a tensor lacks has extent 1, box 1 and any legal stride.
struct TensorMapShape {
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const void* base = nullptr;                     // aligned to 16 bytes
  std::uint64_t extent[kTensorMapRank] = {};      // elements
  std::uint64_t stride[kTensorMapRank - 1] = {};  // bytes, of dimensions 1..4: multiples of 16 below 2^40
  std::uint32_t box[kTensorMapRank] = {};         // elements of one copy; box[0] is 128 bytes or less, 64 where it says
  bool narrow = false;                            // lines of shared memory are 64 bytes

  friend bool operator==(const TensorMapShape&, const TensorMapShape&) = default;
};

// A map of boxes that land swizzled by 128 bytes (kernels/device/wgmma.cuh), or by 64 if they are narrow, and read as
// zero outside the tensor. cudaErrorInvalidValue: the driver refuses the shape; cudaErrorNotSupported: it has no tensor
// maps.
cudaError_t EncodeTensorMap(const TensorMapShape& shape, CUtensorMap& map);

// The same, from the calling thread's latest few if one of them has exactly this shape. A map is a function of its
// shape alone, so one that was kept can be of no other tensor.
cudaError_t FindTensorMap(const TensorMapShape& shape, CUtensorMap& map);

}  // namespace tessera::kernels::device
