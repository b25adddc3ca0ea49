// Every field of a GEMM on shared memory, wrong in every way: each request is answered with the code that the wire
// contract names and the field's path, changes nothing, and leaves the session able to compute.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "common/unique_fd.h"
#include "tests/e2e/bad_input_fixture.h"

namespace tessera::e2e {
namespace {

using grpc::StatusCode;
using Shape = std::vector<std::int64_t>;

constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t k2To31 = std::int64_t{1} << 31;
constexpr std::int64_t k2To32 = std::int64_t{1} << 32;

// Mutations, so that a row of a table is one line.

using Of = v1::Tensor& (*)(v1::GemmRequest&);

void SetView(v1::Tensor& tensor, const Shape& shape, const Shape& strides) {
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.mutable_strides()->Assign(strides.begin(), strides.end());
}

Mutation View(Of of, const Shape& shape, const Shape& strides = {}) {
  return [=](v1::GemmRequest& request) { SetView(of(request), shape, strides); };
}
Mutation Strides(Of of, const Shape& strides) {
  return [=](v1::GemmRequest& request) { of(request).mutable_strides()->Assign(strides.begin(), strides.end()); };
}
Mutation Offset(Of of, std::uint64_t byte_offset) {
  return [=](v1::GemmRequest& request) { of(request).set_byte_offset(byte_offset); };
}
Mutation Type(Of of, int dtype) {
  return [=](v1::GemmRequest& request) { of(request).set_dtype(static_cast<v1::DType>(dtype)); };
}
Mutation Types(int a, int b) {
  return [=](v1::GemmRequest& request) {
    Type(&A, a)(request);
    Type(&B, b)(request);
  };
}
Mutation Op(const std::function<void(v1::GemmOp&)>& change) {
  return [=](v1::GemmRequest& request) { change(*request.mutable_op()); };
}
Mutation All(const std::vector<Mutation>& mutations) {
  return [=](v1::GemmRequest& request) {
    for (const Mutation& mutate : mutations) mutate(request);
  };
}

class BadInputTest : public BadInputFixture {
 protected:
  // The good call with everything, with each of its tensors in turn changed by `mutate`, is refused at `field` + part.
  struct BadTensor {
    std::string what;
    std::function<void(v1::Tensor& tensor)> mutate;
    StatusCode code;
    std::string part;
  };

  void ExpectEachOfEveryTensor(const std::vector<BadTensor>& rows) {
    std::vector<BadGemm> gemms;
    for (const Operand& operand : AllOperands()) {
      for (const BadTensor& row : rows) {
        const auto mutate = [&](v1::GemmRequest& request) { row.mutate(operand.of(request)); };
        gemms.push_back({std::string(operand.field) + ": " + row.what, mutate, row.code, operand.field + row.part});
      }
    }
    ExpectEach(operands_->Full(), gemms);
  }
};

TEST_F(BadInputTest, EveryTensorNeedsItsStorage) {
  const auto id = [](const std::string& bytes) { return [=](v1::Tensor& tensor) { tensor.set_buffer_id(bytes); }; };
  // The parts of an id are epoch, index, generation and nonce.
  const auto flipped = [&](std::size_t byte) {
    std::string bytes = operands_->id();
    bytes[byte] = static_cast<char>(bytes[byte] ^ 0x40);
    return id(bytes);
  };
  client::Buffer released = session_->Allocate(kOperandsBytes).value();
  const std::string released_id = released.id();
  ASSERT_TRUE(released.Release().ok());
  ExpectEachOfEveryTensor({
      {"no storage", [](v1::Tensor& tensor) { tensor.clear_storage(); }, kInvalid, ".storage: "},
      {"id of 0 bytes", id(""), kInvalid, ".buffer_id: "},
      {"id of 1 byte", id("x"), kInvalid, ".buffer_id: "},
      {"id of 15 bytes", id(operands_->id().substr(1)), kInvalid, ".buffer_id: "},
      {"id of 17 bytes", id(operands_->id() + "x"), kInvalid, ".buffer_id: "},
      {"id of 4096 bytes", id(std::string(4096, 'x')), kInvalid, ".buffer_id: "},
      {"zero id", id(std::string(16, '\0')), StatusCode::NOT_FOUND, ".buffer_id: "},
      {"other epoch", flipped(0), StatusCode::FAILED_PRECONDITION, ".buffer_id: "},
      {"other index", flipped(4), StatusCode::NOT_FOUND, ".buffer_id: "},
      {"index beyond all", flipped(7), StatusCode::NOT_FOUND, ".buffer_id: "},
      {"other generation", flipped(8), StatusCode::NOT_FOUND, ".buffer_id: "},
      {"other nonce", flipped(12), StatusCode::NOT_FOUND, ".buffer_id: "},
      {"last byte", flipped(15), StatusCode::NOT_FOUND, ".buffer_id: "},
      {"released", id(released_id), StatusCode::NOT_FOUND, ".buffer_id: "},
      {"another session's", id(foreign_->id()), StatusCode::PERMISSION_DENIED, ".buffer_id: "},
      {"the session's token", id(session_->token()), StatusCode::NOT_FOUND, ".buffer_id: "},
  });
}

TEST_F(BadInputTest, EveryTensorNeedsAViewThatCanBe) {
  const auto view = [](const Shape& shape, const Shape& strides = {}) {
    return [=](v1::Tensor& tensor) { SetView(tensor, shape, strides); };
  };
  const auto type = [](int dtype) { return [=](v1::Tensor& t) { t.set_dtype(static_cast<v1::DType>(dtype)); }; };
  const auto one_stride_more = [](v1::Tensor& tensor) { SetView(tensor, {4, 8}, {32, 8, 1}); };
  ExpectEachOfEveryTensor({
      {"no type", type(0), kInvalid, ".dtype: "},
      {"type 250", type(250), kInvalid, ".dtype: "},
      {"type 257, an 8-bit 1", type(257), kInvalid, ".dtype: "},
      {"type -1", type(-1), kInvalid, ".dtype: "},
      {"least type", type(std::numeric_limits<int>::min()), kInvalid, ".dtype: "},
      {"rank 6", view(Shape(6, 1)), kInvalid, ".shape: "},
      {"rank 65", view(Shape(65, 1), Shape(65, 1)), kInvalid, ".shape: "},
      {"rank 100000", view(Shape(100'000, 1)), kInvalid, ".shape: "},
      {"extent -1", view({-1, 8}), kInvalid, ".shape[0]: "},
      {"least extent", view({4, kMin}), kInvalid, ".shape[1]: "},
      {"2^63 - 1 by 2", view({kMax, 2}), kInvalid, ".shape: "},
      {"2^32 by 2^32", view({k2To32, k2To32}), kInvalid, ".shape: "},
      {"strides without shape", view({}, {1}), kInvalid, ".strides: "},
      {"one stride short", view({4, 8}, {1}), kInvalid, ".strides: "},
      {"one stride more", one_stride_more, kInvalid, ".strides: "},
      {"stride -1", view({4, 8}, {8, -1}), kInvalid, ".strides[1]: "},
      {"least stride", view({4, 8}, {kMin, 1}), kInvalid, ".strides[0]: "},
  });
}

TEST_F(BadInputTest, EveryTensorLiesInItsStorage) {
  const auto stride = [](std::int64_t first) {
    return [=](v1::Tensor& tensor) {
      for (int i = 0; i < tensor.shape_size(); ++i) tensor.add_strides(i == 0 ? first : 1);
    };
  };
  const auto at = [](std::uint64_t offset) { return [=](v1::Tensor& tensor) { tensor.set_byte_offset(offset); }; };
  const std::uint64_t end = kOperandsBytes;
  ExpectEachOfEveryTensor({
      {"stride 2^63 - 1", stride(kMax), kInvalid, ": "},
      {"stride of nearly 2^63 / 3", stride(kMax / 3), kInvalid, ": "},
      {"stride 2^62", stride(std::int64_t{1} << 62), kInvalid, ": "},
      {"stride 2^61, 2^63 bytes of f32", stride(std::int64_t{1} << 61), kInvalid, ": "},
      {"stride 2^32", stride(k2To32), kInvalid, ": "},
      {"last row past the end", stride(1'280), kInvalid, ": "},
      {"last element past the end", at(end - 4), kInvalid, ": "},
      {"at the end", at(end), kInvalid, ": "},
      {"past the end", at(end + 8), kInvalid, ": "},
      {"at 2^63", at(std::uint64_t{1} << 63U), kInvalid, ": "},
      {"16 bytes before 2^64", at(0 - std::uint64_t{16}), kInvalid, ": "},
      {"8 bytes before 2^64", at(0 - std::uint64_t{8}), kInvalid, ": "},
      {"1 byte before 2^64", at(0 - std::uint64_t{1}), kInvalid, ": "},
  });
}

// Of a buffer, also where the memory goes on behind it.
TEST_F(BadInputTest, TheLastPlaceThatFitsComputesAndTheNextIsRefused) {
  constexpr std::uint64_t kRegisteredAt = 1'000;
  const UniqueFd memfd(::memfd_create("bad-input-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(memfd.get(), 4 * kOperandsBytes), 0);
  ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  for (const bool imported : {false, true}) {
    SCOPED_TRACE(imported ? "imported at an offset" : "allocated");
    if (imported) operands_.emplace(session_->Import(memfd.get(), kRegisteredAt, kOperandsBytes).value());
    for (const Operand& operand : AllOperands()) {
      SCOPED_TRACE(operand.field);
      const std::uint64_t last = kOperandsBytes - operand.bytes;
      GoodCall good = operands_->Full();
      operands_->Copy(operand.at, operand.bytes, last);
      operand.of(good.request).set_byte_offset(last);
      const std::uint64_t element = DTypeBytes(static_cast<DType>(operand.dtype));
      ExpectEach(good, {{"one element on", Offset(operand.of, last + element), kInvalid, operand.field, "storage has"},
                        {"one byte on", Offset(operand.of, last + 1), kInvalid, operand.field, "storage has"}});
    }
  }
}

TEST_F(BadInputTest, AddressesAreMultiplesOfTheElement) {
  ExpectEach(operands_->Full(), {{"a_scale", Offset(&AScale, 769), kInvalid, "op.a_scale.vector.byte_offset: "},
                                 {"b_scale", Offset(&BScale, 1'022), kInvalid, "op.b_scale.vector.byte_offset: "},
                                 {"bias", Offset(&Bias, 1'283), kInvalid, "op.epilogue.bias.byte_offset: "},
                                 {"d", Offset(&D, 1'538), kInvalid, "op.d.byte_offset: "}});
  ExpectEach(operands_->Plain(), {{"a", Offset(&A, 1'793), kInvalid, "op.a.byte_offset: "},
                                  {"b", Offset(&B, 2'047), kInvalid, "op.b.byte_offset: "},
                                  {"d", Offset(&D, 1'537), kInvalid, "op.d.byte_offset: "}});
}

TEST_F(BadInputTest, MatricesAreThereAndFitTogether) {
  ExpectEach(
      operands_->Full(),
      {{"empty message", [](v1::GemmRequest& request) { request.Clear(); }, kInvalid, "op.a: "},
       {"empty op", Op([](v1::GemmOp& op) { op.Clear(); }), kInvalid, "op.a: "},
       {"no a", Op([](v1::GemmOp& op) { op.clear_a(); }), kInvalid, "op.a: "},
       {"no b", Op([](v1::GemmOp& op) { op.clear_b(); }), kInvalid, "op.b: "},
       {"no d", Op([](v1::GemmOp& op) { op.clear_d(); }), kInvalid, "op.d: "},
       {"a of rank 0", View(&A, {}), kInvalid, "op.a.shape: "},
       {"a of rank 1", View(&A, {kK}), kInvalid, "op.a.shape: "},
       {"b of rank 0", View(&B, {}), kInvalid, "op.b.shape: "},
       {"b of rank 1", View(&B, {kK}), kInvalid, "op.b.shape: "},
       {"d of rank 0", View(&D, {}), kInvalid, "op.d.shape: "},
       {"d of rank 1", View(&D, {kN}), kInvalid, "op.d.shape: "},
       {"K less in a", View(&A, {kM, kK - 1}), kInvalid, "op.b.shape: "},
       {"K more in b", View(&B, {kN, kK + 1}), kInvalid, "op.b.shape: "},
       {"K of 1 in b", View(&B, {kN, 1}), kInvalid, "op.b.shape: "},
       {"b transposed", View(&B, {kK, kN}), kInvalid, "op.b.shape: "},
       {"M more in a", View(&A, {kM + 1, kK}), kInvalid, "op.d.shape: "},
       {"N less in b", View(&B, {kN - 1, kK}), kInvalid, "op.d.shape: "},
       {"M less in d", View(&D, {kM - 1, kN}), kInvalid, "op.d.shape: "},
       {"M of 0 in d", View(&D, {0, kN}), kInvalid, "op.d.shape: "},
       {"N more in d", View(&D, {kM, kN + 1}), kInvalid, "op.d.shape: "},
       {"d transposed", View(&D, {kN, kM}), kInvalid, "op.d.shape: "},
       {"a has a batch and d none", View(&A, {1, kM, kK}), kInvalid, "op.a.shape: "},
       {"b has a batch and d none", View(&B, {2, kN, kK}), kInvalid, "op.b.shape: "},
       {"batch of 2 in a and 3 in d", All({View(&A, {2, kM, kK}), View(&D, {3, kM, kN})}), kInvalid, "op.a.shape[0]: "},
       {"batch of 0 in b and 2 in d", All({View(&B, {0, kN, kK}), View(&D, {2, kM, kN})}), kInvalid, "op.b.shape[0]: "},
       {"batch of 2, 3 in a and 2, 2 in d", All({View(&A, {2, 3, kM, kK}), View(&D, {2, 2, kM, kN})}), kInvalid,
        "op.a.shape[1]: "},
       {"more batches in b than in d", All({View(&B, {1, 2, kN, kK}), View(&D, {2, kM, kN})}), kInvalid,
        "op.b.shape: "}});
}

TEST_F(BadInputTest, ExtentsAreBounded) {
  const std::int64_t most = k2To31 - 1;
  ExpectEach(
      operands_->Full(),
      {{"M of 2^31", All({View(&A, {k2To31, kK}, {0, 1}), View(&D, {k2To31, kN}, {0, 1})}), kInvalid, "op.a.shape: "},
       {"N of 2^31", All({View(&B, {k2To31, kK}, {0, 1}), View(&D, {kM, k2To31}, {0, 0})}), kInvalid, "op.b.shape: "},
       {"K of 2^31", All({View(&A, {kM, k2To31}, {0, 0}), View(&B, {kN, k2To31}, {0, 0})}), kInvalid, "op.a.shape: "},
       {"K of 2^63 - 1", All({View(&A, {kM, kMax}, {0, 0}), View(&B, {kN, kMax}, {0, 0})}), kInvalid, "op.a.shape: "},
       {"M and N of 2^32",
        All({View(&A, {k2To32, kK}, {0, 1}), View(&B, {k2To32, kK}, {0, 1}), View(&D, {k2To32, k2To32}, {0, 0})}),
        kInvalid, "op.a.shape: "},
       {"2^63 products",
        All({View(&A, {most, most}, {0, 0}), View(&B, {kN, most}, {0, 0}), View(&D, {most, kN}, {0, 0})}), kInvalid,
        "op.a.shape: "},
       {"M and N of 2^31 - 1, twice",
        All({View(&A, {most, kK}, {0, 0}), View(&B, {most, kK}, {0, 0}), View(&D, {2, most, most}, {0, 0, 0})}),
        kInvalid, "op.d.shape: "},
       {"batch of 2^64", View(&D, {k2To32, k2To32, kM, kN}, {0, 0, kN, 1}), kInvalid, "op.d.shape: "},
       {"M of 2^31 - 1 in 4096 bytes", All({View(&A, {most, kK}), View(&D, {most, kN})}), kInvalid, "op.a: "}});
}

TEST_F(BadInputTest, TypesHaveAProduct) {
  const int bf16 = v1::DTYPE_BF16;
  const int s8 = v1::DTYPE_S8;
  ExpectEach(operands_->Plain(), {{"bf16 f16", Types(bf16, v1::DTYPE_F16), kInvalid, "op.b.dtype: "},
                                  {"bf16 f32", Types(bf16, v1::DTYPE_F32), kInvalid, "op.b.dtype: "},
                                  {"bf16 s32", Types(bf16, v1::DTYPE_S32), kInvalid, "op.b.dtype: "},
                                  {"bf16 e4m3", Types(bf16, v1::DTYPE_E4M3), kInvalid, "op.b.dtype: "},
                                  {"e5m2 bf16", Types(v1::DTYPE_E5M2, bf16), kInvalid, "op.b.dtype: "},
                                  {"e5m2 s8", Types(v1::DTYPE_E5M2, s8), kInvalid, "op.b.dtype: "},
                                  {"s8 e4m3", Types(s8, v1::DTYPE_E4M3), kInvalid, "op.b.dtype: "},
                                  {"f16 bf16", Types(v1::DTYPE_F16, bf16), kInvalid, "op.a.dtype: ", "f16"},
                                  {"f16 f16", Types(v1::DTYPE_F16, v1::DTYPE_F16), kInvalid, "op.a.dtype: ", "f16"},
                                  {"f32 f32", Types(v1::DTYPE_F32, v1::DTYPE_F32), kInvalid, "op.a.dtype: ", "f32"},
                                  {"s32 s32", Types(v1::DTYPE_S32, v1::DTYPE_S32), kInvalid, "op.a.dtype: ", "s32"},
                                  {"d f16", Type(&D, v1::DTYPE_F16), kInvalid, "op.d.dtype: "},
                                  {"d e4m3", Type(&D, v1::DTYPE_E4M3), kInvalid, "op.d.dtype: "},
                                  {"d s8", Type(&D, v1::DTYPE_S8), kInvalid, "op.d.dtype: "},
                                  {"d s32", Type(&D, v1::DTYPE_S32), kInvalid, "op.d.dtype: "}});
}

TEST_F(BadInputTest, ScalesSuitTheirOperand) {
  using Scale = v1::Scale* (v1::GemmOp::*)();
  const struct {
    std::string field;
    Scale scale;
    Of vector;
    std::int64_t extent, other_extent;
  } sides[] = {{"op.a_scale", &v1::GemmOp::mutable_a_scale, &AScale, kM, kN},
               {"op.b_scale", &v1::GemmOp::mutable_b_scale, &BScale, kN, kM}};
  for (const auto& side : sides) {
    SCOPED_TRACE(side.field);
    const auto scalar = [&](float value) {
      return Op([&, value](v1::GemmOp& op) { (op.*side.scale)()->set_scalar(value); });
    };
    const std::string vector = side.field + ".vector";
    const std::int64_t extent = side.extent;
    const auto missing = [&](v1::GemmOp& op) { side.extent == kM ? op.clear_a_scale() : op.clear_b_scale(); };
    ExpectEach(
        operands_->Full(),
        {{"missing", Op(missing), kInvalid, side.field + ": "},
         {"neither", Op([&](v1::GemmOp& op) { (op.*side.scale)()->clear_value(); }), kInvalid, side.field + ": "},
         {"nan", scalar(std::nanf("")), kInvalid, side.field + ".scalar: "},
         {"inf", scalar(HUGE_VALF), kInvalid, side.field + ".scalar: "},
         {"-inf", scalar(-HUGE_VALF), kInvalid, side.field + ".scalar: "},
         {"rank 0", View(side.vector, {}), kInvalid, vector + ".shape: "},
         {"length 0", View(side.vector, {0}), kInvalid, vector + ".shape: "},
         {"one short", View(side.vector, {extent - 1}), kInvalid, vector + ".shape: "},
         {"one long", View(side.vector, {extent + 1}), kInvalid, vector + ".shape: "},
         {"the other's", View(side.vector, {side.other_extent}), kInvalid, vector + ".shape: "},
         {"column", View(side.vector, {extent, 1}), kInvalid, vector + ".shape: "},
         {"row", View(side.vector, {1, extent}), kInvalid, vector + ".shape: "},
         {"bf16", Type(side.vector, v1::DTYPE_BF16), kInvalid, vector + ".dtype: "},
         {"f16", Type(side.vector, v1::DTYPE_F16), kInvalid, vector + ".dtype: "},
         {"s32", Type(side.vector, v1::DTYPE_S32), kInvalid, vector + ".dtype: "}});
    const v1::GemmRequest full = operands_->Full().request;
    ExpectEach(operands_->Plain(),
               {{"scalar on bf16", scalar(1), kInvalid, side.field + ": "},
                {"vector on bf16", Op([&](v1::GemmOp& op) {
                   *(op.*side.scale)() = side.extent == kM ? full.op().a_scale() : full.op().b_scale();
                 }),
                 kInvalid, side.field + ": "},
                {"nothing on bf16", Op([&](v1::GemmOp& op) { (op.*side.scale)(); }), kInvalid, side.field + ": "}});
  }
}

TEST_F(BadInputTest, BiasAndAccumulation) {
  const auto accumulation = [](int value) {
    return Op([=](v1::GemmOp& op) { op.set_accumulation(static_cast<v1::Accumulation>(value)); });
  };
  const std::vector<BadGemm> accumulations = {{"77", accumulation(77), kInvalid, "op.accumulation: ", "77"},
                                              {"-1", accumulation(-1), kInvalid, "op.accumulation: ", "-1"}};
  ExpectEach(operands_->Full(), accumulations);
  ExpectEach(operands_->Plain(), accumulations);
  ExpectEach(operands_->Full(), {{"rank 0", View(&Bias, {}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"length 0", View(&Bias, {0}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"one for all", View(&Bias, {1}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"one short", View(&Bias, {kN - 1}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"one long", View(&Bias, {kN + 1}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"M", View(&Bias, {kM}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"row", View(&Bias, {1, kN}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"whole", View(&Bias, {kM, kN}), kInvalid, "op.epilogue.bias.shape: "},
                                 {"f16", Type(&Bias, v1::DTYPE_F16), kInvalid, "op.epilogue.bias.dtype: "},
                                 {"s32", Type(&Bias, v1::DTYPE_S32), kInvalid, "op.epilogue.bias.dtype: "},
                                 {"s8", Type(&Bias, v1::DTYPE_S8), kInvalid, "op.epilogue.bias.dtype: "}});
}

TEST_F(BadInputTest, OutputSharesNoByteWithAnInputOrItself) {
  std::vector<BadGemm> rows = {
      {"rows in one place", Strides(&D, {0, 1}), kInvalid, "op.d.strides: "},
      {"columns in one place", Strides(&D, {kN, 0}), kInvalid, "op.d.strides: "},
      {"all in one place", Strides(&D, {0, 0}), kInvalid, "op.d.strides: "},
      {"rows too close", Strides(&D, {kN - 1, 1}), kInvalid, "op.d.strides: "},
      {"columns too close", Strides(&D, {1, kM - 1}), kInvalid, "op.d.strides: "},
      {"batches in one place", View(&D, {2, kM, kN}, {0, kN, 1}), kInvalid, "op.d.strides: "},
      {"batches too close", View(&D, {2, kM, kN}, {kM * kN - 1, kN, 1}), kInvalid, "op.d.strides: "}};
  const std::uint64_t d_bytes = AllOperands().back().bytes;
  for (std::size_t i = 0; i + 1 < AllOperands().size(); ++i) {
    const Operand& input = AllOperands()[i];
    const std::string overlaps = std::string("op.d: overlaps ") + input.field;
    rows.push_back({overlaps + " from its start", Offset(&D, input.at), kInvalid, overlaps});
    rows.push_back({overlaps + " amid it", Offset(&D, input.at - 40), kInvalid, overlaps});
    rows.push_back({overlaps + " with its end", Offset(&D, input.at - d_bytes + 4), kInvalid, overlaps});
    rows.push_back({overlaps + " at its end", Offset(&D, input.at + input.bytes - 4), kInvalid, overlaps});
    for (const std::uint64_t apart : {input.at - d_bytes, input.at + input.bytes}) {
      GoodCall neighbour = operands_->Full();
      D(neighbour.request).set_byte_offset(apart);
      ExpectRight(neighbour);
    }
  }
  ExpectEach(operands_->Full(), rows);
}

TEST_F(BadInputTest, OverlapIsSeenThroughTwoBuffersOfOneMemory) {
  const UniqueFd memfd(::memfd_create("bad-input-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(memfd.get(), kOperandsBytes), 0);
  ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  operands_.emplace(session_->Import(memfd.get()).value());
  constexpr std::uint64_t kTailAt = 100;
  const client::Buffer tail = session_->Import(memfd.get(), kTailAt).value();
  const std::uint64_t d_bytes = AllOperands().back().bytes;
  std::vector<BadGemm> rows;
  for (std::size_t i = 0; i + 1 < AllOperands().size(); ++i) {
    const Operand& input = AllOperands()[i];
    for (const std::uint64_t at : {input.at - d_bytes + 4, input.at, input.at + input.bytes - 4}) {
      const auto move = [at, id = tail.id()](v1::GemmRequest& request) {
        D(request).set_buffer_id(id);
        D(request).set_byte_offset(at - kTailAt);
      };
      rows.push_back({std::string(input.field) + " at " + std::to_string(at), move, kInvalid,
                      std::string("op.d: overlaps ") + input.field});
    }
  }
  ExpectEach(operands_->Full(), rows);
}

}  // namespace
}  // namespace tessera::e2e
