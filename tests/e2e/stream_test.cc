// Compute.Stream: order, refusals that leave the call alone, everything that ends one, and clients that misbehave on
// it.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/gemm_stream.h"
#include "common/unique_fd.h"
#include "tests/e2e/bad_input_fixture.h"
#include "tests/e2e/inline_problem.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using client::GemmStream;
using grpc::StatusCode;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using workload::MemoryOwner;
using workload::SharedProblem;

constexpr std::uint64_t kSeed = 4711;
constexpr int kInFlightMax = 64;  // as compute.proto says
constexpr char kMethod[] = "/tessera.v1.Compute/Stream";

v1::StreamRequest Wrapped(std::uint64_t tag, const v1::GemmRequest& gemm) {
  v1::StreamRequest request;
  request.set_tag(tag);
  *request.mutable_submission()->add_ops()->mutable_gemm() = gemm.op();
  *request.mutable_submission()->mutable_options() = gemm.options();
  return request;
}

// ---- The bare call ----

// One call of the bare stub, read and written as the test likes.
class StubStream {
 public:
  StubStream(const std::shared_ptr<grpc::Channel>& channel, const std::optional<std::string>& token)
      : stub_(v1::Compute::NewStub(channel)) {
    context_.set_deadline(std::chrono::system_clock::now() + 60s);
    if (token.has_value()) context_.AddMetadata("tessera-session-bin", *token);
    stream_ = stub_->Stream(&context_);
  }

  void Write(const v1::StreamRequest& request) { EXPECT_TRUE(stream_->Write(request)); }
  bool TryWrite(const v1::StreamRequest& request) { return stream_->Write(request); }
  v1::StreamReply Read() {
    v1::StreamReply reply;
    EXPECT_TRUE(stream_->Read(&reply)) << "no more replies";
    return reply;
  }
  void HalfClose() { EXPECT_TRUE(stream_->WritesDone()); }
  void Cancel() { context_.TryCancel(); }

  // After the last reply.
  grpc::Status AwaitEnd() {
    v1::StreamReply reply;
    while (stream_->Read(&reply)) ADD_FAILURE() << "another reply: " << reply.ShortDebugString();
    return stream_->Finish();
  }

  void ExpectGoodEnd() {
    HalfClose();
    const grpc::Status status = AwaitEnd();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

 private:
  const std::unique_ptr<v1::Compute::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StreamRequest, v1::StreamReply>> stream_;
};

// The same with messages of any bytes.
class RawStream {
 public:
  RawStream(const client::Client& client, const std::string& token) : stub_(client.channel()) {
    context_.set_deadline(std::chrono::system_clock::now() + 60s);
    context_.AddMetadata("tessera-session-bin", token);
    stream_ = stub_.PrepareCall(&context_, kMethod, &queue_);
    stream_->StartCall(this);
    EXPECT_TRUE(StepSucceeds());
  }

  void Write(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    stream_->Write(grpc::ByteBuffer(&slice, 1), this);
    EXPECT_TRUE(StepSucceeds());
  }

  std::vector<v1::StreamReply> AwaitReplies() {
    std::vector<v1::StreamReply> replies;
    grpc::ByteBuffer bytes;
    while (stream_->Read(&bytes, this), StepSucceeds()) {
      grpc::Slice slice;
      EXPECT_TRUE(bytes.DumpToSingleSlice(&slice).ok());
      EXPECT_TRUE(replies.emplace_back().ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
    }
    return replies;
  }

  grpc::Status AwaitEnd() {
    grpc::Status status;
    stream_->Finish(&status, this);
    EXPECT_TRUE(StepSucceeds());
    return status;
  }

 private:
  bool StepSucceeds() {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok));
    return ok;
  }

  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

class BadStreamTest : public BadInputFixture {
 protected:
  StubStream Open() { return {client_->channel(), session_->token()}; }

  double Answers(const std::string& code) const {
    return MetricSum(Metrics(), "tessera_rpcs_total", {"method=\"Compute.Stream\"", "code=\"" + code + "\""});
  }

  void ExpectResult(const v1::StreamReply& reply, const GoodCall& good) {
    EXPECT_EQ(reply.code(), 0) << reply.message();
    EXPECT_EQ(reply.message(), "");
    ASSERT_EQ(reply.results_size(), 1);
    EXPECT_THAT(reply.results(0).report().variant(), StartsWith("gemm.cpu."));
    if (!D(const_cast<GoodCall&>(good).request).has_inline_result()) return;
    std::vector<float> values(good.result.size());
    ASSERT_EQ(reply.results(0).inline_result().size(), values.size() * sizeof(float));
    std::memcpy(values.data(), reply.results(0).inline_result().data(), values.size() * sizeof(float));
    EXPECT_EQ(values, good.result);
  }

  static void ExpectRefusal(const v1::StreamReply& reply, StatusCode code, const std::string& begins,
                            const std::string& names = {}) {
    EXPECT_EQ(reply.code(), code) << reply.message();
    EXPECT_THAT(reply.message(), StartsWith(begins));
    EXPECT_THAT(reply.message(), HasSubstr(names));
    EXPECT_EQ(reply.results_size(), 0);
  }

  // A bad request between two good ones: each is answered as if it were alone, and the call goes on. A refusal may
  // overtake the answer of what was accepted before it.
  void ExpectRefusedInTheMiddle(StubStream& stream, const GoodCall& good, const v1::StreamRequest& bad, StatusCode code,
                                const std::string& begins, const std::string& names = {}) {
    ASSERT_EQ(bad.tag(), 2U);
    stream.Write(Wrapped(1, good.request));
    stream.Write(bad);
    stream.Write(Wrapped(3, good.request));
    std::map<std::uint64_t, v1::StreamReply> replies;
    for (int i = 0; i < 3; ++i) {
      const v1::StreamReply reply = stream.Read();
      EXPECT_TRUE(replies.emplace(reply.tag(), reply).second) << reply.tag();
    }
    ExpectResult(replies[1], good);
    ExpectRefusal(replies[2], code, begins, names);
    ExpectResult(replies[3], good);
  }

  void ExpectStreamIsRight(const GoodCall& good) {
    StubStream stream = Open();
    stream.Write(Wrapped(1, good.request));
    ExpectResult(stream.Read(), good);
    stream.ExpectGoodEnd();
  }
};

TEST_F(BadStreamTest, TagsAreEchoedWhateverTheyAre) {
  StubStream stream = Open();
  const std::vector<std::uint64_t> tags = {7, 0, std::numeric_limits<std::uint64_t>::max(), 7, 3, 0};
  for (const std::uint64_t tag : tags) stream.Write(Wrapped(tag, operands_->Full().request));
  for (const std::uint64_t tag : tags) EXPECT_EQ(stream.Read().tag(), tag);
  stream.ExpectGoodEnd();
  EXPECT_EQ(operands_->TakeResult(1536), operands_->Full().result);
  EXPECT_TRUE(Eventually(10s, [this] { return Answers("OK") == 1; })) << "one call, whatever it carries";
}

TEST_F(BadStreamTest, ARefusedRequestIsNamedAndTheNextIsRight) {
  const GoodCall inlined = operands_->Inline();
  const struct {
    std::string what;
    Mutation mutate;
    StatusCode code;
    std::string begins;
    std::string names = {};
  } rows[] = {{"no b", [](v1::GemmRequest& request) { request.mutable_op()->clear_b(); }, StatusCode::INVALID_ARGUMENT,
               "submission.ops[0].gemm.b"},
              {"shape", [](v1::GemmRequest& request) { D(request).set_shape(1, kN + 1); }, StatusCode::INVALID_ARGUMENT,
               "submission.ops[0].gemm.d.shape"},
              {"unknown buffer", [](v1::GemmRequest& request) { A(request).set_buffer_id(std::string(16, '\0')); },
               StatusCode::NOT_FOUND, "submission.ops[0].gemm.a.buffer_id: "},
              {"another's buffer", [this](v1::GemmRequest& request) { D(request).set_buffer_id(foreign_->id()); },
               StatusCode::PERMISSION_DENIED, "submission.ops[0].gemm.d.buffer_id: "},
              {"cuda", [](v1::GemmRequest& request) { request.mutable_options()->set_backend(v1::BACKEND_CUDA); },
               StatusCode::UNIMPLEMENTED, "submission.options.backend: ", "cuda"},
              {"backend 99",
               [](v1::GemmRequest& request) { request.mutable_options()->set_backend(static_cast<v1::Backend>(99)); },
               StatusCode::INVALID_ARGUMENT, "submission.options.backend: "},
              {"stream", [](v1::GemmRequest& request) { request.mutable_options()->set_stream("s"); },
               StatusCode::INVALID_ARGUMENT, "submission.options.stream: "}};
  StubStream stream = Open();
  for (const GoodCall& good : {operands_->Plain(), inlined}) {
    for (const auto& row : rows) {
      SCOPED_TRACE(row.what);
      v1::GemmRequest bad = operands_->Full().request;
      row.mutate(bad);
      ExpectRefusedInTheMiddle(stream, good, Wrapped(2, bad), row.code, row.begins, row.names);
    }
  }
  stream.ExpectGoodEnd();
  EXPECT_EQ(operands_->TakeResult(1536), operands_->Plain().result);
  operands_->ExpectUntouched();
  foreign_->ExpectUntouched();
  EXPECT_TRUE(Eventually(10s, [this] { return Answers("OK") == 1; })) << "refusals are no end of the call";
}

TEST_F(BadStreamTest, ASubmissionHasOperationsUpToALimit) {
  const GoodCall good = operands_->Inline();
  StubStream stream = Open();
  v1::StreamRequest none;
  none.set_tag(2);
  ExpectRefusedInTheMiddle(stream, good, none, StatusCode::INVALID_ARGUMENT, "submission");
  none.mutable_submission();
  ExpectRefusedInTheMiddle(stream, good, none, StatusCode::INVALID_ARGUMENT, "submission.ops: ");
  none.mutable_submission()->add_ops();
  ExpectRefusedInTheMiddle(stream, good, none, StatusCode::INVALID_ARGUMENT, "submission.ops[0]: ");
  v1::StreamRequest many = Wrapped(2, good.request);
  for (int i = 1; i < 64; ++i) *many.mutable_submission()->add_ops() = many.submission().ops(0);
  stream.Write(many);
  const v1::StreamReply reply = stream.Read();
  EXPECT_EQ(reply.code(), 0) << reply.message();
  EXPECT_EQ(reply.results_size(), 64);
  *many.mutable_submission()->add_ops() = many.submission().ops(0);
  ExpectRefusedInTheMiddle(stream, good, many, StatusCode::INVALID_ARGUMENT, "submission.ops: ", "65; at most 64");
  stream.ExpectGoodEnd();
}

TEST_F(BadStreamTest, GarbageEndsTheCallAfterWhatCameBefore) {
  const GoodCall good = operands_->Inline();
  const std::string bytes = Wrapped(9, good.request).SerializeAsString();
  int ended = 0;
  for (const std::string& garbage : {std::string(7, '\xff'), std::string("\x0f\x01"), std::string("\x12\x7f"),
                                     std::string(1U << 20U, '\xff'), bytes.substr(0, bytes.size() / 2)}) {
    SCOPED_TRACE(garbage.substr(0, 8));
    ExpectNothingChanges(good, [&] {
      RawStream stream(*client_, session_->token());
      for (int i = 0; i < 3; ++i) stream.Write(bytes);
      stream.Write(garbage);
      const std::vector<v1::StreamReply> replies = stream.AwaitReplies();
      EXPECT_EQ(replies.size(), 3U);
      for (const v1::StreamReply& reply : replies) ExpectResult(reply, good);
      ExpectRefused(stream.AwaitEnd(), StatusCode::INVALID_ARGUMENT, "", "Compute.Stream");
    });
    ++ended;
    EXPECT_TRUE(Eventually(10s, [&] { return Answers("INVALID_ARGUMENT") == ended; }));
  }
  ExpectStreamIsRight(good);
}

TEST_F(BadStreamTest, AMessageBeyondTheLimitEndsTheCall) {
  const GoodCall good = operands_->Inline();
  ExpectNothingChanges(good, [&] {
    StubStream stream = Open();
    v1::GemmRequest large = good.request;
    A(large).set_inline_data(std::string(client_->ServerInfo().value().message_bytes_max() + 1, 'x'));
    stream.TryWrite(Wrapped(1, large));
    ExpectRefused(stream.AwaitEnd(), StatusCode::RESOURCE_EXHAUSTED, "", "larger than max");
  });
  ExpectStreamIsRight(good);
}

TEST_F(BadStreamTest, TheSessionsToken) {
  client::Session closed = client_->OpenSession("closed").value();
  ASSERT_TRUE(closed.Close().ok());
  std::string other_epoch = session_->token();
  other_epoch[0] = static_cast<char>(other_epoch[0] ^ 0x40);
  const struct {
    std::string what;
    std::string token;
    StatusCode code;
  } rows[] = {{"empty", "", StatusCode::INVALID_ARGUMENT},
              {"17 bytes", session_->token() + "x", StatusCode::INVALID_ARGUMENT},
              {"zeros", std::string(16, '\0'), StatusCode::NOT_FOUND},
              {"other epoch", other_epoch, StatusCode::FAILED_PRECONDITION},
              {"a buffer's id", operands_->id(), StatusCode::NOT_FOUND},
              {"closed", closed.token(), StatusCode::NOT_FOUND}};
  const GoodCall good = operands_->Inline();
  for (const auto& row : rows) {
    SCOPED_TRACE(row.what);
    ExpectNothingChanges(good, [&] {
      StubStream stream(client_->channel(), row.token);
      stream.TryWrite(Wrapped(1, good.request));  // may come too late
      ExpectRefused(stream.AwaitEnd(), row.code, "metadata tessera-session-bin: ");
    });
  }
  ExpectStreamIsRight(good);
}

TEST_F(BadStreamTest, WithoutASessionInlineTensorsWorkWithinTheirLimit) {
  const GoodCall good = operands_->Inline();
  StubStream stream(client_->channel(), std::nullopt);
  v1::GemmRequest beyond = good.request;
  A(beyond).set_inline_data(std::string(client_->ServerInfo().value().inline_bytes_max() + 1, 'x'));
  ExpectRefusedInTheMiddle(stream, good, Wrapped(2, beyond), StatusCode::RESOURCE_EXHAUSTED,
                           "submission.ops[0].gemm.a: ", "inline_bytes_max");
  ExpectRefusedInTheMiddle(stream, good, Wrapped(2, operands_->Full().request), StatusCode::INVALID_ARGUMENT,
                           "submission.ops[0].gemm.a.buffer_id: ", "tessera-session");
  stream.ExpectGoodEnd();
}

TEST_F(BadStreamTest, HalfCloseAnswersEverything) {
  const GoodCall good = operands_->Inline();
  StubStream stream = Open();
  for (std::uint64_t tag = 0; tag < 50; ++tag) stream.Write(Wrapped(tag, good.request));
  stream.HalfClose();
  for (std::uint64_t tag = 0; tag < 50; ++tag) {
    const v1::StreamReply reply = stream.Read();
    EXPECT_EQ(reply.tag(), tag);
    ExpectResult(reply, good);
  }
  EXPECT_TRUE(stream.AwaitEnd().ok());
  StubStream empty = Open();
  empty.ExpectGoodEnd();
}

TEST_F(BadStreamTest, DrainingIsAnsweredRequestByRequest) {
  const GoodCall good = operands_->Inline();
  StubStream stream = Open();
  stream.Write(Wrapped(1, good.request));
  ExpectResult(stream.Read(), good);
  daemon().RequestDrain();
  for (std::uint64_t tag = 2; tag < 5; ++tag) {
    stream.Write(Wrapped(tag, good.request));
    const v1::StreamReply reply = stream.Read();
    EXPECT_EQ(reply.tag(), tag);
    ExpectRefusal(reply, StatusCode::UNAVAILABLE, "", "drain");
  }
  EXPECT_TRUE(daemon().AwaitDrained());
  stream.ExpectGoodEnd();
}

// A product whose reply is a thousand times its request.
v1::GemmRequest LargeReply() {
  constexpr std::int64_t kRows = 250;
  constexpr std::int64_t kColumns = 1000;
  v1::GemmRequest request;
  const auto describe = [](v1::Tensor& tensor, v1::DType dtype, std::int64_t rows, std::int64_t columns) {
    tensor.set_dtype(dtype);
    for (const std::int64_t extent : {rows, columns}) tensor.add_shape(extent);
  };
  describe(A(request), v1::DTYPE_BF16, kRows, 1);
  describe(B(request), v1::DTYPE_BF16, kColumns, 1);
  describe(D(request), v1::DTYPE_F32, kRows, kColumns);
  A(request).set_inline_data(std::string(kRows * 2, '\0'));
  B(request).set_inline_data(std::string(kColumns * 2, '\0'));
  D(request).mutable_inline_result();
  return request;
}

TEST_F(BadStreamTest, AClientThatNeverReadsStopsItselfAndNobodyElse) {
  constexpr int kTransportMax = 40;  // replies of 1 MB that may lie in sockets and windows
  constexpr int kUnreadMax = 9;  // those that the daemon keeps: message_bytes_max of them, and the one that passes it
  const auto operations = [this] { return MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"ok\""}); };
  const client::Client deaf = Connect();
  StubStream stream(deaf.channel(), std::nullopt);
  std::atomic<int> written{0};
  std::thread writer([&] {
    const v1::StreamRequest request = Wrapped(1, LargeReply());
    while (stream.TryWrite(request)) ++written;
  });
  double seen = -1;
  EXPECT_TRUE(Eventually(60s,
                         [&] {
                           const double before = std::exchange(seen, operations());
                           std::this_thread::sleep_for(1s);
                           return seen >= kUnreadMax && seen == before;
                         }))
      << seen << " operations and no end";
  EXPECT_LE(seen, kUnreadMax + kTransportMax);
  const int stopped_at = written;
  for (int i = 0; i < 20; ++i) ExpectRight(operands_->Full());
  ExpectStreamIsRight(operands_->Inline());
  EXPECT_EQ(operations(), seen + 21);
  EXPECT_EQ(written, stopped_at) << "the writer is held back";
  EXPECT_EQ(client_->ServerInfo().value().in_flight(), 0U);
  stream.Cancel();
  writer.join();
  EXPECT_TRUE(Eventually(20s, [this] { return Answers("CANCELLED") == 1; })) << Metrics();
  ExpectStreamIsRight(operands_->Inline());
}

// ---- The client library ----

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kSlowTerms = 2048;
#else
constexpr std::int64_t kSlowTerms = 65536;
#endif

// A buffer with the operands of a product that takes one thread about a second, and of small ones of terms 1: all rows
// of all operands are one row of ones, so that each element of a D is K.
class Ground {
 public:
  explicit Ground(client::Session& session) : buffer_(session.Share(kBytes).value()) {
    std::memset(buffer_.data(), kPattern, kBytes);
    for (std::int64_t i = 0; i < kSlowTerms; ++i) oracle::Encode(DType::kBf16, 1, buffer_.data() + i * 2);
  }

  client::GemmSpec Slow() const { return Spec(kSlowExtent, kSlowTerms, kSlowAt); }
  client::GemmSpec Small(std::uint64_t number) const { return Spec(kSmallExtent, kSmallTerms, SmallAt(number)); }

  bool SmallIsRight(std::uint64_t number) const {
    for (std::int64_t i = 0; i < kSmallExtent * kSmallExtent; ++i) {
      if (oracle::Decode(DType::kF32, buffer_.data() + SmallAt(number) + i * 4) != kSmallTerms) return false;
    }
    return true;
  }
  bool SmallIsUntouched(std::uint64_t number) const {
    const std::string pattern(kSmallBytes, kPattern);
    return std::memcmp(buffer_.data() + SmallAt(number), pattern.data(), pattern.size()) == 0;
  }

 private:
  static constexpr char kPattern = 0x7b;
  static constexpr std::int64_t kSlowExtent = 768;
  static constexpr std::int64_t kSmallExtent = 4;
  static constexpr std::int64_t kSmallTerms = 8;
  static constexpr std::uint64_t kSlowAt = kSlowTerms * 2;
  static constexpr std::uint64_t kSmallBytes = kSmallExtent * kSmallExtent * 4;
  static constexpr std::uint64_t kBytes = 4 << 20;

  static std::uint64_t SmallAt(std::uint64_t number) {
    return kSlowAt + kSlowExtent * kSlowExtent * 4 + number * kSmallBytes;
  }

  client::GemmSpec Spec(std::int64_t extent, std::int64_t terms, std::uint64_t d_at) const {
    const client::TensorView ones = buffer_.Tensor(DType::kBf16, {extent, terms}, 0, {0, 1});
    return {.a = ones, .b = ones, .d = buffer_.Tensor(DType::kF32, {extent, extent}, d_at)};
  }

  client::Buffer buffer_;
};

// Results in the order in which they came, as {number, status}.
class Results {
 public:
  std::function<void(absl::StatusOr<client::GemmResult>)> Of(int number) {
    return [this, number](const absl::StatusOr<client::GemmResult>& result) {
      const std::lock_guard<std::mutex> lock(mutex_);
      results_.emplace_back(number, result.status());
    };
  }

  std::vector<std::pair<int, absl::Status>> Get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return results_;
  }

  // `count` of them, numbered from `first` in their order.
  void ExpectInOrder(std::size_t count, absl::StatusCode code = absl::StatusCode::kOk) const {
    const auto results = Get();
    ASSERT_EQ(results.size(), count);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(results[i].first, static_cast<int>(i));
      EXPECT_EQ(results[i].second.code(), code) << i << ": " << results[i].second;
    }
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<int, absl::Status>> results_;
};

class StreamTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cpu_threads", "1"}});
    client_.emplace(Connect());
    session_.emplace(client_->OpenSession("stream").value());
  }

  void TearDown() override {
    session_.reset();
    client_.reset();
    DaemonFixture::TearDown();
  }

  std::uint32_t InFlight() const { return client_->ServerInfo().value().in_flight(); }
  void AwaitInFlight(std::uint32_t operations) const {
    EXPECT_TRUE(Eventually(20s, [&] { return InFlight() == operations; })) << InFlight();
  }
  double Launches() const { return MetricSum(Metrics(), "tessera_kernel_launches_total"); }

  // The slow product runs and `count` small ones wait behind it when this returns.
  void SendSlowAndSmall(GemmStream& stream, const Ground& ground, Results& results, int count) {
    const double before = std::max(0.0, Launches());
    EXPECT_TRUE(stream.Gemm(ground.Slow(), results.Of(0)).ok());
    EXPECT_TRUE(Eventually(20s, [&] { return Launches() == before + 1; }));
    for (int i = 0; i < count; ++i) {
      EXPECT_TRUE(stream.Gemm(ground.Small(static_cast<std::uint64_t>(i)), results.Of(i + 1)).ok());
    }
    AwaitInFlight(static_cast<std::uint32_t>(count) + 1);
  }

  void ExpectNextIsRight() {
    const auto problem = SharedProblem::Make(*session_, {.m = 8, .n = 9, .k = 10}, kSeed, MemoryOwner::kDaemon).value();
    EXPECT_TRUE(session_->Gemm(problem.spec()).ok());
    EXPECT_TRUE(problem.Check().ok);
    GemmStream stream = session_->OpenStream();
    EXPECT_TRUE(stream.Gemm(problem.spec()).get().ok());
    EXPECT_TRUE(stream.Finish().ok());
  }

  std::optional<client::Client> client_;
  std::optional<client::Session> session_;
};

TEST_F(StreamTest, AThousandProductsPipelinedAreRightAndInOrder) {
  SCOPED_TRACE(kSeed);
  constexpr int kProducts = 1000;
  std::list<SharedProblem> problems;
  oracle::Random random(kSeed);
  for (int i = 0; i < kProducts; ++i) {
    oracle::GemmCase gemm_case{.m = random.Int(1, 40), .n = random.Int(1, 40), .k = random.Int(0, 80)};
    gemm_case.layout = oracle::kGemmLayouts[static_cast<std::size_t>(i) % oracle::kGemmLayouts.size()];
    problems.push_back(SharedProblem::Make(*session_, gemm_case, random.Next(), MemoryOwner::kDaemon).value());
  }
  Results results;
  GemmStream stream = session_->OpenStream();
  int number = 0;
  for (const SharedProblem& problem : problems) ASSERT_TRUE(stream.Gemm(problem.spec(), results.Of(number++)).ok());
  const absl::Status status = stream.Finish();
  EXPECT_TRUE(status.ok()) << status;
  results.ExpectInOrder(kProducts);
  for (const SharedProblem& problem : problems) {
    const oracle::Verdict verdict = problem.Check();
    EXPECT_TRUE(verdict.ok) << verdict.first;
  }
  EXPECT_EQ(MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"ok\""}), kProducts);
}

TEST_F(StreamTest, InlineProductsWithoutASessionAreRight) {
  std::list<InlineProblem> problems;
  GemmStream stream = client_->OpenStream();
  std::vector<std::future<absl::StatusOr<client::GemmResult>>> results;
  for (std::int64_t i = 0; i < 300; ++i) {
    problems.emplace_back(1 + i % 13, 1 + i % 11, 1 + i % 50);
    results.push_back(stream.Gemm(problems.back().spec()));
  }
  for (auto& result : results) {
    const auto answer = result.get();
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_THAT(answer->report.variant(), StartsWith("gemm.cpu."));
    EXPECT_GT(answer->round_trip.count(), 0);
  }
  for (const InlineProblem& problem : problems) problem.ExpectRight();
  EXPECT_TRUE(stream.Finish().ok());
}

// Each product reads what the one before has written, and nobody waits in between.
TEST_F(StreamTest, ProductsStartInTheOrderOfTheirRequests) {
  constexpr std::int64_t kExtent = 32;
  constexpr int kCalls = 200;
  constexpr std::uint64_t kMatrixBytes = kExtent * kExtent * 2;
  const client::Buffer buffer = session_->Allocate((kCalls + 2) * kMatrixBytes).value();
  const auto matrix = [&](int i) {
    return buffer.Tensor(DType::kBf16, {kExtent, kExtent}, static_cast<std::uint64_t>(i) * kMatrixBytes);
  };
  const client::TensorView shift = matrix(kCalls + 1);  // moves every column one to the right
  for (std::int64_t column = 0; column < kExtent; ++column) {
    const std::int64_t from = (column + kExtent - 1) % kExtent;
    oracle::Encode(DType::kBf16, 1, shift.data + (column * kExtent + from) * 2);
  }
  for (std::int64_t i = 0; i < kExtent * kExtent; ++i) {
    oracle::Encode(DType::kBf16, static_cast<double>(i % 251), matrix(0).data + i * 2);
  }
  Results results;
  GemmStream stream = session_->OpenStream();
  for (int i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(stream.Gemm({.a = matrix(i), .b = shift, .d = matrix(i + 1)}, results.Of(i)).ok());
  }
  ASSERT_TRUE(stream.Finish().ok());
  results.ExpectInOrder(kCalls);
  const client::TensorView last = matrix(kCalls);
  for (std::int64_t i = 0; i < kExtent * kExtent; ++i) {
    const std::int64_t from = (i % kExtent + kCalls * (kExtent - 1)) % kExtent;
    ASSERT_EQ(oracle::Decode(DType::kBf16, last.data + i * 2),
              static_cast<double>((i / kExtent * kExtent + from) % 251))
        << i;
  }
}

TEST_F(StreamTest, NoMoreThanTheLimitIsInFlight) {
  constexpr int kSmall = 300;
  const Ground ground(*session_);
  Results results;
  GemmStream stream = session_->OpenStream();
  EXPECT_TRUE(stream.Gemm(ground.Slow(), results.Of(0)).ok());
  std::thread writer([&] {
    for (int i = 0; i < kSmall; ++i) {
      EXPECT_TRUE(stream.Gemm(ground.Small(static_cast<std::uint64_t>(i)), results.Of(i + 1)).ok());
    }
  });
  AwaitInFlight(kInFlightMax);
  std::uint32_t most = 0;
  while (results.Get().empty()) most = std::max(most, InFlight());
  writer.join();
  EXPECT_EQ(most, static_cast<std::uint32_t>(kInFlightMax));
  EXPECT_TRUE(stream.Finish().ok());
  results.ExpectInOrder(kSmall + 1);
  for (std::uint64_t i = 0; i < kSmall; ++i) EXPECT_TRUE(ground.SmallIsRight(i)) << i;
}

TEST_F(StreamTest, ARefusedProductHasItsOwnStatus) {
  GemmStream stream = session_->OpenStream();
  SharedProblem problem = SharedProblem::Make(*session_, {.m = 8, .n = 8, .k = 8}, kSeed, MemoryOwner::kDaemon).value();
  client::GemmSpec cuda = problem.spec();
  cuda.backend = v1::BACKEND_CUDA;
  client::GemmSpec late = problem.spec();
  late.timeout = 1s;
  auto refused = stream.Gemm(cuda);
  auto unsent = stream.Gemm(late);
  auto right = stream.Gemm(problem.spec());
  const absl::Status status = refused.get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(Text(status), HasSubstr("submission.options.backend: "));
  EXPECT_EQ(unsent.get().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(right.get().ok());
  EXPECT_TRUE(problem.Check().ok);
  EXPECT_TRUE(stream.Finish().ok());
  EXPECT_TRUE(stream.Finish().ok()) << "again";
  EXPECT_EQ(stream.Gemm(problem.spec()).get().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(StreamTest, CallbacksMaySendMoreButNotFinish) {
  const Ground ground(*session_);
  GemmStream stream = session_->OpenStream();
  std::promise<void> all;
  std::atomic<int> answered{0};
  absl::Status inside;
  std::function<void(absl::StatusOr<client::GemmResult>)> next = [&](const absl::StatusOr<client::GemmResult>& result) {
    EXPECT_TRUE(result.ok()) << result.status();
    const int number = ++answered;
    if (number < 500) {
      EXPECT_TRUE(stream.Gemm(ground.Small(static_cast<std::uint64_t>(number)), next).ok());
    } else {
      inside = stream.Finish();
      all.set_value();
    }
  };
  ASSERT_TRUE(stream.Gemm(ground.Small(0), next).ok());
  all.get_future().wait();
  EXPECT_EQ(inside.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(stream.Finish().ok());
  for (std::uint64_t i = 0; i < 500; ++i) EXPECT_TRUE(ground.SmallIsRight(i)) << i;
}

TEST_F(StreamTest, TheEndOfTheObjectWaitsForEverything) {
  const Ground ground(*session_);
  Results results;
  {
    GemmStream stream = session_->OpenStream();
    for (int i = 0; i < 200; ++i) {
      EXPECT_TRUE(stream.Gemm(ground.Small(static_cast<std::uint64_t>(i)), results.Of(i)).ok());
    }
    GemmStream moved = std::move(stream);
    moved = session_->OpenStream();  // waits for the one before
    results.ExpectInOrder(200);
  }
  // In its own callback it cannot wait; the last owner of the connection goes with it.
  auto client = std::make_optional(Connect());
  InlineProblem problem(3, 4, 5);
  std::promise<void> answered;
  auto last = std::make_shared<std::optional<GemmStream>>(client->OpenStream());
  ASSERT_TRUE((*last)
                  ->Gemm(problem.spec(),
                         [last, &answered](const absl::StatusOr<client::GemmResult>& result) {
                           EXPECT_TRUE(result.ok()) << result.status();
                           last->reset();
                           answered.set_value();
                         })
                  .ok());
  client.reset();
  answered.get_future().wait();
  problem.ExpectRight();
  ExpectNextIsRight();
}

TEST_F(StreamTest, ACancelledStreamLeavesNothingBehind) {
  const Ground ground(*session_);
  Results results;
  GemmStream stream = session_->OpenStream();
  SendSlowAndSmall(stream, ground, results, 40);
  stream.Cancel();
  EXPECT_EQ(stream.Finish().code(), absl::StatusCode::kCancelled);
  results.ExpectInOrder(41, absl::StatusCode::kCancelled);
  EXPECT_EQ(stream.Gemm(ground.Small(0)).get().status().code(), absl::StatusCode::kFailedPrecondition);
  AwaitInFlight(0);
  for (std::uint64_t i = 0; i < 40; ++i) EXPECT_TRUE(ground.SmallIsUntouched(i)) << i;
  EXPECT_EQ(MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"cancelled\""}), 40);
  EXPECT_TRUE(Eventually(10s, [this] {
    return MetricSum(Metrics(), "tessera_rpcs_total", {"method=\"Compute.Stream\"", "code=\"CANCELLED\""}) == 1;
  })) << Metrics();
  ExpectNextIsRight();
}

TEST_F(StreamTest, TheDeadlineIsThatOfEachProduct) {
  const Ground ground(*session_);
  Results results;
  GemmStream stream = session_->OpenStream(400ms);
  SendSlowAndSmall(stream, ground, results, 20);
  EXPECT_EQ(stream.Finish().code(), absl::StatusCode::kDeadlineExceeded);
  results.ExpectInOrder(21, absl::StatusCode::kDeadlineExceeded);
  AwaitInFlight(0);
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_TRUE(ground.SmallIsUntouched(i)) << i;
  EXPECT_EQ(MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"ok\""}), 1) << "only what ran already";
  GemmStream broken = session_->OpenStream(1ms);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(broken.Gemm(ground.Small(0)).get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(broken.Finish().code(), absl::StatusCode::kDeadlineExceeded);
  ExpectNextIsRight();
}

TEST_F(StreamTest, ConnectionsThatAreCutLeaveNothingBehind) {
  const Ground ground(*session_);
  UniqueFd socket_fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socket().copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(::connect(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const UniqueFd cut(::fcntl(socket_fd.get(), F_DUPFD_CLOEXEC, 0));
  const auto channel = grpc::CreateInsecureChannelFromFd("cut", socket_fd.Release());
  StubStream stream(channel, session_->token());
  v1::GemmRequest small;
  const client::GemmSpec spec = ground.Small(0);
  const auto describe = [](const client::TensorView& view, v1::Tensor& tensor) {
    tensor.set_buffer_id(view.buffer_id);
    tensor.set_byte_offset(view.byte_offset);
    tensor.set_dtype(static_cast<v1::DType>(view.dtype));
    tensor.mutable_shape()->Assign(view.shape.begin(), view.shape.end());
    tensor.mutable_strides()->Assign(view.strides.begin(), view.strides.end());
  };
  describe(spec.a, A(small));
  describe(spec.b, B(small));
  describe(spec.d, D(small));
  Results slow;
  GemmStream other = session_->OpenStream();
  SendSlowAndSmall(other, ground, slow, 0);
  for (std::uint64_t tag = 0; tag < 30; ++tag) stream.Write(Wrapped(tag, small));
  AwaitInFlight(31);
  EXPECT_EQ(::shutdown(cut.get(), SHUT_RDWR), 0);
  EXPECT_EQ(stream.AwaitEnd().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(other.Finish().ok()) << "another connection of the session";
  AwaitInFlight(0);
  EXPECT_TRUE(ground.SmallIsUntouched(0));
  EXPECT_EQ(MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"cancelled\""}), 30);
  ExpectNextIsRight();
}

TEST_F(StreamTest, TheEndOfTheDaemonBreaksTheStream) {
  const Ground ground(*session_);
  GemmStream stream = session_->OpenStream();
  ASSERT_TRUE(stream.Gemm(ground.Small(0)).get().ok());
  StopDaemon();
  const auto gone = AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kCancelled);
  EXPECT_THAT(stream.Gemm(ground.Small(1)).get().status().code(), gone);
  EXPECT_THAT(stream.Gemm(ground.Small(2)).get().status().code(), gone);
  EXPECT_THAT(stream.Finish().code(), gone);
  GemmStream nobody = client_->OpenStream();  // its end finds nobody and does not wait
  StartDaemon();
}

TEST_F(StreamTest, ManyThreadsShareOneStream) {
  const Ground ground(*session_);
  GemmStream stream = session_->OpenStream();
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t i = 0; i < 250; ++i) {
        const auto count = [&](const absl::StatusOr<client::GemmResult>& result) { right += result.ok() ? 1 : 0; };
        EXPECT_TRUE(stream.Gemm(ground.Small(thread * 250 + i), count).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(stream.Finish().ok());
  EXPECT_EQ(right, 1000);
  for (std::uint64_t i = 0; i < 1000; ++i) EXPECT_TRUE(ground.SmallIsRight(i)) << i;
}

}  // namespace
}  // namespace tessera::e2e
