#include "tests/fuzz/bound_checks.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <vector>

namespace tessera::fuzz {
namespace {

using Wide = __int128;

constexpr std::int64_t kRankMost = 5;
constexpr std::int64_t kBatchDims = 3;
constexpr std::int64_t kExtentMost = 2'147'483'647;  // of M, N and K
constexpr std::int64_t kVisitsMost = 4'096;          // elements of one operand that brute force looks at
constexpr std::size_t kMemoryMost = 1 << 20;         // bytes of the largest buffer
constexpr Wide kFar = Wide{1} << 40;                 // bytes; beyond every storage of these tests

std::int64_t ElementBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
    case v1::DTYPE_F16:
      return 2;
    case v1::DTYPE_F32:
    case v1::DTYPE_S32:
      return 4;
    case v1::DTYPE_E4M3:
    case v1::DTYPE_E5M2:
    case v1::DTYPE_S8:
      return 1;
    default:
      return 0;
  }
}

bool IsFloat8(v1::DType dtype) {
  return dtype == v1::DTYPE_E4M3 || dtype == v1::DTYPE_E5M2;
}

bool LegalPair(v1::DType a, v1::DType b) {
  if (IsFloat8(a) || IsFloat8(b)) return IsFloat8(a) && IsFloat8(b);
  const auto legal = [](v1::DType dtype) { return dtype == v1::DTYPE_BF16 || dtype == v1::DTYPE_S8; };
  return legal(a) && legal(b);
}

// A tensor of the request and the memory that it is a view of.
struct Operand {
  std::string_view field;
  const v1::Tensor* tensor = nullptr;
  std::int64_t element_bytes = 0;
  int rank = 0;
  std::array<std::int64_t, kRankMost> extents{};
  std::array<std::int64_t, kRankMost> strides{};  // elements
  const std::byte* storage = nullptr;
  std::uint64_t storage_bytes = 0;
  std::optional<int> memory;  // where another operand may be, too
  std::uint64_t memory_offset = 0;

  std::int64_t FromEnd(int dim) const { return extents[rank - dim]; }
  bool Empty() const { return std::find(extents.begin(), extents.begin() + rank, 0) != extents.begin() + rank; }
  const std::byte* Data() const { return storage + tensor->byte_offset(); }
};

class Checker {
 public:
  Checker(const v1::GemmRequest& request, const server::BoundGemm& bound, const KnownBuffers& buffers,
          const std::string& inline_result, std::uint64_t inline_bytes_max)
      : request_(request),
        op_(request.op()),
        bound_(bound),
        buffers_(buffers),
        inline_result_(inline_result),
        inline_bytes_max_(inline_bytes_max) {}

  void Check() {
    a_ = Read("op.a", op_.a());
    b_ = Read("op.b", op_.b());
    d_ = Read("op.d", op_.d());
    if (op_.a_scale().has_vector()) a_scale_ = Read("op.a_scale.vector", op_.a_scale().vector());
    if (op_.b_scale().has_vector()) b_scale_ = Read("op.b_scale.vector", op_.b_scale().vector());
    if (op_.epilogue().has_bias()) bias_ = Read("op.epilogue.bias", op_.epilogue().bias());
    CheckTypes();
    CheckExtents();
    for (const Operand* operand : Operands()) CheckInside(*operand);
    CheckOutputStandsAlone();
    CheckProblem();
    CheckMatrix(a_, bound_.params.a);
    CheckMatrix(b_, bound_.params.b);
    CheckMatrix(d_, bound_.params.d);
    CheckVectors();
  }

 private:
  void Require(bool holds, std::string_view field, std::string_view what) const {
    if (!holds) BrokenPromise(request_, field, what);
  }

  std::vector<const Operand*> Operands() const {
    std::vector<const Operand*> operands = {&a_, &b_, &d_};
    for (const auto* optional : {&a_scale_, &b_scale_, &bias_}) {
      if (optional->has_value()) operands.push_back(&**optional);
    }
    return operands;
  }

  Operand Read(std::string_view field, const v1::Tensor& tensor) const {
    Operand operand{.field = field, .tensor = &tensor, .element_bytes = ElementBytes(tensor.dtype())};
    Require(operand.element_bytes > 0, field, "bound with an unknown dtype");
    Require(tensor.shape_size() <= kRankMost, field, "bound with a rank over 5");
    Require(tensor.strides_size() == 0 || tensor.strides_size() == tensor.shape_size(), field,
            "bound with a number of strides that is not its rank");
    operand.rank = tensor.shape_size();
    Wide packed = 1;
    for (int i = operand.rank - 1; i >= 0; --i) {
      operand.extents[i] = tensor.shape(i);
      Require(operand.extents[i] >= 0, field, "bound with a negative extent");
      Require(packed <= INT64_MAX, field, "bound with packed strides over 2^63");
      operand.strides[i] = tensor.strides_size() == 0 ? static_cast<std::int64_t>(packed) : tensor.strides(i);
      Require(operand.strides[i] >= 0, field, "bound with a negative stride");
      packed *= std::max<std::int64_t>(1, operand.extents[i]);
    }
    FindStorage(operand);
    return operand;
  }

  void FindStorage(Operand& operand) const {
    const v1::Tensor& tensor = *operand.tensor;
    if (tensor.has_buffer_id()) {
      const auto known = buffers_.find(tensor.buffer_id());
      Require(known != buffers_.end(), operand.field, "bound to a buffer that the session may not use");
      operand.storage = known->second.data;
      operand.storage_bytes = known->second.bytes;
      operand.memory = known->second.memory;
      operand.memory_offset = known->second.memory_offset;
      return;
    }
    Require(tensor.has_inline_data() || tensor.has_inline_result(), operand.field, "bound without a storage");
    const bool is_output = operand.field == "op.d";
    Require(tensor.has_inline_result() == is_output, operand.field, "bound to inline storage of the wrong direction");
    const std::string& bytes = is_output ? inline_result_ : tensor.inline_data();
    Require(bytes.size() <= inline_bytes_max_, operand.field, "bound with more inline bytes than the limit");
    operand.storage = reinterpret_cast<const std::byte*>(bytes.data());
    operand.storage_bytes = bytes.size();
  }

  void CheckTypes() const {
    const v1::DType a = op_.a().dtype();
    const v1::DType b = op_.b().dtype();
    Require(LegalPair(a, b), "op.b.dtype", "bound a pair that has no product");
    Require(op_.d().dtype() == v1::DTYPE_BF16 || op_.d().dtype() == v1::DTYPE_F32, "op.d.dtype", "bound");
    for (const auto& [dtype, given, field] :
         {std::tuple{a, op_.has_a_scale(), "op.a_scale"}, std::tuple{b, op_.has_b_scale(), "op.b_scale"}}) {
      Require(dtype != v1::DTYPE_S8 || given, field, "bound s8 without a scale");
      Require(dtype != v1::DTYPE_BF16 || !given, field, "bound bf16 with a scale");
    }
  }

  void CheckExtents() {
    for (const Operand* matrix : {&a_, &b_, &d_}) Require(matrix->rank >= 2, matrix->field, "bound below rank 2");
    m_ = a_.FromEnd(2);
    n_ = b_.FromEnd(2);
    k_ = a_.FromEnd(1);
    Require(b_.FromEnd(1) == k_, "op.b.shape", "bound with another K than A");
    Require(d_.FromEnd(2) == m_, "op.d.shape", "bound with another M than A");
    Require(d_.FromEnd(1) == n_, "op.d.shape", "bound with another N than B");
    for (const std::int64_t extent : {m_, n_, k_})
      Require(extent <= kExtentMost, "op", "bound an extent over 2^31 - 1");
    for (const Operand* operand : {&a_, &b_}) {
      Require(operand->rank <= d_.rank, operand->field, "bound with more batch dimensions than D");
      for (int dim = 3; dim <= operand->rank; ++dim) {
        const std::int64_t extent = operand->FromEnd(dim);
        Require(extent == 1 || extent == d_.FromEnd(dim), operand->field, "bound with a batch that does not broadcast");
      }
    }
    CheckVectorShape(a_scale_, m_, /*one_for_all=*/true);
    CheckVectorShape(b_scale_, n_, /*one_for_all=*/true);
    CheckVectorShape(bias_, n_, /*one_for_all=*/false);
    const bool bias_is_bf16 = bias_.has_value() && bias_->tensor->dtype() == v1::DTYPE_BF16;
    for (const auto* vector : {&a_scale_, &b_scale_, &bias_}) {
      if (!vector->has_value() || (vector == &bias_ && bias_is_bf16)) continue;
      Require((*vector)->tensor->dtype() == v1::DTYPE_F32, (*vector)->field, "bound with a wrong dtype");
    }
  }

  void CheckVectorShape(const std::optional<Operand>& vector, std::int64_t extent, bool one_for_all) const {
    if (!vector.has_value()) return;
    Require(vector->rank == 1, vector->field, "bound, not a vector");
    Require(vector->extents[0] == extent || (one_for_all && vector->extents[0] == 1), vector->field,
            "bound with a wrong number of elements");
  }

  // Lowest and highest byte, and the alignment of the first element's address.
  void CheckInside(const Operand& operand) const {
    Wide end = operand.tensor->byte_offset();
    if (!operand.Empty()) {
      for (int i = 0; i < operand.rank; ++i) {
        const Wide reach = Wide{operand.extents[i] - 1} * operand.strides[i];
        Require(reach <= kFar, operand.field, "bound, reaches far past its storage");
        end += reach * operand.element_bytes;
      }
      end += operand.element_bytes;
    }
    Require(end <= operand.storage_bytes, operand.field, "bound, reaches past its storage");
    const auto address = reinterpret_cast<std::uintptr_t>(operand.Data());
    Require(address % operand.element_bytes == 0, operand.field, "bound at an address that its elements do not divide");
    if (operand.Empty()) return;
    // A sanitizer or the processor objects if either is not there.
    const volatile auto* bytes = reinterpret_cast<const volatile unsigned char*>(operand.storage);
    static_cast<void>(bytes[operand.tensor->byte_offset()]);
    static_cast<void>(bytes[static_cast<std::uint64_t>(end - 1)]);
  }

  // Calls `visit` with the offset in its memory of every byte of `operand`, once an index; of a corner of kVisitsMost
  // elements if it has more.
  template <typename Visit>
  static void ForEachByte(const Operand& operand, Visit visit) {
    std::array<std::int64_t, kRankMost> extents = operand.extents;
    std::int64_t room = kVisitsMost;
    for (int i = operand.rank - 1; i >= 0; --i) {
      extents[i] = std::min(extents[i], room);
      room /= std::max<std::int64_t>(1, extents[i]);
    }
    std::array<std::int64_t, kRankMost> index{};
    std::uint64_t at = operand.memory_offset + operand.tensor->byte_offset();
    int dim = 0;
    while (dim >= 0) {
      for (std::int64_t i = 0; i < operand.element_bytes; ++i) visit(at + i);
      for (dim = operand.rank - 1; dim >= 0; --dim) {
        // The stride of a single element is never walked and may be anything.
        const std::int64_t step = extents[dim] > 1 ? operand.strides[dim] * operand.element_bytes : 0;
        if (++index[dim] < extents[dim]) {
          at += step;
          break;
        }
        at -= step * (index[dim] - 1);
        index[dim] = 0;
      }
    }
  }

  void CheckOutputStandsAlone() {
    if (d_.Empty()) return;
    // Per byte of memory: the check that last saw D there.
    static std::vector<std::uint32_t>& seen = *new std::vector<std::uint32_t>(kMemoryMost);
    static std::uint32_t check = 0;
    if (++check == 0) {
      std::fill(seen.begin(), seen.end(), 0);
      check = 1;
    }
    ForEachByte(d_, [&](std::uint64_t at) {
      Require(seen[at] != check, "op.d", "bound, two of its elements share a byte");
      seen[at] = check;
    });
    for (const Operand* input : Operands()) {
      if (input == &d_ || input->Empty() || !d_.memory.has_value() || input->memory != d_.memory) continue;
      ForEachByte(*input, [&](std::uint64_t at) {
        Require(seen[at] != check, input->field, "bound, shares a byte with the output");
      });
    }
  }

  void CheckProblem() const {
    const planner::GemmProblem& problem = bound_.problem;
    Require(problem.m == m_ && problem.n == n_ && problem.k == k_, "op", "the problem has other extents");
    Wide flops = Wide{2} * m_ * n_;
    Wide batch = 1;
    for (int dim = 3; dim <= d_.rank; ++dim) {
      batch *= d_.FromEnd(dim);
      Require(batch <= INT64_MAX, "op.d.shape", "bound a batch over 2^63");
    }
    Require(problem.batch == batch, "op.d.shape", "the problem has another batch");
    // Each product is at most 2^126: 2^63 times 2^63, or is zero.
    Require(flops <= INT64_MAX && flops * batch <= INT64_MAX, "op", "bound more than 2^63 flops");
    flops *= batch;
    Require(flops * k_ <= INT64_MAX, "op", "bound more than 2^63 flops");
    flops *= k_;
    Require(bound_.Flops() == static_cast<std::uint64_t>(flops), "op", "flops are miscounted");
    Require(bound_.Empty() == d_.Empty(), "op.d.shape", "emptiness is misjudged");
    const kernels::GemmClass& gemm_class = problem.gemm_class;
    Require(static_cast<int>(gemm_class.a) == op_.a().dtype(), "op.a.dtype", "the class has another type");
    Require(static_cast<int>(gemm_class.b) == op_.b().dtype(), "op.b.dtype", "the class has another type");
    Require(static_cast<int>(gemm_class.out) == op_.d().dtype(), "op.d.dtype", "the class has another type");
    const bool exact = op_.accumulation() == v1::ACCUMULATION_EXACT && IsFloat8(op_.a().dtype());
    Require((gemm_class.accumulation == kernels::Accumulation::kExact) == exact, "op.accumulation", "misread");
    CheckLayout(a_, gemm_class.layout == kernels::GemmLayout::kNT || gemm_class.layout == kernels::GemmLayout::kNN);
    CheckLayout(b_, gemm_class.layout == kernels::GemmLayout::kNT || gemm_class.layout == kernels::GemmLayout::kTT);
  }

  // Where exactly one of the two last strides is 1, the layout is not a matter of taste.
  void CheckLayout(const Operand& operand, bool k_contiguous) const {
    const std::int64_t row_stride = operand.strides[operand.rank - 2];
    const std::int64_t k_stride = operand.strides[operand.rank - 1];
    if ((row_stride == 1) == (k_stride == 1)) return;
    Require(k_contiguous == (k_stride == 1), operand.field, "the class has another layout");
  }

  // The parameters' address of every corner of the product's index space is the request's.
  void CheckMatrix(const Operand& operand, const kernels::GemmMatrix& matrix) const {
    Require(matrix.data == operand.Data(), operand.field, "the parameters begin elsewhere");
    const bool is_a = &operand == &a_;
    const bool is_d = &operand == &d_;
    Require(bound_.params.m == m_ && bound_.params.n == n_ && bound_.params.k == k_, "op", "parameters differ");
    if (d_.Empty()) return;
    std::array<std::int64_t, kBatchDims + 2> extents = {1, 1, 1, is_a || is_d ? m_ : n_, is_d ? n_ : k_};
    for (int dim = 3; dim <= d_.rank; ++dim) extents[5 - dim] = d_.FromEnd(dim);
    for (int i = 0; i < kBatchDims; ++i) {
      Require(bound_.params.batch_shape[i] == extents[i], "op.d.shape", "the parameters have another batch");
    }
    for (unsigned corner = 0; corner < 32; ++corner) {
      Wide is = 0;
      Wide should = 0;
      for (int i = 0; i < kBatchDims + 2; ++i) {
        const Wide index = (corner >> i & 1U) != 0 ? std::max<std::int64_t>(1, extents[i]) - 1 : 0;
        const std::int64_t stride = i < kBatchDims    ? matrix.batch_stride[i]
                                    : i == kBatchDims ? matrix.row_stride
                                                      : matrix.col_stride;
        is += index * stride;
        const int dim = 5 - i;  // from the end
        if (dim <= operand.rank && operand.FromEnd(dim) != 1) should += index * operand.strides[operand.rank - dim];
      }
      Require(operand.Empty() || is == should, operand.field, "the parameters name other elements");
      // Where K is 0, kernels have nothing to read of A and B, but step over their rows all the same.
      Require(is <= kFar, operand.field, "K is 0, and the parameters' strides overflow an address");
    }
  }

  void CheckVectors() const {
    CheckScale("op.a_scale", op_.has_a_scale(), op_.a_scale(), a_scale_, m_, bound_.params.a_scale);
    CheckScale("op.b_scale", op_.has_b_scale(), op_.b_scale(), b_scale_, n_, bound_.params.b_scale);
    const kernels::GemmBias& bias = bound_.params.bias;
    if (!bias_.has_value()) return Require(bias.data == nullptr, "op.epilogue.bias", "made up");
    Require(bias.data == bias_->Data() && static_cast<int>(bias.dtype) == bias_->tensor->dtype(), bias_->field,
            "the parameters begin elsewhere");
    Require(n_ <= 1 || bias.stride == bias_->strides[0], bias_->field, "the parameters name other elements");
  }

  void CheckScale(std::string_view field, bool given, const v1::Scale& wire, const std::optional<Operand>& vector,
                  std::int64_t extent, const kernels::GemmScale& scale) const {
    if (!vector.has_value()) {
      const float scalar = given ? wire.scalar() : 1.0F;
      return Require(scale.vector == nullptr && scale.scalar == scalar, field, "the parameters have another value");
    }
    Require(static_cast<const void*>(scale.vector) == vector->Data(), field, "the parameters begin elsewhere");
    const std::int64_t stride = vector->extents[0] == 1 ? 0 : vector->strides[0];
    Require(extent <= 1 || scale.stride == stride, field, "the parameters name other elements");
  }

  const v1::GemmRequest& request_;
  const v1::GemmOp& op_;
  const server::BoundGemm& bound_;
  const KnownBuffers& buffers_;
  const std::string& inline_result_;
  const std::uint64_t inline_bytes_max_;
  Operand a_, b_, d_;
  std::optional<Operand> a_scale_, b_scale_, bias_;
  std::int64_t m_ = 0, n_ = 0, k_ = 0;
};

}  // namespace

void BrokenPromise(const v1::GemmRequest& request, std::string_view field, std::string_view what) {
  std::cerr << "broken promise: " << field << ": " << what << "\nof the request\n" << request.DebugString();
  std::abort();
}

void CheckBound(const v1::GemmRequest& request, const server::BoundGemm& bound, const KnownBuffers& buffers,
                const std::string& inline_result, std::uint64_t inline_bytes_max) {
  Checker(request, bound, buffers, inline_result, inline_bytes_max).Check();
}

}  // namespace tessera::fuzz
