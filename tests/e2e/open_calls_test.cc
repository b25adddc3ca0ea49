// Calls that are begun and never finished must not keep a daemon from going.

#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/v1/compute.grpc.pb.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using ::testing::AnyOf;
using Local = boost::asio::local::stream_protocol;

struct OpenCase {
  std::string name;
  std::string method;
  std::optional<std::string> message;  // sent, and then a reply awaited
};

const OpenCase kOpenCases[] = {
    {"HealthWatch", "/grpc.health.v1.Health/Watch", ""},
    {"HealthWatchWithoutRequest", "/grpc.health.v1.Health/Watch", std::nullopt},
    {"Reflection", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", std::string("\x3a\x00", 2)},
    {"ReflectionWithoutRequest", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", std::nullopt},
    {"Stream", "/tessera.v1.Compute/Stream", ""},
    {"StreamWithoutRequest", "/tessera.v1.Compute/Stream", std::nullopt},
    {"GemmWithoutRequest", "/tessera.v1.Compute/Gemm", std::nullopt},
    {"OpenSessionWithoutRequest", "/tessera.v1.Memory/OpenSession", std::nullopt},
};

void PrintTo(const OpenCase& open, std::ostream* out) {
  *out << open.name;
}

// A call that is begun and then left as it is.
class OpenCall {
 public:
  OpenCall(const client::Client& client, const OpenCase& open) : stub_(client.channel()) {
    stream_ = stub_.PrepareCall(&context_, open.method, &queue_);
    stream_->StartCall(this);
    EXPECT_TRUE(StepSucceeds());
    if (open.message.has_value()) {
      const grpc::Slice slice(*open.message);
      stream_->Write(grpc::ByteBuffer(&slice, 1), this);
      EXPECT_TRUE(StepSucceeds());
      EXPECT_TRUE(Read());
    }
    // Frames of one connection arrive in order: with this answer the daemon has the call's beginning.
    EXPECT_TRUE(client.ServerInfo().ok());
  }

  grpc::StatusCode AwaitEnd() {
    while (Read()) {
    }
    grpc::Status status;
    stream_->Finish(&status, this);
    EXPECT_TRUE(StepSucceeds());
    return status.error_code();
  }

 private:
  bool Read() {
    stream_->Read(&reply_, this);
    return StepSucceeds();
  }

  bool StepSucceeds() {
    void* tag = nullptr;
    bool ok = false;
    const auto deadline = std::chrono::system_clock::now() + 20s;
    EXPECT_EQ(queue_.AsyncNext(&tag, &ok, deadline), grpc::CompletionQueue::GOT_EVENT);
    return ok;
  }

  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer reply_;
};

constexpr auto kGrace = 5s;

// The real program, whose end must come within its grace.
class SigtermTest : public ::testing::Test {
 protected:
  void SetUp() override {
    daemon_.emplace(std::vector<std::string>{TESSERAD, "--socket", socket(), "--http-address", "127.0.0.1:0",
                                             "--drain-grace-s", std::to_string(kGrace.count())});
    absl::StatusOr<client::Client> client = absl::UnknownError("");
    ASSERT_TRUE(Eventually(20s, [&] {
      client = client::Client::Connect({.socket = socket(), .side_channel = {}, .timeout = 1s});
      return client.ok();
    })) << daemon_->Err();
    client_.emplace(*std::move(client));
  }

  std::string socket() const { return directory_.File("d.sock"); }

  void AwaitOneOperation() const {
    const std::string http = client_->ServerInfo().value().http_address();
    EXPECT_TRUE(Eventually(20s, [&] {
      return MetricSum(HttpGet(http, "/metrics").body, "tessera_operations_total", {"outcome=\"ok\""}) == 1;
    }));
  }

  const TemporaryDirectory directory_;
  std::optional<ChildProcess> daemon_;
  std::optional<client::Client> client_;
};

class OpenCallTest : public SigtermTest, public ::testing::WithParamInterface<OpenCase> {};

TEST_P(OpenCallTest, SigtermDoesNotWaitForIt) {
  OpenCall call(*client_, GetParam());
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(kGrace), 0) << daemon_->Err();
  EXPECT_THAT(call.AwaitEnd(), AnyOf(grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::CANCELLED));
}

INSTANTIATE_TEST_SUITE_P(Calls, OpenCallTest, ::testing::ValuesIn(kOpenCases),
                         [](const auto& test) { return test.param.name; });

// A client that has asked for a large reply and reads nothing of it, as if it were stopped.
class DeafClient {
 public:
  explicit DeafClient(const std::string& path) : socket_(io_) {
    boost::system::error_code error;
    socket_.connect(Local::endpoint(path), error);
    EXPECT_FALSE(error) << error.message();
    socket_.native_non_blocking(true, error);
    EXPECT_FALSE(error) << error.message();
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);  // the daemon may send all of it at once
    channel_ = grpc::CreateCustomInsecureChannelFromFd("deaf", socket_.release(), arguments);
    v1::GemmRequest request;
    const auto describe = [](v1::Tensor& tensor, v1::DType dtype, std::int64_t rows, std::int64_t columns) {
      tensor.set_dtype(dtype);
      tensor.add_shape(rows);
      tensor.add_shape(columns);
    };
    describe(*request.mutable_op()->mutable_a(), v1::DTYPE_BF16, kRows, 1);
    describe(*request.mutable_op()->mutable_b(), v1::DTYPE_BF16, kColumns, 1);
    describe(*request.mutable_op()->mutable_d(), v1::DTYPE_F32, kRows, kColumns);
    request.mutable_op()->mutable_a()->set_inline_data(std::string(kRows * 2, '\0'));
    request.mutable_op()->mutable_b()->set_inline_data(std::string(kColumns * 2, '\0'));
    request.mutable_op()->mutable_d()->mutable_inline_result();
    answer_ = v1::Compute::NewStub(channel_)->AsyncGemm(&context_, request, &queue_);
    answer_->Finish(&reply_, &status_, this);
  }

  // The daemon must have ended by then, else this waits for the whole reply.
  ~DeafClient() {
    if (!heard_) Hear();
  }

  grpc::Status Hear() {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok));
    heard_ = true;
    return status_;
  }

 private:
  static constexpr std::int64_t kRows = 250;
  static constexpr std::int64_t kColumns = 1000;  // a reply of 1 MB, more than a socket buffers

  boost::asio::io_context io_;
  Local::socket socket_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::CompletionQueue queue_;  // nobody asks it, so that gRPC does not read
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::GemmReply>> answer_;
  v1::GemmReply reply_;
  grpc::Status status_;
  bool heard_ = false;
};

TEST_F(SigtermTest, AReplyThatNobodyReadsIsNotWaitedFor) {
  DeafClient deaf(socket());
  AwaitOneOperation();
  daemon_->Signal(SIGTERM);
  const std::optional<int> code = daemon_->Wait(kGrace);
  EXPECT_TRUE(code.has_value()) << "still running: " << daemon_->Err();
  EXPECT_GE(code.value_or(0), 0) << "it must exit, not crash: " << daemon_->Err();
  if (!code.has_value()) daemon_->Signal(SIGKILL);
}

// gRPC may leave a thread behind that polls for ten seconds once a socket was full, and joins it at its end.
TEST_F(SigtermTest, AReplyThatHadToWaitForItsReaderDelaysNothing) {
  DeafClient deaf(socket());
  AwaitOneOperation();
  const grpc::Status status = deaf.Hear();
  EXPECT_TRUE(status.ok()) << status.error_message();
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(kGrace), 0) << daemon_->Err();
}

class OpenCallsTest : public DaemonFixture {};

TEST_F(OpenCallsTest, TheEndOfADaemonDoesNotWaitForAnyOfThem) {
  const client::Client client = Connect();
  std::list<OpenCall> calls;
  for (const OpenCase& open : kOpenCases) calls.emplace_back(client, open);
  Local::iostream silent{Local::endpoint(socket())};  // not even a beginning of HTTP/2
  ASSERT_TRUE(silent);
  const auto start = std::chrono::steady_clock::now();
  daemon().RequestDrain();
  EXPECT_TRUE(daemon().AwaitDrained()) << "a call without a request is no operation";
  StopDaemon();
  EXPECT_LT(std::chrono::steady_clock::now() - start, kGrace);
  for (OpenCall& call : calls) {
    EXPECT_THAT(call.AwaitEnd(), AnyOf(grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::CANCELLED));
  }
}

}  // namespace
}  // namespace tessera::e2e
