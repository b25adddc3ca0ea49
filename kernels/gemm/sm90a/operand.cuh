// How an operand of the Hopper GEMMs lies in memory, in the boxes of the copy engine and in a stage of shared memory.
// A tile is kRows rows (of M for A, of N for B) of 128 bytes of K; both ways of lying take the same bytes, so that row
// r of a tile, r a multiple of 64, begins 128 r bytes into it in either.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/dtype.h"
#include "kernels/device/tensor_map.h"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/legality.h"

namespace tessera::kernels::sm90a {

inline constexpr std::uint32_t kStepsOfK = 4;  // instructions a tile: 32 bytes of K each

// kCopyRows: rows of one copy, where K is contiguous.
template <DType kType, bool kContiguousK, int kTileRows, int kCopyRows>
struct Operand {
  static constexpr DType kDType = kType;
  static constexpr bool kKMajor = kContiguousK;
  static constexpr std::uint32_t kRows = kTileRows;
  static constexpr std::uint32_t kBytes = kRows * device::kSwizzleRowBytes;
  static constexpr std::uint32_t kTileK = device::kSwizzleRowBytes / DTypeBytes(kType);
  // Where M or N is contiguous, a copy is a panel: 64 elements of it by the K of the tile.
  static constexpr std::uint32_t kBoxRows = kKMajor ? kCopyRows : device::kPanelElements;
  static_assert(kKMajor || DTypeBytes(kType) == 2, "wgmma transposes 16-bit types only");
  static_assert(kKMajor || kTileK == device::kPanelElements, "a panel is square");
  static_assert(kRows % kBoxRows == 0 && kBoxRows <= 256 && kBoxRows % 8 == 0);

  // Tiles begin at multiples of so many rows: the device stops with an illegal instruction if a copy's first coordinate
  // is no multiple of 16 bytes.
  static constexpr int kRowUnit = kKMajor ? 1 : 16 / DTypeBytes(kType);

  // The descriptor of the rows from `shared_address` on.
  static __device__ __forceinline__ std::uint64_t Descriptor(std::uint32_t shared_address) {
    if constexpr (kKMajor) {
      return device::SwizzledOperand(shared_address);
    } else {
      return device::SwizzledPanels<kTileK>(shared_address);
    }
  }

  // From one instruction's K to the next one's.
  static constexpr std::uint32_t kStepBytes =
      kKMajor ? device::kSwizzleRowBytes / kStepsOfK : kBytes / kRows * kTileK / kStepsOfK;

  // Rows of a copy from a matrix with so many. What lies outside of a matrix costs a copy more time than what lies in
  // it, so where a matrix has fewer rows than a copy could bring, the copy brings no more. The rows of the tile behind
  // them keep what they held, and become elements of the product that nobody looks at.
  static constexpr std::uint32_t CopyRows(std::int64_t rows) {
    return kKMajor && rows < std::int64_t{kBoxRows} ? static_cast<std::uint32_t>(rows) : kBoxRows;
  }

  // Bytes of all copies of a tile.
  static constexpr std::uint32_t TileBytes(std::int64_t rows) {
    return CopyRows(rows) < kBoxRows ? CopyRows(rows) * device::kSwizzleRowBytes : kBytes;
  }

  // Asks for rows [first, first + count) of the tile whose first row and first K are `row` and `k`, of a matrix with
  // `rows`. `copy(destination, box)` is the kind of copy.
  template <typename Copy>
  static __device__ __forceinline__ void Load(std::uint32_t stage, device::TensorCoordinates box, std::int64_t rows,
                                              std::int32_t row, std::int32_t k, std::uint32_t first,
                                              std::uint32_t count, const Copy& copy) {
    for (std::uint32_t r = first; r < first + count; r += kBoxRows) {
      if (r > 0 && CopyRows(rows) < kBoxRows) return;  // the first copy has all
      box.at[kKMajor ? 0 : 1] = k;
      box.at[kKMajor ? 1 : 0] = row + static_cast<std::int32_t>(r);
      copy(stage + r * device::kSwizzleRowBytes, box);
    }
  }

  // Host: the operand, rows x k elements a matrix, as the copy engine sees it.
  static device::TensorMapShape Map(const GemmMatrix& matrix, std::int64_t rows, std::int64_t k,
                                    const std::int64_t (&batch_shape)[kGemmBatchDimsMax]);
};

// Host: a matrix of `fine` contiguous elements by `lead` with stride `lead_stride`, and its batch dimensions.
inline device::TensorMapShape MatrixMap(const GemmMatrix& matrix, DType dtype, std::int64_t fine, std::int64_t lead,
                                        std::int64_t lead_stride, std::uint32_t box_fine, std::uint32_t box_lead,
                                        const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) {
  constexpr std::uint64_t kAlign = kTmaAlignment;
  const std::uint64_t bytes = DTypeBytes(dtype);
  const std::uint64_t dense = (static_cast<std::uint64_t>(fine) * bytes + kAlign - 1) / kAlign * kAlign;
  device::TensorMapShape map = {.type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                .base = matrix.data};
  map.extent[0] = static_cast<std::uint64_t>(fine);
  map.extent[1] = static_cast<std::uint64_t>(lead);
  map.stride[0] = lead > 1 ? static_cast<std::uint64_t>(lead_stride) * bytes : dense;
  map.box[0] = box_fine;
  map.box[1] = box_lead;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    const int dimension = kGemmBatchDimsMax - 1 - i;
    const bool present = batch_shape[dimension] > 1 && matrix.batch_stride[dimension] != 0;
    map.extent[2 + i] = present ? static_cast<std::uint64_t>(batch_shape[dimension]) : 1;
    map.stride[1 + i] = present ? static_cast<std::uint64_t>(matrix.batch_stride[dimension]) * bytes : map.stride[i];
    map.box[2 + i] = 1;
  }
  return map;
}

template <DType kType, bool kContiguousK, int kTileRows, int kCopyRows>
device::TensorMapShape Operand<kType, kContiguousK, kTileRows, kCopyRows>::Map(
    const GemmMatrix& matrix, std::int64_t rows, std::int64_t k, const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) {
  if (kKMajor) return MatrixMap(matrix, kType, k, rows, matrix.row_stride, kTileK, CopyRows(rows), batch_shape);
  return MatrixMap(matrix, kType, rows, k, matrix.col_stride, kBoxRows, kTileK, batch_shape);
}

}  // namespace tessera::kernels::sm90a
