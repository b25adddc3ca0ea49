// The real tesserad: how it starts, refuses to start, drains and dies.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "common/unique_fd.h"
#include "server/config/settings.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/pipeline.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using workload::MemoryOwner;
using workload::SharedProblem;

class LifecycleTest : public ::testing::Test {
 protected:
  std::string socket() const { return directory_.File("d.sock"); }

  // A daemon on this test's socket; HTTP on a free port unless `more` says otherwise (the last flag of a name counts).
  std::vector<std::string> Arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> argv = {TESSERAD, "--socket", socket(), "--cpu-threads", "1"};
    argv.insert(argv.end(), more.begin(), more.end());
    if (std::find(more.begin(), more.end(), "--http-address") == more.end()) {
      argv.insert(argv.end(), {"--http-address", "127.0.0.1:0"});
    }
    return argv;
  }

  std::unique_ptr<ChildProcess> Start(const std::vector<std::string>& more = {}) const {
    auto child = std::make_unique<ChildProcess>(Arguments(more));
    EXPECT_TRUE(Eventually(10s, [this] { return TryConnect().ok(); })) << child->Err();
    return child;
  }

  absl::StatusOr<client::Client> TryConnect() const {
    return client::Client::Connect({.socket = socket(), .side_channel = {}, .timeout = 1s});
  }

  std::vector<std::string> SocketFiles() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_.File(""))) names.push_back(entry.path());
    return names;
  }

 private:
  TemporaryDirectory directory_;
};

// Work for a daemon of one thread that lasts about as long as asked.
class LongWork {
 public:
  LongWork(const client::Client& client, client::Session& session)
      : session_(session),
        problem_(SharedProblem::Make(session, {.m = 768, .n = 768, .k = 768}, 3, MemoryOwner::kClient).value()),
        pipeline_(client) {}

  void Send(std::chrono::milliseconds duration) {
    EXPECT_TRUE(session_.Gemm(problem_.spec()).ok());
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(session_.Gemm(problem_.spec()).ok());
    const std::chrono::nanoseconds one = std::chrono::steady_clock::now() - start;
    const auto calls = std::clamp<std::int64_t>(std::chrono::nanoseconds(duration) / one, 8, 240);
    for (std::int64_t i = 0; i < calls; ++i) pipeline_.Send(session_, problem_.spec());
    pipeline_.AwaitArrival();
  }

  const client::GemmSpec& spec() const { return problem_.spec(); }
  Pipeline& pipeline() { return pipeline_; }

 private:
  client::Session& session_;
  SharedProblem problem_;
  Pipeline pipeline_;
};

TEST_F(LifecycleTest, HelpVersionAndCheckNeedNoDaemon) {
  const Finished help = RunProgram({TESSERAD, "--help"});
  EXPECT_EQ(help.code, 0);
  for (const server::SettingRow& row : server::SettingRows()) {
    EXPECT_THAT(help.out, HasSubstr(server::FlagName(row.name)));
  }
  const Finished version = RunProgram({TESSERAD, "--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out, "tesserad " + std::string(server::Version()) + "\n");
  const Finished valid = RunProgram({TESSERAD, "--check"});
  EXPECT_EQ(valid.code, 0) << valid.err;
  EXPECT_THAT(valid.out, HasSubstr("valid"));
  const Finished invalid = RunProgram({TESSERAD, "--check", "--cpu-threads", "9999"});
  EXPECT_EQ(invalid.code, 1);
  EXPECT_THAT(invalid.out + invalid.err, HasSubstr("cpu-threads"));
  const Finished unknown = RunProgram({TESSERAD, "--cpu-thread", "1"});
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.err, HasSubstr("--cpu-threads")) << "a near miss is suggested";
  EXPECT_TRUE(SocketFiles().empty());
}

TEST_F(LifecycleTest, SigtermExitsCleanlyAndRemovesItsFiles) {
  for (const int number : {SIGTERM, SIGINT}) {
    const auto daemon = Start();
    EXPECT_GE(SocketFiles().size(), 2U);
    daemon->Signal(number);
    EXPECT_EQ(daemon->Wait(10s), 0) << daemon->Err();
    EXPECT_TRUE(SocketFiles().empty()) << SocketFiles().front();
    EXPECT_THAT(daemon->Err(), HasSubstr("drained"));
  }
}

TEST_F(LifecycleTest, ADaemonReplacesTheSocketOfAKilledOne) {
  const auto first = Start();
  first->Signal(SIGKILL);
  ASSERT_EQ(first->Wait(10s), -SIGKILL);
  ASSERT_FALSE(SocketFiles().empty());  // nobody could remove them
  const auto second = Start();
  client::Client client = TryConnect().value();
  client::Session session = client.OpenSession("after").value();
  const SharedProblem problem = SharedProblem::Make(session, {.m = 8, .n = 8, .k = 8}, 1, MemoryOwner::kDaemon).value();
  ASSERT_TRUE(session.Gemm(problem.spec()).ok());
  EXPECT_TRUE(problem.Check().ok);
}

TEST_F(LifecycleTest, ASecondDaemonOnThePathIsRefusedAndTheFirstServesOn) {
  const auto first = Start();
  const Finished second = RunProgram(Arguments());
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.err, HasSubstr("another daemon is serving at " + socket()));
  EXPECT_TRUE(TryConnect().ok());
  first->Signal(SIGTERM);
  EXPECT_EQ(first->Wait(10s), 0);
}

TEST_F(LifecycleTest, AnHttpPortInUseIsRefusedByName) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  const std::string taken = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const Finished run = RunProgram(Arguments({"--http-address", taken}));
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, HasSubstr("cannot listen on " + taken));
  EXPECT_TRUE(SocketFiles().empty()) << SocketFiles().front();
}

TEST_F(LifecycleTest, AnUnsafeDirectoryIsRefused) {
  const TemporaryDirectory open;
  std::filesystem::permissions(open.File(""), std::filesystem::perms::all);
  const Finished run = RunProgram({TESSERAD, "--socket", open.File("d.sock"), "--http-address", ""});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, HasSubstr("can be written by others"));
}

// Draining, begun by `begin`: what runs finishes, what comes is refused, readiness drops before the first refusal.
void ExpectGracefulDrain(ChildProcess& daemon, client::Client& client, const std::function<void()>& begin) {
  const std::string http = client.ServerInfo().value().http_address();
  ASSERT_EQ(HttpGet(http, "/readyz").code, 200);
  client::Session session = client.OpenSession("work").value();
  client::Session late_session = client.OpenSession("late").value();
  const SharedProblem late =
      SharedProblem::Make(late_session, {.m = 4, .n = 4, .k = 4}, 1, MemoryOwner::kDaemon).value();
  LongWork work(client, session);
  work.Send(1500ms);
  begin();
  absl::Status refused;
  ASSERT_TRUE(Eventually(5s, [&] {
    refused = late_session.Gemm(late.spec()).status();
    return !refused.ok();
  }));
  // Nobody is turned away while the daemon still says that it is ready.
  EXPECT_EQ(HttpGet(http, "/readyz").code, 503);
  EXPECT_EQ(HttpGet(http, "/healthz").code, 200);
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable) << refused;
  EXPECT_THAT(Text(refused), HasSubstr("draining"));
  EXPECT_LT(work.pipeline().Answered(), work.pipeline().Sent()) << "the work was over before the drain was seen";
  work.pipeline().ExpectAllOk();
  EXPECT_EQ(daemon.Wait(10s), 0) << daemon.Err();
}

TEST_F(LifecycleTest, SigtermLetsRunningWorkFinish) {
  const auto daemon = Start();
  client::Client client = TryConnect().value();
  ExpectGracefulDrain(*daemon, client, [&] { daemon->Signal(SIGTERM); });
  EXPECT_TRUE(SocketFiles().empty());
}

TEST_F(LifecycleTest, AdminDrainLetsRunningWorkFinish) {
  const auto daemon = Start({"--drain-grace-s", "17"});
  client::Client client = TryConnect().value();
  ExpectGracefulDrain(*daemon, client, [&] {
    const v1::DrainReply reply = client.Drain().value();
    EXPECT_GT(reply.in_flight(), 0U);
    EXPECT_EQ(reply.grace_s(), 17U);
    EXPECT_TRUE(client.Drain().ok());  // again: the progress
  });
  EXPECT_TRUE(SocketFiles().empty());
}

TEST_F(LifecycleTest, WithoutGraceItDoesNotWaitForTheWork) {
  const auto daemon = Start({"--drain-grace-s", "0"});
  client::Client client = TryConnect().value();
  client::Session session = client.OpenSession("work").value();
  LongWork work(client, session);
  work.Send(30s);
  daemon->Signal(SIGTERM);
  const std::optional<int> code = daemon->Wait(3s);
  ASSERT_TRUE(code.has_value()) << "still running: " << daemon->Err();
  EXPECT_NE(*code, 0);
  EXPECT_GT(*code, 0) << "it must exit, not crash: " << daemon->Err();
  int unfinished = 0;
  for (const auto& result : work.pipeline().Results()) unfinished += result.ok() ? 0 : 1;
  EXPECT_GT(unfinished, 0);
}

TEST_F(LifecycleTest, WithoutGraceItDoesNotWaitForOneLongCall) {
  const auto daemon = Start({"--drain-grace-s", "0"});
  client::Client client = TryConnect().value();
  client::Session session = client.OpenSession("work").value();
  // Minutes of work in little memory: all rows of A, and all of B, are the same.
  constexpr std::int64_t kExtent = 4096;
  constexpr std::int64_t kTerms = 262144;
  const client::Buffer buffer = session.Share(kTerms * 2 + kExtent * kExtent * 2).value();
  const client::TensorView rows = buffer.Tensor(DType::kBf16, {kExtent, kTerms}, 0, {0, 1});
  Pipeline pipeline(client);
  pipeline.Send(session, {.a = rows, .b = rows, .d = buffer.Tensor(DType::kBf16, {kExtent, kExtent}, kTerms * 2)});
  pipeline.AwaitArrival();
  ASSERT_EQ(pipeline.Answered(), 0U);
  daemon->Signal(SIGTERM);
  const std::optional<int> code = daemon->Wait(5s);
  EXPECT_TRUE(code.has_value()) << "still running: " << daemon->Err();
  if (!code.has_value()) daemon->Signal(SIGKILL);  // so that the call below gets its answer
  EXPECT_GT(code.value_or(1), 0) << daemon->Err();
  EXPECT_FALSE(pipeline.Results()[0].ok());
}

// The daemon is another process, so that this one has no channel but the client's: with the last answer, gRPC's
// callback threads come to their end while one of them still runs the callback.
TEST_F(LifecycleTest, AnAnswerMayOutliveItsClient) {
  const auto daemon = Start();
  for (int round = 0; round < 30; ++round) {
    auto answered = std::make_shared<std::promise<absl::Status>>();
    {
      client::Client client = TryConnect().value();
      client::Session session = client.OpenSession("short").value();
      const client::Buffer buffer = session.Allocate(6 << 20).value();
      const auto matrix = [&](std::uint64_t i) { return buffer.Tensor(DType::kBf16, {768, 768}, i << 21U); };
      session.GemmAsync(
          {.a = matrix(0), .b = matrix(1), .d = matrix(2)},
          [answered](const absl::StatusOr<client::GemmResult>& result) { answered->set_value(result.status()); });
    }
    const absl::Status status = answered->get_future().get();  // the session may have ended before the launch
    EXPECT_THAT(status.code(), AnyOf(StatusCode::kOk, StatusCode::kCancelled, StatusCode::kNotFound)) << status;
  }
}

TEST_F(LifecycleTest, ASecondSignalEndsItAtOnce) {
  const auto daemon = Start();
  client::Client client = TryConnect().value();
  client::Session session = client.OpenSession("work").value();
  LongWork work(client, session);
  work.Send(30s);
  daemon->Signal(SIGTERM);
  ASSERT_TRUE(Eventually(5s, [&] { return daemon->Err().find("draining") != std::string::npos; }));
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(3s), 128 + SIGTERM);
}

}  // namespace
}  // namespace tessera::e2e
