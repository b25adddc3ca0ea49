// Calls that are begun and never finished must not keep a daemon from going.

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <boost/asio/local/stream_protocol.hpp>
#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <string>

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

constexpr auto kGrace = 10s;

class OpenCallTest : public ::testing::TestWithParam<OpenCase> {};

TEST_P(OpenCallTest, SigtermDoesNotWaitForIt) {
  const TemporaryDirectory directory;
  ChildProcess daemon({TESSERAD, "--socket", directory.File("d.sock"), "--http-address", "127.0.0.1:0",
                       "--drain-grace-s", std::to_string(kGrace.count())});
  absl::StatusOr<client::Client> client = absl::UnknownError("");
  ASSERT_TRUE(Eventually(20s, [&] {
    client = client::Client::Connect({.socket = directory.File("d.sock"), .side_channel = {}, .timeout = 1s});
    return client.ok();
  })) << daemon.Err();
  OpenCall call(*client, GetParam());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(kGrace), 0) << daemon.Err();
  EXPECT_THAT(call.AwaitEnd(), AnyOf(grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::CANCELLED));
}

INSTANTIATE_TEST_SUITE_P(Calls, OpenCallTest, ::testing::ValuesIn(kOpenCases),
                         [](const auto& test) { return test.param.name; });

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
