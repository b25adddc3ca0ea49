// Accumulators of swapped operands -> D. Where the rows of B are the tensor core's first operand, a warp has 16 columns
// of D, a strip, of all rows of the tile: 8 rows of D are a chunk, of which a thread has two neighbouring rows of two
// columns, 8 apart. A warp stores its strip on its own.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/gemm/cuda/epilogue.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/store_tile.cuh"

namespace tessera::kernels::sm90a {

// How D is written, found by the host.
struct StripOutput {
  DType type;
  bool vectors;  // bf16, eight neighbours of a row at once, aligned to their 16 bytes
};

inline StripOutput StripOutputOf(DType type, const GemmParams& params) {
  constexpr std::int64_t kElements = 8;
  bool vectors = type == DType::kBf16 && (params.n <= 1 || params.d.col_stride == 1) &&
                 reinterpret_cast<std::uintptr_t>(params.d.data) % (kElements * 2) == 0 &&
                 (params.m <= 1 || params.d.row_stride % kElements == 0);
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    if (params.batch_shape[i] > 1 && params.d.batch_stride[i] % kElements != 0) vectors = false;
  }
  return {.type = type, .vectors = vectors};
}

// Where a strip is in D.
struct StripPlace {
  std::int64_t batch_offset;  // elements
  std::int64_t row;           // of the tile's first row
  std::int64_t column;        // of the strip's first column
  std::uint32_t rows;         // of the tile that are in D
};

// kCount: accumulators of a thread, four a chunk: [column, 8 apart][row].
template <int kCount>
class StripStore {
 public:
  static constexpr int kColumns = 16;
  static constexpr std::uint32_t kChunkRows = 8;
  static constexpr int kChunks = kCount / 4;
  static constexpr std::uint32_t kLineBytes = kColumns * 2;
  static constexpr std::uint32_t kBytes = kChunks * kChunkRows * kLineBytes;  // of shared memory, a warp

  // `area`: kBytes of the warp's own. Once the grid ahead has ended, which may write the scales.
  __device__ __forceinline__ StripStore(const GemmParams& params, const StripOutput& output, std::uint32_t area)
      : params_(params), factors_(params), output_(output), area_(area) {}

  // All 32 threads of the warp, with the same place.
  template <typename Accumulator>
  __device__ __forceinline__ void Store(const StripPlace& place, const Accumulator (&acc)[kCount]) const {
    float value[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = static_cast<float>(acc[i]);
    Finish(place, value);
    if (output_.vectors) {
      StoreVectors(place, value);
    } else if (output_.type == DType::kBf16) {
      StoreElements<DType::kBf16>(place, value);
    } else {
      StoreElements<DType::kF32>(place, value);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t Lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ std::uint32_t FirstRow() { return Lane() % 4 * 2; }  // of a chunk
  static __device__ __forceinline__ std::uint32_t FirstColumn() { return Lane() / 4; }

  // cuda::Finish over the strip, in place. Nothing is read for elements outside of D.
  __device__ __forceinline__ void Finish(const StripPlace& place, float (&value)[kCount]) const {
    if (factors_.a.varies) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const std::uint32_t row = i / 2 * kChunkRows + FirstRow() + i % 2;
        const float scale = row < place.rows ? cuda::ScaleAt(params_.a_scale, place.row + row) : 0.0F;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& of = value[i / 2 * 4 + half * 2 + i % 2];
          of = __fmul_rn(of, scale);
        }
      }
    } else if (factors_.a.Matters()) {
      Scale(factors_.a.value, value);
    }
    if (factors_.b.varies) {
      ForColumns(
          place, value, [&](std::int64_t column) { return cuda::ScaleAt(params_.b_scale, column); },
          [](float of, float scale) { return __fmul_rn(of, scale); });
    } else if (factors_.b.Matters()) {
      Scale(factors_.b.value, value);
    }
    if (factors_.bias) {
      ForColumns(
          place, value, [&](std::int64_t column) { return cuda::BiasAt(params_.bias, column); },
          [](float of, float bias) { return __fadd_rn(of, bias); });
    }
  }

  // value = change(value, factor of its column).
  template <typename Read, typename Change>
  __device__ __forceinline__ void ForColumns(const StripPlace& place, float (&value)[kCount], const Read& read,
                                             const Change& change) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t column = place.column + half * 8 + FirstColumn();
      const float factor = column < params_.n ? read(column) : 0.0F;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        float& of = value[i / 2 * 4 + half * 2 + i % 2];
        of = change(of, factor);
      }
    }
  }

  // Any strides and alignment: a chunk at a time, of which eight threads have a row of eight columns.
  template <DType kOut>
  __device__ __forceinline__ void StoreElements(const StripPlace& place, const float (&value)[kCount]) const {
    using Out = cuda::Output<kOut>;
    auto* at = static_cast<typename Out::Element*>(params_.d.data) + place.batch_offset +
               (place.row + FirstRow()) * params_.d.row_stride + (place.column + FirstColumn()) * params_.d.col_stride;
    const std::int64_t columns = params_.n - place.column - FirstColumn();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk, at += kChunkRows * params_.d.row_stride) {
      if (static_cast<std::uint32_t>(chunk * kChunkRows) >= place.rows) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2;
        if (chunk * kChunkRows + FirstRow() + i % 2 < place.rows && half * 8 < columns) {
          at[i % 2 * params_.d.row_stride + half * 8 * params_.d.col_stride] = Out::Round(value[chunk * 4 + i]);
        }
      }
    }
  }

  // Turned over in shared memory, rows of D as lines of 32 bytes, from where two threads store a row's 16 columns. Rows
  // outside of D are turned over with the rest, for fewer branches.
  __device__ __forceinline__ void StoreVectors(const StripPlace& place, const float (&value)[kCount]) const {
    __syncwarp();  // of the strip before, all has been read
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      std::uint32_t word[4];  // [chunk][half]
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = (chunk + i / 2) * 4 + i % 2 * 2;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(value[first], value[first + 1]);
        word[i] = __bfloat16_as_ushort(pair.x) | static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16U;
      }
      const std::uint32_t row = (chunk + Lane() / 16) * kChunkRows + Lane() % 8;
      device::StoreMatricesTransposed(area_ + row * kLineBytes + Lane() / 8 % 2 * 16, word);
    }
    __syncwarp();
    constexpr int kRowsAtOnce = 16;
    constexpr int kGroup = kChunks * kChunkRows / kRowsAtOnce < 4 ? kChunks * kChunkRows / kRowsAtOnce : 4;
    std::uint32_t row = Lane() / 2;
    const std::int64_t column = place.column + Lane() % 2 * 8;
    auto* to = static_cast<__nv_bfloat16*>(params_.d.data) + place.batch_offset +
               (place.row + row) * params_.d.row_stride + column;
    const std::int64_t columns = params_.n - column;
#pragma unroll
    for (int group = 0; group < kChunks * kChunkRows / kRowsAtOnce / kGroup; ++group) {
      device::SharedVector line[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        line[i] = device::LoadSharedVector(area_ + (row + i * kRowsAtOnce) * kLineBytes + Lane() % 2 * 16);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (row < place.rows) StoreLine(to, columns, line[i]);
        row += kRowsAtOnce;
        to += kRowsAtOnce * params_.d.row_stride;
      }
    }
  }

  // Eight neighbours of a row, of which `columns` are in D.
  static __device__ __forceinline__ void StoreLine(__nv_bfloat16* to, std::int64_t columns,
                                                   const device::SharedVector& line) {
    if (columns >= 8) {
      *reinterpret_cast<device::SharedVector*>(to) = line;
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<unsigned short>(line.word[i / 2] >> (i % 2 * 16U));
      if (i < columns) to[i] = __ushort_as_bfloat16(bits);
    }
  }

  const GemmParams& params_;
  Factors factors_;
  StripOutput output_;
  std::uint32_t area_;
};

}  // namespace tessera::kernels::sm90a
