#include "tests/workload/shared_problem.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "tests/oracle/codec.h"

namespace tessera::workload {
namespace {

using oracle::BiasMode;
using oracle::Fill;
using oracle::GemmCase;
using oracle::ScaleMode;
using Shape = std::vector<std::int64_t>;

// A view that is planned before its buffer exists.
struct PlannedView {
  DType dtype = DType::kF32;
  Shape shape;
  Shape strides;
  std::uint64_t byte_offset = 0;
};

std::uint64_t SpanBytes(const PlannedView& view) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    if (view.shape[i] == 0) return 0;
    last += (view.shape[i] - 1) * view.strides[i];
  }
  return static_cast<std::uint64_t>(last + 1) * DTypeBytes(view.dtype);
}

// Places views one behind the other, each on a 256-byte line plus the case's misalignment.
class Layout {
 public:
  explicit Layout(const GemmCase& gemm_case) : case_(gemm_case) {}

  PlannedView Matrix(DType dtype, std::int64_t rows, std::int64_t cols, bool row_major, const bool* broadcast) {
    PlannedView view{.dtype = dtype, .shape = {rows, cols}, .strides = {}};
    const std::int64_t pitch = (row_major ? cols : rows) + case_.padding;
    view.strides = row_major ? Shape{pitch, 1} : Shape{1, pitch};
    std::int64_t next = pitch * (row_major ? rows : cols);
    if (HasBatch()) {
      for (int i = kernels::kGemmBatchDimsMax - 1; i >= 0; --i) {
        const bool repeats = broadcast != nullptr && broadcast[i];
        view.shape.insert(view.shape.begin(), case_.batch[i]);
        view.strides.insert(view.strides.begin(), repeats ? 0 : next);
        if (!repeats) next *= std::max<std::int64_t>(1, case_.batch[i]);
      }
    }
    return Place(std::move(view));
  }

  PlannedView Vector(DType dtype, std::int64_t extent) {
    return Place({.dtype = dtype, .shape = {extent}, .strides = {case_.vector_stride}});
  }

  std::uint64_t bytes() const { return bytes_ + kLine; }

 private:
  static constexpr std::uint64_t kLine = 256;

  bool HasBatch() const {
    return std::any_of(case_.batch.begin(), case_.batch.end(), [](std::int64_t extent) { return extent != 1; });
  }

  PlannedView Place(PlannedView view) {
    view.byte_offset = bytes_ + static_cast<std::uint64_t>(case_.offset) * DTypeBytes(view.dtype);
    bytes_ = (view.byte_offset + SpanBytes(view) + kLine - 1) / kLine * kLine;
    return view;
  }

  const GemmCase& case_;
  std::uint64_t bytes_ = 0;
};

double DrawElement(DType dtype, Fill fill, oracle::Random& random) {
  if (fill == Fill::kIntegers) return static_cast<double>(random.Int(-3, 3));
  if (dtype == DType::kS8) return static_cast<double>(random.Int(-128, 127));
  return random.Uniform(-1, 1);
}

void FillBytes(const client::TensorView& view, Fill fill, oracle::Random& random) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    if (view.shape[i] == 0) return;
    last += (view.shape[i] - 1) * view.strides[i];
  }
  const auto step = static_cast<std::int64_t>(DTypeBytes(view.dtype));
  for (std::int64_t i = 0; i <= last; ++i) {
    oracle::Encode(view.dtype, DrawElement(view.dtype, fill, random), view.data + i * step);
  }
}

client::TensorView View(const client::Buffer& buffer, const PlannedView& planned) {
  return buffer.Tensor(planned.dtype, planned.shape, planned.byte_offset, planned.strides);
}

std::int64_t ScaleExtent(ScaleMode mode, std::int64_t extent) {
  return mode == ScaleMode::kVector ? extent : 1;
}

std::optional<client::Scale> MakeScale(const client::Buffer& buffer, ScaleMode mode, const PlannedView& planned,
                                       Fill fill, oracle::Random& random) {
  if (mode == ScaleMode::kNone) return std::nullopt;
  if (mode == ScaleMode::kScalar) return client::Scale(fill == Fill::kIntegers ? 0.5F : 0.37F);
  const client::TensorView view = View(buffer, planned);
  FillBytes(view, fill, random);
  return client::Scale(view);
}

kernels::GemmMatrix MatrixOf(const client::TensorView& view) {
  const std::size_t rank = view.shape.size();
  kernels::GemmMatrix matrix{
      .data = view.data, .row_stride = view.strides[rank - 2], .col_stride = view.strides[rank - 1]};
  for (std::size_t i = 0; i + 2 < rank; ++i) {
    matrix.batch_stride[kernels::kGemmBatchDimsMax - (rank - 2) + i] = view.strides[i];
  }
  return matrix;
}

kernels::GemmScale ScaleOf(const std::optional<client::Scale>& scale) {
  if (!scale.has_value()) return {};
  if (const float* scalar = std::get_if<float>(&*scale)) return {.scalar = *scalar};
  const auto& view = std::get<client::TensorView>(*scale);
  return {.vector = reinterpret_cast<const float*>(view.data), .stride = view.shape[0] == 1 ? 0 : view.strides[0]};
}

}  // namespace

kernels::GemmParams ParamsOf(const client::GemmSpec& spec) {
  const std::size_t rank = spec.d.shape.size();
  kernels::GemmParams params;
  params.m = spec.d.shape[rank - 2];
  params.n = spec.d.shape[rank - 1];
  params.k = spec.a.shape.back();
  for (std::size_t i = 0; i + 2 < rank; ++i) {
    params.batch_shape[kernels::kGemmBatchDimsMax - (rank - 2) + i] = spec.d.shape[i];
  }
  params.a = MatrixOf(spec.a);
  params.b = MatrixOf(spec.b);
  params.d = MatrixOf(spec.d);
  params.a_scale = ScaleOf(spec.a_scale);
  params.b_scale = ScaleOf(spec.b_scale);
  if (spec.bias.has_value()) {
    params.bias = {.data = spec.bias->data, .stride = spec.bias->strides[0], .dtype = spec.bias->dtype};
  }
  return params;
}

absl::StatusOr<SharedProblem> SharedProblem::Make(client::Session& session, const GemmCase& gemm_case,
                                                  std::uint64_t seed, MemoryOwner owner) {
  Layout layout(gemm_case);
  const PlannedView a =
      layout.Matrix(gemm_case.a, gemm_case.m, gemm_case.k, gemm_case.layout[0] == 'N', gemm_case.a_broadcast.data());
  const PlannedView b =
      layout.Matrix(gemm_case.b, gemm_case.n, gemm_case.k, gemm_case.layout[1] == 'T', gemm_case.b_broadcast.data());
  const PlannedView d = layout.Matrix(gemm_case.d, gemm_case.m, gemm_case.n, /*row_major=*/true, nullptr);
  const PlannedView a_scale = layout.Vector(DType::kF32, ScaleExtent(gemm_case.a_scale, gemm_case.m));
  const PlannedView b_scale = layout.Vector(DType::kF32, ScaleExtent(gemm_case.b_scale, gemm_case.n));
  const PlannedView bias = layout.Vector(gemm_case.bias == BiasMode::kBf16 ? DType::kBf16 : DType::kF32, gemm_case.n);

  ASSIGN_OR_RETURN(client::Buffer buffer,
                   owner == MemoryOwner::kDaemon ? session.Allocate(layout.bytes()) : session.Share(layout.bytes()));
  std::memset(buffer.data(), 0x7b, buffer.bytes());
  SharedProblem problem(std::move(buffer), gemm_case);
  oracle::Random random(seed);
  client::GemmSpec& spec = problem.spec_;
  spec.a = View(problem.buffer_, a);
  spec.b = View(problem.buffer_, b);
  spec.d = View(problem.buffer_, d);
  FillBytes(spec.a, gemm_case.fill, random);
  FillBytes(spec.b, gemm_case.fill, random);
  spec.a_scale = MakeScale(problem.buffer_, gemm_case.a_scale, a_scale, gemm_case.fill, random);
  spec.b_scale = MakeScale(problem.buffer_, gemm_case.b_scale, b_scale, gemm_case.fill, random);
  if (gemm_case.bias != BiasMode::kNone) {
    spec.bias = View(problem.buffer_, bias);
    FillBytes(*spec.bias, gemm_case.fill, random);
  }
  problem.params_ = ParamsOf(spec);
  return problem;
}

oracle::Verdict SharedProblem::Check() const {
  return oracle::CheckGemm(params_, types_, oracle::ComputeGemm(params_, types_));
}

void SharedProblem::DamageOutput() {
  const double value = oracle::Decode(types_.d, params_.d.data);
  oracle::Encode(types_.d, value + 1000, params_.d.data);
}

}  // namespace tessera::workload
