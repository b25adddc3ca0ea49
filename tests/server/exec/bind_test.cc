// Every way in which a decoded GEMM can be wrong about memory, one mutation of a good call a row, and exactly what good
// calls become.
#include "server/exec/bind.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/text.h"
#include "tests/server/exec/bound_memory.h"
#include "tests/server/session/fake_device_memory.h"
#include "tests/server/session/posix_fixtures.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using kernels::GemmLayout;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t k2To32 = std::int64_t{1} << 32;
constexpr std::int64_t kM = 4;
constexpr std::int64_t kN = 6;
constexpr std::int64_t kK = 8;
constexpr std::uint64_t kBufferBytes = 4'096;
constexpr std::uint64_t kInlineMax = 512;

class BindTest : public ::testing::Test {
 protected:
  void SetUp() override {
    lease_ = table_.OpenLease(kTestPeer).value_or(Id{});
    const auto token = table_.OpenSession(kTestPeer, lease_, "");
    ASSERT_TRUE(token.ok()) << token.status();
    session_ = table_.FindSession(kTestPeer, *token).value_or(nullptr);
    other_session_ = OpenTestSession(table_);
    ASSERT_TRUE(session_ && other_session_);
    for (Id* id : {&a_, &b_, &d_, &v_}) *id = Allocate(*session_);
    foreign_ = Allocate(*other_session_);
  }

  Id Allocate(Session& session) {
    const auto made = table_.AllocateBuffer(session, kBufferBytes);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? made->id : Id{};
  }

  Id AllocateOnGpu() {
    const auto made = table_.AllocateBuffer(*session_, kBufferBytes, "cuda");
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? made->id : Id{};
  }

  Id Import(const UniqueFd& fd, std::uint64_t byte_offset) {
    const auto ticket = table_.KeepDescriptor(lease_, Duplicate(fd));
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    const auto made = table_.ImportBuffer(*session_, ticket.value_or(0), byte_offset, 0);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? made->id : Id{};
  }

  // [4, 8] x [6, 8] -> [4, 6], packed, each in a buffer of its own.
  GemmCall Good(DType a = DType::kBf16, DType b = DType::kBf16, DType d = DType::kF32) const {
    GemmCall call;
    call.a = BufferView("op.a", a_, a, {kM, kK});
    call.b = BufferView("op.b", b_, b, {kN, kK});
    call.d = BufferView("op.d", d_, d, {kM, kN});
    return call;
  }

  // Good, with every optional part given as a vector in memory.
  GemmCall Full() const {
    GemmCall call = Good(DType::kS8, DType::kS8);
    call.a_scale = ScaleRef{.vector = BufferView("op.a_scale.vector", v_, DType::kF32, {kM})};
    call.b_scale = ScaleRef{.vector = BufferView("op.b_scale.vector", v_, DType::kF32, {kN}, {}, 64)};
    call.bias = BufferView("op.epilogue.bias", v_, DType::kF32, {kN}, {}, 128);
    return call;
  }

  BindScope Scope() {
    return {.sessions = &table_,
            .session = session_.get(),
            .inline_result = &inline_result_,
            .inline_bytes_max = kInlineMax,
            .metrics = &metrics_};
  }

  absl::StatusOr<BoundGemm> Bind(const GemmCall& call) { return BindGemm(call, Scope()); }

  const std::byte* DataOf(const Id& buffer) {
    const auto pin = table_.PinBuffer(*session_, buffer, BufferAccess::kRead);
    return pin.ok() ? (*pin)->data() : nullptr;
  }

  void ExpectNothingPinned() {
    for (const BufferRow& row : table_.ListBuffers([](const Peer&) { return true; }).rows) EXPECT_EQ(row.users, 0U);
  }

  struct Row {
    const char* what;
    std::function<void(GemmCall&)> mutate;
    StatusCode code;
    const char* begins;
  };

  void ExpectEach(const GemmCall& good, const std::vector<Row>& rows) {
    {
      const auto bound = Bind(good);
      ASSERT_TRUE(bound.ok()) << bound.status();
    }
    for (const Row& row : rows) {
      SCOPED_TRACE(row.what);
      GemmCall call = good;
      row.mutate(call);
      const absl::Status status = Bind(call).status();
      EXPECT_EQ(status.code(), row.code) << status;
      EXPECT_THAT(MessageOf(status), StartsWith(row.begins));
      ExpectNothingPinned();
    }
  }

  FakeDeviceMemory gpu_;
  FakeDeviceMemory second_gpu_{"GPU-22222222-2222-3333-4444-555555555555"};
  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper_{std::chrono::seconds(10), metrics_};
  SessionTable table_{1,
                      {.sessions_max = 9,
                       .leases_max = 9,
                       .buffers_per_session_max = 99,
                       .buffer_bytes_max = 1U << 24U,
                       .session_buffer_bytes_max = 1U << 24U},
                      metrics_,
                      reaper_,
                      MakeIdleLane,
                      {&gpu_, &second_gpu_}};
  std::string inline_result_;
  Id lease_, a_, b_, d_, v_, foreign_;
  std::shared_ptr<Session> session_, other_session_;
};

void Reshape(TensorRef& ref, std::initializer_list<std::int64_t> shape,
             std::initializer_list<std::int64_t> stride = {}) {
  ref = BufferView(ref.field, ref.buffer, ref.dtype, shape, stride, ref.byte_offset);
}

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;

TEST_F(BindTest, TypesThatDoNotMultiplyAreRefused) {
  const auto pair = [](DType a, DType b) {
    return [a, b](GemmCall& c) {
      c.a.dtype = a;
      c.b.dtype = b;
    };
  };
  ExpectEach(Good(), {{"bf16 f16", pair(DType::kBf16, DType::kF16), kInvalid, "op.b.dtype: "},
                      {"f32 f32", pair(DType::kF32, DType::kF32), kInvalid, "op."},
                      {"f16 f16", pair(DType::kF16, DType::kF16), kInvalid, "op."},
                      {"bf16 e4m3", pair(DType::kBf16, DType::kE4m3), kInvalid, "op.b.dtype: "},
                      {"e5m2 s8", pair(DType::kE5m2, DType::kS8), kInvalid, "op.b.dtype: "},
                      {"s8 e4m3", pair(DType::kS8, DType::kE4m3), kInvalid, "op.b.dtype: "},
                      {"s32 s32", pair(DType::kS32, DType::kS32), kInvalid, "op."},
                      {"out f16", [](GemmCall& c) { c.d.dtype = DType::kF16; }, kInvalid, "op.d.dtype: "},
                      {"out s32", [](GemmCall& c) { c.d.dtype = DType::kS32; }, kInvalid, "op.d.dtype: "},
                      {"out e4m3", [](GemmCall& c) { c.d.dtype = DType::kE4m3; }, kInvalid, "op.d.dtype: "}});
}

TEST_F(BindTest, ScalesMustSuitTheirOperand) {
  ExpectEach(Good(), {{"a scale on bf16", [](GemmCall& c) { c.a_scale.emplace(); }, kInvalid, "op.a_scale: "},
                      {"b scale on bf16", [](GemmCall& c) { c.b_scale.emplace(); }, kInvalid, "op.b_scale: "}});
  ExpectEach(Full(), {{"s8 a without", [](GemmCall& c) { c.a_scale.reset(); }, kInvalid, "op.a_scale: "},
                      {"s8 b without", [](GemmCall& c) { c.b_scale.reset(); }, kInvalid, "op.b_scale: "}});
  EXPECT_TRUE(Bind(Good(DType::kE4m3, DType::kE5m2)).ok()) << "fp8 needs none";
}

TEST_F(BindTest, ShapesMustAgree) {
  ExpectEach(Good(), {{"a rank 1", [](GemmCall& c) { Reshape(c.a, {kK}); }, kInvalid, "op.a.shape: "},
                      {"a rank 0", [](GemmCall& c) { Reshape(c.a, {}); }, kInvalid, "op.a.shape: "},
                      {"b rank 1", [](GemmCall& c) { Reshape(c.b, {kK}); }, kInvalid, "op.b.shape: "},
                      {"d rank 1", [](GemmCall& c) { Reshape(c.d, {kN}); }, kInvalid, "op.d.shape: "},
                      {"k differs",
                       [](GemmCall& c) {
                         Reshape(c.b, {kN, kK + 1});
                       },
                       kInvalid, "op.b.shape: "},
                      {"k is 1 in b",
                       [](GemmCall& c) {
                         Reshape(c.b, {kN, 1});
                       },
                       kInvalid, "op.b.shape: "},
                      {"m differs",
                       [](GemmCall& c) {
                         Reshape(c.d, {kM + 1, kN});
                       },
                       kInvalid, "op.d.shape: "},
                      {"n differs",
                       [](GemmCall& c) {
                         Reshape(c.d, {kM, kN - 1});
                       },
                       kInvalid, "op.d.shape: "},
                      {"d transposed",
                       [](GemmCall& c) {
                         Reshape(c.d, {kN, kM});
                       },
                       kInvalid, "op.d.shape: "},
                      {"m is 0 in d",
                       [](GemmCall& c) {
                         Reshape(c.d, {0, kN});
                       },
                       kInvalid, "op.d.shape: "},
                      {"a has a batch, d has none",
                       [](GemmCall& c) {
                         Reshape(c.a, {1, kM, kK});
                       },
                       kInvalid, "op.a.shape: "},
                      {"b has a batch, d has none",
                       [](GemmCall& c) {
                         Reshape(c.b, {2, kN, kK});
                       },
                       kInvalid, "op.b.shape: "}});
}

TEST_F(BindTest, BatchesMustBroadcastToD) {
  GemmCall good = Good();
  Reshape(good.a, {3, kM, kK});
  Reshape(good.b, {2, 1, kN, kK});
  Reshape(good.d, {2, 3, kM, kN});
  ExpectEach(good, {{"a batch 2",
                     [](GemmCall& c) {
                       Reshape(c.a, {2, kM, kK});
                     },
                     kInvalid, "op.a.shape[0]: "},
                    {"a batch 0",
                     [](GemmCall& c) {
                       Reshape(c.a, {0, kM, kK});
                     },
                     kInvalid, "op.a.shape[0]: "},
                    {"b inner 2",
                     [](GemmCall& c) {
                       Reshape(c.b, {2, 2, kN, kK});
                     },
                     kInvalid, "op.b.shape[1]: "},
                    {"b outer 3",
                     [](GemmCall& c) {
                       Reshape(c.b, {3, 1, kN, kK});
                     },
                     kInvalid, "op.b.shape[0]: "},
                    {"d is not broadcast",
                     [](GemmCall& c) {
                       Reshape(c.d, {1, 3, kM, kN});
                     },
                     kInvalid, "op.b.shape[0]: "},
                    {"a has more",
                     [](GemmCall& c) {
                       Reshape(c.a, {1, 2, 3, kM, kK});
                     },
                     kInvalid, "op.a.shape: "},
                    {"d repeats", [](GemmCall& c) { c.d.stride[0] = 0; }, kInvalid, "op.d.strides: "}});
}

TEST_F(BindTest, ViewsMustLieInTheirBuffers) {
  const auto offset = [](TensorRef GemmCall::*tensor, std::uint64_t bytes) {
    return [tensor, bytes](GemmCall& c) { (c.*tensor).byte_offset = bytes; };
  };
  constexpr std::uint64_t kABytes = kM * kK * 2;
  constexpr std::uint64_t kDBytes = kM * kN * 4;
  constexpr auto kMax64 = std::numeric_limits<std::uint64_t>::max();
  ExpectEach(Good(), {{"a one element past", offset(&GemmCall::a, kBufferBytes - kABytes + 2), kInvalid, "op.a"},
                      {"a at the end", offset(&GemmCall::a, kBufferBytes), kInvalid, "op.a"},
                      {"a past the end", offset(&GemmCall::a, kBufferBytes + 2), kInvalid, "op.a"},
                      {"a wraps", offset(&GemmCall::a, kMax64 - 1), kInvalid, "op.a"},
                      {"a wraps to zero", offset(&GemmCall::a, kMax64 - kABytes + 1), kInvalid, "op.a"},
                      {"a at 2^63", offset(&GemmCall::a, std::uint64_t{1} << 63U), kInvalid, "op.a"},
                      {"b one element past", offset(&GemmCall::b, kBufferBytes - kN * kK * 2 + 2), kInvalid, "op.b"},
                      {"d one element past", offset(&GemmCall::d, kBufferBytes - kDBytes + 4), kInvalid, "op.d"},
                      {"a last row past", [](GemmCall& c) { c.a.stride[0] = 681; }, kInvalid, "op.a"},
                      {"d last row past", [](GemmCall& c) { c.d.stride[0] = 340; }, kInvalid, "op.d"},
                      {"a huge row stride", [](GemmCall& c) { c.a.stride[0] = kMax; }, kInvalid, "op.a"},
                      {"a huge k stride", [](GemmCall& c) { c.a.stride[1] = kMax / 7; }, kInvalid, "op.a"},
                      {"a stride that wraps to 0", [](GemmCall& c) { c.a.stride[0] = std::int64_t{1} << 62; }, kInvalid,
                       "op.a"},
                      {"b stride of 2^32", [](GemmCall& c) { c.b.stride[0] = k2To32; }, kInvalid, "op.b"},
                      {"d huge stride", [](GemmCall& c) { c.d.stride[0] = kMax; }, kInvalid, "op.d"}});
  // The last place that fits.
  GemmCall call = Good();
  call.a.byte_offset = kBufferBytes - kABytes;
  call.d.byte_offset = kBufferBytes - kDBytes;
  call.b.stride[0] = (static_cast<std::int64_t>(kBufferBytes) / 2 - kK) / (kN - 1);
  const auto bound = Bind(call);
  EXPECT_TRUE(bound.ok()) << bound.status();
}

TEST_F(BindTest, HugeExtentsAreRefusedWithoutWrapping) {
  ExpectEach(Good(), {{"m = n = 2^32",
                       [](GemmCall& c) {
                         Reshape(c.a, {k2To32, kK}, {kK, 1});
                         Reshape(c.b, {k2To32, kK}, {kK, 1});
                         Reshape(c.d, {k2To32, k2To32}, {k2To32, 1});
                       },
                       kInvalid, "op.a.shape: "},
                      {"m = 2^63 - 1",
                       [](GemmCall& c) {
                         Reshape(c.a, {kMax, kK}, {0, 1});
                         Reshape(c.d, {kMax, kN}, {0, 1});
                       },
                       kInvalid, "op.a.shape: "},
                      {"k = 2^63 - 1",
                       [](GemmCall& c) {
                         Reshape(c.a, {kM, kMax}, {0, 0});
                         Reshape(c.b, {kN, kMax}, {0, 0});
                       },
                       kInvalid, "op.a.shape: "},
                      {"k = 2^40 fits nowhere",
                       [](GemmCall& c) {
                         Reshape(c.a, {kM, std::int64_t{1} << 40}, {0, 1});
                         Reshape(c.b, {kN, std::int64_t{1} << 40}, {0, 1});
                       },
                       kInvalid, "op.a"},
                      {"batch of 2^32 x 2^32",
                       [](GemmCall& c) {
                         Reshape(c.d, {k2To32, k2To32, kM, kN}, {0, 0, kN, 1});
                       },
                       kInvalid, "op.d.shape: "}});
}

TEST_F(BindTest, AddressesMustBeAligned) {
  ExpectEach(Full(),
             {{"d", [](GemmCall& c) { c.d.byte_offset = 2; }, kInvalid, "op.d.byte_offset: "},
              {"a_scale", [](GemmCall& c) { c.a_scale->vector->byte_offset = 1; }, kInvalid,
               "op.a_scale.vector.byte_offset: "},
              {"b_scale", [](GemmCall& c) { c.b_scale->vector->byte_offset = 66; }, kInvalid,
               "op.b_scale.vector.byte_offset: "},
              {"bias", [](GemmCall& c) { c.bias->byte_offset = 130; }, kInvalid, "op.epilogue.bias.byte_offset: "}});
  ExpectEach(Good(), {{"a", [](GemmCall& c) { c.a.byte_offset = 1; }, kInvalid, "op.a.byte_offset: "},
                      {"b", [](GemmCall& c) { c.b.byte_offset = 3; }, kInvalid, "op.b.byte_offset: "}});
  GemmCall call = Full();
  call.a.byte_offset = 1;
  EXPECT_TRUE(Bind(call).ok()) << "bytes are aligned anywhere";
}

TEST_F(BindTest, TheAddressCountsNotTheOffset) {
  const UniqueFd fd = MakeMemfd(kBufferBytes);
  const Id odd = Import(fd, 1);
  ExpectEach(Good(),
             {{"even offset in odd memory", [odd](GemmCall& c) { c.a.buffer = odd; }, kInvalid, "op.a.byte_offset: "}});
  GemmCall call = Good();
  call.a.buffer = odd;
  call.a.byte_offset = 1;
  EXPECT_TRUE(Bind(call).ok());
}

TEST_F(BindTest, BuffersMustBeTheSessionsOwn) {
  const auto use = [](TensorRef GemmCall::*tensor, const Id& id) {
    return [tensor, id](GemmCall& c) { (c.*tensor).buffer = id; };
  };
  Id unknown = a_;
  unknown.nonce += 1;
  Id former = a_;
  former.epoch += 1;
  ExpectEach(Full(), {{"a foreign", use(&GemmCall::a, foreign_), StatusCode::kPermissionDenied, "op.a.buffer_id: "},
                      {"b foreign", use(&GemmCall::b, foreign_), StatusCode::kPermissionDenied, "op.b.buffer_id: "},
                      {"d foreign", use(&GemmCall::d, foreign_), StatusCode::kPermissionDenied, "op.d.buffer_id: "},
                      {"a unknown", use(&GemmCall::a, unknown), StatusCode::kNotFound, "op.a.buffer_id: "},
                      {"d unknown", use(&GemmCall::d, unknown), StatusCode::kNotFound, "op.d.buffer_id: "},
                      {"b former", use(&GemmCall::b, former), StatusCode::kFailedPrecondition, "op.b.buffer_id: "},
                      {"a_scale unknown", [&](GemmCall& c) { c.a_scale->vector->buffer = unknown; },
                       StatusCode::kNotFound, "op.a_scale.vector.buffer_id: "},
                      {"b_scale foreign", [&](GemmCall& c) { c.b_scale->vector->buffer = foreign_; },
                       StatusCode::kPermissionDenied, "op.b_scale.vector.buffer_id: "},
                      {"bias former", [&](GemmCall& c) { c.bias->buffer = former; }, StatusCode::kFailedPrecondition,
                       "op.epilogue.bias.buffer_id: "}});
  BindScope scope = Scope();
  scope.session = nullptr;
  const absl::Status status = BindGemm(Good(), scope).status();
  EXPECT_EQ(status.code(), kInvalid) << status;
  EXPECT_THAT(MessageOf(status), StartsWith("op.a.buffer_id: "));
  EXPECT_THAT(MessageOf(status), HasSubstr("tessera-session-bin"));
}

TEST_F(BindTest, ScalesAndBiasHaveTheirShapeAndType) {
  const auto a_scale = [](auto change) { return [change](GemmCall& c) { change(*c.a_scale->vector); }; };
  const auto b_scale = [](auto change) { return [change](GemmCall& c) { change(*c.b_scale->vector); }; };
  const auto bias = [](auto change) { return [change](GemmCall& c) { change(*c.bias); }; };
  const auto shape = [](std::initializer_list<std::int64_t> extents) {
    return [extents = std::vector<std::int64_t>(extents)](TensorRef& ref) {
      ref.rank = static_cast<int>(extents.size());
      for (std::size_t i = 0; i < extents.size(); ++i) {
        ref.shape[i] = extents[i];
        ref.stride[i] = 1;
      }
    };
  };
  const auto type = [](DType dtype) { return [dtype](TensorRef& ref) { ref.dtype = dtype; }; };
  const auto past = [](TensorRef& ref) { ref.byte_offset = kBufferBytes - 4; };
  const auto huge_stride = [](TensorRef& ref) { ref.stride[0] = kMax; };
  const auto result = [](TensorRef& ref) { ref.storage = TensorRef::Storage::kInlineResult; };
  ExpectEach(Full(), {{"a_scale bf16", a_scale(type(DType::kBf16)), kInvalid, "op.a_scale.vector.dtype: "},
                      {"b_scale f16", b_scale(type(DType::kF16)), kInvalid, "op.b_scale.vector.dtype: "},
                      {"bias f16", bias(type(DType::kF16)), kInvalid, "op.epilogue.bias.dtype: "},
                      {"bias s32", bias(type(DType::kS32)), kInvalid, "op.epilogue.bias.dtype: "},
                      {"a_scale [N]", a_scale(shape({kN})), kInvalid, "op.a_scale.vector.shape: "},
                      {"a_scale [0]", a_scale(shape({0})), kInvalid, "op.a_scale.vector.shape: "},
                      {"a_scale []", a_scale(shape({})), kInvalid, "op.a_scale.vector.shape: "},
                      {"a_scale [M, 1]", a_scale(shape({kM, 1})), kInvalid, "op.a_scale.vector.shape: "},
                      {"b_scale [M]", b_scale(shape({kM})), kInvalid, "op.b_scale.vector.shape: "},
                      {"b_scale [1, N]", b_scale(shape({1, kN})), kInvalid, "op.b_scale.vector.shape: "},
                      {"bias [1]", bias(shape({1})), kInvalid, "op.epilogue.bias.shape: "},
                      {"bias [M]", bias(shape({kM})), kInvalid, "op.epilogue.bias.shape: "},
                      {"bias [1, N]", bias(shape({1, kN})), kInvalid, "op.epilogue.bias.shape: "},
                      {"a_scale past", a_scale(past), kInvalid, "op.a_scale.vector"},
                      {"b_scale past", b_scale(past), kInvalid, "op.b_scale.vector"},
                      {"bias past", bias(past), kInvalid, "op.epilogue.bias"},
                      {"a_scale huge stride", a_scale(huge_stride), kInvalid, "op.a_scale.vector"},
                      {"bias huge stride", bias(huge_stride), kInvalid, "op.epilogue.bias"},
                      {"a_scale as a result", a_scale(result), kInvalid, "op.a_scale.vector.inline_result: "},
                      {"b_scale as a result", b_scale(result), kInvalid, "op.b_scale.vector.inline_result: "},
                      {"bias as a result", bias(result), kInvalid, "op.epilogue.bias.inline_result: "}});
}

TEST_F(BindTest, OutputSharesNoByteWithAnInput) {
  const auto at = [](const Id& id, std::uint64_t offset) {
    return [=](GemmCall& c) {
      c.d.buffer = id;
      c.d.byte_offset = offset;
    };
  };
  // A: 32 bytes at 0; B: 48 bytes; D: 96 bytes. Scales at 0 and 64, bias at 128 of v_.
  ExpectEach(Full(), {{"same as a", at(a_, 0), kInvalid, "op.d: "},
                      {"last byte of a", at(a_, 28), kInvalid, "op.d: "},
                      {"same as b", at(b_, 0), kInvalid, "op.d: "},
                      {"last bytes of b", at(b_, 44), kInvalid, "op.d: "},
                      {"a_scale", at(v_, 12), kInvalid, "op.d: "},
                      {"b_scale", at(v_, 84), kInvalid, "op.d: "},
                      {"bias", at(v_, 148), kInvalid, "op.d: "}});
  for (const auto& apart : {at(a_, 32), at(b_, 48), at(v_, 152)}) {
    GemmCall call = Full();
    apart(call);
    const auto bound = Bind(call);
    EXPECT_TRUE(bound.ok()) << bound.status();
  }
}

TEST_F(BindTest, InputsMayShareMemory) {
  GemmCall call = Good();
  call.b.buffer = call.a.buffer;
  EXPECT_TRUE(Bind(call).ok());
}

TEST_F(BindTest, OverlapIsSeenThroughTwoBuffersOverOneMemfd) {
  const UniqueFd fd = MakeMemfd(kBufferBytes);
  const Id whole = Import(fd, 0);
  const Id tail = Import(fd, 1'024);
  GemmCall good = Full();
  good.d.buffer = tail;
  const auto in_whole = [&](TensorRef& ref, std::uint64_t offset) {
    ref.buffer = whole;
    ref.byte_offset = offset;
  };
  // D: [1024, 1120) of the memfd.
  ExpectEach(good, {{"a over the start", [&](GemmCall& c) { in_whole(c.a, 1'024 - 31); }, kInvalid, "op.d: "},
                    {"a inside", [&](GemmCall& c) { in_whole(c.a, 1'040); }, kInvalid, "op.d: "},
                    {"b over the end", [&](GemmCall& c) { in_whole(c.b, 1'119); }, kInvalid, "op.d: "},
                    {"a_scale", [&](GemmCall& c) { in_whole(*c.a_scale->vector, 1'012); }, kInvalid, "op.d: "},
                    {"b_scale", [&](GemmCall& c) { in_whole(*c.b_scale->vector, 1'116); }, kInvalid, "op.d: "},
                    {"bias", [&](GemmCall& c) { in_whole(*c.bias, 1'060); }, kInvalid, "op.d: "}});
  in_whole(good.a, 1'024 - 32);
  in_whole(good.b, 1'120);
  EXPECT_TRUE(Bind(good).ok()) << "neighbours share no byte";
}

TEST_F(BindTest, ColumnSlicesOfOneParentAreApart) {
  GemmCall call = Good();
  // Rows of 64 bytes: A in columns [0, 16), D in [16, 40).
  call.a = BufferView("op.a", a_, DType::kBf16, {kM, kK}, {32, 1});
  call.d = BufferView("op.d", a_, DType::kF32, {kM, kN}, {16, 1}, 16);
  ExpectEach(call, {{"one column closer", [](GemmCall& c) { c.d.byte_offset = 12; }, kInvalid, "op.d: "},
                    {"into the next row", [](GemmCall& c) { c.d.byte_offset = 44; }, kInvalid, "op.d: "}});
}

TEST_F(BindTest, OutputMayNotOverlapItself) {
  ExpectEach(Good(), {{"row stride 0", [](GemmCall& c) { c.d.stride[0] = 0; }, kInvalid, "op.d.strides: "},
                      {"column stride 0", [](GemmCall& c) { c.d.stride[1] = 0; }, kInvalid, "op.d.strides: "},
                      {"rows too close", [](GemmCall& c) { c.d.stride[0] = kN - 1; }, kInvalid, "op.d.strides: "}});
  GemmCall call = Good();
  Reshape(call.d, {kM, kN}, {1, kM});
  EXPECT_TRUE(Bind(call).ok()) << "transposed";
}

TEST_F(BindTest, InlineTensors) {
  const std::string a_data(kM * kK * 2, 'a');
  const std::string b_data(kN * kK * 2, 'b');
  GemmCall call = Good();
  const auto make_inline = [](TensorRef& ref, const std::string& data) {
    ref.storage = TensorRef::Storage::kInlineData;
    ref.inline_data = &data;
  };
  make_inline(call.a, a_data);
  make_inline(call.b, b_data);
  call.d.storage = TensorRef::Storage::kInlineResult;
  BindScope scope = Scope();
  scope.session = nullptr;
  const auto bound = BindGemm(call, scope);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(inline_result_.size(), static_cast<std::size_t>(kM * kN * 4));
  EXPECT_EQ(bound->params.d.data, inline_result_.data());
  EXPECT_EQ(bound->params.a.data, a_data.data());
  EXPECT_EQ(bound->params.b.data, b_data.data());
  EXPECT_TRUE(bound->pins.empty());

  const std::string short_data(kM * kK * 2 - 1, 'a');
  const std::string none;
  const std::string most(kInlineMax, 'x');
  const std::string too_much(kInlineMax + 1, 'x');
  ExpectEach(
      call,
      {{"one byte short", [&](GemmCall& c) { make_inline(c.a, short_data); }, kInvalid, "op.a"},
       {"no data", [&](GemmCall& c) { make_inline(c.b, none); }, kInvalid, "op.b"},
       {"offset past", [&](GemmCall& c) { c.a.byte_offset = 2; }, kInvalid, "op.a"},
       {"a over the limit", [&](GemmCall& c) { make_inline(c.a, too_much); }, StatusCode::kResourceExhausted, "op.a: "},
       {"b over the limit", [&](GemmCall& c) { make_inline(c.b, too_much); }, StatusCode::kResourceExhausted, "op.b: "},
       {"d over the limit",
        [&](GemmCall& c) {
          Reshape(c.a, {kM, 1});
          Reshape(c.b, {33, 1});
          make_inline(c.a, most);
          make_inline(c.b, most);
          Reshape(c.d, {kM, 33});
          c.d.storage = TensorRef::Storage::kInlineResult;
        },
        StatusCode::kResourceExhausted, "op.d: "},
       {"a as a result", [&](GemmCall& c) { c.a.storage = TensorRef::Storage::kInlineResult; }, kInvalid,
        "op.a.inline_result: "},
       {"b as a result", [&](GemmCall& c) { c.b.storage = TensorRef::Storage::kInlineResult; }, kInvalid,
        "op.b.inline_result: "},
       {"d from data", [&](GemmCall& c) { make_inline(c.d, most); }, kInvalid, "op.d.inline_data: "}});
  GemmCall over = call;
  make_inline(over.a, too_much);
  EXPECT_THAT(MessageOf(Bind(over).status()), HasSubstr("inline_bytes_max"));
  make_inline(over.a, most);
  EXPECT_TRUE(Bind(over).ok()) << "the limit itself is allowed";
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("tessera_refused_total{limit=\"inline_bytes_max\"} 4"));
}

TEST_F(BindTest, PlainCallBecomesExactlyItsParameters) {
  GemmCall call = Good();
  call.a.byte_offset = 32;
  call.d = BufferView("op.d", d_, DType::kF32, {kM, kN}, {10, 1}, 8);
  const auto bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  const kernels::GemmParams& params = bound->params;
  EXPECT_EQ(params.m, kM);
  EXPECT_EQ(params.n, kN);
  EXPECT_EQ(params.k, kK);
  EXPECT_THAT(params.batch_shape, ElementsAre(1, 1, 1));
  EXPECT_EQ(params.a.data, DataOf(a_) + 32);
  EXPECT_EQ(params.b.data, DataOf(b_));
  EXPECT_EQ(params.d.data, DataOf(d_) + 8);
  EXPECT_EQ(params.a.row_stride, kK);
  EXPECT_EQ(params.a.col_stride, 1);
  EXPECT_EQ(params.b.row_stride, kK);
  EXPECT_EQ(params.b.col_stride, 1);
  EXPECT_EQ(params.d.row_stride, 10);
  EXPECT_EQ(params.d.col_stride, 1);
  for (const kernels::GemmMatrix* matrix : {&params.a, &params.b, &params.d}) {
    EXPECT_THAT(matrix->batch_stride, ElementsAre(0, 0, 0));
  }
  EXPECT_EQ(params.a_scale.vector, nullptr);
  EXPECT_EQ(params.a_scale.scalar, 1.0F);
  EXPECT_EQ(params.b_scale.vector, nullptr);
  EXPECT_EQ(params.bias.data, nullptr);
  EXPECT_EQ(bound->pins.size(), 3U);
  EXPECT_EQ(bound->problem.batch, 1);
  EXPECT_EQ(bound->problem.gemm_class.ToString(), "bf16_bf16.f32.fast.NT");
  EXPECT_EQ(bound->Flops(), 2U * kM * kN * kK);
  EXPECT_FALSE(bound->Empty());
  for (const BufferRow& row : table_.ListBuffers([](const Peer&) { return true; }).rows) {
    EXPECT_EQ(row.users, row.id == a_ || row.id == b_ || row.id == d_ ? 1U : 0U);
  }
}

TEST_F(BindTest, ScalesAndBiasBecomeVectorsWithStrides) {
  GemmCall call = Full();
  call.a_scale->vector->stride[0] = 3;
  call.bias->dtype = DType::kBf16;
  auto bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  const auto* v = DataOf(v_);
  EXPECT_EQ(static_cast<const void*>(bound->params.a_scale.vector), v);
  EXPECT_EQ(bound->params.a_scale.stride, 3);
  EXPECT_EQ(static_cast<const void*>(bound->params.b_scale.vector), v + 64);
  EXPECT_EQ(bound->params.b_scale.stride, 1);
  EXPECT_EQ(bound->params.bias.data, v + 128);
  EXPECT_EQ(bound->params.bias.stride, 1);
  EXPECT_EQ(bound->params.bias.dtype, DType::kBf16);

  call.a_scale = ScaleRef{.scalar = 2.5F};
  call.b_scale->vector->shape[0] = 1;
  call.b_scale->vector->stride[0] = 9;
  bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->params.a_scale.vector, nullptr);
  EXPECT_EQ(bound->params.a_scale.scalar, 2.5F);
  EXPECT_EQ(static_cast<const void*>(bound->params.b_scale.vector), v + 64);
  EXPECT_EQ(bound->params.b_scale.stride, 0) << "one value for all channels";
}

TEST_F(BindTest, BatchStridesFollowBroadcasting) {
  GemmCall call = Good();
  // D's batch is [2, 3, 2]: A leaves the first out, has 3 and 1; B repeats its first with stride 0, has 1 and 2.
  Reshape(call.d, {2, 3, 2, kM, kN});
  Reshape(call.a, {3, 1, kM, kK}, {100, 77, kK, 1});
  Reshape(call.b, {2, 1, 2, kN, kK}, {0, 55, 60, kK, 1});
  auto bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_THAT(bound->params.batch_shape, ElementsAre(2, 3, 2));
  EXPECT_THAT(bound->params.a.batch_stride, ElementsAre(0, 100, 0));
  EXPECT_THAT(bound->params.b.batch_stride, ElementsAre(0, 0, 60));
  EXPECT_THAT(bound->params.d.batch_stride, ElementsAre(6 * kM * kN, 2 * kM * kN, kM * kN));
  EXPECT_EQ(bound->problem.batch, 12);
  EXPECT_EQ(bound->Flops(), 24U * kM * kN * kK);

  // One batch dimension is the last of the three.
  Reshape(call.d, {5, kM, kN});
  Reshape(call.a, {kM, kK});
  Reshape(call.b, {5, kN, kK});
  bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_THAT(bound->params.batch_shape, ElementsAre(1, 1, 5));
  EXPECT_THAT(bound->params.a.batch_stride, ElementsAre(0, 0, 0));
  EXPECT_THAT(bound->params.b.batch_stride, ElementsAre(0, 0, kN * kK));
  EXPECT_THAT(bound->params.d.batch_stride, ElementsAre(0, 0, kM * kN));
}

TEST_F(BindTest, StridesDecideTheLayout) {
  const struct {
    bool a_k, b_k;
    GemmLayout layout;
  } rows[] = {{true, true, GemmLayout::kNT},
              {true, false, GemmLayout::kNN},
              {false, false, GemmLayout::kTN},
              {false, true, GemmLayout::kTT}};
  for (const auto& row : rows) {
    for (const std::int64_t padding : {0, 3}) {
      GemmCall call = Good();
      if (row.a_k) Reshape(call.a, {kM, kK}, {kK + padding, 1});
      if (!row.a_k) Reshape(call.a, {kM, kK}, {1, kM + padding});
      if (row.b_k) Reshape(call.b, {kN, kK}, {kK + padding, 1});
      if (!row.b_k) Reshape(call.b, {kN, kK}, {1, kN + padding});
      const auto bound = Bind(call);
      ASSERT_TRUE(bound.ok()) << bound.status();
      EXPECT_EQ(bound->problem.gemm_class.layout, row.layout);
      EXPECT_EQ(bound->params.a.row_stride, call.a.stride[0]);
      EXPECT_EQ(bound->params.a.col_stride, call.a.stride[1]);
      EXPECT_EQ(bound->params.b.row_stride, call.b.stride[0]);
      EXPECT_EQ(bound->params.b.col_stride, call.b.stride[1]);
    }
  }
}

TEST_F(BindTest, PackedViewsWithOneRowOrOneTermAreNt) {
  for (const std::int64_t m : {std::int64_t{1}, kM}) {
    for (const std::int64_t n : {std::int64_t{1}, kN}) {
      for (const std::int64_t k : {std::int64_t{1}, kK}) {
        GemmCall call = Good();
        Reshape(call.a, {m, k});
        Reshape(call.b, {n, k});
        Reshape(call.d, {m, n});
        const auto bound = Bind(call);
        ASSERT_TRUE(bound.ok()) << bound.status();
        EXPECT_EQ(bound->problem.gemm_class.layout, GemmLayout::kNT) << m << " " << n << " " << k;
      }
    }
  }
}

TEST_F(BindTest, OnlyPairsWithAChoiceKeepTheirAccumulation) {
  GemmCall call = Good();
  call.accumulation = kernels::Accumulation::kExact;
  auto bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->problem.gemm_class.ToString(), "bf16_bf16.f32.fast.NT");
  call = Good(DType::kE5m2, DType::kE4m3, DType::kBf16);
  call.accumulation = kernels::Accumulation::kExact;
  bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->problem.gemm_class.ToString(), "e5m2_e4m3.bf16.exact.NT");
}

TEST_F(BindTest, EmptyProblemsBind) {
  const struct {
    std::int64_t batch, m, n, k;
    bool empty;
  } rows[] = {{1, 0, kN, kK, true}, {1, kM, 0, kK, true}, {0, kM, kN, kK, true}, {1, kM, kN, 0, false}};
  for (const auto& row : rows) {
    GemmCall call = Good();
    Reshape(call.a, {row.batch, row.m, row.k});
    Reshape(call.b, {row.n, row.k});
    Reshape(call.d, {row.batch, row.m, row.n});
    const auto bound = Bind(call);
    ASSERT_TRUE(bound.ok()) << bound.status();
    EXPECT_EQ(bound->Empty(), row.empty);
    EXPECT_EQ(bound->Flops(), 0U);
  }
  GemmCall call = Good();
  Reshape(call.a, {kM, 0});
  Reshape(call.b, {kN, 0});
  call.a.buffer = call.d.buffer;
  EXPECT_TRUE(Bind(call).ok()) << "no bytes, no overlap";
}

TEST_F(BindTest, SpaceIsThatOfEveryTensor) {
  const auto host = Bind(Full());
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->space, MemorySpace());

  GemmCall call = Full();
  call.a.buffer = AllocateOnGpu();
  call.b.buffer = AllocateOnGpu();
  call.d.buffer = AllocateOnGpu();
  const Id vectors = AllocateOnGpu();
  for (TensorRef* ref : {&*call.a_scale->vector, &*call.b_scale->vector, &*call.bias}) ref->buffer = vectors;
  const auto bound = Bind(call);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->space, MemorySpace::Gpu(kFakeGpu));
  EXPECT_EQ(bound->params.a.data, DataOf(call.a.buffer));
  EXPECT_EQ(static_cast<const void*>(bound->params.b_scale.vector), DataOf(vectors) + 64);
}

TEST_F(BindTest, MixedSpacesAreRefusedByTheField) {
  const Id on_gpu = AllocateOnGpu();
  std::vector<Row> rows = {
      {"b", [&](GemmCall& c) { c.b.buffer = on_gpu; }, StatusCode::kInvalidArgument, "op.b: is in GPU-1111"},
      {"d", [&](GemmCall& c) { c.d.buffer = on_gpu; }, StatusCode::kInvalidArgument, "op.d: is in GPU-1111"},
      {"a", [&](GemmCall& c) { c.a.buffer = on_gpu; }, StatusCode::kInvalidArgument,
       "op.b: is in host, op.a in GPU-1111"},
      {"a_scale", [&](GemmCall& c) { c.a_scale->vector->buffer = on_gpu; }, StatusCode::kInvalidArgument,
       "op.a_scale.vector: is in GPU-1111"},
      {"b_scale", [&](GemmCall& c) { c.b_scale->vector->buffer = on_gpu; }, StatusCode::kInvalidArgument,
       "op.b_scale.vector: is in GPU-1111"},
      {"bias", [&](GemmCall& c) { c.bias->buffer = on_gpu; }, StatusCode::kInvalidArgument,
       "op.epilogue.bias: is in GPU-1111"},
  };
  ExpectEach(Full(), rows);
}

TEST_F(BindTest, InlineTensorsAreInHostMemory) {
  const std::string data(kInlineMax, '\0');
  GemmCall call = Good();
  call.a.buffer = AllocateOnGpu();
  call.b.buffer = AllocateOnGpu();
  call.d.buffer = AllocateOnGpu();
  const std::vector<Row> rows = {
      {"input",
       [&](GemmCall& c) {
         c.b.storage = TensorRef::Storage::kInlineData;
         c.b.inline_data = &data;
       },
       StatusCode::kInvalidArgument, "op.b: is in host"},
      {"output", [](GemmCall& c) { c.d.storage = TensorRef::Storage::kInlineResult; }, StatusCode::kInvalidArgument,
       "op.d: is in host"},
  };
  ExpectEach(call, rows);
  const auto other_gpu = table_.AllocateBuffer(*session_, kBufferBytes, second_gpu_.uuid());
  ASSERT_TRUE(other_gpu.ok());
  ExpectEach(call, {{"another GPU", [&](GemmCall& c) { c.b.buffer = other_gpu->id; }, StatusCode::kInvalidArgument,
                     "op.b: is in GPU-2222"}});
}

TEST_F(BindTest, OverlapIsSeenThroughTwoImportsOfOneAllocation) {
  const LegacyImport import{.handle = gpu_.ExportLegacy(2 * kBufferBytes),
                            .device_uuid = kFakeGpu,
                            .allocation_id = 7,
                            .exporter_pid = ::getpid() + 1};
  LegacyImport later = import;
  later.byte_offset = 16;
  const auto first = table_.ImportLegacy(*session_, import);
  const auto second = table_.ImportLegacy(*session_, later);
  ASSERT_TRUE(first.ok() && second.ok());
  GemmCall call = Good();
  call.a.buffer = first->id;
  call.b.buffer = AllocateOnGpu();
  call.d.buffer = second->id;
  EXPECT_THAT(MessageOf(Bind(call).status()), StartsWith("op.d: overlaps op.a"));
  call.d.byte_offset = kM * kK * 2 - 16;
  EXPECT_TRUE(Bind(call).ok()) << "right behind A";
  call.d.byte_offset -= 4;
  EXPECT_THAT(MessageOf(Bind(call).status()), StartsWith("op.d: overlaps op.a"));
}

}  // namespace
}  // namespace tessera::server
