#include "tests/fuzz/request_mutator.h"

#include <google/protobuf/repeated_field.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/fuzz/gemm_request.h"

namespace tessera::fuzz {
namespace {

using google::protobuf::RepeatedField;

constexpr std::int64_t kMax64 = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t k2To31 = std::int64_t{1} << 31;
constexpr std::int64_t k2To32 = std::int64_t{1} << 32;
constexpr std::int64_t k2To62 = std::int64_t{1} << 62;
constexpr std::uint64_t k2To63 = std::uint64_t{1} << 63;
constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::uint64_t>::max();
constexpr std::int64_t kExtents[] = {0,   1,     2,     3,      4,          8,      16,     31,     96,     128,
                                     511, 1'024, 2'048, 65'536, k2To31 - 1, k2To31, k2To32, k2To62, kMax64, -1};
constexpr std::int64_t kStrides[] = {0,     1,     2,      3,          7,      8,          16,         64,     256,
                                     1'024, 4'096, k2To32, k2To62 / 2, k2To62, kMax64 / 4, kMax64 - 1, kMax64, -1};
// Around the ends of the known buffers, and of 64 bits.
constexpr std::uint64_t kOffsets[] = {0,     1,     2,     4,     32,     63,        64,     1'024,  1'025,
                                      4'092, 4'094, 4'096, 8'188, 65'534, 1'048'572, k2To32, k2To63, kMaxOffset};
constexpr float kScalars[] = {0.0F, 1.0F, -2.5F, 1e-40F, 3e38F, HUGE_VALF, -HUGE_VALF, NAN};

struct Pair {
  v1::DType a, b;
};
constexpr Pair kPairs[] = {{v1::DTYPE_BF16, v1::DTYPE_BF16}, {v1::DTYPE_E4M3, v1::DTYPE_E4M3},
                           {v1::DTYPE_E4M3, v1::DTYPE_E5M2}, {v1::DTYPE_E5M2, v1::DTYPE_E4M3},
                           {v1::DTYPE_E5M2, v1::DTYPE_E5M2}, {v1::DTYPE_S8, v1::DTYPE_S8},
                           {v1::DTYPE_BF16, v1::DTYPE_S8},   {v1::DTYPE_S8, v1::DTYPE_BF16}};

// Of the types that are served.
std::uint64_t ElementBytes(const v1::Tensor& tensor) {
  if (tensor.dtype() == v1::DTYPE_F32) return 4;
  return tensor.dtype() == v1::DTYPE_BF16 ? 2 : 1;
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  void Mutate(v1::GemmRequest& request) {
    if (OneIn(12)) return MakeLegal(request);
    if (OneIn(3)) return ChangeOneField(request);
    ChangeTogether(*request.mutable_op());
  }

 private:
  std::size_t Below(std::size_t n) { return random_() % n; }
  bool OneIn(std::size_t n) { return Below(n) == 0; }

  template <typename T, std::size_t kCount>
  T Any(const T (&values)[kCount]) {
    return values[Below(kCount)];
  }

  // A known value, or one beside the present one.
  template <typename T, std::size_t kCount>
  T Near(T value, const T (&values)[kCount]) {
    using Unsigned = std::make_unsigned_t<T>;  // wraps
    if (OneIn(2)) return Any(values);
    return static_cast<T>(static_cast<Unsigned>(value) + static_cast<Unsigned>(Below(9)) - Unsigned{4});
  }

  // Changes of one field.

  void ChangeOneField(v1::GemmRequest& request) {
    v1::GemmOp& op = *request.mutable_op();
    switch (Below(12)) {
      case 0:
        return ChangeOptions(*request.mutable_options());
      case 1:
        return op.set_accumulation(static_cast<v1::Accumulation>(Below(4)));
      case 2:
        return ChangeScale(OneIn(2) ? *op.mutable_a_scale() : *op.mutable_b_scale());
      case 3:
        return DropPart(op);
      default:
        return ChangeTensor(AnyTensor(op));
    }
  }

  void ChangeOptions(v1::SubmitOptions& options) {
    switch (Below(8)) {
      case 0:
        return options.set_reply_when(static_cast<v1::ReplyWhen>(Below(4)));
      case 1:
        return options.set_profile(!options.profile());
      case 2:
        return options.set_stream(OneIn(2) ? "s" : "0123456789abcdef");
      case 3: {
        v1::SyncPoint& point = OneIn(2) ? *options.add_wait() : *options.add_signal();
        if (!OneIn(4)) point.set_id("0123456789abcdef");
        point.set_value(Below(3));
        return;
      }
      case 4:
        return options.Clear();
      default:
        return options.set_backend(static_cast<v1::Backend>(Below(6)));
    }
  }

  void ChangeScale(v1::Scale& scale) {
    if (OneIn(3)) return scale.clear_value();
    if (OneIn(2)) return scale.set_scalar(Any(kScalars));
    ChangeTensor(*scale.mutable_vector());
  }

  void DropPart(v1::GemmOp& op) {
    switch (Below(6)) {
      case 0:
        return op.clear_a_scale();
      case 1:
        return op.clear_b_scale();
      case 2:
        return op.clear_epilogue();
      case 3:
        return op.clear_a();
      case 4:
        return op.clear_d();
      default:
        return AnyTensor(op).clear_strides();
    }
  }

  v1::Tensor& AnyTensor(v1::GemmOp& op) {
    switch (Below(9)) {
      case 0:
        return *op.mutable_a_scale()->mutable_vector();
      case 1:
        return *op.mutable_b_scale()->mutable_vector();
      case 2:
        return *op.mutable_epilogue()->mutable_bias();
      case 3:
      case 4:
        return *op.mutable_a();
      case 5:
      case 6:
        return *op.mutable_b();
      default:
        return *op.mutable_d();
    }
  }

  void ChangeTensor(v1::Tensor& tensor) {
    switch (Below(7)) {
      case 0:
        return ChangeStorage(tensor);
      case 1:
        return tensor.set_byte_offset(Near(tensor.byte_offset(), kOffsets));
      case 2:
        return tensor.set_dtype(static_cast<v1::DType>(Below(9)));
      case 3:
        return ChangeRank(tensor);
      case 4:
        return ChangeOne(*tensor.mutable_shape(), kExtents);
      default:
        if (tensor.strides_size() == 0) LayOut(tensor);
        return ChangeOne(*tensor.mutable_strides(), kStrides);
    }
  }

  void ChangeStorage(v1::Tensor& tensor) {
    switch (Below(6)) {
      case 0:
        return tensor.set_inline_data(std::string(Below(kInlineBytesMax + 8), '\x3c'));
      case 1:
        tensor.mutable_inline_result();
        return;
      case 2:
        return tensor.set_buffer_id(std::string(Below(20), '\x01'));
      case 3:
        return tensor.clear_storage();
      default:
        return tensor.set_buffer_id(std::string(1, static_cast<char>(Below(kKnownIds))));
    }
  }

  void ChangeRank(v1::Tensor& tensor) {
    const bool strided = Strided(tensor);
    if (tensor.shape_size() > 0 && OneIn(2)) {
      tensor.mutable_shape()->RemoveLast();
      if (strided) tensor.mutable_strides()->RemoveLast();
      return;
    }
    tensor.add_shape(Any(kExtents));
    if (strided) tensor.add_strides(Any(kStrides));
    std::rotate(tensor.mutable_shape()->begin(), tensor.mutable_shape()->end() - 1, tensor.mutable_shape()->end());
  }

  template <std::size_t kCount>
  void ChangeOne(RepeatedField<std::int64_t>& values, const std::int64_t (&known)[kCount]) {
    if (values.empty()) return values.Add(Any(known));
    const int at = static_cast<int>(Below(values.size()));
    values.Set(at, Near(values.Get(at), known));
  }

  // Changes of several fields, so that a legal request stays legal.

  void ChangeTogether(v1::GemmOp& op) {
    switch (Below(8)) {
      case 0:
        return SetPair(op);
      case 1:
        return SetExtents(op);
      case 2:
        return SetBatch(op);
      case 3:
        return LayOut(OneIn(3) ? *op.mutable_d() : OneIn(2) ? *op.mutable_a() : *op.mutable_b());
      case 4:
        return ShareParent(op);
      case 5:
        return MakeInline(op);
      default:
        return Move(AnyGiven(op));
    }
  }

  v1::Tensor& AnyGiven(v1::GemmOp& op) {
    std::vector<v1::Tensor*> given = {op.mutable_a(), op.mutable_b(), op.mutable_d()};
    if (op.a_scale().has_vector()) given.push_back(op.mutable_a_scale()->mutable_vector());
    if (op.b_scale().has_vector()) given.push_back(op.mutable_b_scale()->mutable_vector());
    if (op.epilogue().has_bias()) given.push_back(op.mutable_epilogue()->mutable_bias());
    return *given[Below(given.size())];
  }

  // Whatever was refused about the request, back to one that is served.
  void MakeLegal(v1::GemmRequest& request) {
    request.clear_options();
    v1::GemmOp& op = *request.mutable_op();
    op.clear_epilogue();
    op.set_accumulation(static_cast<v1::Accumulation>(Below(3)));
    for (v1::Tensor* operand : {op.mutable_a(), op.mutable_b(), op.mutable_d()}) {
      operand->mutable_shape()->Resize(2, 1);
      Move(*operand);
    }
    SetExtents(op);
    SetBatch(op);
    SetPair(op);
    if (OneIn(2)) return;
    v1::Tensor& bias = *op.mutable_epilogue()->mutable_bias();
    bias.set_dtype(OneIn(2) ? v1::DTYPE_BF16 : v1::DTYPE_F32);
    bias.add_shape(op.d().shape(op.d().shape_size() - 1));
    Move(bias);
  }

  void SetPair(v1::GemmOp& op) {
    const Pair pair = Any(kPairs);
    op.mutable_a()->set_dtype(pair.a);
    op.mutable_b()->set_dtype(pair.b);
    op.mutable_d()->set_dtype(OneIn(2) ? v1::DTYPE_BF16 : v1::DTYPE_F32);
    op.clear_a_scale();
    op.clear_b_scale();
    if (pair.a != v1::DTYPE_BF16) GiveScale(*op.mutable_a_scale(), op.a());
    if (pair.b != v1::DTYPE_BF16) GiveScale(*op.mutable_b_scale(), op.b());
  }

  void GiveScale(v1::Scale& scale, const v1::Tensor& operand) {
    if (operand.shape_size() < 2 || OneIn(3)) return scale.set_scalar(0.5F);
    v1::Tensor& vector = *scale.mutable_vector();
    vector.Clear();
    vector.set_dtype(v1::DTYPE_F32);
    vector.add_shape(OneIn(3) ? 1 : operand.shape(operand.shape_size() - 2));
    if (OneIn(3)) vector.add_strides(Any(kStrides));
    Move(vector);
  }

  // New M, N and K, packed.
  void SetExtents(v1::GemmOp& op) {
    const std::int64_t m = AnyExtent();
    const std::int64_t n = AnyExtent();
    const std::int64_t k = AnyExtent();
    SetLast(*op.mutable_a(), {m, k});
    SetLast(*op.mutable_b(), {n, k});
    SetLast(*op.mutable_d(), {m, n});
    if (op.a_scale().has_vector()) SetLast(*op.mutable_a_scale()->mutable_vector(), {m});
    if (op.b_scale().has_vector()) SetLast(*op.mutable_b_scale()->mutable_vector(), {n});
    if (op.epilogue().has_bias()) SetLast(*op.mutable_epilogue()->mutable_bias(), {n});
  }

  std::int64_t AnyExtent() { return OneIn(4) ? Any(kExtents) : static_cast<std::int64_t>(Below(10)); }

  static void SetLast(v1::Tensor& tensor, std::initializer_list<std::int64_t> extents) {
    const int count = static_cast<int>(extents.size());
    while (tensor.shape_size() < count) tensor.add_shape(1);
    std::copy(extents.begin(), extents.end(), tensor.mutable_shape()->end() - count);
    tensor.clear_strides();
  }

  // New batch dimensions: all of them in D, and in A and B what broadcasts to them.
  void SetBatch(v1::GemmOp& op) {
    std::vector<std::int64_t> batch(Below(4));
    for (std::int64_t& extent : batch) extent = static_cast<std::int64_t>(Below(4));
    PutBatch(*op.mutable_d(), batch);
    for (v1::Tensor* operand : {op.mutable_a(), op.mutable_b()}) {
      std::vector<std::int64_t> own(batch.begin() + static_cast<std::ptrdiff_t>(Below(batch.size() + 1)), batch.end());
      for (std::int64_t& extent : own) extent = OneIn(3) ? 1 : extent;
      PutBatch(*operand, own);
      if (OneIn(3)) LayOut(*operand);
      for (int i = 0; i < operand->strides_size() - 2; ++i) {
        if (OneIn(2)) operand->set_strides(i, 0);
      }
    }
  }

  static bool Strided(const v1::Tensor& tensor) { return tensor.strides_size() == tensor.shape_size(); }

  static void PutBatch(v1::Tensor& tensor, const std::vector<std::int64_t>& batch) {
    if (tensor.shape_size() < 2) return;
    const std::int64_t last[] = {tensor.shape(tensor.shape_size() - 2), tensor.shape(tensor.shape_size() - 1)};
    tensor.mutable_shape()->Assign(batch.begin(), batch.end());
    tensor.mutable_shape()->Add(std::begin(last), std::end(last));
    tensor.clear_strides();
  }

  // Strides of the tensor as packed rows, padded rows, or with its last two dimensions the other way round.
  void LayOut(v1::Tensor& tensor) {
    const int rank = tensor.shape_size();
    const bool swapped = rank >= 2 && OneIn(2);
    const std::uint64_t padding = OneIn(2) ? Below(8) : 0;
    tensor.mutable_strides()->Resize(rank, 0);
    std::uint64_t stride = 1;  // wraps
    for (int i = rank - 1; i >= 0; --i) {
      const int dim = swapped && i >= rank - 2 ? 2 * rank - 3 - i : i;
      tensor.set_strides(dim, static_cast<std::int64_t>(stride));
      stride = stride * static_cast<std::uint64_t>(std::max<std::int64_t>(1, tensor.shape(dim))) + padding;
    }
  }

  // D beside, or across, an input in one parent with rows of a power of two.
  void ShareParent(v1::GemmOp& op) {
    const std::int64_t pitch = std::int64_t{16} << Below(6);
    v1::Tensor& d = *op.mutable_d();
    v1::Tensor& input = OneIn(2) ? *op.mutable_a() : *op.mutable_b();
    const bool imported = OneIn(3);
    Place(input, imported ? KnownId::kImported : KnownId::k64KiB, Below(128) * ElementBytes(input));
    Place(d, imported ? KnownId::kImportedTail : KnownId::k64KiB, Below(64) * 4 + (imported ? 3 : 0));
    for (v1::Tensor* tensor : {&d, &input}) {
      LayOut(*tensor);
      const int rows = tensor->strides_size() - 2;
      if (rows >= 0) tensor->set_strides(rows, pitch / static_cast<std::int64_t>(ElementBytes(*tensor)));
    }
  }

  // As much inline data as the packed tensor needs, give or take a byte now and then.
  void MakeInline(v1::GemmOp& op) {
    if (OneIn(3)) {
      op.mutable_d()->mutable_inline_result();
      op.mutable_d()->clear_strides();
      return op.mutable_d()->clear_byte_offset();
    }
    v1::Tensor& tensor = OneIn(2) ? *op.mutable_a() : *op.mutable_b();
    std::uint64_t bytes = ElementBytes(tensor);  // wraps
    for (const std::int64_t extent : tensor.shape()) bytes *= static_cast<std::uint64_t>(extent);
    if (OneIn(8)) bytes += Below(3) - 1;
    if (bytes > kInlineBytesMax + 1) return;
    tensor.set_inline_data(std::string(bytes, '\x3c'));
    tensor.clear_strides();
    tensor.clear_byte_offset();
  }

  // To a buffer that the session may use.
  void Move(v1::Tensor& tensor) {
    constexpr KnownId kUsable[] = {KnownId::k64Bytes, KnownId::k4KiB,     KnownId::k64KiB,
                                   KnownId::k1MiB,    KnownId::kImported, KnownId::kImportedTail};
    const KnownId id = Any(kUsable);
    Place(tensor, id, Below(64) * 4 + (id == KnownId::kImportedTail ? 3 : 0));
  }

  static void Place(v1::Tensor& tensor, KnownId id, std::uint64_t byte_offset) {
    tensor.set_buffer_id(std::string(1, static_cast<char>(id)));
    tensor.set_byte_offset(byte_offset);
  }

  std::minstd_rand random_;
};

}  // namespace

void MutateRequest(v1::GemmRequest& request, std::uint32_t seed) {
  Mutator(seed).Mutate(request);
}

}  // namespace tessera::fuzz
