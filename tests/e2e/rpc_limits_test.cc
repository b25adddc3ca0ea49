// What the daemon promises to take, and how it refuses what is beyond: sizes of inline tensors, queues, connections,
// addresses without alignment.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "tessera/v1/compute.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/oracle/codec.h"
#include "tests/oracle/test_data.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using workload::MemoryOwner;
using workload::SharedProblem;

// ---- Inline tensors ----

constexpr std::int64_t kSmallBytes = 4'200'000;  // more than the 4 MiB that gRPC allows by itself
constexpr std::int64_t kLargeBytes = 33'800'000;
constexpr std::int64_t kRowElements = 1000;

// Element (row, column) of operand number `which`: a small integer, so that every sum is exact.
int Value(int which, std::int64_t row, std::int64_t column) {
  return static_cast<int>((row * 7 + column * (which + 1)) % 5) - 2;
}

std::string Encoded(int which, std::int64_t rows, std::int64_t columns) {
  std::string codes(10, '\0');
  for (int value = -2; value <= 2; ++value) oracle::Encode(DType::kBf16, value, codes.data() + (value + 2) * 2);
  std::string bytes;
  bytes.reserve(static_cast<std::size_t>(rows * columns) * 2);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      bytes.append(codes, static_cast<std::size_t>(Value(which, row, column) + 2) * 2, 2);
    }
  }
  return bytes;
}

// An inline product of [m, k] and [n, k], both bf16, with an inline result in f32.
struct InlineProduct {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;

  v1::GemmRequest Request() const {
    v1::GemmRequest request;
    v1::GemmOp& op = *request.mutable_op();
    const auto describe = [](v1::Tensor& tensor, v1::DType dtype, std::int64_t rows, std::int64_t columns) {
      tensor.set_dtype(dtype);
      tensor.add_shape(rows);
      tensor.add_shape(columns);
    };
    describe(*op.mutable_a(), v1::DTYPE_BF16, m, k);
    describe(*op.mutable_b(), v1::DTYPE_BF16, n, k);
    describe(*op.mutable_d(), v1::DTYPE_F32, m, n);
    op.mutable_a()->set_inline_data(Encoded(0, m, k));
    op.mutable_b()->set_inline_data(Encoded(1, n, k));
    op.mutable_d()->mutable_inline_result();
    return request;
  }

  void ExpectResult(const std::string& result) const {
    ASSERT_EQ(result.size(), static_cast<std::size_t>(m * n) * sizeof(float));
    for (std::int64_t row = 0; row < m; ++row) {
      for (std::int64_t column = 0; column < n; ++column) {
        int sum = 0;
        for (std::int64_t term = 0; term < k; ++term) sum += Value(0, row, term) * Value(1, column, term);
        float got = 0;
        std::memcpy(&got, result.data() + (row * n + column) * static_cast<std::int64_t>(sizeof(got)), sizeof(got));
        ASSERT_EQ(got, static_cast<float>(sum)) << row << ", " << column;
      }
    }
  }
};

InlineProduct WithInputOf(std::int64_t bytes) {
  return {.m = bytes / 2 / kRowElements, .n = 3, .k = kRowElements};
}

InlineProduct WithOutputOf(std::int64_t bytes) {
  return {.m = bytes / 4 / kRowElements, .n = kRowElements, .k = 1};
}

constexpr InlineProduct kGood{.m = 5, .n = 3, .k = 40};

class InlineSizeTest : public DaemonFixture {
 protected:
  grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const InlineProduct& product) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 60s);
    reply_.Clear();
    return v1::Compute::NewStub(channel)->Gemm(&context, product.Request(), &reply_);
  }

  void ExpectRight(const std::shared_ptr<grpc::Channel>& channel, const InlineProduct& product) {
    const grpc::Status status = Call(channel, product);
    ASSERT_TRUE(status.ok()) << status.error_message();
    product.ExpectResult(reply_.inline_result());
  }

  // Refused with a message that holds `named`; the next good call on the same channel is right.
  void ExpectRefused(const std::shared_ptr<grpc::Channel>& channel, const InlineProduct& product,
                     const std::vector<std::string>& named) {
    const grpc::Status status = Call(channel, product);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    for (const std::string& part : named) EXPECT_THAT(status.error_message(), HasSubstr(part));
    EXPECT_TRUE(reply_.inline_result().empty());
    ExpectRight(channel, kGood);
  }

  v1::GemmReply reply_;
};

TEST_F(InlineSizeTest, LargeLimitsTakeLargeRequestsAndReplies) {
  StartDaemon({{"inline_bytes_max", "40MiB"}, {"message_bytes_max", "64MiB"}});
  const client::Client client = Connect();
  for (const std::int64_t bytes : {kSmallBytes, kLargeBytes}) {
    SCOPED_TRACE(bytes);
    const v1::GemmRequest request = WithInputOf(bytes).Request();
    ASSERT_EQ(request.op().a().inline_data().size(), static_cast<std::size_t>(bytes));
    ExpectRight(client.channel(), WithInputOf(bytes));
    ExpectRight(client.channel(), WithOutputOf(bytes));
    EXPECT_EQ(reply_.inline_result().size(), static_cast<std::size_t>(bytes));
  }
}

TEST_F(InlineSizeTest, DefaultLimitsRefuseThemByName) {
  const client::Client client = Connect();
  const v1::ServerInfoReply info = client.ServerInfo().value();
  const std::string inline_limit = "inline_bytes_max is " + std::to_string(info.inline_bytes_max());
  const std::string message_limit = std::to_string(info.message_bytes_max());
  ExpectRefused(client.channel(), WithInputOf(kSmallBytes), {"op.a", inline_limit});
  ExpectRefused(client.channel(), WithInputOf(kLargeBytes), {"larger than max", message_limit});
  ExpectRefused(client.channel(), WithOutputOf(kSmallBytes), {"op.d", inline_limit});
  ExpectRefused(client.channel(), WithOutputOf(kLargeBytes), {"op.d", inline_limit});
  EXPECT_EQ(MetricSum(Metrics(), "tessera_refused_total", {"limit=\"inline_bytes_max\""}), 3);
}

// Why the client library raises its own limit: gRPC's default is smaller than what this daemon may be told to send.
TEST_F(InlineSizeTest, AChannelWithGrpcsDefaultsStopsLargeRepliesItself) {
  StartDaemon({{"inline_bytes_max", "40MiB"}, {"message_bytes_max", "64MiB"}});
  const auto channel = grpc::CreateChannel("unix:" + socket(), grpc::InsecureChannelCredentials());
  ExpectRefused(channel, WithOutputOf(kSmallBytes), {"larger than max", std::to_string(4 << 20)});
  ExpectRight(channel, WithInputOf(kSmallBytes));
  EXPECT_EQ(MetricSum(Metrics(), "tessera_in_flight"), 0);
}

// ---- Queues and connections ----

// K of a product that one thread works on for about a second; a sanitizer makes kernels slower by far.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kSlowTerms = 2048;
#else
constexpr std::int64_t kSlowTerms = 65536;
#endif

// Small products and one slow one, all in one buffer of ones: each D is its own, and each element of it is K.
class Workpiece {
 public:
  // Enough that the daemon queues it: a smaller one would be done on the spot if its own session is idle.
  static constexpr std::int64_t kSmallTerms = 2048;
  static constexpr std::int64_t kSmallExtent = 4;

  explicit Workpiece(client::Session& session) : session_(session), buffer_(session.Share(kBytes).value()) {
    for (std::int64_t i = 0; i < kSlowTerms; ++i) oracle::Encode(DType::kBf16, 1, buffer_.data() + i * 2);
    std::memset(buffer_.data() + kSmallAt, kPattern, kBytes - kSmallAt);
  }

  // All rows of A, and all of B, are the same memory.
  std::future<absl::StatusOr<client::GemmResult>> SendSlow() {
    const client::TensorView rows = buffer_.Tensor(DType::kBf16, {kSlowExtent, kSlowTerms}, 0, {0, 1});
    return session_.GemmAsync(
        {.a = rows, .b = rows, .d = buffer_.Tensor(DType::kF32, {kSlowExtent, kSlowExtent}, kSlowAt)});
  }

  std::future<absl::StatusOr<client::GemmResult>> SendSmall(std::uint64_t number) {
    const client::TensorView rows = buffer_.Tensor(DType::kBf16, {kSmallExtent, kSmallTerms}, 0, {0, 1});
    return session_.GemmAsync({.a = rows, .b = rows, .d = SmallD(number)});
  }

  bool SmallIsRight(std::uint64_t number) const {
    const client::TensorView d = SmallD(number);
    for (int i = 0; i < kSmallExtent * kSmallExtent; ++i) {
      if (oracle::Decode(DType::kF32, d.data + i * 4) != kSmallTerms) return false;
    }
    return true;
  }

  bool SmallIsUntouched(std::uint64_t number) const {
    const std::string pattern(kSmallBytesEach, kPattern);
    return std::memcmp(SmallD(number).data, pattern.data(), pattern.size()) == 0;
  }

 private:
  static constexpr char kPattern = 0x7b;
  static constexpr std::int64_t kSlowExtent = 768;
  static constexpr std::uint64_t kSlowAt = std::uint64_t{kSlowTerms} * 2;
  static constexpr std::uint64_t kSmallAt = kSlowAt + kSlowExtent * kSlowExtent * 4;
  static constexpr std::uint64_t kSmallBytesEach = kSmallExtent * kSmallExtent * 4;
  static constexpr std::uint64_t kBytes = kSmallAt + 64 * kSmallBytesEach;

  client::TensorView SmallD(std::uint64_t number) const {
    return buffer_.Tensor(DType::kF32, {kSmallExtent, kSmallExtent}, kSmallAt + number * kSmallBytesEach);
  }

  client::Session& session_;
  client::Buffer buffer_;
};

using Answers = std::vector<std::future<absl::StatusOr<client::GemmResult>>>;

bool Ready(const std::future<absl::StatusOr<client::GemmResult>>& answer) {
  return answer.wait_for(0s) == std::future_status::ready;
}

std::size_t CountReady(const Answers& answers) {
  return static_cast<std::size_t>(std::count_if(answers.begin(), answers.end(), Ready));
}

class QueueLimitTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cpu_threads", "1"}, {"queue_per_session_max", "4"}, {"queue_max", "8"}});
    client_.emplace(Connect());
  }

  void AwaitInFlight(std::uint32_t operations) const {
    EXPECT_TRUE(Eventually(20s, [&] { return client_->ServerInfo().value().in_flight() == operations; }))
        << client_->ServerInfo().value().in_flight();
  }

  // Sends `calls` small products, of which the daemon must refuse all but `accepted` at once, by `limit`.
  Answers SendBurst(Workpiece& piece, std::size_t calls, std::size_t accepted) {
    Answers answers;
    for (std::size_t i = 0; i < calls; ++i) answers.push_back(piece.SendSmall(i));
    EXPECT_TRUE(Eventually(20s, [&] { return CountReady(answers) >= calls - accepted; }));
    return answers;
  }

  static void ExpectBurst(Workpiece& piece, Answers& answers, std::size_t accepted, const std::string& limit) {
    std::size_t right = 0;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      SCOPED_TRACE(i);
      const auto answer = answers[i].get();
      right += answer.ok() ? 1 : 0;
      if (answer.ok()) {
        EXPECT_TRUE(piece.SmallIsRight(i));
        continue;
      }
      EXPECT_EQ(answer.status().code(), StatusCode::kResourceExhausted) << answer.status();
      EXPECT_THAT(Text(answer.status()), HasSubstr(limit + ":"));
      EXPECT_TRUE(piece.SmallIsUntouched(i));
    }
    EXPECT_EQ(right, accepted);
  }

  std::optional<client::Client> client_;
};

TEST_F(QueueLimitTest, ExcessIsRefusedAtOnceByNameAndTheRestIsRight) {
  client::Session first = client_->OpenSession("first").value();
  client::Session second = client_->OpenSession("second").value();
  client::Session third = client_->OpenSession("third").value();
  Workpiece first_piece(first), second_piece(second), third_piece(third);
  std::future<absl::StatusOr<client::GemmResult>> slow = first_piece.SendSlow();
  AwaitInFlight(1);
  Answers of_first = SendBurst(first_piece, 11, 3);
  AwaitInFlight(4);
  Answers of_second = SendBurst(second_piece, 6, 4);
  AwaitInFlight(8);
  Answers of_third = SendBurst(third_piece, 5, 0);
  EXPECT_FALSE(Ready(slow)) << "the slow product was over before the bursts: use a larger one";
  EXPECT_EQ(CountReady(of_first) + CountReady(of_second), 8U + 2U) << "refusals and nothing else, before any room";

  EXPECT_TRUE(slow.get().ok());
  ExpectBurst(first_piece, of_first, 3, "queue_per_session_max");
  ExpectBurst(second_piece, of_second, 4, "queue_max");
  ExpectBurst(third_piece, of_third, 0, "queue_max");
  AwaitInFlight(0);
  const std::string metrics = Metrics();
  EXPECT_EQ(MetricSum(metrics, "tessera_refused_total", {"limit=\"queue_per_session_max\""}), 8);
  EXPECT_EQ(MetricSum(metrics, "tessera_refused_total", {"limit=\"queue_max\""}), 2 + 5);
  EXPECT_EQ(MetricSum(metrics, "tessera_queue_depth"), 0);

  // All of the room is there again.
  slow = first_piece.SendSlow();
  AwaitInFlight(1);
  of_first = SendBurst(first_piece, 3, 3);
  of_second = SendBurst(second_piece, 4, 4);
  EXPECT_TRUE(slow.get().ok());
  ExpectBurst(first_piece, of_first, 3, "");
  ExpectBurst(second_piece, of_second, 4, "");
}

class ConnectionLimitTest : public DaemonFixture {
 protected:
  // With room for two sessions, the third is refused by `limit`; when one goes, another fits and works.
  void ExpectTwoSessions(const std::string& limit) {
    StartDaemon({{limit, "2"}});
    client::Client client = Connect();
    client::Session stays = client.OpenSession("stays").value();
    std::optional<client::Session> leaves = client.OpenSession("leaves").value();
    for (int i = 0; i < 3; ++i) {
      const absl::Status refused = client.OpenSession("refused").status();
      EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted) << refused;
      EXPECT_THAT(Text(refused), HasSubstr(limit));
      // The daemon sees the end of a refused connection a little later than its client.
      EXPECT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_side_connections") == 2; }));
    }
    EXPECT_EQ(client.ServerInfo().value().sessions(), 2U);
    EXPECT_EQ(MetricSum(Metrics(), "tessera_refused_total", {"limit=\"" + limit + "\""}), 3);
    leaves.reset();
    absl::StatusOr<client::Session> next = absl::UnknownError("");
    EXPECT_TRUE(Eventually(10s, [&] {
      next = client.OpenSession("next");
      return next.ok();
    })) << next.status();
    for (client::Session* session : {&stays, &*next}) {
      const auto problem = SharedProblem::Make(*session, {.m = 8, .n = 8, .k = 8}, 3, MemoryOwner::kDaemon).value();
      EXPECT_TRUE(session->Gemm(problem.spec()).ok());
      EXPECT_TRUE(problem.Check().ok);
    }
  }
};

TEST_F(ConnectionLimitTest, Sessions) {
  ExpectTwoSessions("sessions_max");
}

TEST_F(ConnectionLimitTest, SideConnections) {
  ExpectTwoSessions("side_connections_max");
}

// ---- Addresses ----

constexpr std::array<const char*, 6> kOperands = {"a", "b", "d", "a_scale", "b_scale", "bias"};

// The bytes of D when operand number `moved` begins one element after a 256-byte boundary and the others on one.
std::string Product(client::Session& session, const client::Buffer& buffer, DType dtype, DType bias,
                    std::optional<std::size_t> moved) {
  constexpr std::int64_t kM = 37, kN = 70, kK = 133;
  std::memset(buffer.data(), 0x7f, buffer.bytes());  // NaN as bf16, f32 or fp8; 127 as s8
  std::uint64_t next = 0;
  std::size_t number = 0;
  const auto place = [&](DType type, std::vector<std::int64_t> shape) {
    oracle::Random random(number + 1);
    client::TensorView view = buffer.Tensor(type, std::move(shape), next + (number == moved ? DTypeBytes(type) : 0));
    const std::uint64_t bytes = client::PackedBytes(type, view.shape);
    for (std::uint64_t at = 0; at < bytes; at += DTypeBytes(type)) {
      const double value = type == DType::kS8 ? static_cast<double>(random.Int(-128, 127)) : random.Uniform(-1, 1);
      oracle::Encode(type, value, view.data + at);
    }
    next = (view.byte_offset + bytes + 512) / 256 * 256;
    ++number;
    return view;
  };
  client::GemmSpec spec{
      .a = place(dtype, {kM, kK}), .b = place(dtype, {kN, kK}), .d = place(DType::kF32, {kM, kN}), .bias = {}};
  const client::TensorView a_scale = place(DType::kF32, {kM});
  const client::TensorView b_scale = place(DType::kF32, {kN});
  if (dtype != DType::kBf16) spec.a_scale = a_scale, spec.b_scale = b_scale;
  spec.bias = place(bias, {kN});
  EXPECT_LE(next, buffer.bytes());
  const auto result = session.Gemm(spec);
  EXPECT_TRUE(result.ok()) << result.status();
  const kernels::GemmParams params = workload::ParamsOf(spec);
  const oracle::GemmTypes types{dtype, dtype, DType::kF32};
  const oracle::Verdict verdict = oracle::CheckGemm(params, types, oracle::ComputeGemm(params, types));
  EXPECT_TRUE(verdict.ok) << verdict.wrong << " wrong: " << verdict.first;
  return {reinterpret_cast<const char*>(spec.d.data), static_cast<std::size_t>(kM * kN) * sizeof(float)};
}

class AlignmentTest : public DaemonFixture {};

TEST_F(AlignmentTest, NoOperandNeedsMoreThanItsElement) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("alignment").value();
  const client::Buffer buffer = session.Allocate(1 << 20).value();
  for (const DType dtype : {DType::kBf16, DType::kE4m3, DType::kE5m2, DType::kS8}) {
    for (const DType bias : {DType::kF32, DType::kBf16}) {
      const std::string aligned = Product(session, buffer, dtype, bias, std::nullopt);
      for (std::size_t moved = 0; moved < kOperands.size(); ++moved) {
        SCOPED_TRACE(std::string(DTypeName(dtype)) + ", moved: " + kOperands[moved]);
        EXPECT_TRUE(Product(session, buffer, dtype, bias, moved) == aligned) << "other bits";
      }
    }
  }
}

}  // namespace
}  // namespace tessera::e2e
