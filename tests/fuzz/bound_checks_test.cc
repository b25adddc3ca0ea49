// The fuzzer's checks see what they are there to see: one good bound request, and each way in which it could be wrong.
#include "tests/fuzz/bound_checks.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>

namespace tessera::fuzz {
namespace {

constexpr std::uint64_t kInlineMax = 64;

void SetView(v1::Tensor& tensor, const std::string& buffer, v1::DType dtype, std::initializer_list<std::int64_t> shape,
             std::initializer_list<std::int64_t> strides = {}) {
  tensor.set_buffer_id(buffer);
  tensor.set_dtype(dtype);
  tensor.clear_shape();
  tensor.clear_strides();
  for (const std::int64_t extent : shape) tensor.add_shape(extent);
  for (const std::int64_t stride : strides) tensor.add_strides(stride);
}

// [2, 3, 4] x [2, 4] -> [2, 3, 2] of s8, with both scales and a bias, and what binding should make of it.
struct Case {
  Case() {
    v1::GemmOp& op = *request.mutable_op();
    SetView(*op.mutable_a(), "inputs", v1::DTYPE_S8, {2, 3, 4});
    SetView(*op.mutable_b(), "inputs", v1::DTYPE_S8, {2, 4});
    SetView(*op.mutable_d(), "output", v1::DTYPE_F32, {2, 3, 2});
    SetView(*op.mutable_a_scale()->mutable_vector(), "inputs", v1::DTYPE_F32, {3});
    op.mutable_b_scale()->set_scalar(2.0F);
    SetView(*op.mutable_epilogue()->mutable_bias(), "inputs", v1::DTYPE_F32, {2}, {3});
    bound.problem = {
        .gemm_class = {.a = DType::kS8, .b = DType::kS8, .out = DType::kF32}, .batch = 2, .m = 3, .n = 2, .k = 4};
    kernels::GemmParams& params = bound.params;
    params.m = 3;
    params.n = 2;
    params.k = 4;
    params.batch_shape[2] = 2;
    params.a = {.data = inputs.data(), .row_stride = 4, .col_stride = 1, .batch_stride = {0, 0, 12}};
    params.b = {.data = inputs.data(), .row_stride = 4, .col_stride = 1};
    params.d = {.data = output.data(), .row_stride = 2, .col_stride = 1, .batch_stride = {0, 0, 6}};
    params.a_scale = {.vector = reinterpret_cast<const float*>(inputs.data()), .stride = 1};
    params.b_scale.scalar = 2.0F;
    params.bias = {.data = inputs.data(), .stride = 3, .dtype = DType::kF32};
    buffers = {{"inputs", {.data = inputs.data(), .bytes = inputs.size(), .memory = 1}},
               {"output", {.data = output.data(), .bytes = output.size(), .memory = 2}}};
  }

  void Check() { CheckBound(request, bound, buffers, inline_result, kInlineMax); }

  alignas(4) std::array<std::byte, 24> inputs{};
  alignas(4) std::array<std::byte, 48> output{};
  v1::GemmRequest request;
  server::BoundGemm bound;
  KnownBuffers buffers;
  std::string inline_result;
};

TEST(BoundChecksTest, AGoodRequestPasses) {
  Case good;
  good.Check();
  good.request.mutable_op()->mutable_d()->mutable_inline_result();
  good.inline_result.resize(48);
  good.bound.params.d.data = good.inline_result.data();
  good.Check();
}

struct Row {
  const char* what;
  std::function<void(Case&, v1::GemmOp&)> spoil;
  const char* message;
};

void ExpectEachIsSeen(std::initializer_list<Row> rows) {
  GTEST_FLAG_SET(death_test_style, "fast");
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    Case spoilt;
    row.spoil(spoilt, *spoilt.request.mutable_op());
    EXPECT_DEATH(spoilt.Check(), std::string("broken promise: ") + row.message);
  }
}

TEST(BoundChecksDeathTest, ViewsOutsideTheirStorage) {
  ExpectEachIsSeen(
      {{"offset", [](Case&, v1::GemmOp& op) { op.mutable_a()->set_byte_offset(1); }, "op.a: .*past its storage"},
       {"stride",
        [](Case&, v1::GemmOp& op) {
          SetView(*op.mutable_b(), "inputs", v1::DTYPE_S8, {2, 4}, {21, 1});
        },
        "op.b: .*past its storage"},
       {"far",
        [](Case&, v1::GemmOp& op) {
          SetView(*op.mutable_b(), "inputs", v1::DTYPE_S8, {2, 4}, {INT64_MAX, 1});
        },
        "op.b: .*far past its storage"},
       {"shorter buffer", [](Case& c, v1::GemmOp&) { c.buffers["output"].bytes = 47; }, "op.d: .*past its storage"},
       {"unknown buffer", [](Case&, v1::GemmOp& op) { op.mutable_d()->set_buffer_id("other"); }, "op.d: .*may not use"},
       {"misaligned", [](Case& c, v1::GemmOp&) { c.buffers["output"].data += 2; }, "op.d: .*do not divide"}});
}

TEST(BoundChecksDeathTest, OutputsThatAreNotAlone) {
  const auto same_memory = [](Case& c) {
    c.buffers["output"].memory = 1;
    c.buffers["output"].memory_offset = 20;
  };
  ExpectEachIsSeen(
      {{"over an input", [&](Case& c, v1::GemmOp&) { same_memory(c); }, "op.a: .*shares a byte with the output"},
       {"over the bias alone",
        [&](Case& c, v1::GemmOp& op) {
          same_memory(c);
          SetView(*op.mutable_a(), "inputs", v1::DTYPE_S8, {2, 3, 4}, {4, 4, 1});
          op.mutable_epilogue()->mutable_bias()->set_byte_offset(8);
        },
        "op.epilogue.bias: .*shares a byte"},
       {"over itself",
        [](Case&, v1::GemmOp& op) {
          SetView(*op.mutable_d(), "output", v1::DTYPE_F32, {2, 3, 2}, {6, 1, 1});
        },
        "op.d: .*share a byte"}});
}

TEST(BoundChecksDeathTest, OperandsThatDisagree) {
  ExpectEachIsSeen(
      {{"K", [](Case&, v1::GemmOp& op) { op.mutable_b()->set_shape(1, 3); }, "op.b.shape: .*another K"},
       {"M", [](Case&, v1::GemmOp& op) { op.mutable_d()->set_shape(1, 2); }, "op.d.shape: .*another M"},
       {"N", [](Case&, v1::GemmOp& op) { op.mutable_d()->set_shape(2, 1); }, "op.d.shape: .*another N"},
       {"batch", [](Case&, v1::GemmOp& op) { op.mutable_d()->set_shape(0, 1); }, "op.a: .*does not broadcast"},
       {"types", [](Case&, v1::GemmOp& op) { op.mutable_b()->set_dtype(v1::DTYPE_E4M3); }, "op.b.dtype"},
       {"scale", [](Case&, v1::GemmOp& op) { op.clear_b_scale(); }, "op.b_scale: .*without a scale"},
       {"bias", [](Case&, v1::GemmOp& op) { op.mutable_epilogue()->mutable_bias()->set_shape(0, 1); },
        "op.epilogue.bias: .*number of elements"}});
}

TEST(BoundChecksDeathTest, ParametersThatSaySomethingElse) {
  ExpectEachIsSeen(
      {{"problem", [](Case& c, v1::GemmOp&) { c.bound.problem.k = 5; }, "op: the problem has other extents"},
       {"batch", [](Case& c, v1::GemmOp&) { c.bound.problem.batch = 1; }, "op.d.shape: the problem has another batch"},
       {"layout", [](Case& c, v1::GemmOp&) { c.bound.problem.gemm_class.layout = kernels::GemmLayout::kTN; },
        "op.a: the class has another layout"},
       {"begin", [](Case& c, v1::GemmOp&) { c.bound.params.b.data = c.inputs.data() + 1; }, "op.b: .*begin elsewhere"},
       {"stride", [](Case& c, v1::GemmOp&) { c.bound.params.a.batch_stride[2] = 0; }, "op.a: .*other elements"},
       {"repeats", [](Case& c, v1::GemmOp&) { c.bound.params.b.batch_stride[2] = 8; }, "op.b: .*other elements"},
       {"rows of an empty K",
        [](Case& c, v1::GemmOp& op) {
          op.mutable_a()->set_shape(2, 0);
          op.mutable_b()->set_shape(1, 0);
          c.bound.problem.k = c.bound.params.k = 0;
          c.bound.params.a.row_stride = INT64_MAX;
        },
        "op.a: K is 0"},
       {"scale", [](Case& c, v1::GemmOp&) { c.bound.params.a_scale.stride = 0; }, "op.a_scale: .*other elements"},
       {"scalar", [](Case& c, v1::GemmOp&) { c.bound.params.b_scale.scalar = 1.0F; }, "op.b_scale: .*another value"},
       {"bias", [](Case& c, v1::GemmOp&) { c.bound.params.bias.stride = 1; }, "op.epilogue.bias: .*other elements"}});
}

}  // namespace
}  // namespace tessera::fuzz
