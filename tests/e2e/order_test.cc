// Streams, timelines, Execute, ENQUEUED and Synchronize: what is ordered, what is refused, and how waits end.

#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <limits>
#include <list>
#include <numeric>

#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/exact_product.h"
#include "tests/e2e/inline_problem.h"
#include "tests/e2e/raw_order.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

constexpr int kSlowness = kSanitized ? 5 : 1;
constexpr int kSlots = 32;

void ExpectStatus(const absl::Status& status, StatusCode code, const std::string& begins,
                  const std::string& names = "") {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith(begins));
  EXPECT_THAT(std::string(status.message()), HasSubstr(names));
}

void ExpectTold(const absl::StatusOr<v1::SynchronizeReply>& reply, StatusCode code, const std::string& names = "") {
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->code(), static_cast<int>(code)) << reply->message();
  EXPECT_THAT(reply->message(), HasSubstr(names));
}

// A daemon whose one thread makes the order of what runs that of what is told here.
class OrderTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    Begin();
  }
  void TearDown() override {
    End();
    DaemonFixture::TearDown();
  }

  void Begin(SettingTexts settings = {}) {
    End();
    settings.emplace_back("cpu_threads", "1");
    StartDaemon(settings);
    raw_.emplace(socket());
    client_.emplace(Connect());
    session_.emplace(client_->OpenSession("order").value());
    order_.emplace(*raw_, session_->token());
    memory_.emplace(session_->Allocate(kSlots * kSlotBytes).value());
    slow_.emplace(session_->Allocate(kSlowProduct.BufferBytes()).value());
  }
  void End() {
    slow_.reset();
    memory_.reset();
    order_.reset();
    session_.reset();
    client_.reset();
    raw_.reset();
  }

  // More than a daemon does on the thread of a call; its operands and an untouched D.
  ExactProduct Small(int slot) { return Filled(slot, 2048); }
  // As much as it does there, if nothing is before it in its stream.
  ExactProduct Tiny(int slot) { return Filled(slot, 8); }
  v1::GemmRequest Slow(const client::OrderSpec& order = {}) const {
    return Ordered(ProductOf(kSlowProduct, slow_->id(), slow_->id()), order);
  }

  GemmUnderWay Send(const v1::GemmRequest& request, std::chrono::milliseconds timeout = 60s) const {
    return {*raw_, session_->token(), request, timeout};
  }

  // A slow product that has been launched.
  GemmUnderWay Run(const v1::GemmRequest& slow) {
    const double before = std::max(0.0, MetricSum(Metrics(), "tessera_kernel_launches_total"));
    GemmUnderWay call = Send(slow);
    EXPECT_TRUE(Eventually(20s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") == before + 1; }));
    return call;
  }

  v1::SessionInfo Info() const {
    const v1::ListSessionsReply list = raw_->ListSessions().value();
    for (const v1::SessionInfo& row : list.sessions()) {
      if (row.label() == "order") return row;
    }
    return {};
  }
  bool AwaitGated(std::uint32_t count) const {
    return Eventually(20s, [&] { return Info().gated() == count; });
  }
  double Refused(const std::string& limit) const {
    return MetricSum(Metrics(), "tessera_refused_total", {"limit=\"" + limit + "\""});
  }
  double Outcome(const std::string& outcome) const {
    return std::max(0.0, MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"" + outcome + "\""}));
  }

  // Nothing waits, runs or holds a buffer any more.
  void ExpectIdle() const {
    EXPECT_TRUE(Eventually(20s, [&] {
      const std::string metrics = Metrics();
      return MetricSum(metrics, "tessera_in_flight") == 0 && MetricSum(metrics, "tessera_queue_depth") == 0 &&
             MetricSum(metrics, "tessera_gated") == 0;
    })) << Metrics();
    EXPECT_EQ(Info().in_flight(), 0U);
    EXPECT_EQ(Info().gated(), 0U);
  }

  // 16 bytes that look like an id of this daemon, of something that is not there.
  static std::string Unknown(std::string id) {
    id.back() = static_cast<char>(id.back() ^ 1);
    return id;
  }

  std::optional<RawClient> raw_;
  std::optional<client::Client> client_;
  std::optional<client::Session> session_;
  std::optional<RawOrder> order_;  // of session_
  std::optional<client::Buffer> memory_;
  std::optional<client::Buffer> slow_;

 private:
  static constexpr std::uint64_t kSlotBytes = 64 << 10U;

  ExactProduct Filled(int slot, std::int64_t k) {
    EXPECT_LT(slot, kSlots);
    ExactProduct product(*memory_, 4, 4, k, static_cast<std::uint64_t>(slot) * kSlotBytes);
    product.Fill(static_cast<std::uint64_t>(slot));
    return product;
  }
};

// ---- Execute ----

using ExecuteTest = OrderTest;

TEST_F(ExecuteTest, TheSecondReadsWhatTheFirstWrote) {
  for (int round = 0; round < 20; ++round) {
    // x = 1 * c, y = x * 1: each element of y is 16 * 16 * c.
    const client::TensorView ones = memory_->Tensor(DType::kBf16, {16, 16});
    const client::TensorView first = memory_->Tensor(DType::kBf16, {16, 16}, 1024);
    const client::TensorView x = memory_->Tensor(DType::kBf16, {16, 16}, 2048);
    const client::TensorView y = memory_->Tensor(DType::kF32, {16, 16}, 4096);
    for (std::size_t i = 0; i < 256; ++i) {
      oracle::Encode(DType::kBf16, 1, ones.data + 2 * i);
      oracle::Encode(DType::kBf16, round, first.data + 2 * i);
      oracle::Encode(DType::kBf16, -7, x.data + 2 * i);
    }
    const auto results = session_->Execute({{.a = ones, .b = first, .d = x}, {.a = x, .b = ones, .d = y}});
    ASSERT_TRUE(results.ok()) << results.status();
    ASSERT_EQ(results->size(), 2U);
    for (const client::GemmResult& result : *results) EXPECT_THAT(result.report.variant(), StartsWith("gemm.cpu."));
    for (std::size_t i = 0; i < 256; ++i) {
      ASSERT_EQ(oracle::Decode(DType::kF32, y.data + 4 * i), 256.0 * round) << i;
    }
  }
  EXPECT_EQ(Outcome("ok"), 40);
}

TEST_F(ExecuteTest, AWrongOperationIsNamedByItsIndexAndNothingRuns) {
  const ExactProduct products[] = {Small(0), Small(1), Small(2)};
  std::vector<v1::GemmRequest> gemms;
  for (const ExactProduct& product : products) gemms.push_back(RequestOf(product.spec()));
  v1::ExecuteRequest shape = ExecuteOf(gemms);
  shape.mutable_submission()->mutable_ops(2)->mutable_gemm()->mutable_d()->set_shape(1, 5);
  v1::ExecuteRequest kind = ExecuteOf(gemms);
  kind.mutable_submission()->mutable_ops(1)->clear_gemm();
  v1::ExecuteRequest buffer = ExecuteOf(gemms);
  buffer.mutable_submission()->mutable_ops(1)->mutable_gemm()->mutable_b()->set_buffer_id(Unknown(memory_->id()));
  const std::string ops = "submission.ops";
  ExpectStatus(order_->Execute(shape).status(), StatusCode::kInvalidArgument, ops + "[2].gemm.d.shape");
  ExpectStatus(order_->Execute(kind).status(), StatusCode::kInvalidArgument, ops + "[1]: ");
  ExpectStatus(order_->Execute(buffer).status(), StatusCode::kNotFound, ops + "[1].gemm.b.buffer_id: ");
  ExpectStatus(order_->Execute({}).status(), StatusCode::kInvalidArgument, ops + ": ");
  v1::ExecuteRequest backend = ExecuteOf(gemms);
  backend.mutable_submission()->mutable_options()->set_backend(v1::BACKEND_CUDA);
  ExpectStatus(order_->Execute(backend).status(), StatusCode::kUnimplemented, "submission.options.backend: ");
  for (const ExactProduct& product : products) EXPECT_TRUE(product.Untouched());
  EXPECT_EQ(raw_->ListBuffers()->buffers(0).references(), 0U);
  ExpectIdle();
}

TEST_F(ExecuteTest, HasUpTo64Operations) {
  const ExactProduct product = Small(0);
  std::vector<v1::GemmRequest> gemms(65, RequestOf(product.spec()));
  ExpectStatus(order_->Execute(ExecuteOf(gemms)).status(), StatusCode::kInvalidArgument,
               "submission.ops: 65; at most 64");
  EXPECT_TRUE(product.Untouched());
  gemms.pop_back();
  const auto reply = order_->Execute(ExecuteOf(gemms));
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->results_size(), 64);
  EXPECT_TRUE(product.Right(0));
  EXPECT_EQ(Outcome("ok"), 64);
}

TEST_F(ExecuteTest, EachOperationTakesAPlaceInTheQueue) {
  Begin({{"queue_per_session_max", "5"}});
  GemmUnderWay running = Run(Slow());
  const std::vector<v1::GemmRequest> five(5, RequestOf(Small(0).spec()));
  ExpectStatus(order_->Execute(ExecuteOf(five)).status(), StatusCode::kResourceExhausted, "queue_per_session_max: ");
  const std::vector<v1::GemmRequest> four(4, RequestOf(Small(0).spec()));
  EXPECT_TRUE(order_->Execute(ExecuteOf(four)).ok());
  EXPECT_TRUE(running.Await().ok());
  EXPECT_TRUE(order_->Execute(ExecuteOf(five)).ok());
  ExpectIdle();
}

TEST_F(ExecuteTest, InlineTensorsOfEachOperation) {
  InlineProblem first(3, 5, 40);
  InlineProblem second(7, 2, 9);
  const auto results = session_->Execute({first.spec(), second.spec()});
  ASSERT_TRUE(results.ok()) << results.status();
  first.ExpectRight();
  second.ExpectRight();
  // And without a session.
  InlineProblem third(2, 2, 3);
  v1::GemmRequest request = RequestOf(third.spec());
  const auto reply = RawClient::Call(raw_->compute(), &v1::Compute::Stub::Execute, ExecuteOf({request, request}));
  ASSERT_TRUE(reply.ok()) << reply.status();
  ASSERT_EQ(reply->results_size(), 2);
  for (const v1::OpResult& result : reply->results()) {
    const client::TensorView d = third.spec().d;
    ASSERT_EQ(result.inline_result().size(), 4 * sizeof(float));
    std::memcpy(d.data, result.inline_result().data(), result.inline_result().size());
    third.ExpectRight();
  }
}

// ---- Streams ----

TEST_F(OrderTest, AStreamIsInOrderAndHoldsUpNoOther) {
  const std::string one = order_->OpenStream().value();
  const std::string other = order_->OpenStream(v1::STREAM_PRIORITY_HIGH).value();
  GemmUnderWay slow = Run(Slow({.stream = one}));
  const ExactProduct behind = Tiny(0);
  ExpectStatus(Send(RequestOf(behind.spec(), {.stream = one}), 100ms).Await(), StatusCode::kDeadlineExceeded, "");
  const ExactProduct beside = Tiny(1);
  EXPECT_TRUE(order_->Gemm(RequestOf(beside.spec(), {.stream = other})).ok());
  EXPECT_TRUE(beside.Right(1));
  const ExactProduct own = Tiny(2);
  EXPECT_TRUE(order_->Gemm(RequestOf(own.spec())).ok());
  EXPECT_TRUE(own.Right(2));
  EXPECT_FALSE(slow.Answered()) << "the slow product was over too soon: use a larger one";
  EXPECT_TRUE(slow.Await().ok());
  EXPECT_TRUE(behind.Untouched());
  EXPECT_TRUE(order_->Gemm(RequestOf(behind.spec(), {.stream = one})).ok());
  EXPECT_TRUE(behind.Right(0));
}

// One thread for all: what is queued in one stream is no reason for another to wait for all of it.
TEST_F(OrderTest, AQueueOfOneStreamIsNotBeforeAnother) {
  const std::string one = order_->OpenStream().value();
  const std::string other = order_->OpenStream().value();
  GemmUnderWay running = Run(Slow({.stream = one}));
  GemmUnderWay second = Send(Slow({.stream = one}));
  GemmUnderWay third = Send(Slow({.stream = one}));
  ASSERT_TRUE(Eventually(20s, [&] { return Info().in_flight() == 3; }));
  const ExactProduct small = Small(0);
  EXPECT_TRUE(order_->Gemm(RequestOf(small.spec(), {.stream = other})).ok());
  EXPECT_TRUE(small.Right(0));
  EXPECT_FALSE(third.Answered());
  for (GemmUnderWay* call : {&running, &second, &third}) EXPECT_TRUE(call->Await().ok());
}

TEST_F(OrderTest, RepliesOfAStreamCallAreInOrderWithinOneStreamOnly) {
  const std::string one = order_->OpenStream().value();
  const std::string other = order_->OpenStream().value();
  const auto context = RawClient::Context(session_->token());
  const auto call = raw_->compute().Stream(context.get());
  ASSERT_TRUE(call->Write(StreamRequestOf(100, Slow({.stream = one}))));
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(call->Write(StreamRequestOf(101 + i, RequestOf(Tiny(i).spec(), {.stream = one}))));
    ASSERT_TRUE(call->Write(StreamRequestOf(200 + i, RequestOf(Tiny(10 + i).spec(), {.stream = other}))));
  }
  ASSERT_TRUE(call->WritesDone());
  std::vector<std::uint64_t> tags;
  for (v1::StreamReply reply; call->Read(&reply);) {
    EXPECT_EQ(reply.code(), 0) << reply.message();
    tags.push_back(reply.tag());
  }
  EXPECT_TRUE(call->Finish().ok());
  std::vector<std::uint64_t> expected(21);
  std::iota(expected.begin(), expected.begin() + 10, 200);
  std::iota(expected.begin() + 10, expected.end(), 100);
  EXPECT_EQ(tags, expected) << "all of the stream that is free, then all of the other";
}

TEST_F(OrderTest, IdsThatAreWrongAreNamed) {
  const client::Session elsewhere = client_->OpenSession("elsewhere").value();
  const RawOrder others(*raw_, elsewhere.token());
  const std::string stream = order_->OpenStream().value();
  const std::string timeline = order_->CreateTimeline().value();
  const std::string foreign_stream = others.OpenStream().value();
  const std::string foreign_timeline = others.CreateTimeline().value();
  const std::string released_stream = order_->OpenStream().value();
  const std::string released_timeline = order_->CreateTimeline().value();
  ASSERT_TRUE(order_->Release(released_stream).ok());
  ASSERT_TRUE(order_->Release(released_timeline).ok());
  std::string former = stream;
  former[0] = static_cast<char>(former[0] ^ 0x40);
  const ExactProduct product = Small(0);
  const auto gemm = [&](const client::OrderSpec& order) { return order_->Gemm(RequestOf(product.spec(), order)); };

  const struct {
    const char* what;
    std::string as_stream, as_timeline;
    StatusCode code;
  } rows[] = {{"short", "s", "t", StatusCode::kInvalidArgument},
              {"17 bytes", stream + "x", timeline + "x", StatusCode::kInvalidArgument},
              {"zeros", std::string(16, '\0'), std::string(16, '\0'), StatusCode::kNotFound},
              {"unknown", Unknown(stream), Unknown(timeline), StatusCode::kNotFound},
              {"a buffer", memory_->id(), memory_->id(), StatusCode::kNotFound},
              {"the other kind", timeline, stream, StatusCode::kInvalidArgument},
              {"foreign", foreign_stream, foreign_timeline, StatusCode::kPermissionDenied},
              {"released", released_stream, released_timeline, StatusCode::kNotFound},
              {"former", former, former, StatusCode::kFailedPrecondition}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.what);
    const client::SyncPoint good{timeline, 0};
    const client::SyncPoint bad{row.as_timeline, 1};
    ExpectStatus(gemm({.stream = row.as_stream}), row.code, "options.stream: ");
    ExpectStatus(gemm({.wait = {good, bad}}), row.code, "options.wait[1].id: ");
    ExpectStatus(gemm({.signal = {{timeline, 5}, bad}}), row.code, "options.signal[1].id: ");
    ExpectStatus(order_->Execute(ExecuteOf({RequestOf(product.spec())}, {.wait = {bad}})).status(), row.code,
                 "submission.options.wait[0].id: ");
    ExpectStatus(order_->Synchronize(RawOrder::OfStream(row.as_stream)).status(), row.code, "stream_id: ");
    ExpectStatus(order_->Synchronize(RawOrder::OfPoint(row.as_timeline, 0)).status(), row.code, "point.id: ");
    ExpectStatus(order_->Signal(row.as_timeline, 1), row.code, "point.id: ");
    if (std::string(row.what) == "the other kind") continue;
    ExpectStatus(order_->Release(row.as_stream), row.code, "id: ");
    ExpectStatus(order_->Release(row.as_timeline), row.code, "id: ");
  }
  EXPECT_TRUE(product.Untouched());
  EXPECT_EQ(order_->Synchronize(RawOrder::OfPoint(timeline, 0))->value(), 0U) << "refused calls signal nothing";
  v1::OpenStreamRequest priority;
  priority.set_priority(static_cast<v1::StreamPriority>(77));
  ExpectStatus(RawClient::Call(raw_->memory(), &v1::Memory::Stub::OpenStream, priority, session_->token()).status(),
               StatusCode::kInvalidArgument, "priority: ", "77");
  ExpectStatus(order_->CreateTimeline({"alice"}).status(), StatusCode::kInvalidArgument, "shared_with");
  ExpectStatus(order_->CreateTimeline(std::vector<std::string>(17, "uid:1")).status(), StatusCode::kInvalidArgument,
               "shared_with", "16");
  const std::string huge = order_->CreateTimeline({}, false, std::numeric_limits<std::uint64_t>::max()).value();
  EXPECT_TRUE(gemm({.wait = {{huge, std::numeric_limits<std::uint64_t>::max()}}, .signal = {{huge, 1}}}).ok());
  ExpectIdle();
}

TEST_F(OrderTest, StreamsAndTimelinesOfASessionAreLimited) {
  Begin({{"streams_per_session_max", "3"}, {"timelines_per_session_max", "2"}});
  std::vector<std::string> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(order_->OpenStream().value());
  for (int i = 0; i < 2; ++i) ids.push_back(order_->CreateTimeline().value());
  ExpectStatus(order_->OpenStream().status(), StatusCode::kResourceExhausted, "streams_per_session_max: ", "3");
  for (int i = 0; i < 2; ++i) {
    ExpectStatus(order_->CreateTimeline().status(), StatusCode::kResourceExhausted, "timelines_per_session_max: ", "2");
  }
  EXPECT_EQ(Refused("streams_per_session_max"), 1);
  EXPECT_EQ(Refused("timelines_per_session_max"), 2);
  EXPECT_EQ(Info().streams(), 3U);
  EXPECT_EQ(Info().timelines(), 2U);
  {
    client::Session other = client_->OpenSession("another").value();
    EXPECT_TRUE(other.OpenWorkStream().ok()) << "each session has its own";
    EXPECT_TRUE(other.CreateTimeline().ok());
  }
  ASSERT_TRUE(order_->Release(ids[1]).ok());
  ASSERT_TRUE(order_->Release(ids[3]).ok());
  EXPECT_EQ(Info().streams(), 2U);
  EXPECT_EQ(Info().timelines(), 1U);
  EXPECT_TRUE(order_->OpenStream().ok());
  EXPECT_TRUE(order_->CreateTimeline().ok());
  {  // the library's objects give theirs back
    client::Session other = client_->OpenSession("library").value();
    for (int i = 0; i < 10; ++i) {
      const auto stream = other.OpenWorkStream();
      const auto timeline = other.CreateTimeline();
      ASSERT_TRUE(stream.ok() && timeline.ok()) << i;
    }
  }
}

// ---- Waits and signals ----

TEST_F(OrderTest, OneStreamWaitsForAnother) {
  client::WorkStream writer = session_->OpenWorkStream().value();
  client::WorkStream reader = session_->OpenWorkStream(v1::STREAM_PRIORITY_LOW).value();
  client::Timeline timeline = session_->CreateTimeline().value();
  const client::TensorView ones = memory_->Tensor(DType::kBf16, {16, 16});
  const client::TensorView x = memory_->Tensor(DType::kBf16, {16, 16}, 2048);
  const client::TensorView y = memory_->Tensor(DType::kF32, {16, 16}, 4096);
  for (std::size_t i = 0; i < 256; ++i) oracle::Encode(DType::kBf16, 1, ones.data + 2 * i);
  std::memset(x.data, 0, 512);
  std::future<absl::StatusOr<client::GemmResult>> read =
      session_->GemmAsync({.a = x,
                           .b = ones,
                           .d = y,
                           .profile = true,
                           .order = {.stream = reader.id(), .wait = {timeline.At(1)}, .signal = {timeline.At(2)}}});
  ASSERT_TRUE(AwaitGated(1));
  EXPECT_EQ(MetricSum(Metrics(), "tessera_gated"), 1);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(read.wait_for(0s), std::future_status::timeout);
  EXPECT_TRUE(
      session_->Gemm({.a = ones, .b = ones, .d = x, .order = {.stream = writer.id(), .signal = {timeline.At(1)}}})
          .ok());
  const auto value = timeline.Wait(2, 20s);
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ(*value, 2U);
  const auto result = read.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GE(result->report.timing().gate_ns(), 50'000'000U);
  EXPECT_GE(result->report.timing().queue_ns(), result->report.timing().gate_ns());
  for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(oracle::Decode(DType::kF32, y.data + 4 * i), 256) << i;
  ExpectIdle();
}

TEST_F(OrderTest, ALowerSignalAndALowerWait) {
  const std::string timeline = order_->CreateTimeline({}, false, 5).value();
  EXPECT_EQ(order_->Synchronize(RawOrder::OfPoint(timeline, 5), 1s)->value(), 5U);
  EXPECT_TRUE(order_->Signal(timeline, 3).ok()) << "the value only grows";
  EXPECT_EQ(order_->Synchronize(RawOrder::OfPoint(timeline, 1), 1s)->value(), 5U);
  ExpectStatus(order_->Synchronize(RawOrder::OfPoint(timeline, 6), 100ms).status(), StatusCode::kDeadlineExceeded, "");
  const ExactProduct product = Small(0);
  GemmUnderWay waiting = Send(RequestOf(product.spec(), {.wait = {{timeline, 4}, {timeline, 7}}}));
  ASSERT_TRUE(AwaitGated(1));
  ASSERT_TRUE(order_->Signal(timeline, 6).ok());
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(waiting.Answered());
  ASSERT_TRUE(order_->Signal(timeline, 100).ok());
  EXPECT_TRUE(waiting.Await().ok());
  EXPECT_TRUE(product.Right(0));
}

TEST_F(OrderTest, SessionsOfOneUserShareATimeline) {
  const client::Session other = client_->OpenSession("waiting").value();
  const RawOrder waiter(*raw_, other.token());
  const std::string secret = order_->CreateTimeline().value();
  const std::string shared = order_->CreateTimeline({}, true).value();
  InlineProblem problem(2, 2, 4);
  ExpectStatus(waiter.Gemm(RequestOf(problem.spec(), {.wait = {{secret, 0}}})), StatusCode::kPermissionDenied,
               "options.wait[0].id: ");
  GemmUnderWay waiting(*raw_, waiter.token(),
                       RequestOf(problem.spec(), {.wait = {{shared, 1}}, .signal = {{shared, 2}}}));
  ASSERT_TRUE(Eventually(20s, [&] { return MetricSum(Metrics(), "tessera_gated") == 1; }));
  EXPECT_TRUE(order_->Gemm(RequestOf(Small(0).spec(), {.wait = {}, .signal = {{shared, 1}}})).ok());
  ExpectTold(order_->Synchronize(RawOrder::OfPoint(shared, 2)), StatusCode::kOk);
  EXPECT_TRUE(waiting.Await().ok());
  ExpectStatus(waiter.Release(shared), StatusCode::kPermissionDenied, "id: ");
}

TEST_F(OrderTest, UsersThatAreNamedShareATimeline) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const RawClient alice(socket(), kAliceUid);
  const RawClient bob(socket(), kBobUid);
  const RawOrder of_alice(alice, alice.OpenFor(60'000).value());
  const RawOrder of_bob(bob, bob.OpenFor(60'000).value());
  const std::string timeline = order_->CreateTimeline({PrincipalOf(kAliceUid)}).value();
  InlineProblem problem(2, 2, 4);
  const v1::GemmRequest request = RequestOf(problem.spec(), {.wait = {{timeline, 1}}, .signal = {{timeline, 2}}});
  ExpectStatus(of_bob.Gemm(request), StatusCode::kPermissionDenied, "options.wait[0].id: ");
  ExpectStatus(of_bob.Signal(timeline, 9), StatusCode::kPermissionDenied, "point.id: ");
  ExpectStatus(of_bob.Synchronize(RawOrder::OfPoint(timeline, 0)).status(), StatusCode::kPermissionDenied,
               "point.id: ");
  GemmUnderWay waiting(alice, of_alice.token(), request);
  ASSERT_TRUE(Eventually(20s, [&] { return MetricSum(Metrics(), "tessera_gated") == 1; }));
  EXPECT_TRUE(order_->Signal(timeline, 1).ok());
  EXPECT_TRUE(waiting.Await().ok());
  EXPECT_EQ(order_->Synchronize(RawOrder::OfPoint(timeline, 2))->value(), 2U);
  EXPECT_TRUE(of_alice.Signal(timeline, 3).ok());
  ExpectStatus(of_alice.Release(timeline), StatusCode::kPermissionDenied, "id: ");
  EXPECT_EQ(order_->Synchronize(RawOrder::OfPoint(timeline, 0))->value(), 3U);
}

// ---- Waits that never come ----

class NeverTest : public OrderTest {
 protected:
  void SetUp() override {
    OrderTest::SetUp();
    stream_ = order_->OpenStream().value();
    never_ = order_->CreateTimeline().value();
    signals_ = order_->CreateTimeline().value();
  }

  client::OrderSpec Order() const { return {.stream = stream_, .wait = {{never_, 1}}, .signal = {{signals_, 1}}}; }

  // What ended the submission that waits, in slot 0, is in its signal; what is behind it, in slot 1, computes.
  void ExpectTheNextGoesOn(GemmUnderWay& ended, GemmUnderWay& behind, StatusCode code) {
    ExpectStatus(ended.Await(), code, "");
    EXPECT_TRUE(behind.AnsweredWithin(kSlowness * 1000ms)) << "held up by what is over";
    ASSERT_TRUE(order_->Signal(never_, 1).ok());
    EXPECT_TRUE(behind.Await().ok());
    EXPECT_TRUE(waiting_->Untouched());
    EXPECT_TRUE(behind_->Right(1));
    const auto told = order_->Synchronize(RawOrder::OfPoint(signals_, 1));
    ASSERT_TRUE(told.ok()) << told.status();
    // The daemon may hear of a client that has left before it sees that the deadline is over.
    EXPECT_TRUE(told->code() == static_cast<int>(code) ||
                (code == StatusCode::kDeadlineExceeded && told->code() == static_cast<int>(StatusCode::kCancelled)))
        << told->code() << told->message();
    EXPECT_EQ(told->value(), 0U) << "an error raises nothing";
    ExpectTold(order_->Synchronize(RawOrder::OfPoint(signals_, 0)), StatusCode::kOk);
    // And who waits for that: nothing computed, and the reason told.
    const ExactProduct third = Small(2);
    ExpectStatus(order_->Gemm(RequestOf(third.spec(), {.wait = {{signals_, 1}}, .signal = {{signals_, 2}}})),
                 StatusCode::kAborted, "what it waited for has failed: ");
    EXPECT_TRUE(third.Untouched());
    EXPECT_TRUE(order_->Gemm(RequestOf(third.spec(), {.wait = {{signals_, 0}}})).ok()) << "an earlier value";
    ExpectIdle();
    EXPECT_EQ(Outcome("aborted"), 1);
  }

  GemmUnderWay SendWaiting(std::chrono::milliseconds timeout = 60s, std::chrono::milliseconds launch_timeout = 0ms) {
    waiting_.emplace(Small(0));
    client::OrderSpec order = Order();
    order.launch_timeout = launch_timeout;
    GemmUnderWay call = Send(RequestOf(waiting_->spec(), order), timeout);
    EXPECT_TRUE(AwaitGated(1));
    return call;
  }
  GemmUnderWay SendBehind() {
    behind_.emplace(Small(1));
    GemmUnderWay call = Send(RequestOf(behind_->spec(), {.stream = stream_}));
    EXPECT_TRUE(AwaitGated(2));
    return call;
  }

  std::string stream_, never_, signals_;
  std::optional<ExactProduct> waiting_, behind_;
};

TEST_F(NeverTest, TheDeadlineOfTheCallEndsIt) {
  GemmUnderWay waiting = SendWaiting(1500ms);
  GemmUnderWay behind = SendBehind();
  ExpectTheNextGoesOn(waiting, behind, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Outcome("expired") + Outcome("cancelled"), 1);
}

TEST_F(NeverTest, TimeoutMsEndsItSoon) {
  const Clock::time_point start = Clock::now();
  GemmUnderWay waiting = SendWaiting(60s, 1000ms);
  GemmUnderWay behind = SendBehind();
  ASSERT_TRUE(waiting.AnsweredWithin(20s));
  EXPECT_GE(Clock::now() - start, 1000ms);
  EXPECT_LT(Clock::now() - start, 1000ms + kSlowness * 400ms);
  ExpectTheNextGoesOn(waiting, behind, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Outcome("expired"), 1);
}

TEST_F(NeverTest, CancellingEndsIt) {
  GemmUnderWay waiting = SendWaiting();
  GemmUnderWay behind = SendBehind();
  waiting.Cancel();
  ExpectTheNextGoesOn(waiting, behind, StatusCode::kCancelled);
  EXPECT_EQ(Outcome("cancelled"), 1);
}

TEST_F(NeverTest, TheEndOfTheSessionEndsItAndTellsOthers) {
  const client::Session other = client_->OpenSession("other").value();
  const RawOrder others(*raw_, other.token());
  const std::string shared = order_->CreateTimeline({}, true).value();
  waiting_.emplace(Small(0));
  GemmUnderWay waiting = Send(RequestOf(waiting_->spec(), {.wait = {{never_, 1}}, .signal = {{shared, 1}}}));
  ASSERT_TRUE(AwaitGated(1));
  InlineProblem problem(2, 2, 4);
  // Of two that wait in the other session, one waits for what is signalled by the end, one for what never is.
  const std::string second = others.OpenStream().value();
  GemmUnderWay dependent(*raw_, other.token(), RequestOf(problem.spec(), {.wait = {{shared, 1}}}));
  GemmUnderWay orphan(*raw_, other.token(), RequestOf(problem.spec(), {.stream = second, .wait = {{shared, 2}}}));
  SynchronizeUnderWay point(*raw_, other.token(), RawOrder::OfPoint(shared, 3));
  ASSERT_TRUE(Eventually(20s, [&] { return MetricSum(Metrics(), "tessera_gated") == 3; }));
  const Clock::time_point start = Clock::now();
  ASSERT_TRUE(raw_->Close(session_->token()).ok());
  ExpectStatus(waiting.Await(), StatusCode::kCancelled, "");
  ExpectStatus(dependent.Await(), StatusCode::kAborted, "what it waited for has failed: ", "session ended");
  ExpectStatus(orphan.Await(), StatusCode::kAborted, "what it waited for has failed: ", "session");
  EXPECT_TRUE(point.Await().ok());
  EXPECT_EQ(point.reply().code(), static_cast<int>(StatusCode::kCancelled)) << "the error that was signalled";
  EXPECT_LT(Clock::now() - start, kSlowness * 2000ms);
  EXPECT_TRUE(others.Gemm(RequestOf(problem.spec())).ok());
}

TEST_F(NeverTest, ReleasingItsTimelineEndsIt) {
  GemmUnderWay waiting = SendWaiting();
  GemmUnderWay behind = SendBehind();
  SynchronizeUnderWay point(*raw_, session_->token(), RawOrder::OfPoint(never_, 1));
  std::this_thread::sleep_for(50ms);
  ASSERT_TRUE(order_->Release(never_).ok());
  ExpectStatus(waiting.Await(), StatusCode::kAborted, "what it waited for has failed: ", "released");
  EXPECT_TRUE(behind.Await().ok());
  EXPECT_TRUE(waiting_->Untouched());
  EXPECT_TRUE(behind_->Right(1));
  EXPECT_TRUE(point.Await().ok());
  EXPECT_EQ(point.reply().code(), static_cast<int>(StatusCode::kAborted));
  ExpectTold(order_->Synchronize(RawOrder::OfPoint(signals_, 1)), StatusCode::kAborted, "released");
  ExpectIdle();
}

TEST_F(NeverTest, AStreamThatIsReleasedGoesOn) {
  GemmUnderWay waiting = SendWaiting();
  ASSERT_TRUE(order_->Release(stream_).ok());
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(waiting.Answered());
  ASSERT_TRUE(order_->Signal(never_, 1).ok());
  EXPECT_TRUE(waiting.Await().ok());
  EXPECT_TRUE(waiting_->Right(0));
}

TEST_F(NeverTest, TheSessionWaitsForAStreamThatIsReleased) {
  GemmUnderWay waiting = SendWaiting();
  ASSERT_TRUE(order_->Release(stream_).ok());
  ExpectStatus(order_->Synchronize({}, 200ms).status(), StatusCode::kDeadlineExceeded, "");
  ASSERT_TRUE(order_->Signal(never_, 1).ok());
  EXPECT_TRUE(waiting.Await().ok());
  ExpectTold(order_->Synchronize({}, 20s), StatusCode::kOk);
}

TEST_F(NeverTest, TheEndOfTheSessionReachesAStreamThatIsReleased) {
  GemmUnderWay waiting = SendWaiting();
  ASSERT_TRUE(order_->Release(stream_).ok());
  ASSERT_TRUE(raw_->Close(session_->token()).ok());
  EXPECT_TRUE(waiting.AnsweredWithin(kSlowness * 2000ms));
  ExpectStatus(waiting.Await(), StatusCode::kCancelled, "");
}

// timeout_ms of what is behind something that runs, with no wait of its own.
TEST_F(OrderTest, TimeoutMsEndsWhatIsQueued) {
  GemmUnderWay slow = Run(Slow());
  const ExactProduct product = Small(0);
  GemmUnderWay queued = Send(RequestOf(product.spec(), {.launch_timeout = 100ms}));
  EXPECT_TRUE(queued.AnsweredWithin(kSlowness * 450ms)) << "within some 100 ms of its timeout";
  EXPECT_FALSE(slow.Answered()) << "the slow product was over too soon: use a larger one";
  ExpectStatus(queued.Await(), StatusCode::kDeadlineExceeded, "", "timeout_ms");
  EXPECT_TRUE(slow.Await().ok());
  EXPECT_TRUE(product.Untouched());
}

TEST_F(OrderTest, AClientThatIsKilledAbortsWhoWaitsForIt) {
  ChildProcess child({SESSION_HOLDER, "--socket", socket(), "--bytes", "4096", "--timeline"});
  ASSERT_TRUE(Eventually(20s, [&] { return child.Out().ends_with("holding\n"); })) << child.Err();
  std::string timeline;
  for (std::size_t i = 0; i < 32; i += 2) {
    timeline.push_back(static_cast<char>(std::stoi(child.Out().substr(i, 2), nullptr, 16)));
  }
  const ExactProduct product = Small(0);
  GemmUnderWay waiting = Send(RequestOf(product.spec(), {.wait = {{timeline, 1}}}));
  SynchronizeUnderWay point(*raw_, session_->token(), RawOrder::OfPoint(timeline, 1));
  ASSERT_TRUE(AwaitGated(1));
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(waiting.Answered() || point.Answered());
  const Clock::time_point killed = Clock::now();
  child.Signal(SIGKILL);
  ExpectStatus(waiting.Await(), StatusCode::kAborted, "what it waited for has failed: ", "session");
  EXPECT_TRUE(point.Await().ok());
  EXPECT_EQ(point.reply().code(), static_cast<int>(StatusCode::kAborted)) << point.reply().ShortDebugString();
  EXPECT_LT(Clock::now() - killed, kSlowness * 2000ms);
  EXPECT_TRUE(product.Untouched());
  EXPECT_TRUE(order_->Gemm(RequestOf(product.spec())).ok());
  ExpectIdle();
}

// ---- ENQUEUED ----

TEST_F(OrderTest, EnqueuedIsAnsweredBeforeItCompletes) {
  const std::string stream = order_->OpenStream().value();
  const std::string timeline = order_->CreateTimeline().value();
  const v1::GemmRequest slow =
      Slow({.stream = stream, .signal = {{timeline, 1}}, .reply_when = v1::REPLY_WHEN_ENQUEUED});
  std::memset(slow_->data(), 0, kSlowProduct.BufferBytes());
  for (std::int64_t i = 0; i < kSlowProduct.terms; ++i) oracle::Encode(DType::kBf16, 1, slow_->data() + 2 * i);
  EXPECT_TRUE(order_->Gemm(slow).ok());
  EXPECT_EQ(Info().in_flight(), 1U) << "it was over too soon: use a larger product";
  EXPECT_EQ(Outcome("ok"), 0);
  ExpectTold(order_->Synchronize(RawOrder::OfStream(stream)), StatusCode::kOk);
  EXPECT_EQ(Info().in_flight(), 0U);
  EXPECT_EQ(Outcome("ok"), 1);
  EXPECT_EQ(order_->Synchronize(RawOrder::OfPoint(timeline, 1), 1s)->value(), 1U);
  // The inputs may be overwritten now, and the result is that of the former ones.
  std::memset(slow_->data(), 0xff, ProductSize::kInputBytes);
  const auto elements = static_cast<std::size_t>(kSlowProduct.extent * kSlowProduct.extent);
  for (std::size_t i = 0; i < elements; ++i) {
    ASSERT_EQ(oracle::Decode(DType::kF32, slow_->data() + ProductSize::kInputBytes + 4 * i),
              static_cast<double>(kSlowProduct.terms));
  }
}

TEST_F(OrderTest, EnqueuedIsNotCancelledByADeadline) {
  const std::string stream = order_->OpenStream().value();
  GemmUnderWay slow = Send(Slow({.stream = stream, .reply_when = v1::REPLY_WHEN_ENQUEUED}), 200ms);
  EXPECT_TRUE(slow.Await().ok());
  std::this_thread::sleep_for(250ms);
  ExpectTold(order_->Synchronize(RawOrder::OfStream(stream)), StatusCode::kOk);
  EXPECT_EQ(Outcome("ok"), 1);
}

TEST_F(OrderTest, EnqueuedOfTinyAndEmptyProductsIsAnsweredOnce) {
  for (int i = 0; i < 100; ++i) {
    const ExactProduct product = Tiny(0);
    v1::GemmRequest request = RequestOf(product.spec(), {.reply_when = v1::REPLY_WHEN_ENQUEUED});
    ASSERT_TRUE(order_->Gemm(request).ok());
    ExpectTold(order_->Synchronize(), StatusCode::kOk);
    ASSERT_TRUE(product.Right(0));
    request.mutable_op()->mutable_a()->set_shape(0, 0);
    request.mutable_op()->mutable_d()->set_shape(0, 0);
    ASSERT_TRUE(order_->Gemm(request).ok());
  }
  EXPECT_EQ(Outcome("ok"), 200);
  ExpectIdle();
}

TEST_F(OrderTest, EnqueuedNeedsASessionAndBuffers) {
  InlineProblem problem(2, 2, 4);
  const client::OrderSpec enqueued{.reply_when = v1::REPLY_WHEN_ENQUEUED};
  ExpectStatus(order_->Gemm(RequestOf(problem.spec(), enqueued)), StatusCode::kInvalidArgument, "options.reply_when: ");
  ExpectStatus(raw_->Gemm(std::nullopt, RequestOf(problem.spec(), enqueued)), StatusCode::kInvalidArgument,
               "options.reply_when: ");
  const ExactProduct product = Small(0);
  v1::GemmRequest mixed = RequestOf(product.spec(), enqueued);
  mixed.mutable_op()->mutable_d()->clear_byte_offset();
  mixed.mutable_op()->mutable_d()->clear_strides();
  mixed.mutable_op()->mutable_d()->mutable_inline_result();
  ExpectStatus(order_->Gemm(mixed), StatusCode::kInvalidArgument, "options.reply_when: ");
  ExpectStatus(order_->Execute(ExecuteOf({RequestOf(product.spec()), RequestOf(problem.spec())}, enqueued)).status(),
               StatusCode::kInvalidArgument, "submission.options.reply_when: ");
  EXPECT_TRUE(product.Untouched());
}

// ---- Synchronize ----

TEST_F(OrderTest, SynchronizeWaitsForWhatItIsAskedFor) {
  const std::string busy = order_->OpenStream().value();
  const std::string idle = order_->OpenStream().value();
  GemmUnderWay slow = Run(Slow({.stream = busy}));
  ExpectTold(order_->Synchronize(RawOrder::OfStream(idle), 5s), StatusCode::kOk);
  EXPECT_FALSE(slow.Answered());
  SynchronizeUnderWay of_stream(*raw_, session_->token(), RawOrder::OfStream(busy));
  SynchronizeUnderWay of_session(*raw_, session_->token(), {});
  // What comes later is not waited for.
  const std::string timeline = order_->CreateTimeline().value();
  std::this_thread::sleep_for(100ms);
  GemmUnderWay later = Send(RequestOf(Small(0).spec(), {.stream = busy, .wait = {{timeline, 1}}}));
  ASSERT_TRUE(AwaitGated(1));
  EXPECT_FALSE(of_stream.Answered() || of_session.Answered());
  EXPECT_TRUE(slow.Await().ok());
  EXPECT_TRUE(of_stream.Await().ok());
  EXPECT_TRUE(of_session.Await().ok());
  EXPECT_FALSE(later.Answered());
  ASSERT_TRUE(order_->Signal(timeline, 1).ok());
  EXPECT_TRUE(later.Await().ok());
}

TEST_F(OrderTest, SynchronizeTellsTheFirstErrorOnce) {
  client::WorkStream stream = session_->OpenWorkStream().value();
  client::Timeline never = session_->CreateTimeline().value();
  client::GemmSpec spec = Small(0).spec();
  spec.order = {.stream = stream.id(), .wait = {never.At(1)}, .launch_timeout = 1ms};
  EXPECT_EQ(session_->Gemm(spec).status().code(), StatusCode::kDeadlineExceeded);
  spec.order.launch_timeout = 0ms;
  spec.timeout = 10s;
  auto cancelled = Send(RequestOf(spec, spec.order));
  ASSERT_TRUE(AwaitGated(1));
  cancelled.Cancel();
  ExpectStatus(cancelled.Await(), StatusCode::kCancelled, "");
  ExpectIdle();
  const absl::Status first = stream.Synchronize(5s);
  ExpectStatus(first, StatusCode::kDeadlineExceeded, "", "timeout_ms");
  EXPECT_TRUE(stream.Synchronize(5s).ok());
  EXPECT_TRUE(session_->Synchronize(5s).ok());
}

TEST_F(OrderTest, PlacesToWaitAreLimitedAndReturn) {
  const std::string never = order_->CreateTimeline().value();
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    std::list<SynchronizeUnderWay> calls;
    for (int i = 0; i < 300; ++i) calls.emplace_back(*raw_, session_->token(), RawOrder::OfPoint(never, 1));
    const auto is_answered = [](const SynchronizeUnderWay& call) { return call.Answered(); };
    EXPECT_TRUE(Eventually(20s, [&] { return std::count_if(calls.begin(), calls.end(), is_answered) == 300 - 256; }));
    ExpectStatus(order_->Synchronize({}, 5s).status(), StatusCode::kResourceExhausted, "", "256");
    for (SynchronizeUnderWay& call : calls) {
      const bool refused = call.Answered();
      if (!refused) call.Cancel();
      ExpectStatus(call.Await(), refused ? StatusCode::kResourceExhausted : StatusCode::kCancelled, "");
    }
    const auto answered = [&](const char* code) {
      return MetricSum(Metrics(), "tessera_rpcs_total",
                       {"method=\"Memory.Synchronize\"", std::string("code=\"") + code + "\""});
    };
    EXPECT_TRUE(Eventually(20s, [&] { return answered("CANCELLED") == 256 * (round + 1); }));
    std::this_thread::sleep_for(kSlowness * 100ms);  // a place goes a moment after its answer
    if (HasFailure()) break;
  }
  ExpectTold(order_->Synchronize(), StatusCode::kOk);
  ASSERT_TRUE(order_->Signal(never, 1).ok());
  ExpectTold(order_->Synchronize(RawOrder::OfPoint(never, 1)), StatusCode::kOk);
}

// As many as it takes to run out, one after the other.
TEST_F(OrderTest, WaitsThatMissTheirDeadlineLeaveNothingBehind) {
  const std::string never = order_->CreateTimeline().value();
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(order_->Synchronize(RawOrder::OfPoint(never, 1), 2ms).status().code(), StatusCode::kDeadlineExceeded)
        << i;
  }
}

TEST_F(OrderTest, WaitsForWorkThatMissTheirDeadlineLeaveNothingBehind) {
  GemmUnderWay slow = Run(Slow());
  for (int i = 0; i < 300 && !slow.Answered(); ++i) {
    ASSERT_EQ(order_->Synchronize({}, 1ms).status().code(), StatusCode::kDeadlineExceeded) << i;
  }
  EXPECT_TRUE(slow.Await().ok());
}

TEST_F(OrderTest, TheEndOfTheSessionAnswersSynchronize) {
  const client::Session other = client_->OpenSession("other").value();
  const RawOrder others(*raw_, other.token());
  const std::string own = order_->CreateTimeline().value();
  const std::string foreign = others.CreateTimeline({}, true).value();
  SynchronizeUnderWay of_own(*raw_, session_->token(), RawOrder::OfPoint(own, 1));
  SynchronizeUnderWay of_foreign(*raw_, session_->token(), RawOrder::OfPoint(foreign, 1));
  GemmUnderWay gated = Send(RequestOf(Small(0).spec(), {.wait = {{foreign, 1}}}));
  ASSERT_TRUE(AwaitGated(1));
  SynchronizeUnderWay of_session(*raw_, session_->token(), {});
  std::this_thread::sleep_for(100ms);
  ASSERT_TRUE(raw_->Close(session_->token()).ok());
  ExpectStatus(gated.Await(), StatusCode::kCancelled, "");
  const auto expect_cancelled = [&](SynchronizeUnderWay& call, const char* what) {
    SCOPED_TRACE(what);
    EXPECT_TRUE(call.AnsweredWithin(kSlowness * 2000ms));
    if (!call.Answered()) call.Cancel();
    ExpectStatus(call.Await(), StatusCode::kCancelled, "");
  };
  expect_cancelled(of_session, "session");
  expect_cancelled(of_own, "own timeline");
  expect_cancelled(of_foreign, "foreign timeline");
}

// ---- Drain ----

class DrainTest : public ::testing::Test {
 protected:
  // A submission that is held back, in a daemon that gives it a second.
  void SetUp() override {
    daemon_.emplace(TESSERAD, std::vector<std::string>{"--drain-grace-s", "2"});
    raw_.emplace(daemon_->socket());
    order_.emplace(*raw_, raw_->OpenFor(60'000).value());
    timeline_ = order_->CreateTimeline().value();
    waiting_.emplace(*raw_, order_->token(), RequestOf(problem_.spec(), {.wait = {{timeline_, 1}}}));
    ASSERT_TRUE(Eventually(20s, [&] { return MetricSum(daemon_->Metrics(), "tessera_gated") == 1; }));
  }

  InlineProblem problem_{2, 2, 4};
  std::optional<DaemonProcess> daemon_;
  std::optional<RawClient> raw_;
  std::optional<RawOrder> order_;
  std::string timeline_;
  std::optional<GemmUnderWay> waiting_;
};

TEST_F(DrainTest, WhatIsHeldBackCountsAsWork) {
  const Clock::time_point start = Clock::now();
  daemon_->child().Signal(SIGTERM);
  EXPECT_EQ(daemon_->child().Wait(20s), 3) << daemon_->child().Err();
  EXPECT_GE(Clock::now() - start, 2000ms);
  EXPECT_LT(Clock::now() - start, 2000ms + kSlowness * 2500ms);
  EXPECT_FALSE(waiting_->Await().ok());
}

TEST_F(DrainTest, WhatIsHeldBackMayStillBeSignalled) {
  daemon_->child().Signal(SIGTERM);
  ASSERT_TRUE(Eventually(5s, [&] { return daemon_->child().Err().find("draining") != std::string::npos; }));
  EXPECT_EQ(order_->Gemm(RequestOf(problem_.spec())).code(), StatusCode::kUnavailable);
  EXPECT_TRUE(order_->Signal(timeline_, 1).ok());
  EXPECT_TRUE(waiting_->Await().ok());
  EXPECT_EQ(daemon_->child().Wait(20s), 0) << daemon_->child().Err();
}

}  // namespace
}  // namespace tessera::e2e
