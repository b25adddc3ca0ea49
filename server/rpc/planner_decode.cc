#include "server/rpc/planner_decode.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/gemm_addressable.h"
#include "server/rpc/decode.h"

namespace tessera::server {
namespace {

using kernels::GemmLayout;
using kernels::GemmMatrix;
using kernels::GemmParams;

constexpr std::int64_t kExtentMax = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kStrideMax = std::int64_t{1} << 40;  // elements
constexpr std::uint32_t kAlignmentMax = 256;                // bytes, what allocations have

absl::Status Invalid(std::string_view field, std::string_view part, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(Av(field), Av(part), ": ", Av(what)));
}

absl::StatusOr<DType> DecodeType(v1::DType type, DType otherwise, std::string_view field, std::string_view part) {
  if (type == v1::DTYPE_UNSPECIFIED) return otherwise;
  const auto dtype = static_cast<DType>(type);
  if (!v1::DType_IsValid(type) || !IsKnown(dtype)) {
    return Invalid(field, part, absl::StrCat("unknown value ", static_cast<int>(type)));
  }
  return dtype;
}

absl::StatusOr<GemmLayout> DecodeLayout(v1::GemmLayout layout, std::string_view field) {
  switch (layout) {
    case v1::GEMM_LAYOUT_UNSPECIFIED:
    case v1::GEMM_LAYOUT_NT:
      return GemmLayout::kNT;
    case v1::GEMM_LAYOUT_NN:
      return GemmLayout::kNN;
    case v1::GEMM_LAYOUT_TN:
      return GemmLayout::kTN;
    case v1::GEMM_LAYOUT_TT:
      return GemmLayout::kTT;
    default:
      return Invalid(field, ".layout", absl::StrCat("unknown value ", static_cast<int>(layout)));
  }
}

absl::Status CheckExtent(std::int64_t extent, std::string_view field, std::string_view part) {
  if (extent >= 1 && extent <= kExtentMax) return absl::OkStatus();
  return Invalid(field, part, absl::StrCat(extent, "; takes 1 to ", kExtentMax));
}

// An operand of which `inner` elements are contiguous, `outer` times, at multiples of `stride`.
struct Operand {
  std::int64_t stride = 0;  // as asked for; 0 = packed
  std::int64_t inner = 0;
  std::int64_t outer = 0;
  bool k_contiguous = true;
};

absl::Status SetOperand(Operand operand, std::uintptr_t address, std::int64_t batch, std::string_view field,
                        std::string_view part, GemmMatrix& matrix) {
  if (operand.stride == 0) operand.stride = operand.inner;
  if (operand.stride < operand.inner || operand.stride > kStrideMax) {
    return Invalid(field, part,
                   absl::StrCat(operand.stride, "; takes 0 (packed) or ", operand.inner, " to 2^40 elements"));
  }
  matrix.data = reinterpret_cast<void*>(address);  // asked for its alignment, and never read
  matrix.row_stride = operand.k_contiguous ? operand.stride : 1;
  matrix.col_stride = operand.k_contiguous ? 1 : operand.stride;
  std::int64_t of_batch = 0;
  if (batch > 1 && __builtin_mul_overflow(operand.stride, operand.outer, &of_batch)) {
    return Invalid(field, part, "the operand of all batches has more than 2^63 elements");
  }
  matrix.batch_stride[kernels::kGemmBatchDimsMax - 1] = of_batch;
  return absl::OkStatus();
}

absl::StatusOr<std::uintptr_t> AddressOf(const v1::GemmShape& shape, const std::string& field) {
  const std::uint32_t alignment = shape.alignment_bytes() == 0 ? kAlignmentMax : shape.alignment_bytes();
  if (alignment > kAlignmentMax || (alignment & (alignment - 1)) != 0) {
    return Invalid(field, ".alignment_bytes",
                   absl::StrCat(alignment, "; takes a power of two up to ", kAlignmentMax, ", or 0"));
  }
  return alignment;
}

absl::StatusOr<planner::GemmProblem> DecodeShape(const v1::GemmShape& shape, const std::string& field) {
  planner::GemmProblem problem;
  kernels::GemmClass& of = problem.gemm_class;
  ASSIGN_OR_RETURN(of.a, DecodeType(shape.a(), DType::kBf16, field, ".a"));
  ASSIGN_OR_RETURN(of.b, DecodeType(shape.b(), of.a, field, ".b"));
  ASSIGN_OR_RETURN(of.out, DecodeType(shape.d(), DType::kBf16, field, ".d"));
  ASSIGN_OR_RETURN(of.layout, DecodeLayout(shape.layout(), field));
  ASSIGN_OR_RETURN(of.accumulation, DecodeAccumulation(shape.accumulation(), absl::StrCat(field, ".accumulation")));
  if (!kernels::HasAccumulationChoice(of.a, of.b)) of.accumulation = kernels::Accumulation::kFast;
  problem.batch = shape.batch() == 0 ? 1 : shape.batch();
  problem.m = shape.m();
  problem.n = shape.n();
  problem.k = shape.k();
  RETURN_IF_ERROR(CheckExtent(problem.batch, field, ".batch"));
  RETURN_IF_ERROR(CheckExtent(problem.m, field, ".m"));
  RETURN_IF_ERROR(CheckExtent(problem.n, field, ".n"));
  RETURN_IF_ERROR(CheckExtent(problem.k, field, ".k"));

  GemmParams params{.m = problem.m, .n = problem.n, .k = problem.k};
  params.batch_shape[kernels::kGemmBatchDimsMax - 1] = problem.batch;
  ASSIGN_OR_RETURN(const std::uintptr_t address, AddressOf(shape, field));
  if (address < std::max(DTypeBytes(of.a), DTypeBytes(of.b))) {
    return Invalid(field, ".alignment_bytes", absl::StrCat(address, "; less than an element has"));
  }
  const bool a_along_k = of.layout == GemmLayout::kNT || of.layout == GemmLayout::kNN;
  const bool b_along_k = of.layout == GemmLayout::kNT || of.layout == GemmLayout::kTT;
  RETURN_IF_ERROR(SetOperand({.stride = shape.a_stride(),
                              .inner = a_along_k ? problem.k : problem.m,
                              .outer = a_along_k ? problem.m : problem.k,
                              .k_contiguous = a_along_k},
                             address, problem.batch, field, ".a_stride", params.a));
  RETURN_IF_ERROR(SetOperand({.stride = shape.b_stride(),
                              .inner = b_along_k ? problem.k : problem.n,
                              .outer = b_along_k ? problem.n : problem.k,
                              .k_contiguous = b_along_k},
                             address, problem.batch, field, ".b_stride", params.b));
  params.d = {.data = reinterpret_cast<void*>(address), .row_stride = problem.n, .col_stride = 1};
  if (problem.batch > 1) params.d.batch_stride[kernels::kGemmBatchDimsMax - 1] = problem.m * problem.n;
  problem.addressable = kernels::AddressableBy(of, params);
  return problem;
}

}  // namespace

absl::StatusOr<ProbedProblem> DecodeProblem(const v1::Problem& problem, std::string_view field) {
  ProbedProblem decoded;
  if (problem.kind_case() != v1::Problem::kGemm) return Invalid(field, "", "no problem is set; give gemm");
  ASSIGN_OR_RETURN(decoded.gemm, DecodeShape(problem.gemm(), absl::StrCat(Av(field), ".gemm")));
  ASSIGN_OR_RETURN(decoded.backend, DecodeBackend(problem.backend(), absl::StrCat(Av(field), ".backend")));
  if (problem.device().size() > 64) return Invalid(field, ".device", "a name has at most 64 bytes");
  decoded.device = problem.device();
  return decoded;
}

}  // namespace tessera::server
