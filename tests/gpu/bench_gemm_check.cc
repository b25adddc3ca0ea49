#include "tests/gpu/bench_gemm_check.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "tests/gpu/bench_gemm_data.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/naive_gemm.h"
#include "tests/oracle/codec.h"

namespace tessera::gpu_test {
namespace {

constexpr std::int64_t kAllUpTo = 128;  // extents of which every index is looked at
constexpr std::int64_t kSamples = 32;   // of larger ones

constexpr double kBf16HalfUlp = 0x1p-8;
constexpr double kF32HalfUlp = 0x1p-23;  // some roundings of it

double Rounding(DType out) {
  return out == DType::kBf16 ? kBf16HalfUlp : kF32HalfUlp;
}

absl::StatusOr<std::vector<double>> Download(const DeviceAllocation& from, const BenchStream& stream) {
  std::vector<double> values(from.bytes() / sizeof(double));
  RETURN_IF_ERROR(
      ToStatus(cudaMemcpyAsync(values.data(), from.data(), from.bytes(), cudaMemcpyDeviceToHost, stream.get()),
               "cudaMemcpyAsync"));
  RETURN_IF_ERROR(stream.Wait());
  return values;
}

}  // namespace

Referee::Walk Referee::WalkOver(std::int64_t extent) {
  if (extent <= kAllUpTo) return {.count = extent};
  std::int64_t step = (extent - 1) / (kSamples - 1);
  if (step % 2 == 0) --step;
  return {.first = extent - 1 - step * (kSamples - 1), .step = step, .count = kSamples};
}

void Referee::Narrow(const Walk& walk, DType dtype, kernels::GemmMatrix& matrix, kernels::GemmScale& scale) {
  matrix.data = static_cast<std::byte*>(matrix.data) +
                walk.first * matrix.row_stride * static_cast<std::int64_t>(DTypeBytes(dtype));
  matrix.row_stride *= walk.step;
  if (scale.vector == nullptr) return;
  scale.vector += walk.first * scale.stride;
  scale.stride *= walk.step;
}

absl::StatusOr<Referee> Referee::Make(const BenchCell& cell, const kernels::GemmParams& params,
                                      const BenchStream& stream) {
  Referee referee(cell, stream);
  RETURN_IF_ERROR(referee.ComputeTruth(params));
  return referee;
}

absl::Status Referee::ComputeTruth(kernels::GemmParams params) {
  params.m = rows_.count;
  params.n = cols_.count;
  Narrow(rows_, cell_.gemm_class.a, params.a, params.a_scale);
  Narrow(cols_, cell_.gemm_class.b, params.b, params.b_scale);
  const std::size_t bytes = static_cast<std::size_t>(rows_.count * cols_.count) * sizeof(double);
  ASSIGN_OR_RETURN(const std::unique_ptr<DeviceAllocation> value, AllocatePlain(bytes));
  ASSIGN_OR_RETURN(const std::unique_ptr<DeviceAllocation> sum_magnitude, AllocatePlain(bytes));
  ASSIGN_OR_RETURN(const std::unique_ptr<DeviceAllocation> magnitude, AllocatePlain(bytes));
  const NaiveTruth truth = {.value = reinterpret_cast<double*>(value->data()),
                            .sum_magnitude = reinterpret_cast<double*>(sum_magnitude->data()),
                            .magnitude = reinterpret_cast<double*>(magnitude->data())};
  RETURN_IF_ERROR(
      ToStatus(NaiveGemm(params, cell_.gemm_class.a, cell_.gemm_class.b, truth, stream_.get()), "NaiveGemm"));
  ASSIGN_OR_RETURN(value_, Download(*value, stream_));
  ASSIGN_OR_RETURN(unit_, Download(*sum_magnitude, stream_));
  for (double& unit : unit_) unit /= std::sqrt(static_cast<double>(cell_.k));
  return absl::OkStatus();
}

// Tensor cores keep float32 sums of bf16 products but for the last digits; of fp8 products 14 bits, promoted now and
// then where the accumulation is exact; of s8 all. What a wrong tile is off by is about 2 of the unit. Kernels are held
// to the last digit by the conformance program.
double Referee::OursAllowed() const {
  const kernels::GemmClass& gemm_class = cell_.gemm_class;
  if (gemm_class.a == DType::kS8) return 1e-5;
  if (!IsFp8(gemm_class.a)) return 4e-3;
  return gemm_class.accumulation == kernels::Accumulation::kFast ? 0.1 : 0.04;
}

// The library may add parts of a sum in the output's type.
double Referee::PeerAllowed() const {
  return cell_.gemm_class.a == DType::kS8 ? OursAllowed() : 0.15;
}

absl::Status Referee::CheckSamples(const std::byte* d, double allowed) const {
  const DType out = cell_.gemm_class.out;
  const std::size_t element = DTypeBytes(out);
  const std::size_t row_bytes = static_cast<std::size_t>(cell_.n) * element;
  std::vector<std::byte> rows(static_cast<std::size_t>(rows_.count) * row_bytes);
  RETURN_IF_ERROR(
      ToStatus(cudaMemcpy2DAsync(rows.data(), row_bytes, d + static_cast<std::size_t>(rows_.first) * row_bytes,
                                 static_cast<std::size_t>(rows_.step) * row_bytes, row_bytes,
                                 static_cast<std::size_t>(rows_.count), cudaMemcpyDeviceToHost, stream_.get()),
               "cudaMemcpy2DAsync"));
  RETURN_IF_ERROR(stream_.Wait());
  std::int64_t wrong = 0;
  double worst = 0;
  for (std::size_t i = 0; i < value_.size(); ++i) {
    const std::int64_t row = static_cast<std::int64_t>(i) / cols_.count;
    const std::int64_t col = cols_.first + static_cast<std::int64_t>(i) % cols_.count * cols_.step;
    const double got = oracle::Decode(
        out, rows.data() + static_cast<std::size_t>(row) * row_bytes + static_cast<std::size_t>(col) * element);
    const double error = std::max(0.0, std::fabs(got - value_[i]) - Rounding(out) * std::fabs(value_[i])) / unit_[i];
    if (std::isnan(got) || !(error <= allowed)) ++wrong;
    worst = std::max(worst, error);
  }
  if (wrong == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(wrong, " of ", value_.size(), " samples are wrong; the largest error is ",
                                          worst, " of sum |ab| / sqrt(K), where ", allowed, " is allowed"));
}

absl::Status Referee::CheckAlike(const std::byte* ours, const std::byte* peer) const {
  // Extremes of many more elements than the samples are.
  const double absolute = 1.5 * (OursAllowed() + PeerAllowed()) * *std::max_element(unit_.begin(), unit_.end());
  ASSIGN_OR_RETURN(const std::unique_ptr<DeviceAllocation> count, AllocatePlain(sizeof(unsigned long long)));
  const CompareParams params = {.x = ours,
                                .y = peer,
                                .dtype = cell_.gemm_class.out,
                                .elements = cell_.m * cell_.n,
                                .relative = static_cast<float>(2.1 * Rounding(cell_.gemm_class.out)),
                                .absolute = static_cast<float>(absolute)};
  auto* const wrong = reinterpret_cast<unsigned long long*>(count->data());
  RETURN_IF_ERROR(ToStatus(CountDifferences(params, wrong, stream_.get()), "CountDifferences"));
  unsigned long long found = 0;
  RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost, stream_.get()),
                           "cudaMemcpyAsync"));
  RETURN_IF_ERROR(stream_.Wait());
  if (found == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(found, " of ", params.elements, " elements differ from cuBLASLt's"));
}

}  // namespace tessera::gpu_test
