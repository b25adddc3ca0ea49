#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "tests/gpu/bench_gemm_data.h"

namespace tessera::gpu_test {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kBlocksMax = 132 * 64;  // further elements are walked by the same threads

unsigned BlocksFor(std::int64_t elements) {
  const std::int64_t blocks = (elements + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kBlocksMax ? blocks : kBlocksMax);
}

__device__ std::int64_t FirstElement() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ std::int64_t ElementStep() {
  return static_cast<std::int64_t>(gridDim.x) * kThreads;
}

// The finaliser of splitmix64 over seed and index: 32 random bits an element, whatever the order.
__device__ std::uint32_t RandomBits(std::uint64_t seed, std::int64_t index) {
  std::uint64_t bits = seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(index) * 0xd1342543de82ef95ULL;
  bits = (bits ^ (bits >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27U)) * 0x94d049bb133111ebULL;
  return static_cast<std::uint32_t>((bits ^ (bits >> 31U)) >> 32U);
}

// [0, 1), in steps that a float32 holds.
__device__ float RandomUnit(std::uint64_t seed, std::int64_t index) {
  return static_cast<float>(RandomBits(seed, index) >> 8U) * 0x1p-24F;
}

__device__ float RandomSigned(std::uint64_t seed, std::int64_t index) {
  return 2.0F * RandomUnit(seed, index) - 1.0F;
}

__device__ void StoreRandom(void* data, DType dtype, std::uint64_t seed, std::int64_t index) {
  switch (dtype) {
    case DType::kBf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(RandomSigned(seed, index));
      break;
    case DType::kE4m3:
      static_cast<__nv_fp8_storage_t*>(data)[index] =
          __nv_cvt_float_to_fp8(RandomSigned(seed, index), __NV_SATFINITE, __NV_E4M3);
      break;
    case DType::kE5m2:
      static_cast<__nv_fp8_storage_t*>(data)[index] =
          __nv_cvt_float_to_fp8(RandomSigned(seed, index), __NV_SATFINITE, __NV_E5M2);
      break;
    default:
      static_cast<std::uint8_t*>(data)[index] = static_cast<std::uint8_t>(RandomBits(seed, index) >> 24U);
  }
}

__global__ void __launch_bounds__(kThreads)
    FillRandomKernel(void* data, DType dtype, std::int64_t elements, std::uint64_t seed) {
  for (std::int64_t i = FirstElement(); i < elements; i += ElementStep()) StoreRandom(data, dtype, seed, i);
}

__global__ void __launch_bounds__(kThreads) FillScalesKernel(float* scales, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t i = FirstElement(); i < count; i += ElementStep()) scales[i] = 0.5F + RandomUnit(seed, i);
}

// Threads of a block take neighbouring groups of eight elements in one row: 32 bytes read and 16 written by each, so
// that lines are whole and the blocks of an SM have enough on their way.
constexpr int kDequantiseThreads = 128;
constexpr int kGroup = 8;

__device__ std::uint32_t Bf16Pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.x)) |
         static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16U;
}

__device__ uint2 Scaled(const int4& sums, const float4& col_scale, float row_scale) {
  return make_uint2(Bf16Pair(static_cast<float>(sums.x) * row_scale * col_scale.x,
                             static_cast<float>(sums.y) * row_scale * col_scale.y),
                    Bf16Pair(static_cast<float>(sums.z) * row_scale * col_scale.z,
                             static_cast<float>(sums.w) * row_scale * col_scale.w));
}

__global__ void __launch_bounds__(kDequantiseThreads) DequantiseKernel(const DequantiseParams params) {
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.x) * kDequantiseThreads + threadIdx.x) * kGroup;
  if (col >= params.cols) return;
  const std::int64_t row = blockIdx.y;
  const std::int64_t first = row * params.cols + col;
  const auto* const sums = reinterpret_cast<const int4*>(params.sums + first);
  const auto* const col_scale = reinterpret_cast<const float4*>(params.col_scale + col);
  const int4 low = sums[0];
  const int4 high = sums[1];
  const float row_scale = params.row_scale[row];
  const uint2 low_out = Scaled(low, col_scale[0], row_scale);
  const uint2 high_out = Scaled(high, col_scale[1], row_scale);
  auto* const out = static_cast<__nv_bfloat16*>(params.out) + first;
  *reinterpret_cast<uint4*>(out) = make_uint4(low_out.x, low_out.y, high_out.x, high_out.y);
}

__device__ float OutputAt(const void* data, DType dtype, std::int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[index];
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}

__global__ void __launch_bounds__(kThreads)
    CountDifferencesKernel(const CompareParams params, unsigned long long* wrong) {
  unsigned long long found = 0;
  for (std::int64_t i = FirstElement(); i < params.elements; i += ElementStep()) {
    const float x = OutputAt(params.x, params.dtype, i);
    const float y = OutputAt(params.y, params.dtype, i);
    const float allowed = params.relative * fmaxf(fabsf(x), fabsf(y)) + params.absolute;
    if (!(fabsf(x - y) <= allowed)) ++found;
  }
  if (found > 0) atomicAdd(wrong, found);
}

}  // namespace

cudaError_t FillRandom(void* data, DType dtype, std::int64_t elements, std::uint64_t seed, cudaStream_t stream) {
  FillRandomKernel<<<BlocksFor(elements), kThreads, 0, stream>>>(data, dtype, elements, seed);
  return cudaGetLastError();
}

cudaError_t FillScales(float* scales, std::int64_t count, std::uint64_t seed, cudaStream_t stream) {
  FillScalesKernel<<<BlocksFor(count), kThreads, 0, stream>>>(scales, count, seed);
  return cudaGetLastError();
}

cudaError_t Dequantise(const DequantiseParams& params, cudaStream_t stream) {
  constexpr std::int64_t kRowsMax = 65535;  // of a grid's second dimension
  constexpr std::int64_t kBlockCols = kDequantiseThreads * kGroup;
  if (params.cols % kGroup != 0 || params.rows > kRowsMax) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((params.cols + kBlockCols - 1) / kBlockCols),
                  static_cast<unsigned>(params.rows));
  DequantiseKernel<<<grid, kDequantiseThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t CountDifferences(const CompareParams& params, unsigned long long* wrong, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(wrong, 0, sizeof(*wrong), stream);
  if (error != cudaSuccess) return error;
  CountDifferencesKernel<<<BlocksFor(params.elements), kThreads, 0, stream>>>(params, wrong);
  return cudaGetLastError();
}

}  // namespace tessera::gpu_test
