// Accumulators of a warpgroup -> its 64 rows of an output tile.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/cuda/epilogue.cuh"
#include "kernels/gemm/gemm_params.h"

namespace tessera::kernels::sm90a {

// The part of D that a thread's accumulators go to.
struct FragmentPlace {
  std::int64_t batch_offset = 0;  // elements, of D
  std::int64_t row = 0;           // the first of its two rows
  std::int64_t column = 0;        // the first of its columns
  int rows = 0;                   // from `row` to the end of D, 0 or less outside of it
  int columns = 0;                // from `column` to the end of D
};

// One factor a column of the tile, spread over a warp: lane l has those of columns l, l + 32 and so on. A thread gets
// those of its own columns from its neighbours, so each is read once a warp and no thread holds many.
template <int kColumns>
class SpreadColumns {
 public:
  // `read(column)` for the columns of D; the others are 0, of elements that are never stored. All 32 threads.
  template <typename Read>
  __device__ __forceinline__ SpreadColumns(const FragmentPlace& place, const Read& read) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int ahead = lane - device::WgmmaFragment::FirstColumn(lane);
#pragma unroll
    for (int j = 0; j < kColumns / 32; ++j) {
      const int step = ahead + 32 * j;
      factor_[j] = step < place.columns ? read(place.column + step) : 0.0F;
    }
  }

  // Of the thread's column `column` of `pair`. All 32 threads.
  __device__ __forceinline__ float At(int pair, int column) const {
    using Fragment = device::WgmmaFragment;
    constexpr int kPairs = 32 / Fragment::kColumnStep;
    const int lane =
        pair % kPairs * Fragment::kColumnStep + Fragment::FirstColumn(static_cast<int>(threadIdx.x)) + column;
    return __shfl_sync(0xFFFFFFFFU, factor_[pair / kPairs], lane);
  }

 private:
  float factor_[kColumns / 32];
};

// value = change(value, factor of its column), over a fragment.
template <int kCount, typename Read, typename Change>
__device__ __forceinline__ void ForColumns(const FragmentPlace& place, float (&acc)[kCount], const Read& read,
                                           const Change& change) {
  using Fragment = device::WgmmaFragment;
  const SpreadColumns<kCount * 2> factors(place, read);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float factor = factors.At(i / 2, i % 2);
#pragma unroll
    for (int r = 0; r < Fragment::kRowPairs; ++r) {
      float& value = acc[Fragment::Index(r, i / 2, i % 2)];
      value = change(value, factor);
    }
  }
}

// cuda::Finish over a fragment, in place, pass by pass. What every request pays for is the test that there is nothing
// to do; multiplying by 1 changes no value.
template <int kCount>
__device__ __forceinline__ void FinishFragment(const GemmParams& params, const FragmentPlace& place,
                                               float (&acc)[kCount]) {
  using Fragment = device::WgmmaFragment;
  if (params.a_scale.vector != nullptr || params.a_scale.scalar != 1.0F) {
#pragma unroll
    for (int r = 0; r < Fragment::kRowPairs; ++r) {
      const int step = r * Fragment::kRowStep;
      const float scale = step < place.rows ? cuda::ScaleAt(params.a_scale, place.row + step) : 0.0F;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        float& value = acc[Fragment::Index(r, i / 2, i % 2)];
        value = __fmul_rn(value, scale);
      }
    }
  }
  if (params.b_scale.vector != nullptr || params.b_scale.scalar != 1.0F) {
    ForColumns(
        place, acc, [&](std::int64_t column) { return cuda::ScaleAt(params.b_scale, column); },
        [](float value, float scale) { return __fmul_rn(value, scale); });
  }
  if (params.bias.data != nullptr) {
    ForColumns(
        place, acc, [&](std::int64_t column) { return cuda::BiasAt(params.bias, column); },
        [](float value, float bias) { return __fadd_rn(value, bias); });
  }
}

// Any strides and alignment.
template <DType kOut, int kCount>
__device__ __forceinline__ void StoreElements(const GemmParams& params, const FragmentPlace& place,
                                              const float (&acc)[kCount]) {
  using Fragment = device::WgmmaFragment;
  using Out = cuda::Output<kOut>;
  auto* const d = static_cast<typename Out::Element*>(params.d.data) + place.batch_offset;
#pragma unroll
  for (int r = 0; r < Fragment::kRowPairs; ++r) {
    if (r * Fragment::kRowStep >= place.rows) continue;
    auto* at = d + (place.row + r * Fragment::kRowStep) * params.d.row_stride + place.column * params.d.col_stride;
#pragma unroll
    for (int pair = 0; pair < kCount / 4; ++pair, at += Fragment::kColumnStep * params.d.col_stride) {
      const int column = pair * Fragment::kColumnStep;
      if (column < place.columns) at[0] = Out::Round(acc[Fragment::Index(r, pair, 0)]);
      if (column + 1 < place.columns) at[params.d.col_stride] = Out::Round(acc[Fragment::Index(r, pair, 1)]);
    }
  }
}

// Word j of thread q of four neighbours <-> word q of thread j. All 32 threads.
__device__ __forceinline__ void TransposeQuad(std::uint32_t (&word)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j & step) != 0) continue;
      const std::uint32_t received = __shfl_xor_sync(0xFFFFFFFFU, upper ? word[j] : word[j + step], step);
      (upper ? word[j] : word[j + step]) = received;
    }
  }
}

// How a type is stored where the columns of D are contiguous and rows begin at multiples of kVectorBytes.
template <DType kOut>
struct VectorStore;

// Four neighbours hold two columns each of every 8. They trade so that each has all of one 8 out of four and stores it
// by 16 bytes; together they write 64 bytes of a row, whole sectors of memory.
template <>
struct VectorStore<DType::kBf16> {
  static constexpr int kVectorBytes = 16;

  template <int kCount>
  static __device__ __forceinline__ void Store(const GemmParams& params, const FragmentPlace& place,
                                               const float (&acc)[kCount]) {
    using Fragment = device::WgmmaFragment;
    constexpr int kPairsTraded = 4;
    static_assert(kCount / 4 % kPairsTraded == 0);
    // From the thread's own two columns to its own 8 of the first 32.
    const int ahead = static_cast<int>(threadIdx.x) % 4 * (Fragment::kColumnStep - 2);
#pragma unroll
    for (int r = 0; r < Fragment::kRowPairs; ++r) {
      auto* const d = static_cast<__nv_bfloat16*>(params.d.data) + place.batch_offset +
                      (place.row + r * Fragment::kRowStep) * params.d.row_stride + place.column + ahead;
      const int columns = r * Fragment::kRowStep < place.rows ? place.columns - ahead : 0;
#pragma unroll
      for (int pair = 0; pair < kCount / 4; pair += kPairsTraded) {
        std::uint32_t word[kPairsTraded];
#pragma unroll
        for (int j = 0; j < kPairsTraded; ++j) {
          word[j] = Pack(acc[Fragment::Index(r, pair + j, 0)], acc[Fragment::Index(r, pair + j, 1)]);
        }
        TransposeQuad(word);
        StoreEight(d + pair * Fragment::kColumnStep, columns - pair * Fragment::kColumnStep, word);
      }
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t Pack(float low, float high) {
    using Out = cuda::Output<DType::kBf16>;
    return __bfloat16_as_ushort(Out::Round(low)) | static_cast<std::uint32_t>(__bfloat16_as_ushort(Out::Round(high)))
                                                       << 16U;
  }

  // The first `columns` of 8, if that many.
  static __device__ __forceinline__ void StoreEight(__nv_bfloat16* d, int columns, const std::uint32_t (&word)[4]) {
    if (columns >= 8) {
      *reinterpret_cast<uint4*>(d) = make_uint4(word[0], word[1], word[2], word[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto half = static_cast<unsigned short>(word[i / 2] >> (i % 2 * 16));
      if (i < columns) d[i] = __ushort_as_bfloat16(half);
    }
  }
};

// Four neighbours hold 32 contiguous bytes, a whole sector, as they are.
template <>
struct VectorStore<DType::kF32> {
  static constexpr int kVectorBytes = 8;

  template <int kCount>
  static __device__ __forceinline__ void Store(const GemmParams& params, const FragmentPlace& place,
                                               const float (&acc)[kCount]) {
    using Fragment = device::WgmmaFragment;
#pragma unroll
    for (int r = 0; r < Fragment::kRowPairs; ++r) {
      if (r * Fragment::kRowStep >= place.rows) continue;
      auto* const d = static_cast<float*>(params.d.data) + place.batch_offset +
                      (place.row + r * Fragment::kRowStep) * params.d.row_stride + place.column;
#pragma unroll
      for (int pair = 0; pair < kCount / 4; ++pair) {
        const int column = pair * Fragment::kColumnStep;
        const float2 value = make_float2(acc[Fragment::Index(r, pair, 0)], acc[Fragment::Index(r, pair, 1)]);
        if (column + 2 <= place.columns) {
          *reinterpret_cast<float2*>(d + column) = value;
        } else if (column < place.columns) {
          d[column] = value.x;
        }
      }
    }
  }
};

// Host: whether VectorStore is legal for this D. The stride of a dimension of extent 1 is never used.
template <DType kOut>
inline bool TakesVectors(const GemmParams& params) {
  constexpr std::int64_t kBytes = VectorStore<kOut>::kVectorBytes;
  constexpr auto kElements = kBytes / static_cast<std::int64_t>(DTypeBytes(kOut));
  if (params.n > 1 && params.d.col_stride != 1) return false;
  if (reinterpret_cast<std::uintptr_t>(params.d.data) % kBytes != 0) return false;
  if (params.m > 1 && params.d.row_stride % kElements != 0) return false;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    if (params.batch_shape[i] > 1 && params.d.batch_stride[i] % kElements != 0) return false;
  }
  return true;
}

}  // namespace tessera::kernels::sm90a
