// GEMMs through client, socket and daemon: every pair, layout and output type on shared memory against float64, inline
// tensors through the bare stub, and every refusal that Compute documents.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <array>
#include <cstring>
#include <future>
#include <list>
#include <thread>
#include <tuple>

#include "tessera/v1/compute.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/pipeline.h"
#include "tests/oracle/codec.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using oracle::BiasMode;
using oracle::GemmCase;
using oracle::ScaleMode;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using workload::MemoryOwner;
using workload::SharedProblem;

constexpr std::uint64_t kSeed = 4711;

class GemmTest : public DaemonFixture {};

// A result is right and says who made it.
void ExpectRight(const SharedProblem& problem, const absl::StatusOr<client::GemmResult>& result,
                 const GemmCase& gemm_case) {
  SCOPED_TRACE(gemm_case.Describe());
  ASSERT_TRUE(result.ok()) << result.status();
  const oracle::Verdict verdict = problem.Check();
  EXPECT_TRUE(verdict.ok) << verdict.wrong << " wrong, worst " << verdict.worst << ": " << verdict.first;
  const kernels::GemmParams& params = problem.params();
  const std::int64_t products = oracle::BatchCount(params) * params.m * params.n * params.k;
  EXPECT_EQ(result->report.flops(), 2 * static_cast<std::uint64_t>(products));
  EXPECT_GT(result->round_trip.count(), 0);
  if (oracle::BatchCount(params) * params.m * params.n == 0) return;  // nothing ran
  EXPECT_THAT(result->report.variant(), StartsWith("gemm.cpu."));
  EXPECT_THAT(result->report.variant(), HasSubstr("." + gemm_case.layout + "/"));
  EXPECT_EQ(result->report.backend(), "cpu");
  EXPECT_FALSE(result->report.source().empty());
  EXPECT_GE(result->report.split(), 1U);
}

// Cases of one class: plain; misaligned with bias; batches that repeat an operand; a long K; no K; nothing at all.
std::vector<GemmCase> CasesOf(DType a, DType b, DType d, const char* layout) {
  std::vector<GemmCase> cases(6, {.a = a, .b = b, .d = d, .layout = layout, .m = 17, .n = 33, .k = 65});
  cases[1].padding = 3, cases[1].offset = 1, cases[1].bias = BiasMode::kBf16;
  cases[2].batch = {2, 1, 3}, cases[2].a_broadcast[2] = true, cases[2].b_broadcast[0] = true;
  cases[3].m = 5, cases[3].n = 7, cases[3].k = 1500, cases[3].bias = BiasMode::kF32;
  cases[4].k = 0, cases[4].bias = BiasMode::kF32;
  cases[5].m = 0;
  const std::vector<ScaleMode> a_scales = oracle::LegalScales(a);
  const std::vector<ScaleMode> b_scales = oracle::LegalScales(b);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    cases[i].a_scale = a_scales[i % a_scales.size()];
    cases[i].b_scale = b_scales[(i + i / 3) % b_scales.size()];
  }
  return cases;
}

TEST_F(GemmTest, EveryPairLayoutAndOutputBlockingAndAsynchronous) {
  SCOPED_TRACE(kSeed);
  client::Client client = Connect();
  client::Session session = client.OpenSession("gemm").value();
  std::uint64_t number = 0;
  for (const auto& [a, b] : oracle::kGemmPairs) {
    for (const char* layout : oracle::kGemmLayouts) {
      for (const DType d : {DType::kBf16, DType::kF32}) {
        for (const GemmCase& gemm_case : CasesOf(a, b, d, layout)) {
          ++number;
          const MemoryOwner owner = number % 4 < 2 ? MemoryOwner::kDaemon : MemoryOwner::kClient;
          const SharedProblem problem = SharedProblem::Make(session, gemm_case, kSeed + number, owner).value();
          ExpectRight(problem, number % 2 == 0 ? session.Gemm(problem.spec()) : session.GemmAsync(problem.spec()).get(),
                      gemm_case);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(GemmTest, EveryCombinationOfScales) {
  SCOPED_TRACE(kSeed);
  client::Client client = Connect();
  client::Session session = client.OpenSession("scales").value();
  for (const auto& [a, b] : oracle::kGemmPairs) {
    for (const ScaleMode a_scale : oracle::LegalScales(a)) {
      for (const ScaleMode b_scale : oracle::LegalScales(b)) {
        GemmCase gemm_case{.a = a, .b = b, .d = DType::kF32, .m = 9, .n = 20, .k = 31};
        gemm_case.a_scale = a_scale, gemm_case.b_scale = b_scale, gemm_case.vector_stride = 2;
        const SharedProblem problem = SharedProblem::Make(session, gemm_case, kSeed, MemoryOwner::kDaemon).value();
        ExpectRight(problem, session.Gemm(problem.spec()), gemm_case);
      }
    }
  }
}

TEST_F(GemmTest, CallsOfOneSessionRunInTheOrderOfTheirArrival) {
  constexpr std::int64_t kExtent = 32;
  constexpr int kCalls = 20;
  constexpr std::uint64_t kMatrixBytes = kExtent * kExtent * 2;
  client::Client client = Connect();
  client::Session session = client.OpenSession("chain").value();
  const client::Buffer buffer = session.Allocate((kCalls + 2) * kMatrixBytes).value();
  const auto matrix = [&](int i) {
    return buffer.Tensor(DType::kBf16, {kExtent, kExtent}, static_cast<std::uint64_t>(i) * kMatrixBytes);
  };
  // B moves every column of A one to the right; each call's input is the output of the one before.
  const client::TensorView shift = matrix(kCalls + 1);
  for (std::int64_t column = 0; column < kExtent; ++column) {
    const std::int64_t from = (column + kExtent - 1) % kExtent;
    oracle::Encode(DType::kBf16, 1, shift.data + (column * kExtent + from) * 2);
  }
  const client::TensorView first = matrix(0);
  for (std::int64_t i = 0; i < kExtent * kExtent; ++i) {
    oracle::Encode(DType::kBf16, static_cast<double>(i % 251), first.data + i * 2);
  }
  const SharedProblem slow =
      SharedProblem::Make(session, {.m = 1024, .n = 1024, .k = 512}, kSeed, MemoryOwner::kDaemon).value();
  Pipeline pipeline(client);
  pipeline.Send(session, slow.spec());
  for (int i = 0; i < kCalls; ++i) {
    pipeline.Send(session, {.a = matrix(i), .b = shift, .d = matrix(i + 1)});
    pipeline.AwaitArrival();  // two calls on the way may overtake each other
  }
  pipeline.ExpectAllOk();
  const client::TensorView last = matrix(kCalls);
  for (std::int64_t row = 0; row < kExtent; ++row) {
    for (std::int64_t column = 0; column < kExtent; ++column) {
      const std::int64_t from = (column + kExtent - kCalls) % kExtent;
      static_assert(kCalls <= kExtent);
      EXPECT_EQ(oracle::Decode(DType::kBf16, last.data + (row * kExtent + column) * 2),
                static_cast<double>((row * kExtent + from) % 251))
          << row << ", " << column;
    }
  }
}

TEST_F(GemmTest, CallsOfOneSessionOnTheWayAtOnce) {
  SCOPED_TRACE(kSeed);
  client::Client client = Connect();
  client::Session session = client.OpenSession("pipeline").value();
  std::list<SharedProblem> problems;
  Pipeline pipeline(client);
  for (std::int64_t i = 0; i < 64; ++i) {
    const GemmCase gemm_case{.m = 1 + i, .n = 65 - i, .k = 3 * i};
    problems.push_back(
        SharedProblem::Make(session, gemm_case, kSeed + static_cast<std::uint64_t>(i), MemoryOwner::kClient).value());
    pipeline.Send(session, problems.back().spec());
  }
  pipeline.ExpectAllOk();
  for (const SharedProblem& problem : problems) {
    const oracle::Verdict verdict = problem.Check();
    EXPECT_TRUE(verdict.ok) << problem.params().m << ": " << verdict.first;
  }
}

TEST_F(GemmTest, EightClientsAtOnce) {
  SCOPED_TRACE(kSeed);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([this, thread] {
      oracle::Random random(kSeed + static_cast<std::uint64_t>(thread));
      client::Client client = Connect();
      client::Session session = client.OpenSession("thread").value();
      std::list<std::pair<GemmCase, SharedProblem>> problems;
      std::vector<std::future<absl::StatusOr<client::GemmResult>>> pending;
      for (std::size_t i = 0; i < 12; ++i) {
        GemmCase gemm_case{.layout = oracle::kGemmLayouts[i % oracle::kGemmLayouts.size()]};
        std::tie(gemm_case.a, gemm_case.b) =
            oracle::kGemmPairs[(i + static_cast<std::size_t>(thread)) % oracle::kGemmPairs.size()];
        gemm_case.a_scale = oracle::LegalScales(gemm_case.a)[0];
        gemm_case.b_scale = oracle::LegalScales(gemm_case.b)[0];
        gemm_case.m = random.Int(2, 70), gemm_case.n = random.Int(2, 70), gemm_case.k = random.Int(2, 200);
        problems.emplace_back(gemm_case,
                              SharedProblem::Make(session, gemm_case, random.Next(), MemoryOwner::kDaemon).value());
        pending.push_back(session.GemmAsync(problems.back().second.spec()));
      }
      auto result = pending.begin();
      for (const auto& [gemm_case, problem] : problems) ExpectRight(problem, (result++)->get(), gemm_case);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(MetricSum(Metrics(), "tessera_in_flight"), 0);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"ok\""}), 8 * 12);
}

TEST_F(GemmTest, TimingOnlyIfAskedFor) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("timing").value();
  SharedProblem problem =
      SharedProblem::Make(session, {.m = 64, .n = 64, .k = 64}, kSeed, MemoryOwner::kDaemon).value();
  EXPECT_FALSE(session.Gemm(problem.spec()).value().report.has_timing());
  problem.spec().profile = true;
  const client::GemmResult result = session.Gemm(problem.spec()).value();
  ASSERT_TRUE(result.report.has_timing());
  EXPECT_GT(result.report.timing().run_ns(), 0U);
  EXPECT_LT(result.report.timing().run_ns(), static_cast<std::uint64_t>(result.round_trip.count()));
}

TEST_F(GemmTest, ANamedBackendIsStrict) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("backends").value();
  SharedProblem problem = SharedProblem::Make(session, {.m = 8, .n = 8, .k = 8}, kSeed, MemoryOwner::kDaemon).value();
  problem.spec().backend = v1::BACKEND_CUDA;
  const auto refused = session.Gemm(problem.spec());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnimplemented) << refused.status();
  EXPECT_THAT(Text(refused.status()), HasSubstr("cuda"));
  for (const v1::Backend backend : {v1::BACKEND_CPU, v1::BACKEND_AUTO}) {
    problem.spec().backend = backend;
    ExpectRight(problem, session.Gemm(problem.spec()), {.m = 8, .n = 8, .k = 8});
  }
}

// ---- The bare stub: what the client library never sends.

// A context that carries the session's token, if given.
std::unique_ptr<grpc::ClientContext> Context(const client::Session* session = nullptr) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + 30s);
  if (session != nullptr) context->AddMetadata("tessera-session-bin", session->token());
  return context;
}

void SetInline(v1::Tensor& tensor, DType dtype, std::vector<std::int64_t> shape, const std::vector<double>& values) {
  std::string bytes(values.size() * DTypeBytes(dtype), '\0');
  for (std::size_t i = 0; i < values.size(); ++i) {
    oracle::Encode(dtype, values[i], bytes.data() + i * DTypeBytes(dtype));
  }
  tensor.set_inline_data(bytes);
  tensor.set_dtype(static_cast<v1::DType>(dtype));
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
}

// [[1, 2, 3], [4, 5, 6]] times the transpose of [[1, 0, 1], [2, 1, 0]], plus [10, 20].
v1::GemmRequest InlineRequest() {
  v1::GemmRequest request;
  v1::GemmOp& op = *request.mutable_op();
  SetInline(*op.mutable_a(), DType::kBf16, {2, 3}, {1, 2, 3, 4, 5, 6});
  SetInline(*op.mutable_b(), DType::kBf16, {2, 3}, {1, 0, 1, 2, 1, 0});
  SetInline(*op.mutable_epilogue()->mutable_bias(), DType::kF32, {2}, {10, 20});
  op.mutable_d()->mutable_inline_result();
  op.mutable_d()->set_dtype(v1::DTYPE_F32);
  for (const int extent : {2, 2}) op.mutable_d()->add_shape(extent);
  return request;
}

class GemmStubTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    Restub();
  }

  void Restub() {
    client_.emplace(Connect());
    stub_ = v1::Compute::NewStub(client_->channel());
  }

  grpc::Status Call(const v1::GemmRequest& request) { return stub_->Gemm(Context().get(), request, &reply_); }

  void ExpectGoodCallIsRight() {
    const grpc::Status status = Call(InlineRequest());
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(reply_.inline_result().size(), 4 * sizeof(float));
    std::array<float, 4> values{};
    std::memcpy(values.data(), reply_.inline_result().data(), sizeof(values));
    EXPECT_EQ(values, (std::array<float, 4>{14, 24, 20, 33}));
  }

  void ExpectRefused(const v1::GemmRequest& request, grpc::StatusCode code, const std::string& named) {
    const grpc::Status status = Call(request);
    EXPECT_EQ(status.error_code(), code) << named << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(named));
    ExpectGoodCallIsRight();
  }

  std::optional<client::Client> client_;
  std::unique_ptr<v1::Compute::Stub> stub_;
  v1::GemmReply reply_;
};

TEST_F(GemmStubTest, InlineTensorsNeedNoSession) {
  ExpectGoodCallIsRight();
  EXPECT_FALSE(reply_.report().variant().empty());
  EXPECT_EQ(client_->ServerInfo().value().sessions(), 0U);
}

TEST_F(GemmStubTest, InlineDataAndResultsAreBounded) {
  const std::uint64_t limit = client_->ServerInfo().value().inline_bytes_max();
  ASSERT_EQ(limit, 1U << 20U);
  const auto rows = static_cast<std::int64_t>(limit / 2 / 64);  // of 64 bf16 that just fit
  for (const std::int64_t excess : {0, 1}) {
    v1::GemmRequest input = InlineRequest();
    SetInline(*input.mutable_op()->mutable_a(), DType::kBf16, {rows + excess, 64},
              std::vector<double>(static_cast<std::size_t>((rows + excess) * 64), 1));
    SetInline(*input.mutable_op()->mutable_b(), DType::kBf16, {2, 64}, std::vector<double>(128, 1));
    input.mutable_op()->mutable_d()->set_shape(0, rows + excess);
    if (excess == 0) {
      const grpc::Status status = Call(input);
      EXPECT_TRUE(status.ok()) << status.error_message();
    } else {
      ExpectRefused(input, grpc::StatusCode::RESOURCE_EXHAUSTED, "inline_bytes_max");
    }
  }
  v1::GemmRequest output = InlineRequest();
  const std::int64_t extent = 600;  // 600 * 600 * 4 > 1 MiB
  for (v1::Tensor* operand : {output.mutable_op()->mutable_a(), output.mutable_op()->mutable_b()}) {
    SetInline(*operand, DType::kBf16, {extent, 1}, std::vector<double>(extent, 1));
  }
  output.mutable_op()->mutable_epilogue()->clear_bias();
  output.mutable_op()->mutable_d()->set_shape(0, extent);
  output.mutable_op()->mutable_d()->set_shape(1, extent);
  ExpectRefused(output, grpc::StatusCode::RESOURCE_EXHAUSTED, "inline_bytes_max");
}

TEST_F(GemmStubTest, MessagesAreBounded) {
  v1::GemmRequest request = InlineRequest();
  request.mutable_op()->mutable_a()->set_inline_data(
      std::string(client_->ServerInfo().value().message_bytes_max() + 1, '\0'));
  ExpectRefused(request, grpc::StatusCode::RESOURCE_EXHAUSTED, "larger than max");
}

TEST_F(GemmStubTest, BoundsFollowTheSettings) {
  StartDaemon({{"inline_bytes_max", "1KiB"}, {"message_bytes_max", "128KiB"}});
  Restub();
  v1::GemmRequest request = InlineRequest();
  SetInline(*request.mutable_op()->mutable_a(), DType::kBf16, {2, 300}, std::vector<double>(600, 1));
  SetInline(*request.mutable_op()->mutable_b(), DType::kBf16, {2, 300}, std::vector<double>(600, 1));
  ExpectRefused(request, grpc::StatusCode::RESOURCE_EXHAUSTED, "inline_bytes_max");
  request.mutable_op()->mutable_a()->set_inline_data(std::string(128 << 10U, '\0'));
  ExpectRefused(request, grpc::StatusCode::RESOURCE_EXHAUSTED, "larger than max");
}

TEST_F(GemmStubTest, OrderNeedsASession) {
  const std::string id(16, 'x');
  v1::GemmRequest stream = InlineRequest();
  stream.mutable_options()->set_stream(id);
  ExpectRefused(stream, grpc::StatusCode::INVALID_ARGUMENT, "tessera-session-bin");
  v1::GemmRequest wait = InlineRequest();
  wait.mutable_options()->add_wait()->set_id(id);
  ExpectRefused(wait, grpc::StatusCode::INVALID_ARGUMENT, "tessera-session-bin");
  v1::GemmRequest signal = InlineRequest();
  signal.mutable_options()->add_signal()->set_id(id);
  ExpectRefused(signal, grpc::StatusCode::INVALID_ARGUMENT, "tessera-session-bin");
  v1::GemmRequest reply_when = InlineRequest();
  reply_when.mutable_options()->set_reply_when(v1::REPLY_WHEN_ENQUEUED);
  ExpectRefused(reply_when, grpc::StatusCode::INVALID_ARGUMENT, "options.reply_when");
  v1::GemmRequest completed = InlineRequest();
  completed.mutable_options()->set_reply_when(v1::REPLY_WHEN_COMPLETED);
  EXPECT_TRUE(Call(completed).ok());
}

TEST_F(GemmStubTest, WrongFieldsAreNamed) {
  v1::GemmRequest missing = InlineRequest();
  missing.mutable_op()->clear_b();
  ExpectRefused(missing, grpc::StatusCode::INVALID_ARGUMENT, "op.b");
  v1::GemmRequest shape = InlineRequest();
  shape.mutable_op()->mutable_d()->set_shape(1, 3);
  ExpectRefused(shape, grpc::StatusCode::INVALID_ARGUMENT, "op.d.shape");
  v1::GemmRequest beyond = InlineRequest();
  beyond.mutable_op()->mutable_a()->set_byte_offset(2);
  ExpectRefused(beyond, grpc::StatusCode::INVALID_ARGUMENT, "op.a");
  v1::GemmRequest negative = InlineRequest();
  for (const int stride : {3, -1}) negative.mutable_op()->mutable_a()->add_strides(stride);
  ExpectRefused(negative, grpc::StatusCode::INVALID_ARGUMENT, "op.a.strides[1]");
  v1::GemmRequest backend = InlineRequest();
  backend.mutable_options()->set_backend(static_cast<v1::Backend>(77));
  ExpectRefused(backend, grpc::StatusCode::INVALID_ARGUMENT, "options.backend");
}

TEST_F(GemmStubTest, ADeadlineThatHasPassedIsAnswered) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() - 1s);
  EXPECT_EQ(stub_->Gemm(&context, InlineRequest(), &reply_).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  ExpectGoodCallIsRight();
}

TEST_F(GemmTest, ADeadlineThatPassesInTheQueueLeavesTheOutputAlone) {
  StartDaemon({{"cpu_threads", "1"}});
  client::Client client = Connect();
  client::Session session = client.OpenSession("deadline").value();
  const GemmCase slow_case{.m = 512, .n = 512, .k = 512};
  const SharedProblem slow = SharedProblem::Make(session, slow_case, kSeed, MemoryOwner::kDaemon).value();
  SharedProblem late = SharedProblem::Make(session, {.m = 16, .n = 16, .k = 16}, kSeed, MemoryOwner::kDaemon).value();
  const std::string before(reinterpret_cast<const char*>(late.spec().d.data), 16 * 16 * sizeof(float));
  std::vector<std::future<absl::StatusOr<client::GemmResult>>> running;
  for (int i = 0; i < 4; ++i) running.push_back(session.GemmAsync(slow.spec()));
  late.spec().timeout = 1ms;
  const auto refused = session.Gemm(late.spec());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kDeadlineExceeded) << refused.status();
  for (auto& result : running) EXPECT_TRUE(result.get().ok());
  ASSERT_TRUE(Eventually(10s, [&] { return client.ServerInfo().value().in_flight() == 0; }));
  EXPECT_EQ(std::memcmp(before.data(), late.spec().d.data, before.size()), 0);
  late.spec().timeout = {};
  ExpectRight(late, session.Gemm(late.spec()), {.m = 16, .n = 16, .k = 16});
}

}  // namespace
}  // namespace tessera::e2e
