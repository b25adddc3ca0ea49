#include "server/rpc/decode.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {
namespace {

static_assert(static_cast<int>(DType::kBf16) == v1::DTYPE_BF16);
static_assert(static_cast<int>(DType::kF16) == v1::DTYPE_F16);
static_assert(static_cast<int>(DType::kF32) == v1::DTYPE_F32);
static_assert(static_cast<int>(DType::kE4m3) == v1::DTYPE_E4M3);
static_assert(static_cast<int>(DType::kE5m2) == v1::DTYPE_E5M2);
static_assert(static_cast<int>(DType::kS8) == v1::DTYPE_S8);
static_assert(static_cast<int>(DType::kS32) == v1::DTYPE_S32);
static_assert(v1::DType_MAX == v1::DTYPE_S32, "a new wire type needs a row in common/dtype.h");

absl::Status Invalid(std::string_view field, std::string_view part, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(Av(field), Av(part), ": ", Av(what)));
}

absl::Status DecodeStorage(const v1::Tensor& tensor, TensorRef& ref) {
  switch (tensor.storage_case()) {
    case v1::Tensor::kBufferId:
      ref.storage = TensorRef::Storage::kBuffer;
      if (!Id::Parse(tensor.buffer_id(), ref.buffer)) {
        return Invalid(ref.field, ".buffer_id", absl::StrCat(tensor.buffer_id().size(), " bytes; an id has 16"));
      }
      return absl::OkStatus();
    case v1::Tensor::kInlineData:
      ref.storage = TensorRef::Storage::kInlineData;
      ref.inline_data = &tensor.inline_data();
      return absl::OkStatus();
    case v1::Tensor::kInlineResult:
      ref.storage = TensorRef::Storage::kInlineResult;
      if (tensor.strides_size() != 0)
        return Invalid(ref.field, ".strides", "an inline result is packed; leave them out");
      if (tensor.byte_offset() != 0)
        return Invalid(ref.field, ".byte_offset", "an inline result is packed; leave it out");
      return absl::OkStatus();
    case v1::Tensor::STORAGE_NOT_SET:
      break;
  }
  return Invalid(ref.field, ".storage", "none set; give buffer_id, inline_data or inline_result");
}

// Row-major strides; extents of 0 count as 1, so that strides stay positive.
absl::Status PackedStrides(TensorRef& ref) {
  std::int64_t stride = 1;
  for (int i = ref.rank - 1; i >= 0; --i) {
    ref.stride[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(1, ref.shape[i]), &stride)) {
      return Invalid(ref.field, ".shape", "more than 2^63 elements");
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeShape(const v1::Tensor& tensor, TensorRef& ref) {
  if (tensor.shape_size() > kRankMax) {
    return Invalid(ref.field, ".shape", absl::StrCat("rank ", tensor.shape_size(), "; at most ", kRankMax));
  }
  ref.rank = tensor.shape_size();
  for (int i = 0; i < ref.rank; ++i) {
    ref.shape[i] = tensor.shape(i);
    if (ref.shape[i] < 0) {
      return Invalid(ref.field, absl::StrCat(".shape[", i, "]"), absl::StrCat(ref.shape[i], " is negative"));
    }
  }
  if (tensor.strides_size() == 0) return PackedStrides(ref);
  if (tensor.strides_size() != ref.rank) {
    return Invalid(ref.field, ".strides",
                   absl::StrCat(tensor.strides_size(), " strides for ", ref.rank, " dimensions"));
  }
  for (int i = 0; i < ref.rank; ++i) {
    ref.stride[i] = tensor.strides(i);
    if (ref.stride[i] < 0) {
      return Invalid(ref.field, absl::StrCat(".strides[", i, "]"), absl::StrCat(ref.stride[i], " is negative"));
    }
  }
  return absl::OkStatus();
}

// `field` is a literal: it is kept in the result.
absl::StatusOr<TensorRef> DecodeTensor(const v1::Tensor& tensor, std::string_view field) {
  TensorRef ref;
  ref.field = field;
  RETURN_IF_ERROR(DecodeStorage(tensor, ref));
  ref.byte_offset = tensor.byte_offset();
  ref.dtype = static_cast<DType>(tensor.dtype());
  if (!v1::DType_IsValid(tensor.dtype()) || !IsKnown(ref.dtype)) {
    return Invalid(field, ".dtype", absl::StrCat("unknown value ", static_cast<int>(tensor.dtype())));
  }
  RETURN_IF_ERROR(DecodeShape(tensor, ref));
  return ref;
}

absl::StatusOr<TensorRef> DecodeRequired(bool given, const v1::Tensor& tensor, std::string_view field) {
  if (!given) return Invalid(field, "", "missing");
  return DecodeTensor(tensor, field);
}

absl::StatusOr<ScaleRef> DecodeScale(const v1::Scale& scale, std::string_view field, std::string_view vector_field) {
  ScaleRef ref;
  switch (scale.value_case()) {
    case v1::Scale::kScalar:
      ref.scalar = scale.scalar();
      if (!std::isfinite(ref.scalar)) return Invalid(field, ".scalar", "not finite");
      return ref;
    case v1::Scale::kVector: {
      ASSIGN_OR_RETURN(ref.vector, DecodeTensor(scale.vector(), vector_field));
      return ref;
    }
    case v1::Scale::VALUE_NOT_SET:
      break;
  }
  return Invalid(field, "", "neither scalar nor vector set");
}

constexpr std::uint64_t kTimeoutMaxMs = std::uint64_t{1} << 40U;  // decades, and far from the clock's end

absl::StatusOr<std::vector<DecodedPoint>> DecodePoints(const google::protobuf::RepeatedPtrField<v1::SyncPoint>& points,
                                                       std::string_view field) {
  if (points.size() > kSyncPointsMax) {
    return Invalid(field, "", absl::StrCat(points.size(), " points; at most ", kSyncPointsMax));
  }
  std::vector<DecodedPoint> decoded;
  for (const v1::SyncPoint& point : points) {
    DecodedPoint& to = decoded.emplace_back(DecodedPoint{.id = {}, .value = point.value()});
    if (!Id::Parse(point.id(), to.id)) {
      return Invalid(field, absl::StrCat("[", decoded.size() - 1, "].id"), "must be 16 bytes");
    }
  }
  return decoded;
}

}  // namespace

absl::StatusOr<std::optional<kernels::Backend>> DecodeBackend(v1::Backend backend, std::string_view field) {
  switch (backend) {
    case v1::BACKEND_UNSPECIFIED:
    case v1::BACKEND_AUTO:
      return std::optional<kernels::Backend>();
    case v1::BACKEND_CPU:
      return kernels::Backend::kCpu;
    case v1::BACKEND_CUDA:
      return kernels::Backend::kCuda;
    case v1::BACKEND_VENDOR:
      return kernels::Backend::kVendor;
    default:
      return Invalid(field, "", absl::StrCat("unknown value ", static_cast<int>(backend)));
  }
}

absl::StatusOr<kernels::Accumulation> DecodeAccumulation(v1::Accumulation accumulation, std::string_view field) {
  switch (accumulation) {
    case v1::ACCUMULATION_UNSPECIFIED:
    case v1::ACCUMULATION_FAST:
      return kernels::Accumulation::kFast;
    case v1::ACCUMULATION_EXACT:
      return kernels::Accumulation::kExact;
    default:
      return Invalid(field, "", absl::StrCat("unknown value ", static_cast<int>(accumulation)));
  }
}

absl::StatusOr<GemmCall> DecodeGemm(const v1::GemmOp& op) {
  GemmCall call;
  ASSIGN_OR_RETURN(call.a, DecodeRequired(op.has_a(), op.a(), "op.a"));
  ASSIGN_OR_RETURN(call.b, DecodeRequired(op.has_b(), op.b(), "op.b"));
  ASSIGN_OR_RETURN(call.d, DecodeRequired(op.has_d(), op.d(), "op.d"));
  if (op.has_a_scale()) {
    ASSIGN_OR_RETURN(call.a_scale, DecodeScale(op.a_scale(), "op.a_scale", "op.a_scale.vector"));
  }
  if (op.has_b_scale()) {
    ASSIGN_OR_RETURN(call.b_scale, DecodeScale(op.b_scale(), "op.b_scale", "op.b_scale.vector"));
  }
  if (op.epilogue().has_bias()) {
    ASSIGN_OR_RETURN(call.bias, DecodeTensor(op.epilogue().bias(), "op.epilogue.bias"));
  }
  ASSIGN_OR_RETURN(call.accumulation, DecodeAccumulation(op.accumulation(), "op.accumulation"));
  return call;
}

absl::StatusOr<DecodedOptions> DecodeOptions(const v1::SubmitOptions& options) {
  DecodedOptions decoded{.profile = options.profile()};
  if (!options.stream().empty()) {
    Id stream;
    if (!Id::Parse(options.stream(), stream)) return Invalid("options.stream", "", "must be 16 bytes");
    decoded.stream = stream;
  }
  ASSIGN_OR_RETURN(decoded.wait, DecodePoints(options.wait(), "options.wait"));
  ASSIGN_OR_RETURN(decoded.signal, DecodePoints(options.signal(), "options.signal"));
  if (!v1::ReplyWhen_IsValid(options.reply_when())) {
    return Invalid("options.reply_when", "", absl::StrCat("unknown value ", static_cast<int>(options.reply_when())));
  }
  decoded.answer_when_launched = options.reply_when() == v1::REPLY_WHEN_ENQUEUED;
  decoded.timeout = std::chrono::milliseconds(std::min<std::uint64_t>(options.timeout_ms(), kTimeoutMaxMs));
  ASSIGN_OR_RETURN(decoded.backend, DecodeBackend(options.backend(), "options.backend"));
  return decoded;
}

}  // namespace tessera::server
