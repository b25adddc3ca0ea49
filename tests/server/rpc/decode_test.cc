// Every field of a GEMM request: what it decodes to, and each way in which the message itself can be wrong.
#include "server/rpc/decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "common/text.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::StartsWith;

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

void SetView(v1::Tensor& tensor, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides) {
  tensor.clear_shape();
  tensor.clear_strides();
  for (const std::int64_t extent : shape) tensor.add_shape(extent);
  for (const std::int64_t stride : strides) tensor.add_strides(stride);
}

v1::Tensor Buffer(v1::DType dtype, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides) {
  v1::Tensor tensor;
  tensor.set_buffer_id("0123456789abcdef");
  tensor.set_byte_offset(64);
  tensor.set_dtype(dtype);
  SetView(tensor, shape, strides);
  return tensor;
}

v1::GemmOp Good() {
  v1::GemmOp op;
  *op.mutable_a() = Buffer(v1::DTYPE_S8, {2, 4, 8}, {64, 8, 1});
  *op.mutable_b() = Buffer(v1::DTYPE_S8, {6, 8}, {});
  *op.mutable_d() = Buffer(v1::DTYPE_BF16, {2, 4, 6}, {});
  *op.mutable_a_scale()->mutable_vector() = Buffer(v1::DTYPE_F32, {4}, {2});
  *op.mutable_b_scale()->mutable_vector() = Buffer(v1::DTYPE_F32, {1}, {});
  *op.mutable_epilogue()->mutable_bias() = Buffer(v1::DTYPE_BF16, {6}, {});
  op.set_accumulation(v1::ACCUMULATION_EXACT);
  return op;
}

struct Operand {
  std::string field;
  std::function<v1::Tensor*(v1::GemmOp&)> of;
};

const std::vector<Operand>& Operands() {
  static const std::vector<Operand> operands = {
      {"op.a", [](v1::GemmOp& op) { return op.mutable_a(); }},
      {"op.b", [](v1::GemmOp& op) { return op.mutable_b(); }},
      {"op.d", [](v1::GemmOp& op) { return op.mutable_d(); }},
      {"op.a_scale.vector", [](v1::GemmOp& op) { return op.mutable_a_scale()->mutable_vector(); }},
      {"op.b_scale.vector", [](v1::GemmOp& op) { return op.mutable_b_scale()->mutable_vector(); }},
      {"op.epilogue.bias", [](v1::GemmOp& op) { return op.mutable_epilogue()->mutable_bias(); }}};
  return operands;
}

void ExpectRefused(const v1::GemmOp& op, StatusCode code, const std::string& begins) {
  const absl::Status status = DecodeGemm(op).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(MessageOf(status), StartsWith(begins));
}

TEST(DecodeGemmTest, EveryFieldArrives) {
  const v1::GemmOp op = Good();
  const auto call = DecodeGemm(op);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->a.field, "op.a");
  EXPECT_EQ(call->a.storage, TensorRef::Storage::kBuffer);
  EXPECT_EQ(call->a.buffer.Bytes(), "0123456789abcdef");
  EXPECT_EQ(call->a.byte_offset, 64U);
  EXPECT_EQ(call->a.dtype, DType::kS8);
  ASSERT_EQ(call->a.rank, 3);
  EXPECT_EQ(call->a.shape, (std::array<std::int64_t, kRankMax>{2, 4, 8}));
  EXPECT_EQ(call->a.stride, (std::array<std::int64_t, kRankMax>{64, 8, 1}));
  EXPECT_EQ(call->b.field, "op.b");
  EXPECT_EQ(call->b.stride, (std::array<std::int64_t, kRankMax>{8, 1})) << "packed";
  EXPECT_EQ(call->d.field, "op.d");
  EXPECT_EQ(call->d.dtype, DType::kBf16);
  EXPECT_EQ(call->d.stride, (std::array<std::int64_t, kRankMax>{24, 6, 1})) << "packed";
  ASSERT_TRUE(call->a_scale.has_value() && call->a_scale->vector.has_value());
  EXPECT_EQ(call->a_scale->vector->field, "op.a_scale.vector");
  EXPECT_EQ(call->a_scale->vector->stride[0], 2);
  ASSERT_TRUE(call->b_scale.has_value() && call->b_scale->vector.has_value());
  EXPECT_EQ(call->b_scale->vector->field, "op.b_scale.vector");
  ASSERT_TRUE(call->bias.has_value());
  EXPECT_EQ(call->bias->field, "op.epilogue.bias");
  EXPECT_EQ(call->accumulation, kernels::Accumulation::kExact);
}

TEST(DecodeGemmTest, OptionalPartsMayBeLeftOut) {
  v1::GemmOp op = Good();
  op.clear_a_scale();
  op.clear_b_scale();
  op.clear_epilogue();
  op.clear_accumulation();
  auto call = DecodeGemm(op);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_FALSE(call->a_scale.has_value());
  EXPECT_FALSE(call->b_scale.has_value());
  EXPECT_FALSE(call->bias.has_value());
  EXPECT_EQ(call->accumulation, kernels::Accumulation::kFast);
  op.mutable_epilogue();
  op.set_accumulation(v1::ACCUMULATION_FAST);
  call = DecodeGemm(op);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_FALSE(call->bias.has_value());
  EXPECT_EQ(call->accumulation, kernels::Accumulation::kFast);
}

TEST(DecodeGemmTest, OperandsAreNeeded) {
  ExpectRefused(v1::GemmRequest().op(), kInvalid, "op.a: ");
  v1::GemmOp op = Good();
  op.clear_a();
  ExpectRefused(op, kInvalid, "op.a: ");
  op = Good();
  op.clear_b();
  ExpectRefused(op, kInvalid, "op.b: ");
  op = Good();
  op.clear_d();
  ExpectRefused(op, kInvalid, "op.d: ");
}

TEST(DecodeGemmTest, EveryTensorIsCheckedInEveryField) {
  const struct {
    const char* what;
    std::function<void(v1::Tensor&)> mutate;
    const char* part;
  } rows[] = {
      {"no storage", [](v1::Tensor& t) { t.clear_storage(); }, ".storage: "},
      {"id of 15 bytes", [](v1::Tensor& t) { t.set_buffer_id("0123456789abcde"); }, ".buffer_id: "},
      {"id of 17 bytes", [](v1::Tensor& t) { t.set_buffer_id("0123456789abcdefg"); }, ".buffer_id: "},
      {"empty id", [](v1::Tensor& t) { t.set_buffer_id(""); }, ".buffer_id: "},
      {"no type", [](v1::Tensor& t) { t.clear_dtype(); }, ".dtype: "},
      {"type 250", [](v1::Tensor& t) { t.set_dtype(static_cast<v1::DType>(250)); }, ".dtype: "},
      {"type 257, a bf16 in eight bits", [](v1::Tensor& t) { t.set_dtype(static_cast<v1::DType>(257)); }, ".dtype: "},
      {"type -1", [](v1::Tensor& t) { t.set_dtype(static_cast<v1::DType>(-1)); }, ".dtype: "},
      {"rank 6", [](v1::Tensor& t) { SetView(t, std::vector<std::int64_t>(6, 1), {}); }, ".shape: "},
      {"rank 65", [](v1::Tensor& t) { SetView(t, std::vector<std::int64_t>(65, 1), {}); }, ".shape: "},
      {"rank 65 with strides",
       [](v1::Tensor& t) { SetView(t, std::vector<std::int64_t>(65, 1), std::vector<std::int64_t>(65, 1)); },
       ".shape: "},
      {"negative first extent",
       [](v1::Tensor& t) {
         SetView(t, {-1, 8}, {});
       },
       ".shape[0]: "},
      {"negative last extent",
       [](v1::Tensor& t) {
         SetView(t, {8, std::numeric_limits<std::int64_t>::min()}, {8, 1});
       },
       ".shape[1]: "},
      {"negative stride",
       [](v1::Tensor& t) {
         SetView(t, {4, 8}, {8, -1});
       },
       ".strides[1]: "},
      {"most negative stride",
       [](v1::Tensor& t) {
         SetView(t, {4, 8}, {std::numeric_limits<std::int64_t>::min(), 1});
       },
       ".strides[0]: "},
      {"one stride short",
       [](v1::Tensor& t) {
         SetView(t, {4, 8}, {1});
       },
       ".strides: "},
      {"one stride more",
       [](v1::Tensor& t) {
         SetView(t, {4, 8}, {32, 8, 1});
       },
       ".strides: "},
      {"strides without a shape", [](v1::Tensor& t) { SetView(t, {}, {1}); }, ".strides: "},
      {"packed strides pass 2^63",
       [](v1::Tensor& t) {
         SetView(t, {2, kMax, kMax}, {});
       },
       ".shape: "},
      {"2^32 x 2^32 packed",
       [](v1::Tensor& t) {
         SetView(t, {std::int64_t{1} << 32, std::int64_t{1} << 32}, {});
       },
       ".shape: "},
  };
  for (const Operand& operand : Operands()) {
    for (const auto& row : rows) {
      SCOPED_TRACE(operand.field + ": " + row.what);
      v1::GemmOp op = Good();
      row.mutate(*operand.of(op));
      ExpectRefused(op, kInvalid, operand.field + row.part);
    }
  }
}

TEST(DecodeGemmTest, InlineResultIsPacked) {
  v1::GemmOp op = Good();
  op.mutable_d()->mutable_inline_result();
  op.mutable_d()->clear_byte_offset();
  const auto call = DecodeGemm(op);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->d.storage, TensorRef::Storage::kInlineResult);
  EXPECT_EQ(call->d.stride, (std::array<std::int64_t, kRankMax>{24, 6, 1}));
  SetView(*op.mutable_d(), {4, 6}, {6, 1});
  ExpectRefused(op, kInvalid, "op.d.strides: ");
  SetView(*op.mutable_d(), {4, 6}, {});
  op.mutable_d()->set_byte_offset(4);
  ExpectRefused(op, kInvalid, "op.d.byte_offset: ");
}

TEST(DecodeGemmTest, InlineDataStaysInTheRequest) {
  v1::GemmOp op = Good();
  op.mutable_a()->set_inline_data("bytes");
  const auto call = DecodeGemm(op);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->a.storage, TensorRef::Storage::kInlineData);
  EXPECT_EQ(call->a.inline_data, &op.a().inline_data());
}

TEST(DecodeGemmTest, ExtremesThatAreLegalHere) {
  v1::GemmOp op = Good();
  SetView(*op.mutable_a(), {kMax, kMax}, {kMax, 0});
  op.mutable_a()->set_byte_offset(std::numeric_limits<std::uint64_t>::max());
  SetView(*op.mutable_b(), {0, 0}, {});
  SetView(*op.mutable_d(), {}, {});
  const auto call = DecodeGemm(op);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->a.stride[0], kMax);
  EXPECT_EQ(call->a.byte_offset, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(call->b.stride, (std::array<std::int64_t, kRankMax>{1, 1})) << "an extent of 0 counts as 1";
  EXPECT_EQ(call->d.rank, 0);
}

TEST(DecodeGemmTest, ScalesHaveAFiniteValueOrAVector) {
  const struct {
    std::string field;
    v1::Scale* (v1::GemmOp::*scale)();
  } rows[] = {{"op.a_scale", &v1::GemmOp::mutable_a_scale}, {"op.b_scale", &v1::GemmOp::mutable_b_scale}};
  for (const auto& row : rows) {
    v1::GemmOp op = Good();
    (op.*row.scale)()->clear_value();
    ExpectRefused(op, kInvalid, row.field + ": ");
    for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
      (op.*row.scale)()->set_scalar(bad);
      ExpectRefused(op, kInvalid, row.field + ".scalar: ");
    }
    for (const float good :
         {0.0F, -2.5F, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()}) {
      (op.*row.scale)()->set_scalar(good);
      const auto call = DecodeGemm(op);
      ASSERT_TRUE(call.ok()) << call.status();
      const auto& scale = row.field == "op.a_scale" ? call->a_scale : call->b_scale;
      EXPECT_EQ(scale->scalar, good);
      EXPECT_FALSE(scale->vector.has_value());
    }
  }
}

TEST(DecodeGemmTest, UnknownAccumulationIsRefused) {
  v1::GemmOp op = Good();
  for (const int value : {3, 250, -1}) {
    op.set_accumulation(static_cast<v1::Accumulation>(value));
    ExpectRefused(op, kInvalid, "op.accumulation: ");
  }
}

TEST(DecodeOptionsTest, DefaultsAndBackends) {
  v1::SubmitOptions options;
  auto decoded = DecodeOptions(options);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_FALSE(decoded->backend.has_value());
  EXPECT_FALSE(decoded->profile);
  options.set_profile(true);
  options.set_reply_when(v1::REPLY_WHEN_COMPLETED);
  const struct {
    v1::Backend wire;
    std::optional<kernels::Backend> backend;
  } rows[] = {{v1::BACKEND_AUTO, std::nullopt},
              {v1::BACKEND_CPU, kernels::Backend::kCpu},
              {v1::BACKEND_CUDA, kernels::Backend::kCuda},
              {v1::BACKEND_VENDOR, kernels::Backend::kVendor}};
  for (const auto& row : rows) {
    options.set_backend(row.wire);
    decoded = DecodeOptions(options);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->backend, row.backend);
    EXPECT_TRUE(decoded->profile);
  }
}

void AddPoint(google::protobuf::RepeatedPtrField<v1::SyncPoint>& points, std::uint64_t value) {
  v1::SyncPoint& point = *points.Add();
  point.set_id("0123456789abcdef");
  point.set_value(value);
}

TEST(DecodeOptionsTest, OrderArrives) {
  v1::SubmitOptions options;
  auto decoded = DecodeOptions(options);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_FALSE(decoded->stream.has_value());
  EXPECT_TRUE(decoded->wait.empty());
  EXPECT_TRUE(decoded->signal.empty());
  EXPECT_FALSE(decoded->answer_when_launched);
  EXPECT_EQ(decoded->timeout.count(), 0);
  options.set_stream("fedcba9876543210");
  for (int i = 0; i < kSyncPointsMax; ++i) AddPoint(*options.mutable_wait(), 100 + static_cast<std::uint64_t>(i));
  AddPoint(*options.mutable_signal(), std::numeric_limits<std::uint64_t>::max());
  AddPoint(*options.mutable_signal(), 0);
  options.set_reply_when(v1::REPLY_WHEN_ENQUEUED);
  options.set_timeout_ms(1'500);
  decoded = DecodeOptions(options);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ASSERT_TRUE(decoded->stream.has_value());
  EXPECT_EQ(decoded->stream->Bytes(), "fedcba9876543210");
  ASSERT_EQ(decoded->wait.size(), 16U);
  EXPECT_EQ(decoded->wait[0].id.Bytes(), "0123456789abcdef");
  EXPECT_EQ(decoded->wait[15].value, 115U);
  ASSERT_EQ(decoded->signal.size(), 2U);
  EXPECT_EQ(decoded->signal[0].value, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(decoded->signal[1].value, 0U);
  EXPECT_TRUE(decoded->answer_when_launched);
  EXPECT_EQ(decoded->timeout, std::chrono::milliseconds(1'500));
  options.set_reply_when(v1::REPLY_WHEN_COMPLETED);
  EXPECT_FALSE(DecodeOptions(options)->answer_when_launched);
}

// Added to the clock's time, it must not pass its end.
TEST(DecodeOptionsTest, TheLongestTimeoutIsStillInTheFuture) {
  v1::SubmitOptions options;
  options.set_timeout_ms(std::numeric_limits<std::uint64_t>::max());
  const auto decoded = DecodeOptions(options);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto now = std::chrono::steady_clock::now();
  EXPECT_GT(now + decoded->timeout, now + std::chrono::hours(24));
}

TEST(DecodeOptionsTest, BadFieldsAreNamed) {
  const struct {
    const char* what;
    std::function<void(v1::SubmitOptions&)> mutate;
    StatusCode code;
    const char* begins;
  } rows[] = {
      {"stream of 15 bytes", [](v1::SubmitOptions& o) { o.set_stream("0123456789abcde"); }, kInvalid,
       "options.stream: "},
      {"stream of 17 bytes", [](v1::SubmitOptions& o) { o.set_stream("0123456789abcdefg"); }, kInvalid,
       "options.stream: "},
      {"wait without an id", [](v1::SubmitOptions& o) { o.add_wait()->set_value(1); }, kInvalid,
       "options.wait[0].id: "},
      {"signal without an id", [](v1::SubmitOptions& o) { o.add_signal()->set_value(1); }, kInvalid,
       "options.signal[0].id: "},
      {"second wait of 15 bytes",
       [](v1::SubmitOptions& o) {
         AddPoint(*o.mutable_wait(), 1);
         o.add_wait()->set_id("0123456789abcde");
       },
       kInvalid, "options.wait[1].id: "},
      {"second signal of 17 bytes",
       [](v1::SubmitOptions& o) {
         AddPoint(*o.mutable_signal(), 1);
         o.add_signal()->set_id("0123456789abcdefg");
       },
       kInvalid, "options.signal[1].id: "},
      {"17 waits",
       [](v1::SubmitOptions& o) {
         for (int i = 0; i <= kSyncPointsMax; ++i) AddPoint(*o.mutable_wait(), 1);
       },
       kInvalid, "options.wait: "},
      {"17 signals",
       [](v1::SubmitOptions& o) {
         for (int i = 0; i <= kSyncPointsMax; ++i) AddPoint(*o.mutable_signal(), 1);
       },
       kInvalid, "options.signal: "},
      {"reply_when 250", [](v1::SubmitOptions& o) { o.set_reply_when(static_cast<v1::ReplyWhen>(250)); }, kInvalid,
       "options.reply_when: "},
      {"reply_when -1", [](v1::SubmitOptions& o) { o.set_reply_when(static_cast<v1::ReplyWhen>(-1)); }, kInvalid,
       "options.reply_when: "},
      {"backend 250", [](v1::SubmitOptions& o) { o.set_backend(static_cast<v1::Backend>(250)); }, kInvalid,
       "options.backend: "},
      {"backend -1", [](v1::SubmitOptions& o) { o.set_backend(static_cast<v1::Backend>(-1)); }, kInvalid,
       "options.backend: "},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.what);
    v1::SubmitOptions options;
    row.mutate(options);
    const absl::Status status = DecodeOptions(options).status();
    EXPECT_EQ(status.code(), row.code) << status;
    EXPECT_THAT(MessageOf(status), StartsWith(row.begins));
  }
}

}  // namespace
}  // namespace tessera::server
