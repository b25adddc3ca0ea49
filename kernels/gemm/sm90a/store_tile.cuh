// Accumulators of a warpgroup -> its 64 rows of an output tile.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/cuda/epilogue.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/legality.h"

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

// A scale of all rows, or of all columns.
struct Factor {
  float value;  // of a scale that is the same for all of D
  bool varies;

  // A launch reads a value that is the same for all of D once, not for each tile.
  explicit __device__ __forceinline__ Factor(const GemmScale& scale)
      : value(scale.vector == nullptr ? scale.scalar : *scale.vector),
        varies(scale.vector != nullptr && scale.stride != 0) {}

  // Multiplying by 1 changes no value.
  __device__ __forceinline__ bool Matters() const { return varies || value != 1.0F; }
};

struct Factors {
  Factor a;
  Factor b;
  bool bias;

  // Once the grid ahead has ended, which may write the scales.
  explicit __device__ __forceinline__ Factors(const GemmParams& params)
      : a(params.a_scale), b(params.b_scale), bias(params.bias.data != nullptr) {}

  // Whether they depend on where an element is.
  __device__ __forceinline__ bool Vary() const { return a.varies || b.varies || bias; }
};

template <int kCount>
__device__ __forceinline__ void Scale(float factor, float (&acc)[kCount]) {
#pragma unroll
  for (float& value : acc) value = __fmul_rn(value, factor);
}

// cuda::Finish over a fragment, in place, pass by pass. What every request pays for is the test that there is nothing
// to do. `place` is looked at only if the factors vary.
template <int kCount>
__device__ __forceinline__ void FinishFragment(const GemmParams& params, const Factors& factors,
                                               const FragmentPlace& place, float (&acc)[kCount]) {
  using Fragment = device::WgmmaFragment;
  if (!factors.a.varies) {
    if (factors.a.Matters()) Scale(factors.a.value, acc);
  } else {
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
  if (!factors.b.varies) {
    if (factors.b.Matters()) Scale(factors.b.value, acc);
  } else {
    ForColumns(
        place, acc, [&](std::int64_t column) { return cuda::ScaleAt(params.b_scale, column); },
        [](float value, float scale) { return __fmul_rn(value, scale); });
  }
  if (factors.bias) {
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

// Of float32, where D's columns are contiguous and its rows begin at multiples of 8 bytes: four neighbours write 32
// bytes of a row at once, whole sectors of memory.
template <int kCount>
__device__ __forceinline__ void StoreFloatPairs(const GemmParams& params, const FragmentPlace& place,
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

// A fragment rounded to bf16, two neighbours of a row a word: half the registers, so that a tile can wait in them until
// the tensor cores are busy with the next one.
template <int kTileColumns>
struct RoundedFragment {
  std::uint32_t word[kTileColumns / 4];  // [pair of columns][row]

  __device__ __forceinline__ void Set(const float (&acc)[kTileColumns / 2]) {
    using Fragment = device::WgmmaFragment;
#pragma unroll
    for (int i = 0; i < kTileColumns / 4; ++i) {
      const __nv_bfloat162 pair =
          __floats2bfloat162_rn(acc[Fragment::Index(i % 2, i / 2, 0)], acc[Fragment::Index(i % 2, i / 2, 1)]);
      word[i] = __bfloat16_as_ushort(pair.x) | static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16U;
    }
  }
};

// bf16 by the copy engine, which writes whole lines and clips them at D's edges. A warp's 16 rows go through buffers of
// its own in shared memory, a block of 64 columns at a time, or 32 where a tile is no multiple of 64 wide: no warp
// waits for another. They lie swizzled, by 128 or 64 bytes, so that eight rows of a matrix are in different banks: of
// lines of 128 bytes, line l has its 16-byte column c at c ^ (l % 8); of lines of 64 bytes at c ^ (l / 2 % 4).
template <int kTileColumns>
class StagedStore {
 public:
  static constexpr bool kNarrow = kTileColumns % 64 != 0;
  static constexpr int kColumns = kNarrow ? 32 : 64;
  static constexpr int kRows = 16;
  static constexpr int kBlocks = kTileColumns / kColumns;
  static constexpr int kBuffers = kNarrow && kBlocks <= 5 ? kBlocks : 2;
  // Stores of before that may still read when a buffer's turn has come, which is every kBuffers blocks, but sooner
  // where a tile's first block follows the last one of the tile before.
  static constexpr int kReading = (kBlocks % kBuffers == 0 ? kBuffers : kBlocks % kBuffers) - 1;
  static constexpr std::uint32_t kLineBytes = kColumns * 2;
  static constexpr std::uint32_t kBufferBytes = kRows * kLineBytes;
  static constexpr std::uint32_t kWarpBytes = kBuffers * kBufferBytes;
  static constexpr std::uint32_t kBytes = 4 * kWarpBytes;  // of a warpgroup
  static constexpr std::uint32_t kBoxBytes = 32;           // of a warp
  static_assert(kTileColumns % kColumns == 0);
  static_assert(kBufferBytes % device::kSwizzleAtomBytes == 0, "every buffer begins at a swizzle atom");

  // `area`: kBytes of the warpgroup's own, aligned to a swizzle atom. `box`: kBoxBytes of the warp's own.
  __device__ __forceinline__ StagedStore(std::uint32_t area, std::uint32_t box, const CUtensorMap* map)
      : area_(area + threadIdx.x % 128 / 32 * kWarpBytes), box_(box), map_(map) {}

  // Where the next blocks go: the first column and row of the warpgroup's part of the tile, and its batch. By the first
  // thread of a warp. It is kept in shared memory, as registers are scarce.
  __device__ __forceinline__ void SetBox(const device::TensorCoordinates& box) const {
    const auto word = [](std::int32_t value) { return static_cast<std::uint32_t>(value); };
    const std::int32_t row = box.at[1] + static_cast<std::int32_t>(threadIdx.x % 128 / 32 * kRows);
    device::StoreSharedVector(box_, {{word(box.at[0]), word(row), word(box.at[2]), word(box.at[3])}});
    device::StoreSharedVector(box_ + sizeof(device::SharedVector), {{word(box.at[4])}});
  }

  // Block `block`, if there is one of that number. All 32 threads of a warp.
  __device__ __forceinline__ void Store(std::uint32_t block, const RoundedFragment<kTileColumns>& tile) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (static_cast<std::uint32_t>(i) == block) StoreOne(i, tile);
    }
  }

  __device__ __forceinline__ void StoreAll(const RoundedFragment<kTileColumns>& tile) const {
    for (std::uint32_t block = 0; block < kBlocks; ++block) Store(block, tile);
  }

  // Before the block ends: shared memory must outlive the stores that read it.
  __device__ __forceinline__ void Finish() const {
    if (threadIdx.x % 32 == 0) device::WaitStoresDone();
  }

 private:
  __device__ __forceinline__ device::TensorCoordinates Box() const {
    const device::SharedVector first = device::LoadSharedVector(box_);
    const device::SharedVector rest = device::LoadSharedVector(box_ + sizeof(device::SharedVector));
    const auto number = [](std::uint32_t word) { return static_cast<std::int32_t>(word); };
    return {{number(first.word[0]), number(first.word[1]), number(first.word[2]), number(first.word[3]),
             number(rest.word[0])}};
  }

  __device__ __forceinline__ void StoreOne(int block, const RoundedFragment<kTileColumns>& tile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Lane l names row l % 8 of matrix l / 8: matrices 0 and 1 are the upper and lower 8 rows, 2 and 3 the next
    // columns.
    const std::uint32_t buffer = area_ + block % kBuffers * kBufferBytes;
    const std::uint32_t line = buffer + (lane / 8 % 2 * 8 + lane % 8) * kLineBytes;
    const int swizzle = kNarrow ? lane % 8 / 2 : lane % 8;
    if (lane == 0) device::WaitStoresRead<kReading>();
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < kColumns / 8; chunk += 2) {
      const int first = (block * (kColumns / 8) + chunk) * 2;
      const std::uint32_t word[4] = {tile.word[first], tile.word[first + 1], tile.word[first + 2],
                                     tile.word[first + 3]};
      device::StoreMatrices(line + ((chunk + lane / 16) ^ swizzle) * 16, word);
    }
    device::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) {
      device::TensorCoordinates box = Box();
      box.at[0] += block * kColumns;
      device::TmaStore(map_, buffer, box);
    }
  }

  std::uint32_t area_;  // the warp's
  std::uint32_t box_;   // the warp's
  const CUtensorMap* map_;
};

// How the accumulators reach D, found by the host.
enum class StorePath : int {
  kBf16Elements,
  kBf16Staged,
  kF32Elements,
  kF32Pairs,
};

// Host: the fastest path that D's strides and alignment allow. The stride of a dimension of extent 1 is never used.
inline StorePath StorePathOf(DType out, const GemmParams& params) {
  if (out == DType::kBf16) {
    // A store of the copy engine ends on 16 bytes, whatever the map says: it would write past a row that does not.
    const std::int64_t whole = kTmaAlignment / DTypeBytes(out);
    const bool staged =
        params.n % whole == 0 && TmaIllegal(params.d, DTypeBytes(out), params.m, params.n, params.batch_shape).empty();
    return staged ? StorePath::kBf16Staged : StorePath::kBf16Elements;
  }
  constexpr std::int64_t kElements = 2;
  constexpr std::uintptr_t kBytes = 8;
  bool pairs = (params.n <= 1 || params.d.col_stride == 1) &&
               reinterpret_cast<std::uintptr_t>(params.d.data) % kBytes == 0 &&
               (params.m <= 1 || params.d.row_stride % kElements == 0);
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    if (params.batch_shape[i] > 1 && params.d.batch_stride[i] % kElements != 0) pairs = false;
  }
  return pairs ? StorePath::kF32Pairs : StorePath::kF32Elements;
}

}  // namespace tessera::kernels::sm90a
