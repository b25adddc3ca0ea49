#include "server/exec/bind.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/exec/overlap.h"

namespace tessera::server {
namespace {

using kernels::GemmMatrix;
using kernels::kGemmBatchDimsMax;

// Of M, N and K: kernels index them with 32 bits.
constexpr std::int64_t kExtentMax = std::numeric_limits<std::int32_t>::max();

// A tensor with its memory found and its bounds checked.
struct BoundView {
  const TensorRef* ref = nullptr;
  std::byte* data = nullptr;   // element [0, .., 0]; never read through here, it may be a GPU's
  bool shared_memory = false;  // in a buffer, so that it may alias another view
  MemoryKey memory;
  StridedBytes bytes;  // begin counts from the start of `memory`
};

absl::Status Invalid(const TensorRef& ref, std::string_view part, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(Av(ref.field), Av(part), ": ", Av(what)));
}

// The same error with the tensor's field in front, for errors that arise where fields are not known.
absl::Status AtField(const TensorRef& ref, std::string_view part, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(Av(ref.field), Av(part), ": ", status.message()));
}

bool HasElements(const TensorRef& ref) {
  return std::all_of(ref.shape.begin(), ref.shape.begin() + ref.rank, [](std::int64_t extent) { return extent > 0; });
}

// Bytes from element zero to the end of the last element; nullopt if that passes 63 bits. 0 for an empty view.
std::optional<std::uint64_t> SpanBytes(const TensorRef& ref) {
  if (!HasElements(ref)) return 0;
  std::int64_t elements = 1;
  for (int i = 0; i < ref.rank; ++i) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(ref.shape[i] - 1, ref.stride[i], &reach) ||
        __builtin_add_overflow(elements, reach, &elements)) {
      return std::nullopt;
    }
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, static_cast<std::int64_t>(DTypeBytes(ref.dtype)), &bytes)) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

// A stride as kernels get it: 0 in a view without elements, where the client's may be anything. Kernels step over the
// rows of A and B even if K is 0.
std::int64_t WalkedStride(const TensorRef& ref, int dim) {
  return HasElements(ref) ? ref.stride[dim] : 0;
}

std::string ShapeText(const TensorRef& ref) {
  std::string text = "[";
  for (int i = 0; i < ref.rank; ++i) absl::StrAppend(&text, i == 0 ? "" : ", ", ref.shape[i]);
  return text + "]";
}

class Binder {
 public:
  Binder(const BindScope& scope, BoundGemm& bound) : scope_(scope), bound_(bound) {}

  absl::StatusOr<BoundView> Input(const TensorRef& ref) {
    if (ref.storage == TensorRef::Storage::kInlineResult) {
      return Invalid(ref, ".inline_result", "only the output can be an inline result");
    }
    return Bind(ref, BufferAccess::kRead);
  }

  absl::StatusOr<BoundView> Output(const TensorRef& ref) {
    if (ref.storage == TensorRef::Storage::kInlineData) {
      return Invalid(ref, ".inline_data", "the output needs a buffer or inline_result");
    }
    return Bind(ref, BufferAccess::kReadWrite);
  }

 private:
  absl::StatusOr<BoundView> Bind(const TensorRef& ref, BufferAccess access) {
    const std::optional<std::uint64_t> span = SpanBytes(ref);
    if (!span.has_value()) return Invalid(ref, "", "shape and strides reach past 2^63 bytes");
    BoundView view{.ref = &ref};
    std::uint64_t available = 0;
    switch (ref.storage) {
      case TensorRef::Storage::kBuffer:
        RETURN_IF_ERROR(FindBuffer(ref, access, view, available));
        break;
      case TensorRef::Storage::kInlineData:
        bound_.has_inline_tensor = true;
        RETURN_IF_ERROR(CheckInlineBytes(ref, ref.inline_data->size()));
        RETURN_IF_ERROR(CheckSpace(ref, MemorySpace()));
        // Kernels only read inputs; GemmMatrix has one pointer type for both directions.
        view.data = reinterpret_cast<std::byte*>(const_cast<char*>(ref.inline_data->data()));
        available = ref.inline_data->size();
        break;
      case TensorRef::Storage::kInlineResult:
        bound_.has_inline_tensor = true;
        RETURN_IF_ERROR(CheckInlineBytes(ref, *span));
        RETURN_IF_ERROR(CheckSpace(ref, MemorySpace()));
        scope_.inline_result->resize(*span);
        view.data = reinterpret_cast<std::byte*>(scope_.inline_result->data());
        available = *span;
        break;
    }
    if (ref.byte_offset > available || *span > available - ref.byte_offset) {
      return Invalid(ref, "",
                     absl::StrCat("shape ", ShapeText(ref), " at byte_offset ", ref.byte_offset, " needs ", *span,
                                  " bytes; the storage has ", available));
    }
    view.data += ref.byte_offset;
    const std::size_t element_bytes = DTypeBytes(ref.dtype);
    if (reinterpret_cast<std::uintptr_t>(view.data) % element_bytes != 0) {
      return Invalid(ref, ".byte_offset",
                     absl::StrCat("the address is not a multiple of the element size, ", element_bytes, " bytes"));
    }
    view.bytes.begin += ref.byte_offset;
    view.bytes.element_bytes = element_bytes;
    view.bytes.rank = ref.rank;
    view.bytes.shape = ref.shape;
    // Cannot overflow where the extent is over 1: SpanBytes bounds it. Elsewhere the stride is never walked.
    for (int i = 0; i < ref.rank; ++i) {
      view.bytes.stride_bytes[i] =
          ref.shape[i] > 1 ? WalkedStride(ref, i) * static_cast<std::int64_t>(element_bytes) : 0;
    }
    return view;
  }

  absl::Status FindBuffer(const TensorRef& ref, BufferAccess access, BoundView& view, std::uint64_t& available) {
    if (scope_.session == nullptr) {
      return Invalid(ref, ".buffer_id", "a call that names buffers needs metadata tessera-session-bin");
    }
    auto pin = scope_.sessions->PinBuffer(*scope_.session, ref.buffer, access);
    if (!pin.ok()) return AtField(ref, ".buffer_id", pin.status());
    RETURN_IF_ERROR(CheckSpace(ref, (*pin)->space()));
    view.data = (*pin)->data();
    view.shared_memory = true;
    view.memory = (*pin)->memory();
    view.bytes.begin = (*pin)->memory_offset();
    available = (*pin)->bytes();
    bound_.pins.push_back(*std::move(pin));
    return absl::OkStatus();
  }

  // The first tensor decides where the call is; every other one must be there, too.
  absl::Status CheckSpace(const TensorRef& ref, const MemorySpace& space) {
    if (first_ == nullptr) {
      first_ = &ref;
      bound_.space = space;
      return absl::OkStatus();
    }
    if (space == bound_.space) return absl::OkStatus();
    return Invalid(ref, "",
                   absl::StrCat("is in ", space.Name(), ", ", Av(first_->field), " in ", bound_.space.Name(),
                                "; all tensors of an operation must be in one space, and inline ones are in host"));
  }

  absl::Status CheckInlineBytes(const TensorRef& ref, std::uint64_t bytes) {
    if (bytes <= scope_.inline_bytes_max) return absl::OkStatus();
    scope_.metrics->Refused(Limit::kInlineBytes);
    return absl::ResourceExhaustedError(absl::StrCat(Av(ref.field), ": ", bytes, " inline bytes; inline_bytes_max is ",
                                                     scope_.inline_bytes_max, "; use a buffer"));
  }

  const BindScope& scope_;
  BoundGemm& bound_;
  const TensorRef* first_ = nullptr;  // bound before all others
};

absl::Status CheckPair(const GemmCall& call) {
  const DType a = call.a.dtype;
  const DType b = call.b.dtype;
  const bool known = (a == DType::kBf16 && (b == DType::kBf16 || b == DType::kS8)) || (IsFp8(a) && IsFp8(b)) ||
                     (a == DType::kS8 && (b == DType::kS8 || b == DType::kBf16));
  if (a != DType::kBf16 && a != DType::kS8 && !IsFp8(a)) {
    return absl::InvalidArgumentError(
        absl::StrCat("op.a.dtype: ", Av(DTypeName(a)), " is no operand's type; they are bf16, e4m3, e5m2 and s8"));
  }
  if (!known) {
    return absl::InvalidArgumentError(
        absl::StrCat("op.b.dtype: no product of ", Av(DTypeName(a)), " and ", Av(DTypeName(b)),
                     "; pairs are bf16_bf16, e4m3/e5m2 in any mix, s8_s8, bf16_s8 and s8_bf16"));
  }
  if (call.d.dtype != DType::kBf16 && call.d.dtype != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat("op.d.dtype: ", Av(DTypeName(call.d.dtype)), "; bf16 or f32"));
  }
  return absl::OkStatus();
}

absl::Status CheckScaleGiven(DType operand, bool given, std::string_view field) {
  if (operand == DType::kS8 && !given) {
    return absl::InvalidArgumentError(absl::StrCat(Av(field), ": an s8 operand needs its scale"));
  }
  if (operand == DType::kBf16 && given) {
    return absl::InvalidArgumentError(absl::StrCat(Av(field), ": a bf16 operand has no scale"));
  }
  return absl::OkStatus();
}

absl::Status CheckExtents(const GemmCall& call) {
  for (const TensorRef* ref : {&call.a, &call.b, &call.d}) {
    if (ref->rank < 2) return Invalid(*ref, ".shape", absl::StrCat("rank ", ref->rank, "; a matrix has at least 2"));
  }
  const auto last = [](const TensorRef& ref) { return ref.shape[ref.rank - 1]; };
  const auto second_last = [](const TensorRef& ref) { return ref.shape[ref.rank - 2]; };
  if (last(call.b) != last(call.a)) {
    return Invalid(call.b, ".shape",
                   absl::StrCat("K is ", last(call.b), " here and ", last(call.a), " in op.a",
                                " (A is [.., M, K], B is [.., N, K])"));
  }
  if (second_last(call.d) != second_last(call.a) || last(call.d) != second_last(call.b)) {
    return Invalid(call.d, ".shape",
                   absl::StrCat("[.., ", second_last(call.d), ", ", last(call.d), "]; A and B give [.., ",
                                second_last(call.a), ", ", second_last(call.b), "]"));
  }
  for (const auto& [ref, dim] : {std::pair{&call.a, "M"}, std::pair{&call.b, "N"}}) {
    if (std::max(second_last(*ref), last(*ref)) > kExtentMax) {
      return Invalid(
          *ref, ".shape",
          absl::StrCat("[.., ", second_last(*ref), ", ", last(*ref), "]; ", dim, " and K are at most ", kExtentMax));
    }
  }
  // The work must be countable: every later product of extents is at most this one.
  std::int64_t work = 2;
  for (int i = 0; i < call.d.rank; ++i) {
    if (__builtin_mul_overflow(work, std::max<std::int64_t>(1, call.d.shape[i]), &work)) {
      return Invalid(call.d, ".shape", "more than 2^62 elements");
    }
  }
  if (__builtin_mul_overflow(work, std::max<std::int64_t>(1, last(call.a)), &work)) {
    return Invalid(call.a, ".shape", "the product has more than 2^62 terms");
  }
  return absl::OkStatus();
}

// Batch strides of an operand under D's batch, which is aligned at its last dimension: missing dimensions and extents
// of 1 repeat.
absl::Status BindBatch(const TensorRef& d, const TensorRef& ref, GemmMatrix& matrix) {
  const int d_dims = d.rank - 2;
  const int dims = ref.rank - 2;
  if (dims > d_dims) {
    return Invalid(ref, ".shape", absl::StrCat("has ", dims, " batch dimensions; op.d has ", d_dims));
  }
  for (int i = 0; i < dims; ++i) {
    const int d_dim = d_dims - dims + i;
    const std::int64_t extent = ref.shape[i];
    if (extent != d.shape[d_dim] && extent != 1) {
      return Invalid(ref, absl::StrCat(".shape[", i, "]"),
                     absl::StrCat("batch extent ", extent, "; op.d has ", d.shape[d_dim]));
    }
    matrix.batch_stride[kGemmBatchDimsMax - d_dims + d_dim] = extent == 1 ? 0 : WalkedStride(ref, i);
  }
  return absl::OkStatus();
}

GemmMatrix MatrixOf(const BoundView& view) {
  const TensorRef& ref = *view.ref;
  return {
      .data = view.data, .row_stride = WalkedStride(ref, ref.rank - 2), .col_stride = WalkedStride(ref, ref.rank - 1)};
}

// Which of an operand's last two dimensions is the contiguous one; for a view where neither is, the finer one.
bool KContiguous(const TensorRef& ref) {
  const std::int64_t k_stride = ref.stride[ref.rank - 1];
  const std::int64_t row_stride = ref.stride[ref.rank - 2];
  if (k_stride == 1) return true;
  if (row_stride == 1) return false;
  return ref.shape[ref.rank - 1] <= 1 || k_stride <= row_stride;
}

absl::Status CheckNoAlias(const BoundView& d, const BoundView& input) {
  if (!d.shared_memory || !input.shared_memory || !(d.memory == input.memory)) return absl::OkStatus();
  if (!HasElements(*d.ref) || !HasElements(*input.ref)) return absl::OkStatus();
  if (!MayOverlap(d.bytes, input.bytes)) return absl::OkStatus();
  return Invalid(*d.ref, "",
                 absl::StrCat("overlaps ", Av(input.ref->field), "; an output may share no byte with an input"));
}

// `extent` elements, or one for all where that is allowed.
absl::StatusOr<std::int64_t> VectorStride(const TensorRef& ref, std::int64_t extent, bool one_for_all) {
  if (ref.rank == 1 && ref.shape[0] == extent) return ref.stride[0];
  if (one_for_all && ref.rank == 1 && ref.shape[0] == 1) return 0;
  return Invalid(ref, ".shape", absl::StrCat(ShapeText(ref), "; must be [", extent, one_for_all ? "] or [1]" : "]"));
}

absl::StatusOr<kernels::GemmScale> BindScale(Binder& binder, const ScaleRef& scale, std::int64_t extent,
                                             const BoundView& d) {
  if (!scale.vector.has_value()) return kernels::GemmScale{.scalar = scale.scalar};
  const TensorRef& ref = *scale.vector;
  if (ref.dtype != DType::kF32) return Invalid(ref, ".dtype", "scales are f32");
  ASSIGN_OR_RETURN(const std::int64_t stride, VectorStride(ref, extent, /*one_for_all=*/true));
  ASSIGN_OR_RETURN(const BoundView view, binder.Input(ref));
  RETURN_IF_ERROR(CheckNoAlias(d, view));
  return kernels::GemmScale{.vector = reinterpret_cast<const float*>(view.data), .stride = stride};
}

absl::StatusOr<kernels::GemmBias> BindBias(Binder& binder, const TensorRef& ref, std::int64_t extent,
                                           const BoundView& d) {
  if (ref.dtype != DType::kF32 && ref.dtype != DType::kBf16) return Invalid(ref, ".dtype", "bias is f32 or bf16");
  ASSIGN_OR_RETURN(const std::int64_t stride, VectorStride(ref, extent, /*one_for_all=*/false));
  ASSIGN_OR_RETURN(const BoundView view, binder.Input(ref));
  RETURN_IF_ERROR(CheckNoAlias(d, view));
  return kernels::GemmBias{.data = view.data, .stride = stride, .dtype = ref.dtype};
}

planner::GemmProblem ProblemOf(const GemmCall& call) {
  planner::GemmProblem problem{
      .gemm_class = {.a = call.a.dtype,
                     .b = call.b.dtype,
                     .out = call.d.dtype,
                     .accumulation = kernels::HasAccumulationChoice(call.a.dtype, call.b.dtype)
                                         ? call.accumulation
                                         : kernels::Accumulation::kFast,
                     .layout = kernels::GemmLayoutOf(KContiguous(call.a), KContiguous(call.b))},
      .m = call.d.shape[call.d.rank - 2],
      .n = call.d.shape[call.d.rank - 1],
      .k = call.a.shape[call.a.rank - 1]};
  for (int i = 0; i < call.d.rank - 2; ++i) problem.batch *= call.d.shape[i];
  return problem;
}

}  // namespace

std::uint64_t BoundGemm::Flops() const {
  // Counted without overflow by CheckExtents.
  return 2ULL * static_cast<std::uint64_t>(problem.batch) * static_cast<std::uint64_t>(problem.m) *
         static_cast<std::uint64_t>(problem.n) * static_cast<std::uint64_t>(problem.k);
}

std::uint64_t BoundGemm::ScalarOperations() const {
  if (problem.k > 0) return Flops() / 2;
  return static_cast<std::uint64_t>(problem.batch) * static_cast<std::uint64_t>(problem.m) *
         static_cast<std::uint64_t>(problem.n);  // D is in memory, element by element: it fits
}

absl::StatusOr<BoundGemm> BindGemm(const GemmCall& call, const BindScope& scope) {
  RETURN_IF_ERROR(CheckPair(call));
  RETURN_IF_ERROR(CheckScaleGiven(call.a.dtype, call.a_scale.has_value(), "op.a_scale"));
  RETURN_IF_ERROR(CheckScaleGiven(call.b.dtype, call.b_scale.has_value(), "op.b_scale"));
  RETURN_IF_ERROR(CheckExtents(call));

  BoundGemm bound;
  bound.problem = ProblemOf(call);
  bound.pins.reserve(3);
  Binder binder(scope, bound);
  ASSIGN_OR_RETURN(const BoundView a, binder.Input(call.a));
  ASSIGN_OR_RETURN(const BoundView b, binder.Input(call.b));
  ASSIGN_OR_RETURN(const BoundView d, binder.Output(call.d));
  RETURN_IF_ERROR(CheckNoAlias(d, a));
  RETURN_IF_ERROR(CheckNoAlias(d, b));
  if (HasElements(call.d) && MayOverlapItself(d.bytes)) {
    return Invalid(call.d, ".strides", "two elements of the output share bytes");
  }

  kernels::GemmParams& params = bound.params;
  params.m = bound.problem.m;
  params.n = bound.problem.n;
  params.k = bound.problem.k;
  params.a = MatrixOf(a);
  params.b = MatrixOf(b);
  params.d = MatrixOf(d);
  const int batch_dims = call.d.rank - 2;
  for (int i = 0; i < batch_dims; ++i) params.batch_shape[kGemmBatchDimsMax - batch_dims + i] = call.d.shape[i];
  RETURN_IF_ERROR(BindBatch(call.d, call.a, params.a));
  RETURN_IF_ERROR(BindBatch(call.d, call.b, params.b));
  RETURN_IF_ERROR(BindBatch(call.d, call.d, params.d));
  if (call.a_scale.has_value()) {
    ASSIGN_OR_RETURN(params.a_scale, BindScale(binder, *call.a_scale, params.m, d));
  }
  if (call.b_scale.has_value()) {
    ASSIGN_OR_RETURN(params.b_scale, BindScale(binder, *call.b_scale, params.n, d));
  }
  if (call.bias.has_value()) {
    ASSIGN_OR_RETURN(params.bias, BindBias(binder, *call.bias, params.n, d));
  }
  return bound;
}

}  // namespace tessera::server
