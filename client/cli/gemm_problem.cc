#include "client/cli/gemm_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/cli/output.h"
#include "client/tensor_file.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client::cli {
namespace {

using Shape = std::vector<std::int64_t>;

void FillRandom(const TensorView& view, std::uint64_t bytes, std::mt19937_64& random) {
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  const float reach = view.dtype == DType::kS8 ? 127.0F : 1.0F;
  const std::size_t step = DTypeBytes(view.dtype);
  Progress progress("random data", bytes);
  for (std::uint64_t at = 0; at < bytes; at += step) {
    EncodeElement(view.dtype, uniform(random) * reach, view.data + at);
    if (at % (1U << 20U) == 0) progress.Update(at);
  }
}

// A matrix [.., rows, cols] stored so that `row_major`, or its transpose, is packed.
absl::StatusOr<TensorView> AddMatrix(OperandMemory& memory, DType dtype, const Shape& batch, std::int64_t rows,
                                     std::int64_t cols, bool row_major) {
  Shape stored = batch;
  stored.insert(stored.end(), {row_major ? rows : cols, row_major ? cols : rows});
  ASSIGN_OR_RETURN(TensorView view, memory.Allocate(PackedBytes(dtype, stored), dtype, stored));
  return row_major ? view : view.Transposed();
}

absl::StatusOr<TensorView> AddRandom(OperandMemory& memory, DType dtype, const Shape& batch, std::int64_t rows,
                                     std::int64_t cols, bool row_major, std::mt19937_64& random) {
  ASSIGN_OR_RETURN(const TensorView view, AddMatrix(memory, dtype, batch, rows, cols, row_major));
  FillRandom(view, PackedBytes(dtype, view.shape), random);
  return view;
}

absl::StatusOr<TensorView> AddVector(OperandMemory& memory, std::int64_t extent, float lo, float hi,
                                     std::mt19937_64& random) {
  ASSIGN_OR_RETURN(TensorView view, memory.Allocate(4 * static_cast<std::uint64_t>(extent), DType::kF32, {extent}));
  std::uniform_real_distribution<float> uniform(lo, hi);
  for (std::int64_t i = 0; i < extent; ++i) EncodeElement(DType::kF32, uniform(random), view.data + 4 * i);
  return view;
}

absl::StatusOr<TensorView> AddFromFile(OperandMemory& memory, const std::string& spec) {
  ASSIGN_OR_RETURN(const TensorFileSpec file_spec, ParseTensorFileSpec(spec));
  ASSIGN_OR_RETURN(const TensorFile file, TensorFile::Open(file_spec.path));
  ASSIGN_OR_RETURN(const TensorFileEntry entry, file.Find(file_spec.name));
  if (entry.shape.size() < 2) {
    return absl::InvalidArgumentError(absl::StrCat(spec, ": rank ", entry.shape.size(), "; a matrix has at least 2"));
  }
  ASSIGN_OR_RETURN(TensorView view, memory.Allocate(entry.bytes, entry.dtype, entry.shape, entry.strides));
  RETURN_IF_ERROR(file.Read(entry, {view.data, entry.bytes}));
  return view;
}

absl::StatusOr<std::pair<DType, DType>> ParsePair(const std::string& pair) {
  const std::size_t underscore = pair.find('_');
  const DType a = DTypeFromName(pair.substr(0, underscore));
  const DType b = underscore == std::string::npos ? DType::kUnspecified : DTypeFromName(pair.substr(underscore + 1));
  if (a == DType::kUnspecified || b == DType::kUnspecified) {
    return absl::InvalidArgumentError(absl::StrCat("--pair ", pair, ": give A_B of bf16, e4m3, e5m2, s8"));
  }
  return std::make_pair(a, b);
}

// The operand's scale: a number if given, else by --scales, else 1 where the type needs one.
absl::StatusOr<std::optional<Scale>> MakeScale(OperandMemory& memory, const GemmArguments& arguments, DType dtype,
                                               std::optional<float> given, std::int64_t extent,
                                               std::mt19937_64& random) {
  if (given.has_value()) return std::optional<Scale>(*given);
  if (dtype == DType::kBf16) return std::optional<Scale>();
  if (arguments.scales == "row_col") {
    ASSIGN_OR_RETURN(TensorView vector, AddVector(memory, extent, 0.5F, 1.5F, random));
    return std::optional<Scale>(std::move(vector));
  }
  if (arguments.scales == "tensor" || dtype == DType::kS8) return std::optional<Scale>(0.5F);
  return std::optional<Scale>();
}

double ScaleAt(const std::optional<Scale>& scale, std::int64_t index) {
  if (!scale.has_value()) return 1;
  if (const float* scalar = std::get_if<float>(&*scale)) return *scalar;
  const auto& vector = std::get<TensorView>(*scale);
  const std::int64_t at = vector.shape[0] == 1 ? 0 : index * vector.strides[0];
  return DecodeElement(DType::kF32, vector.data + 4 * at);
}

// One matrix of a batch, decoded to double, rows x cols packed.
std::vector<double> Decode(const TensorView& view, std::int64_t batch) {
  const std::size_t rank = view.shape.size();
  std::int64_t base = 0;
  for (std::size_t i = rank - 2; i-- > 0;) {
    base += batch % view.shape[i] * view.strides[i];
    batch /= view.shape[i];
  }
  const std::int64_t rows = view.shape[rank - 2];
  const std::int64_t cols = view.shape[rank - 1];
  const auto step = static_cast<std::int64_t>(DTypeBytes(view.dtype));
  std::vector<double> values(static_cast<std::size_t>(rows * cols));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      const std::int64_t at = base + row * view.strides[rank - 2] + col * view.strides[rank - 1];
      values[static_cast<std::size_t>(row * cols + col)] = DecodeElement(view.dtype, view.data + at * step);
    }
  }
  return values;
}

std::int64_t BatchOf(const TensorView& view) {
  std::int64_t batch = 1;
  for (std::size_t i = 0; i + 2 < view.shape.size(); ++i) batch *= view.shape[i];
  return batch;
}

void CheckElement(double got, double want, double allowed, CheckResult& result) {
  if (std::isnan(want) || std::isinf(want)) {
    const bool same = std::isnan(want) ? std::isnan(got) : got == want;
    if (!same) ++result.wrong;
    return;
  }
  const double error = std::fabs(got - want);
  if (allowed > 0) result.worst = std::max(result.worst, error / allowed);
  if (!(error <= allowed)) ++result.wrong;
}

}  // namespace

absl::StatusOr<TensorView> OperandMemory::Allocate(std::uint64_t bytes, DType dtype,
                                                   const std::vector<std::int64_t>& shape,
                                                   const std::vector<std::int64_t>& strides) {
  bytes = std::max<std::uint64_t>(1, bytes);
  if (place_ == OperandPlace::kHost) {
    ASSIGN_OR_RETURN(Buffer buffer, session_->Allocate(bytes));
    buffers_.push_back(std::move(buffer));
    return buffers_.back().Tensor(dtype, shape, 0, strides);
  }
  if (place_ == OperandPlace::kGpu) {
    ASSIGN_OR_RETURN(Buffer buffer, session_->AllocateOnDevice(bytes));
    buffers_.push_back(std::move(buffer));
    blocks_.push_back(std::make_unique<std::byte[]>(bytes));
    copies_.push_back({.buffer = buffers_.size() - 1, .data = blocks_.back().get(), .bytes = bytes});
    TensorView view = buffers_.back().Tensor(dtype, shape, 0, strides);
    view.data = blocks_.back().get();
    return view;
  }
  // No message holds more, whatever the daemon's limit.
  constexpr std::uint64_t kInlineMax = std::uint64_t{1} << 31;
  if (bytes > kInlineMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a tensor of ", bytes, " bytes does not fit a message; over TCP tensors travel inside messages"));
  }
  blocks_.push_back(std::make_unique<std::byte[]>(bytes));
  return InlineTensor(blocks_.back().get(), dtype, shape, strides);
}

absl::Status OperandMemory::Upload() {
  for (const Copy& copy : copies_) RETURN_IF_ERROR(buffers_[copy.buffer].Upload(copy.data, copy.bytes));
  return absl::OkStatus();
}

absl::Status OperandMemory::Download() {
  for (const Copy& copy : copies_) RETURN_IF_ERROR(buffers_[copy.buffer].Download(copy.data, copy.bytes));
  return absl::OkStatus();
}

absl::StatusOr<GemmSpec> MakeGemmProblem(OperandMemory& memory, const GemmArguments& arguments) {
  GemmSpec spec;
  std::mt19937_64 random(arguments.seed);
  ASSIGN_OR_RETURN(const auto pair, ParsePair(arguments.pair));
  const Shape batch = arguments.batch > 0 ? Shape{arguments.batch} : Shape{};
  if (arguments.a_file.empty()) {
    ASSIGN_OR_RETURN(
        spec.a, AddRandom(memory, pair.first, batch, arguments.m, arguments.k, arguments.layout[0] == 'N', random));
  } else {
    ASSIGN_OR_RETURN(spec.a, AddFromFile(memory, arguments.a_file));
  }
  const std::int64_t m = spec.a.shape[spec.a.shape.size() - 2];
  const std::int64_t k = spec.a.shape.back();
  if (arguments.b_file.empty()) {
    ASSIGN_OR_RETURN(spec.b, AddRandom(memory, pair.second, batch, arguments.n, k, arguments.layout[1] == 'T', random));
  } else {
    ASSIGN_OR_RETURN(spec.b, AddFromFile(memory, arguments.b_file));
    if (arguments.b_is_kn) spec.b = spec.b.Transposed();
  }
  const std::int64_t n = spec.b.shape[spec.b.shape.size() - 2];
  const DType out = DTypeFromName(arguments.out);
  const Shape d_batch(spec.a.shape.begin(), spec.a.shape.end() - 2);
  ASSIGN_OR_RETURN(spec.d, AddMatrix(memory, out, d_batch, m, n, /*row_major=*/true));
  ASSIGN_OR_RETURN(spec.a_scale, MakeScale(memory, arguments, spec.a.dtype, arguments.a_scale, m, random));
  ASSIGN_OR_RETURN(spec.b_scale, MakeScale(memory, arguments, spec.b.dtype, arguments.b_scale, n, random));
  if (arguments.bias) {
    ASSIGN_OR_RETURN(spec.bias, AddVector(memory, n, -1.0F, 1.0F, random));
  }
  return spec;
}

CheckResult CheckGemm(const GemmSpec& spec) {
  constexpr double kSingle = 0x1p-24;  // half a unit in the last place of float32, relative
  CheckResult result;
  const std::size_t rank = spec.d.shape.size();
  const std::int64_t rows = spec.d.shape[rank - 2];
  const std::int64_t cols = spec.d.shape[rank - 1];
  const std::int64_t depth = spec.a.shape.back();
  Progress progress("check", static_cast<std::uint64_t>(BatchOf(spec.d) * rows));
  for (std::int64_t batch = 0; batch < BatchOf(spec.d); ++batch) {
    const std::vector<double> a = Decode(spec.a, BatchOf(spec.a) == 1 ? 0 : batch);
    const std::vector<double> b = Decode(spec.b, BatchOf(spec.b) == 1 ? 0 : batch);
    const std::vector<double> d = Decode(spec.d, batch);
    for (std::int64_t m = 0; m < rows; ++m) {
      progress.Update(static_cast<std::uint64_t>(batch * rows + m));
      for (std::int64_t n = 0; n < cols; ++n) {
        double sum = 0;
        double magnitude = 0;
        for (std::int64_t k = 0; k < depth; ++k) {
          const double product = a[m * depth + k] * b[n * depth + k];
          sum += product;
          magnitude += std::fabs(product);
        }
        const double scale = ScaleAt(spec.a_scale, m) * ScaleAt(spec.b_scale, n);
        const double bias = spec.bias.has_value()
                                ? DecodeElement(spec.bias->dtype, spec.bias->data + 4 * n * spec.bias->strides[0])
                                : 0.0;
        const double want = sum * scale + bias;
        double allowed = (2 * static_cast<double>(depth) + 4) * kSingle * magnitude * std::fabs(scale) +
                         4 * kSingle * std::fabs(bias);
        if (spec.d.dtype == DType::kBf16) allowed += 0x1p-8 * std::fabs(want);
        CheckElement(d[m * cols + n], want, allowed, result);
      }
    }
  }
  return result;
}

std::vector<std::byte> PackedOutput(const TensorView& d) {
  const std::uint64_t bytes = PackedBytes(d.dtype, d.shape);
  return {d.data, d.data + bytes};  // MakeGemmProblem packs it
}

}  // namespace tessera::client::cli
