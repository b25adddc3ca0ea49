// GEMM for Hopper with one-byte operands as they lie in memory, whatever their strides and alignment. The tensor core
// takes one-byte operands with K contiguous only, and the copy engine wants rows that begin at multiples of 16 bytes:
// an operand that is not so is packed into scratch first, by a kernel of its own, at the speed of memory. What does not
// fit the scratch is done in parts.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/catalog/gemm_catalog.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/launch.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/pack.cuh"
#include "kernels/gemm/sm90a/wgmma_gemm.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

// Enqueues the packing of `from`, `rows` x `k` a matrix, to `to`.
inline cudaError_t Pack(const GemmMatrix& from, std::int64_t rows, std::int64_t k,
                        const std::int64_t (&batch_shape)[kGemmBatchDimsMax], std::int64_t packed_row,
                        unsigned char* to, cudaStream_t stream) {
  PackShape shape = {.rows = rows, .k = k, .batch_shape = {}, .packed_row = packed_row};
  std::int64_t matrices = 1;
  bool words = from.row_stride == 1 && from.col_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(from.data) % 4 == 0;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    shape.batch_shape[i] = batch_shape[i];
    matrices *= batch_shape[i];
    if (from.batch_stride[i] % 4 != 0) words = false;
  }
  constexpr std::int64_t kBlocks = 132 * 8;
  const std::int64_t tiles = matrices * ((rows + kPackTile - 1) / kPackTile) * ((k + kPackTile - 1) / kPackTile);
  const dim3 grid(static_cast<unsigned>(std::min(tiles, kBlocks)));
  if (words) {
    PackKernel<true><<<grid, kPackThreads, 0, stream>>>(from, shape, to);
  } else {
    PackKernel<false><<<grid, kPackThreads, 0, stream>>>(from, shape, to);
  }
  return cudaGetLastError();
}

// An operand for the copy engine: as it is, or packed.
class PackedOperand {
 public:
  // Of `rows` x `k` elements a matrix.
  PackedOperand(const GemmMatrix& matrix, DType dtype, std::int64_t rows, std::int64_t k)
      : matrix_(matrix), dtype_(dtype), rows_(rows), k_(k) {}

  bool Packs(const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) const {
    return !TmaIllegal(matrix_, DTypeBytes(dtype_), rows_, k_, batch_shape).empty();
  }

  // Scratch for `rows` rows of each distinct matrix of the batch.
  std::int64_t Bytes(std::int64_t rows, const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) const {
    std::int64_t bytes = rows * PackedRowBytes(k_);
    for (const std::int64_t extent : Distinct(batch_shape).extent) bytes *= extent;
    return bytes;
  }

  // Rows [first, first + rows) of the operand, packed at `scratch`.
  cudaError_t Part(std::int64_t first, std::int64_t rows, const std::int64_t (&batch_shape)[kGemmBatchDimsMax],
                   unsigned char* scratch, cudaStream_t stream, GemmMatrix& part) const {
    GemmMatrix from = matrix_;
    from.data = static_cast<unsigned char*>(matrix_.data) + first * matrix_.row_stride;
    const Shape distinct = Distinct(batch_shape);
    const std::int64_t row_bytes = PackedRowBytes(k_);
    part = {.data = scratch, .row_stride = row_bytes, .col_stride = 1};
    std::int64_t stride = rows * row_bytes;
    for (int i = kGemmBatchDimsMax - 1; i >= 0; --i) {
      part.batch_stride[i] = matrix_.batch_stride[i] == 0 ? 0 : stride;
      stride *= distinct.extent[i];
    }
    return Pack(from, rows, k_, distinct.extent, row_bytes, scratch, stream);
  }

 private:
  struct Shape {
    std::int64_t extent[kGemmBatchDimsMax];
  };

  // A matrix that the batch repeats is packed once.
  Shape Distinct(const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) const {
    Shape shape = {};
    for (int i = 0; i < kGemmBatchDimsMax; ++i) shape.extent[i] = matrix_.batch_stride[i] == 0 ? 1 : batch_shape[i];
    return shape;
  }

  GemmMatrix matrix_;
  DType dtype_;
  std::int64_t rows_;
  std::int64_t k_;
};

template <DType kA, DType kB, DType kOut, Accumulation kAccumulation, GemmLayout kLayout, typename Tile>
struct PackedGemm {
  static_assert(DTypeBytes(kA) == 1 && DTypeBytes(kB) == 1, "of 16-bit types the tensor core takes every layout");
  using Gemm = WgmmaGemm<kA, kB, kOut, kAccumulation, GemmLayout::kNT, Tile>;

  static cudaError_t Prepare(KernelFacts& facts) {
    // So that they are loaded; what the product takes is what is reported.
    for (const auto kernel : {&PackKernel<false>, &PackKernel<true>}) {
      const cudaError_t error = PrepareKernel(kernel, 0, kPackThreads, facts);
      if (error != cudaSuccess) return error;
    }
    return Gemm::Prepare(facts);
  }

  static cudaError_t Launch(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    if (shape.split != 1 || shape.raster < 0) return cudaErrorInvalidValue;
    if (params.k == 0) return Gemm::Launch(params, shape, context);
    constexpr GemmClass kClass = {.a = kA, .b = kB, .out = kOut, .accumulation = kAccumulation, .layout = kLayout};
    if (!PackIllegal(params, kClass, Tile::kM, Tile::kN).empty()) return cudaErrorInvalidValue;
    std::int64_t matrices = 1;
    for (const std::int64_t extent : params.batch_shape) matrices *= extent;
    if (matrices == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
    const PackedOperand a(params.a, kA, params.m, params.k);
    const PackedOperand b(params.b, kB, params.n, params.k);
    const std::int64_t needed = (a.Packs(params.batch_shape) ? a.Bytes(params.m, params.batch_shape) : 0) +
                                (b.Packs(params.batch_shape) ? b.Bytes(params.n, params.batch_shape) : 0);
    if (needed <= static_cast<std::int64_t>(context.workspace.bytes)) return LaunchParts(params, shape, context);
    // Matrix by matrix, each in parts.
    for (std::int64_t i = 0; i < matrices; ++i) {
      const cudaError_t error = LaunchParts(OneOfBatch(params, i), shape, context);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  static GemmParams OneOfBatch(const GemmParams& params, std::int64_t index) {
    GemmParams one = params;
    for (int i = kGemmBatchDimsMax - 1; i >= 0; --i) {
      const std::int64_t at = index % params.batch_shape[i];
      index /= params.batch_shape[i];
      one.batch_shape[i] = 1;
      one.a.data = static_cast<unsigned char*>(one.a.data) + at * params.a.batch_stride[i];
      one.b.data = static_cast<unsigned char*>(one.b.data) + at * params.b.batch_stride[i];
      one.d.data = DAt(one.d, at * params.d.batch_stride[i]);
    }
    return one;
  }

  static void* DAt(const GemmMatrix& d, std::int64_t elements) {
    return static_cast<unsigned char*>(d.data) + elements * static_cast<std::int64_t>(DTypeBytes(kOut));
  }

  // Rows of an operand at a time: all, or whole tiles of what has room in `bytes`.
  static std::int64_t RowsAtOnce(std::int64_t rows, std::int64_t bytes_of_a_row, std::int64_t bytes,
                                 std::int64_t tile) {
    return std::min(rows, std::max<std::int64_t>(1, bytes / bytes_of_a_row / tile) * tile);
  }

  static cudaError_t LaunchParts(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const PackedOperand a(params.a, kA, params.m, params.k);
    const PackedOperand b(params.b, kB, params.n, params.k);
    const bool packs_a = a.Packs(params.batch_shape);
    const bool packs_b = b.Packs(params.batch_shape);
    const auto bytes = static_cast<std::int64_t>(context.workspace.bytes) / kPackAlignment * kPackAlignment;
    const std::int64_t a_row = a.Bytes(1, params.batch_shape);
    const std::int64_t b_row = b.Bytes(1, params.batch_shape);
    // A gets half of the scratch, or what it needs, if B needs some, too.
    const std::int64_t a_most = packs_b ? std::max(bytes / 2, bytes - params.n * b_row) : bytes;
    const std::int64_t a_rows = packs_a ? RowsAtOnce(params.m, a_row, a_most, Tile::kM) : params.m;
    const std::int64_t a_bytes = packs_a ? (a_rows * a_row + kPackAlignment - 1) / kPackAlignment * kPackAlignment : 0;
    const std::int64_t b_rows = packs_b ? RowsAtOnce(params.n, b_row, bytes - a_bytes, Tile::kN) : params.n;
    if (a_bytes + (packs_b ? b_rows * b_row : 0) > bytes && (packs_a || packs_b)) return cudaErrorInvalidValue;
    auto* const scratch = static_cast<unsigned char*>(context.workspace.scratch);
    for (std::int64_t m = 0; m < params.m; m += a_rows) {
      GemmParams part = params;
      part.m = std::min(a_rows, params.m - m);
      if (packs_a) {
        const cudaError_t error = a.Part(m, part.m, params.batch_shape, scratch, stream, part.a);
        if (error != cudaSuccess) return error;
      }
      for (std::int64_t n = 0; n < params.n; n += b_rows) {
        part.n = std::min(b_rows, params.n - n);
        if (packs_b) {
          const cudaError_t error = b.Part(n, part.n, params.batch_shape, scratch + a_bytes, stream, part.b);
          if (error != cudaSuccess) return error;
        }
        part.d.data = DAt(params.d, m * params.d.row_stride + n * params.d.col_stride);
        part.a_scale = From(params.a_scale, m);
        part.b_scale = From(params.b_scale, n);
        part.bias.data = BiasFrom(params.bias, n);
        const cudaError_t error = Gemm::Launch(part, shape, context);
        if (error != cudaSuccess) return error;
      }
    }
    return cudaSuccess;
  }

  static GemmScale From(GemmScale scale, std::int64_t first) {
    if (scale.vector != nullptr) scale.vector += first * scale.stride;
    return scale;
  }

  static const void* BiasFrom(const GemmBias& bias, std::int64_t first) {
    if (bias.data == nullptr) return nullptr;
    return static_cast<const unsigned char*>(bias.data) +
           first * bias.stride * static_cast<std::int64_t>(DTypeBytes(bias.dtype));
  }
};

}  // namespace tessera::kernels::sm90a
