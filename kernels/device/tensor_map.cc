#include "kernels/device/tensor_map.h"

#include <cudaTypedefs.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

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

// A thread's maps, each in the one place that its shape has: finding one costs a comparison, and what collides is
// encoded again.
class KeptMaps {
 public:
  cudaError_t Find(const TensorMapShape& shape, CUtensorMap& map) {
    Entry& entry = entries_[PlaceOf(shape)];
    if (!entry.used || !(entry.shape == shape)) {
      entry.used = false;
      const cudaError_t error = EncodeTensorMap(shape, entry.map);
      if (error != cudaSuccess) return error;
      entry.shape = shape;
      entry.used = true;
    }
    map = entry.map;
    return cudaSuccess;
  }

 private:
  static constexpr std::size_t kEntries = 64;

  struct Entry {
    TensorMapShape shape;
    CUtensorMap map = {};
    bool used = false;
  };

  // Tensors differ most in where they are and how long a row is.
  static std::size_t PlaceOf(const TensorMapShape& shape) {
    std::uint64_t mixed = reinterpret_cast<std::uintptr_t>(shape.base);
    for (const std::uint64_t value : {shape.extent[0], shape.extent[1], shape.stride[0],
                                      static_cast<std::uint64_t>(shape.box[0]) << 32U | shape.box[1]}) {
      mixed = (mixed ^ value) * 0x9E3779B97F4A7C15ULL;
      mixed ^= mixed >> 32U;
    }
    return mixed % kEntries;
  }

  Entry entries_[kEntries];
};

}  // namespace

cudaError_t FindTensorMap(const TensorMapShape& shape, CUtensorMap& map) {
  thread_local KeptMaps maps;
  return maps.Find(shape, map);
}

cudaError_t EncodeTensorMap(const TensorMapShape& shape, CUtensorMap& map) {
  static const Encoder encoder = FindEncoder();
  if (encoder.error != cudaSuccess) return encoder.error;
  constexpr cuuint32_t kDense[kTensorMapRank] = {1, 1, 1, 1, 1};
  // The driver only stores the address.
  const CUresult result = encoder.encode(&map, shape.type, kTensorMapRank, const_cast<void*>(shape.base), shape.extent,
                                         shape.stride, shape.box, kDense, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         shape.narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace tessera::kernels::device
