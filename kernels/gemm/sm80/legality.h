// Which accesses of 16 or fewer bytes at once a view allows, decided on the host from base address, strides and
// extents. A stride over an extent of 1 is never used and may be anything.
#pragma once

#include <cstdint>

#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::sm80 {

struct ViewDimension {
  std::int64_t extent;
  std::int64_t stride;  // in elements
};

// True if every line of the view, in every batch entry, starts at a multiple of `unit` bytes and holds its elements, of
// `element_bytes`, one after another. `line` counts the lines, `within` the elements of one.
inline bool LinesAligned(const GemmParams& params, const GemmMatrix& matrix, ViewDimension line, ViewDimension within,
                         std::int64_t element_bytes, std::int64_t unit) {
  if (within.extent > 1 && within.stride != 1) return false;
  if (reinterpret_cast<std::uintptr_t>(matrix.data) % static_cast<std::uintptr_t>(unit) != 0) return false;
  const std::int64_t unit_elements = unit / element_bytes;
  if (line.extent > 1 && line.stride % unit_elements != 0) return false;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    if (params.batch_shape[i] > 1 && matrix.batch_stride[i] % unit_elements != 0) return false;
  }
  return true;
}

}  // namespace tessera::kernels::sm80
