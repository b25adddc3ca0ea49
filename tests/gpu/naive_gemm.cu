#include "tests/gpu/naive_gemm.h"

#include <cstdint>

namespace tessera::gpu_test {
namespace {

using kernels::GemmBias;
using kernels::GemmMatrix;
using kernels::GemmParams;
using kernels::GemmScale;

constexpr int kThreads = 256;
constexpr std::int64_t kBlocksMax = 1 << 20;  // further elements are walked by the same threads

// 8-bit floats: sign, exponent biased by `kBias`, `kMantissaBits`.
template <int kMantissaBits, int kBias>
__device__ double SmallFloat(unsigned magnitude) {
  const unsigned exponent = magnitude >> kMantissaBits;
  const unsigned mantissa = magnitude & ((1U << kMantissaBits) - 1);
  if (exponent == 0) return ldexp(static_cast<double>(mantissa), 1 - kBias - kMantissaBits);
  return ldexp(static_cast<double>(mantissa + (1U << kMantissaBits)),
               static_cast<int>(exponent) - kBias - kMantissaBits);
}

__device__ double DecodeE4m3(std::uint8_t code) {
  const unsigned magnitude = code & 0x7fU;
  const double value = magnitude == 0x7fU ? nan("") : SmallFloat<3, 7>(magnitude);
  return (code & 0x80U) != 0 ? -value : value;
}

__device__ double DecodeE5m2(std::uint8_t code) {
  const unsigned magnitude = code & 0x7fU;
  double value = SmallFloat<2, 15>(magnitude);
  if (magnitude == 0x7cU) value = __longlong_as_double(0x7ff0000000000000LL);
  if (magnitude > 0x7cU) value = nan("");
  return (code & 0x80U) != 0 ? -value : value;
}

// A bf16 is the upper half of a float32.
__device__ double DecodeBf16(std::uint16_t code) {
  return static_cast<double>(__uint_as_float(static_cast<unsigned>(code) << 16));
}

__device__ double ElementAt(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kBf16:
      return DecodeBf16(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kF32:
      return static_cast<double>(static_cast<const float*>(data)[index]);
    case DType::kE4m3:
      return DecodeE4m3(static_cast<const std::uint8_t*>(data)[index]);
    case DType::kE5m2:
      return DecodeE5m2(static_cast<const std::uint8_t*>(data)[index]);
    case DType::kS8:
      return static_cast<double>(static_cast<const std::int8_t*>(data)[index]);
    default:
      return nan("");
  }
}

__device__ std::int64_t MatrixOffset(const GemmParams& params, const GemmMatrix& matrix, std::int64_t batch) {
  std::int64_t offset = 0;
  for (int dimension = kernels::kGemmBatchDimsMax - 1; dimension >= 0; --dimension) {
    offset += batch % params.batch_shape[dimension] * matrix.batch_stride[dimension];
    batch /= params.batch_shape[dimension];
  }
  return offset;
}

__device__ double ScaleOf(const GemmScale& scale, std::int64_t index) {
  return static_cast<double>(scale.vector == nullptr ? scale.scalar : scale.vector[index * scale.stride]);
}

// What a short accumulator may lose, as tests/oracle/short_accumulator.h derives it: kUnit of the largest number of
// each step, for each of its products and twice more.
class ShortLoss {
 public:
  __device__ void Add(double product) {
    sum_ += product;
    largest_ = fmax(largest_, fabs(product));
    if (++added_ % kStep == 0) EndStep(kStep);
    if (added_ % kPromotion == 0) low_ = high_ = sum_;
  }

  __device__ void Finish() {
    if (added_ % kStep != 0) EndStep(added_ % kStep);
  }

  __device__ double throughout() const { return throughout_; }
  __device__ double promoted() const { return promoted_; }

 private:
  static constexpr double kUnit = 1.0 / 8192;
  static constexpr std::int64_t kStep = 32;
  static constexpr std::int64_t kPromotion = 128;

  __device__ void EndStep(std::int64_t products) {
    const double cuts = kUnit * static_cast<double>(products + 2);
    lowest_ = fmin(lowest_, sum_);
    highest_ = fmax(highest_, sum_);
    low_ = fmin(low_, sum_);
    high_ = fmax(high_, sum_);
    throughout_ += cuts * fmax(largest_, highest_ - lowest_);
    promoted_ += cuts * fmax(largest_, high_ - low_);
    largest_ = 0;
  }

  std::int64_t added_ = 0;
  double sum_ = 0;
  double largest_ = 0;
  double lowest_ = 0;  // of all sums
  double highest_ = 0;
  double low_ = 0;  // since the last promotion
  double high_ = 0;
  double throughout_ = 0;
  double promoted_ = 0;
};

__device__ void ComputeElement(const GemmParams& params, DType a_type, DType b_type, const NaiveTruth& truth,
                               std::int64_t index) {
  const std::int64_t n = index % params.n;
  const std::int64_t m = index / params.n % params.m;
  const std::int64_t batch = index / params.n / params.m;
  std::int64_t a = MatrixOffset(params, params.a, batch) + m * params.a.row_stride;
  std::int64_t b = MatrixOffset(params, params.b, batch) + n * params.b.row_stride;
  double sum = 0;
  double sum_magnitude = 0;
  ShortLoss loss;
  for (std::int64_t k = 0; k < params.k; ++k, a += params.a.col_stride, b += params.b.col_stride) {
    const double product = ElementAt(params.a.data, a_type, a) * ElementAt(params.b.data, b_type, b);
    sum += product;
    sum_magnitude += fabs(product);
    loss.Add(product);
  }
  loss.Finish();
  const double a_scale = ScaleOf(params.a_scale, m);
  const double b_scale = ScaleOf(params.b_scale, n);
  const double bias =
      params.bias.data == nullptr ? 0 : ElementAt(params.bias.data, params.bias.dtype, n * params.bias.stride);
  truth.value[index] = sum * a_scale * b_scale + bias;
  truth.sum_magnitude[index] = sum_magnitude * fabs(a_scale) * fabs(b_scale);
  truth.magnitude[index] = truth.sum_magnitude[index] + fabs(bias);
  if (truth.short_loss == nullptr || truth.promoted_loss == nullptr) return;
  truth.short_loss[index] = loss.throughout() * fabs(a_scale * b_scale);
  truth.promoted_loss[index] = loss.promoted() * fabs(a_scale * b_scale);
}

__global__ void __launch_bounds__(kThreads)
    NaiveGemmKernel(const GemmParams params, DType a, DType b, const NaiveTruth truth, std::int64_t elements) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < elements;
       index += step) {
    ComputeElement(params, a, b, truth, index);
  }
}

}  // namespace

cudaError_t NaiveGemm(const GemmParams& params, DType a, DType b, const NaiveTruth& truth, cudaStream_t stream) {
  std::int64_t elements = params.m * params.n;
  for (const std::int64_t extent : params.batch_shape) elements *= extent;
  if (elements == 0) return cudaSuccess;
  std::int64_t blocks = (elements + kThreads - 1) / kThreads;
  if (blocks > kBlocksMax) blocks = kBlocksMax;
  NaiveGemmKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, a, b, truth, elements);
  return cudaGetLastError();
}

}  // namespace tessera::gpu_test
