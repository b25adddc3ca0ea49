#include "tests/gpu/gemm_problem.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/launch/gemm_launch.h"
#include "tests/gpu/naive_gemm.h"
#include "tests/oracle/codec.h"

namespace tessera::gpu_test {
namespace {

using kernels::GemmLayout;
using kernels::GemmMatrix;
using kernels::GemmParams;
using kernels::LaunchShape;
using oracle::GemmTruth;

constexpr std::int64_t kHostOracleProducts = std::int64_t{1} << 26;  // beyond, the naive kernel computes the truth
constexpr std::size_t kScratchGuard = kernels::kWorkspaceAlignment;
constexpr int kScratchPattern = 0xff;  // NaN as float32: what nobody wrote must not be summed
constexpr std::size_t kBiasGuard = 256;
constexpr std::int64_t kInt8SumLimit = std::int64_t{1} << 17;  // from here on a sum of s8 products may not fit 32 bits

bool AContiguousAlongK(GemmLayout layout) {
  return layout == GemmLayout::kNT || layout == GemmLayout::kNN;
}
bool BContiguousAlongK(GemmLayout layout) {
  return layout == GemmLayout::kNT || layout == GemmLayout::kTT;
}

bool AllBytesAre(std::span<const std::byte> bytes, std::byte value) {
  return std::all_of(bytes.begin(), bytes.end(), [value](std::byte byte) { return byte == value; });
}

DType BiasType(const GpuCase& problem) {
  return problem.bias == oracle::BiasMode::kBf16 ? DType::kBf16 : DType::kF32;
}

// Scratch of a launch between two guards of kScratchGuard bytes, all of one pattern.
class Scratch {
 public:
  Scratch(const Gpu& gpu, std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    memory_ = DeviceBytes(bytes + 2 * kScratchGuard);
    Require(cudaMemsetAsync(memory_.data(), kScratchPattern, memory_.size(), gpu.stream()), "fill scratch");
  }

  kernels::Workspace workspace() const {
    if (bytes_ == 0) return {};
    return {.scratch = memory_.data() + kScratchGuard, .bytes = bytes_};
  }

  bool GuardsIntact(const Gpu& gpu) const {
    if (bytes_ == 0) return true;
    constexpr std::byte kPattern{kScratchPattern};
    return AllBytesAre(Download(gpu, memory_.data(), kScratchGuard), kPattern) &&
           AllBytesAre(Download(gpu, memory_.data() + kScratchGuard + bytes_, kScratchGuard), kPattern);
  }

 private:
  std::size_t bytes_;
  DeviceBytes memory_;
};

std::vector<double> DownloadDoubles(const Gpu& gpu, const DeviceBytes& from) {
  std::vector<double> numbers(from.size() / sizeof(double));
  const std::vector<std::byte> bytes = Download(gpu, from.data(), from.size());
  if (!bytes.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

// 16-byte aligned base, contiguous lines, every other stride in use a multiple of 16 bytes.
bool AlignedView(const GemmParams& params, const GemmMatrix& matrix, DType dtype, std::int64_t rows, std::int64_t cols,
                 bool cols_contiguous) {
  const auto size = static_cast<std::int64_t>(DTypeBytes(dtype));
  const auto whole = [size](std::int64_t extent, std::int64_t stride) {
    return extent <= 1 || (stride > 0 && stride * size % 16 == 0);
  };
  const std::int64_t fine_extent = cols_contiguous ? cols : rows;
  const std::int64_t fine_stride = cols_contiguous ? matrix.col_stride : matrix.row_stride;
  if (reinterpret_cast<std::uintptr_t>(matrix.data) % 16 != 0 || (fine_extent > 1 && fine_stride != 1)) return false;
  if (!whole(cols_contiguous ? rows : cols, cols_contiguous ? matrix.row_stride : matrix.col_stride)) return false;
  for (int dimension = 0; dimension < kernels::kGemmBatchDimsMax; ++dimension) {
    const std::int64_t stride = matrix.batch_stride[dimension];
    if (stride != 0 && !whole(params.batch_shape[dimension], stride)) return false;
  }
  return true;
}

}  // namespace

const CaseData& SharedCase::Data() {
  std::call_once(data_made_, [this] { data_ = MakeCaseData(problem_, a_, b_, seed_); });
  return data_;
}

const GemmTruth& SharedCase::Truth(const std::function<GemmTruth()>& compute) {
  std::call_once(truth_made_, [&] { truth_ = compute(); });
  return truth_;
}

GemmProblem::GemmProblem(Gpu& gpu, SharedCase& shared, GemmLayout layout, bool tight)
    : gpu_(gpu), shared_(shared), tight_(tight) {
  const CaseData& data = shared.Data();
  const GpuCase& problem = data.problem;
  a_ = PlaceInput(data.a, problem.a, AContiguousAlongK(layout), tight);
  b_ = PlaceInput(data.b, problem.b, BContiguousAlongK(layout), tight);
  if (!data.bias.empty()) {
    const std::size_t size = DTypeBytes(BiasType(problem));
    const std::size_t step = static_cast<std::size_t>(problem.bias_stride) * size;
    bias_first_byte_ = kBiasGuard + static_cast<std::size_t>(problem.bias_offset) * size;
    bias_.assign(bias_first_byte_ + (data.bias.size() - 1) * step + size + (tight ? 0 : kBiasGuard), kNanPoison);
    for (std::size_t n = 0; n < data.bias.size(); ++n) {
      oracle::Encode(BiasType(problem), data.bias[n], bias_.data() + bias_first_byte_ + n * step);
    }
  }
  const std::lock_guard lock(gpu_.mutex);
  if (gpu_.lost) return;
  device_a_ = Upload(gpu_, a_.bytes);
  device_b_ = Upload(gpu_, b_.bytes);
  device_bias_ = Upload(gpu_, bias_);
  device_a_scales_ = Upload(gpu_, std::as_bytes(std::span(data.a_scales)));
  device_b_scales_ = Upload(gpu_, std::as_bytes(std::span(data.b_scales)));
}

GemmProblem::~GemmProblem() {
  const std::lock_guard lock(gpu_.mutex);
  outputs_.clear();
  for (DeviceBytes* bytes : {&device_a_, &device_b_, &device_bias_, &device_a_scales_, &device_b_scales_}) {
    const DeviceBytes freed = std::move(*bytes);
  }
}

// A scale for all: A's by value, B's from memory, so that both ways are taken.
GemmParams GemmProblem::ParamsAt(const std::byte* a, const std::byte* b, const std::byte* bias, const float* a_scales,
                                 const float* b_scales) const {
  const GpuCase& problem = shared_.problem();
  const CaseData& data = shared_.Data();
  GemmParams params{.m = problem.m, .n = problem.n, .k = problem.k};
  std::copy(problem.batch.begin(), problem.batch.end(), params.batch_shape);
  params.a = a_.matrix;
  params.b = b_.matrix;
  // The parameters are for reading and writing alike, so their pointers are not const.
  params.a.data = const_cast<std::byte*>(a) + a_.first_byte;
  params.b.data = const_cast<std::byte*>(b) + b_.first_byte;
  const std::int64_t scale_stride = problem.vector_scales ? 1 : 0;
  if (!data.a_scales.empty()) {
    params.a_scale = {.vector = a_scales, .stride = 1};
    if (!problem.vector_scales) params.a_scale = {.scalar = data.a_scales[0]};
  }
  if (!data.b_scales.empty()) params.b_scale = {.vector = b_scales, .stride = scale_stride};
  if (!data.bias.empty()) {
    params.bias = {.data = bias + bias_first_byte_, .stride = problem.bias_stride, .dtype = BiasType(problem)};
  }
  return params;
}

const GemmTruth& GemmProblem::Truth() {
  return shared_.Truth([this] { return problem().Products() <= kHostOracleProducts ? HostTruth() : NaiveTruthOf(); });
}

GemmTruth GemmProblem::HostTruth() const {
  const CaseData& data = shared_.Data();
  const GemmParams params =
      ParamsAt(a_.bytes.data(), b_.bytes.data(), bias_.data(), data.a_scales.data(), data.b_scales.data());
  return oracle::ComputeGemm(params, {.a = shared_.a(), .b = shared_.b()});
}

GemmTruth GemmProblem::NaiveTruthOf() const {
  const std::lock_guard lock(gpu_.mutex);
  if (gpu_.lost) return {};
  const std::size_t bytes = static_cast<std::size_t>(problem().Elements()) * sizeof(double);
  const DeviceBytes value(bytes);
  const DeviceBytes sum_magnitude(bytes);
  const DeviceBytes magnitude(bytes);
  const DeviceBytes short_loss(bytes);
  const DeviceBytes promoted_loss(bytes);
  const GemmParams params = ParamsAt(device_a_.data(), device_b_.data(), device_bias_.data(),
                                     reinterpret_cast<const float*>(device_a_scales_.data()),
                                     reinterpret_cast<const float*>(device_b_scales_.data()));
  const NaiveTruth truth{.value = reinterpret_cast<double*>(value.data()),
                         .sum_magnitude = reinterpret_cast<double*>(sum_magnitude.data()),
                         .magnitude = reinterpret_cast<double*>(magnitude.data()),
                         .short_loss = reinterpret_cast<double*>(short_loss.data()),
                         .promoted_loss = reinterpret_cast<double*>(promoted_loss.data())};
  Require(NaiveGemm(params, shared_.a(), shared_.b(), truth, gpu_.stream()), "naive oracle");
  return {.value = DownloadDoubles(gpu_, value),
          .sum_magnitude = DownloadDoubles(gpu_, sum_magnitude),
          .magnitude = DownloadDoubles(gpu_, magnitude),
          .short_loss = DownloadDoubles(gpu_, short_loss),
          .promoted_loss = DownloadDoubles(gpu_, promoted_loss)};
}

const Output& GemmProblem::OutputOf(DType dtype) {
  const auto found = outputs_.find(dtype);
  if (found != outputs_.end()) return found->second;
  Output output{.placed = PlaceOutput(problem(), dtype, tight_)};
  output.size = std::exchange(output.placed.bytes, {}).size();
  const std::lock_guard lock(gpu_.mutex);
  if (!gpu_.lost) output.device = DeviceBytes(output.size);
  return outputs_.emplace(dtype, std::move(output)).first->second;
}

GemmParams GemmProblem::Params(DType out) {
  const Output& output = OutputOf(out);
  GemmParams params = ParamsAt(device_a_.data(), device_b_.data(), device_bias_.data(),
                               reinterpret_cast<const float*>(device_a_scales_.data()),
                               reinterpret_cast<const float*>(device_b_scales_.data()));
  params.d = output.placed.matrix;
  params.d.data = output.device.data() + output.placed.first_byte;
  return params;
}

Run GemmProblem::Launch(std::size_t variant, const GemmParams& params, const LaunchShape& shape, std::byte poison,
                        const std::function<void(std::byte*)>& poke) {
  const kernels::GemmVariant& row = kernels::GemmVariants()[variant];
  const Output& output = OutputOf(row.gemm_class.out);
  const auto scratch_bytes =
      kernels::GemmWorkspaceBytes(row, problem().Matrices(), problem().m, problem().n, problem().k, shape.split);
  Run run{.poison = poison};
  const std::lock_guard lock(gpu_.mutex);
  if (gpu_.lost) {
    run.fault = "the device was lost before";
    return run;
  }
  if (!scratch_bytes.has_value()) {
    run.fault = "the workspace does not fit";
    return run;
  }
  const Scratch scratch(gpu_, static_cast<std::size_t>(*scratch_bytes));
  Require(cudaMemsetAsync(output.device.data(), static_cast<int>(poison), output.size, gpu_.stream()), "poison D");
  Require(cudaStreamSynchronize(gpu_.stream()), "poison D");
  static_cast<void>(cudaGetLastError());  // so that an error below is this launch's
  run.launch = kernels::LaunchGemm(variant, params, shape, {.stream = gpu_.stream(), .workspace = scratch.workspace()});
  const cudaError_t pending = cudaGetLastError();
  const cudaError_t finished = cudaStreamSynchronize(gpu_.stream());
  if (finished != cudaSuccess) {
    gpu_.lost = true;
    run.fault = std::string("the kernel failed: ") + cudaGetErrorString(finished);
    return run;
  }
  // Our launchers refuse before they call CUDA: an error that CUDA reported is a launch that went wrong.
  const bool library_refused = row.info.arch == kernels::Arch::kVendor && run.launch != kernels::kLaunchOk;
  if (pending != cudaSuccess && !library_refused)
    run.fault = std::string("a CUDA call failed: ") + cudaGetErrorString(pending);
  if (!scratch.GuardsIntact(gpu_)) run.fault = "wrote outside its scratch";
  if (poke) poke(output.device.data());
  run.bytes = Download(gpu_, output.device.data(), output.size);
  return run;
}

bool GemmProblem::OutsideIntact(const Run& run, DType out) {
  const Placed& placed = OutputOf(out).placed;
  std::vector<std::byte> outside = run.bytes;
  const std::size_t size = DTypeBytes(placed.dtype);
  ForEachElement(placed, [&](std::size_t at) {
    std::fill_n(outside.begin() + static_cast<std::ptrdiff_t>(at), size, run.poison);
  });
  return AllBytesAre(outside, run.poison);
}

std::string GemmProblem::Check(Run& run, const kernels::GemmClass& gemm_class, double* worst) {
  if (!run.fault.empty()) return run.fault;
  if (run.launch != kernels::kLaunchOk) return "LaunchGemm returned " + std::to_string(run.launch);
  const DType out = gemm_class.out;
  const Placed& placed = OutputOf(out).placed;
  if (!OutsideIntact(run, out)) return "bytes outside D were written";
  GemmParams params = Params(out);
  params.d.data = run.bytes.data() + placed.first_byte;
  const oracle::GemmTypes types{.a = shared_.a(), .b = shared_.b(), .d = out, .accumulator = AccumulatorOf(gemm_class)};
  const GemmTruth& truth = Truth();
  if (truth.value.size() != static_cast<std::size_t>(problem().Elements())) return "no truth: the device was lost";
  const oracle::Verdict verdict = oracle::CheckGemm(params, types, truth);
  *worst = std::max(*worst, verdict.worst);
  if (!verdict.ok) return std::to_string(verdict.wrong) + " wrong, first " + verdict.first;
  if (!shared_.exact()) return {};
  const oracle::Verdict exact = oracle::CheckGemmExact(params, types, truth);
  return exact.ok ? std::string() : std::to_string(exact.wrong) + " inexact, first " + exact.first;
}

bool GemmProblem::SameBits(const Run& one, const Run& other, DType out) {
  const Placed& placed = OutputOf(out).placed;
  if (one.bytes.size() != other.bytes.size()) return false;
  const std::size_t size = DTypeBytes(placed.dtype);
  bool same = true;
  ForEachElement(placed, [&](std::size_t at) {
    same = same && std::memcmp(one.bytes.data() + at, other.bytes.data() + at, size) == 0;
  });
  return same;
}

bool GemmProblem::Untouched(const Run& run) {
  return AllBytesAre(run.bytes, run.poison);
}

bool GemmProblem::InputsIntact() const {
  const std::lock_guard lock(gpu_.mutex);
  if (gpu_.lost) return true;
  return Download(gpu_, device_a_.data(), device_a_.size()) == a_.bytes &&
         Download(gpu_, device_b_.data(), device_b_.size()) == b_.bytes;
}

bool Refused(const kernels::GemmVariant& variant, const Run& run) {
  if (!run.fault.empty()) return false;
  const bool library = variant.info.arch == kernels::Arch::kVendor;
  return run.launch == kernels::kLaunchInvalidValue || (library && run.launch == cudaErrorNotSupported);
}

oracle::Accumulator AccumulatorOf(const kernels::GemmClass& gemm_class) {
  if (!IsFp8(gemm_class.a) || !IsFp8(gemm_class.b)) return oracle::Accumulator::kFloat32;
  const bool exact = gemm_class.accumulation == kernels::Accumulation::kExact;
  return exact ? oracle::Accumulator::kShortPromoted : oracle::Accumulator::kShort;
}

bool MustTake(const kernels::GemmVariant& variant, const GemmParams& params) {
  const kernels::GemmClass& c = variant.gemm_class;
  const bool inputs_aligned = AlignedView(params, params.a, c.a, params.m, params.k, AContiguousAlongK(c.layout)) &&
                              AlignedView(params, params.b, c.b, params.n, params.k, BContiguousAlongK(c.layout));
  switch (variant.info.arch) {
    case kernels::Arch::kSm90a: {
      const bool sum_fits = c.a != DType::kS8 || c.b != DType::kS8 || params.k < kInt8SumLimit;
      const bool packs = variant.info.workspace == kernels::WorkspaceRule::kPacked;
      return params.k == 0 || ((packs || inputs_aligned) && sum_fits);
    }
    case kernels::Arch::kVendor:
      return params.k > 0 && inputs_aligned && params.bias.data == nullptr && params.a_scale.vector == nullptr &&
             params.b_scale.vector == nullptr && oracle::BatchCount(params) == 1 &&
             AlignedView(params, params.d, c.out, params.m, params.n, true);
    default:
      return true;
  }
}

}  // namespace tessera::gpu_test
