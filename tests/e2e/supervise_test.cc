// The real tesserad under its own supervisor, and as the first process of a PID namespace.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/unique_fd.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/pipeline.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using workload::MemoryOwner;
using workload::SharedProblem;

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// The words of a line of /proc/PID/status; empty if the process is gone.
std::vector<std::string> StatusLine(pid_t pid, const std::string& key) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key + ":")) continue;
    std::istringstream words(line.substr(key.size() + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

pid_t ParentOf(pid_t pid) {
  const std::vector<std::string> parent = StatusLine(pid, "PPid");
  return parent.empty() ? -1 : std::stoi(parent[0]);
}

bool Runs(pid_t pid) {
  const std::vector<std::string> state = StatusLine(pid, "State");
  return !state.empty() && state[0] != "Z" && state[0] != "X";
}

// Dead ones that are not reaped included.
std::vector<pid_t> ChildrenOf(pid_t parent) {
  std::vector<pid_t> children;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (ParentOf(std::stoi(name)) == parent) children.push_back(std::stoi(name));
  }
  return children;
}

// Who listens at a Unix socket, by its number here: in a PID namespace of its own it knows itself by another.
pid_t ListenerAt(const std::string& path) {
  const UniqueFd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(::connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ucred peer{};
  socklen_t length = sizeof(peer);
  EXPECT_EQ(::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length), 0);
  return peer.pid;
}

std::size_t CountOf(std::string_view what, std::string_view text) {
  std::size_t count = 0;
  for (std::size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

class SuperviseTest : public ::testing::Test {
 protected:
  std::string socket() const { return sockets_.File("d.sock"); }

  std::vector<std::string> Arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> argv = {TESSERAD,        "--socket", socket(),         "--cpu-threads", "1",
                                     "--cuda-device", "off",      "--http-address", "127.0.0.1:0"};
    argv.insert(argv.end(), more.begin(), more.end());
    return argv;
  }

  std::unique_ptr<ChildProcess> StartProgram(const std::vector<std::string>& argv) const {
    auto child = std::make_unique<ChildProcess>(argv);
    EXPECT_TRUE(Eventually(30s, [this] { return TryConnect().ok(); })) << child->Err();
    return child;
  }

  std::unique_ptr<ChildProcess> Start(const std::vector<std::string>& more = {"--supervise"}) const {
    return StartProgram(Arguments(more));
  }

  absl::StatusOr<client::Client> TryConnect() const {
    return client::Client::Connect({.socket = socket(), .side_channel = {}, .timeout = 1s});
  }

  // Of the daemon that serves now.
  absl::StatusOr<v1::ServerInfoReply> Info() const {
    const absl::StatusOr<client::Client> client = TryConnect();
    return client.ok() ? client->ServerInfo() : client.status();
  }

  // Waits for another daemon than that of `epoch`.
  v1::ServerInfoReply AwaitSuccessor(const std::string& epoch, std::chrono::milliseconds timeout) const {
    v1::ServerInfoReply reply;
    EXPECT_TRUE(Eventually(timeout, [&] {
      const auto info = Info();
      if (info.ok()) reply = *info;
      return info.ok() && info->epoch() != epoch;
    }));
    return reply;
  }

  std::vector<std::string> SocketFiles() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(sockets_.File(""))) names.push_back(entry.path());
    return names;
  }

  // Takes the socket's lock from the daemon as soon as that one dies, so that the next cannot start.
  UniqueFd KillAndKeepLock(pid_t daemon) const {
    UniqueFd lock(::open((socket() + ".lock").c_str(), O_RDWR | O_CLOEXEC));
    EXPECT_TRUE(lock);
    EXPECT_EQ(::kill(daemon, SIGKILL), 0);
    EXPECT_EQ(::flock(lock.get(), LOCK_EX), 0);
    return lock;
  }

  const TemporaryDirectory& other_files() const { return other_files_; }

 private:
  TemporaryDirectory sockets_;
  TemporaryDirectory other_files_;
};

TEST_F(SuperviseTest, WithoutSupervisorThereIsOneProcess) {
  const auto daemon = Start({});
  const v1::ServerInfoReply info = Info().value();
  EXPECT_EQ(ParentOf(info.pid()), ::getpid());
  EXPECT_THAT(ChildrenOf(info.pid()), IsEmpty());
  EXPECT_EQ(info.restarts(), 0U);
  ::kill(info.pid(), SIGKILL);
  EXPECT_EQ(daemon->Wait(10s), -SIGKILL);
  EXPECT_THAT(daemon->Err(), Not(HasSubstr("supervisor")));
}

TEST_F(SuperviseTest, TheSupervisorDoesNothingButWait) {
  const auto supervisor = Start();
  const pid_t pid = ParentOf(Info()->pid());
  EXPECT_EQ(ParentOf(pid), ::getpid());
  EXPECT_EQ(StatusLine(pid, "Threads"), std::vector<std::string>{"1"});
  const std::string maps = ReadFile("/proc/" + std::to_string(pid) + "/maps");
  EXPECT_THAT(maps, HasSubstr("tesserad"));
  EXPECT_THAT(maps, Not(HasSubstr("libcuda.so")));
}

TEST_F(SuperviseTest, AKilledDaemonIsReplacedAndItsClientsFindTheNext) {
  const auto supervisor = Start();
  client::Client client = TryConnect().value();
  const v1::ServerInfoReply before = client.ServerInfo().value();
  EXPECT_EQ(before.restarts(), 0U);
  client::Session session = client.OpenSession("before").value();
  const SharedProblem work =
      SharedProblem::Make(session, {.m = 768, .n = 768, .k = 768}, 3, MemoryOwner::kClient).value();
  Pipeline pipeline(client);
  for (int i = 0; i < 100; ++i) pipeline.Send(session, work.spec());
  pipeline.AwaitArrival();
  ASSERT_LT(pipeline.Answered(), pipeline.Sent()) << "the work was over before the daemon was killed";

  ASSERT_EQ(::kill(before.pid(), SIGKILL), 0);
  std::size_t lost = 0;
  for (const auto& result : pipeline.Results()) {
    if (result.ok()) continue;
    ++lost;
    EXPECT_EQ(result.status().code(), StatusCode::kUnavailable) << result.status();
  }
  EXPECT_GT(lost, 0U);

  const v1::ServerInfoReply after = AwaitSuccessor(before.epoch(), 5s);
  EXPECT_NE(after.epoch(), before.epoch());
  EXPECT_NE(after.pid(), before.pid());
  EXPECT_EQ(after.restarts(), 1U);
  EXPECT_EQ(MetricSum(HttpGet(after.http_address(), "/metrics").body, "tessera_restarts"), 1);
  EXPECT_THAT(supervisor->Err(), HasSubstr("was killed by signal 9"));

  // The same client: its channel finds the new daemon by itself, which tells it what became of its session.
  absl::Status old_session;
  ASSERT_TRUE(Eventually(10s, [&] {
    old_session = session.Gemm(work.spec()).status();
    return old_session.code() != StatusCode::kUnavailable;
  })) << old_session;
  EXPECT_EQ(old_session.code(), StatusCode::kFailedPrecondition) << old_session;
  EXPECT_THAT(Text(old_session), HasSubstr("former daemon process"));
  client::Session next = client.OpenSession("after").value();
  const SharedProblem problem = SharedProblem::Make(next, {.m = 33, .n = 65, .k = 40}, 5, MemoryOwner::kDaemon).value();
  const auto result = next.Gemm(problem.spec());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(problem.Check().ok);
}

TEST_F(SuperviseTest, AStopSignalDrainsAndIsNotFollowedByAStart) {
  for (const int number : {SIGTERM, SIGINT}) {
    const auto supervisor = Start();
    const pid_t daemon = Info()->pid();
    EXPECT_GE(SocketFiles().size(), 2U);
    supervisor->Signal(number);
    EXPECT_EQ(supervisor->Wait(20s), 0) << supervisor->Err();
    EXPECT_FALSE(Runs(daemon));
    EXPECT_THAT(SocketFiles(), IsEmpty());
    EXPECT_THAT(supervisor->Err(), HasSubstr("drained"));
    EXPECT_EQ(CountOf("supervisor: daemon process", supervisor->Err()), 1U) << supervisor->Err();
  }
}

TEST_F(SuperviseTest, ADrainByRpcIsNotFollowedByAStart) {
  const auto supervisor = Start();
  ASSERT_TRUE(TryConnect()->Drain().ok());
  EXPECT_EQ(supervisor->Wait(20s), 0) << supervisor->Err();
  EXPECT_EQ(CountOf("supervisor: daemon process", supervisor->Err()), 1U) << supervisor->Err();
}

// One call that takes minutes, in little memory: all rows of A, and all of B, are the same.
class EndlessWork {
 public:
  explicit EndlessWork(const client::Client& client, client::Session& session)
      : buffer_(session.Share(kTerms * 2 + kExtent * kExtent * 2).value()), pipeline_(client) {
    const client::TensorView rows = buffer_.Tensor(DType::kBf16, {kExtent, kTerms}, 0, {0, 1});
    pipeline_.Send(session, {.a = rows, .b = rows, .d = buffer_.Tensor(DType::kBf16, {kExtent, kExtent}, kTerms * 2)});
    pipeline_.AwaitArrival();
  }
  ~EndlessWork() { pipeline_.Results(); }

 private:
  static constexpr std::int64_t kExtent = 4096;
  static constexpr std::int64_t kTerms = 262144;
  client::Buffer buffer_;
  Pipeline pipeline_;
};

TEST_F(SuperviseTest, OneWishThatArrivesTwiceDrainsAndASecondWishEndsAtOnce) {
  const auto supervisor = Start();
  client::Client client = TryConnect().value();
  client::Session session = client.OpenSession("work").value();
  const EndlessWork work(client, session);
  // As a service manager does that signals every process of the service.
  ASSERT_EQ(::kill(client.ServerInfo()->pid(), SIGTERM), 0);
  supervisor->Signal(SIGTERM);
  ASSERT_TRUE(Eventually(10s, [&] { return CountOf("supervisor: signal", supervisor->Err()) == 1; }));
  EXPECT_EQ(supervisor->Wait(500ms), std::nullopt) << "it has work to finish: " << supervisor->Err();
  EXPECT_THAT(supervisor->Err(), HasSubstr("draining"));
  supervisor->Signal(SIGTERM);
  EXPECT_EQ(supervisor->Wait(5s), 128 + SIGTERM) << supervisor->Err();
}

TEST_F(SuperviseTest, UnfinishedWorkIsReportedAndNotFollowedByAStart) {
  const auto supervisor = Start({"--supervise", "--drain-grace-s", "0"});
  client::Client client = TryConnect().value();
  client::Session session = client.OpenSession("work").value();
  const EndlessWork work(client, session);
  supervisor->Signal(SIGTERM);
  EXPECT_EQ(supervisor->Wait(10s), 3) << supervisor->Err();
}

TEST_F(SuperviseTest, AFirstStartThatFailsIsFinal) {
  const auto other = Start({});
  const std::string taken = Info()->http_address();
  const TemporaryDirectory directory;
  const Finished run = RunProgram(
      {TESSERAD, "--supervise", "--socket", directory.File("d.sock"), "--cuda-device", "off", "--http-address", taken});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, HasSubstr("cannot listen on " + taken));
  EXPECT_EQ(CountOf("cannot start", run.err), 1U) << run.err;
  EXPECT_TRUE(std::filesystem::is_empty(directory.File("")));
}

TEST_F(SuperviseTest, ARestartThatFailsIsTriedAgain) {
  const auto supervisor = Start();
  const v1::ServerInfoReply before = Info().value();
  {
    const UniqueFd lock = KillAndKeepLock(before.pid());
    ASSERT_TRUE(Eventually(20s, [&] { return CountOf("cannot start", supervisor->Err()) >= 2; })) << supervisor->Err();
  }
  EXPECT_GE(AwaitSuccessor(before.epoch(), 10s).restarts(), 3U);
  supervisor->Signal(SIGTERM);
  EXPECT_EQ(supervisor->Wait(20s), 0) << supervisor->Err();
}

TEST_F(SuperviseTest, AStopSignalBetweenTwoStartsEndsItAtOnce) {
  const auto supervisor = Start();
  const UniqueFd lock = KillAndKeepLock(Info()->pid());
  ASSERT_TRUE(Eventually(30s, [&] { return CountOf("restart in 2000 ms", supervisor->Err()) > 0; }))
      << supervisor->Err();
  supervisor->Signal(SIGTERM);
  EXPECT_EQ(supervisor->Wait(1500ms), 0) << supervisor->Err();
}

TEST_F(SuperviseTest, TheDaemonEndsWithItsSupervisor) {
  const auto supervisor = Start();
  const pid_t daemon = Info()->pid();
  supervisor->Signal(SIGKILL);
  ASSERT_EQ(supervisor->Wait(10s), -SIGKILL);
  EXPECT_TRUE(Eventually(10s, [&] { return !Runs(daemon); }));
  EXPECT_THAT(SocketFiles(), IsEmpty());
  EXPECT_FALSE(TryConnect().ok());
}

class FirstProcessTest : public SuperviseTest {
 protected:
  void SetUp() override {
    std::vector<std::string> argv = Namespace();
    argv.push_back("/bin/true");
    const Finished probe = RunProgram(argv);
    if (probe.code != 0) GTEST_SKIP() << "no PID namespaces here: " << probe.err;
  }

  // What follows is PID 1 of a new PID namespace, and dies with the process that this starts.
  static std::vector<std::string> Namespace() {
    return {"/usr/bin/unshare", "--pid", "--fork", "--kill-child", "--mount-proc"};
  }

  std::unique_ptr<ChildProcess> StartAsFirst(const std::vector<std::string>& more = {},
                                             const std::vector<std::string>& wrapper = {}) const {
    std::vector<std::string> argv = Namespace();
    argv.insert(argv.end(), wrapper.begin(), wrapper.end());
    const std::vector<std::string> arguments = Arguments(more);
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    return StartProgram(argv);
  }

  // PID 1 by its number here.
  pid_t First() const { return ParentOf(ListenerAt(socket())); }
};

TEST_F(FirstProcessTest, TheDaemonIsAnotherProcess) {
  const auto unshare = StartAsFirst();
  EXPECT_GT(Info()->pid(), 1);
  const std::vector<std::string> numbers = StatusLine(First(), "NSpid");
  ASSERT_GE(numbers.size(), 2U);
  EXPECT_EQ(numbers.back(), "1");
  EXPECT_EQ(StatusLine(First(), "Threads"), std::vector<std::string>{"1"});
  ASSERT_EQ(::kill(First(), SIGTERM), 0);
  EXPECT_EQ(unshare->Wait(20s), 0) << unshare->Err();
  EXPECT_THAT(unshare->Err(), HasSubstr("drained"));
  EXPECT_THAT(SocketFiles(), IsEmpty());
}

TEST_F(FirstProcessTest, WithoutSuperviseTheExitCodeIsPassedOn) {
  const auto unshare = StartAsFirst();
  ASSERT_EQ(::kill(ListenerAt(socket()), SIGKILL), 0);
  EXPECT_EQ(unshare->Wait(20s), 128 + SIGKILL) << unshare->Err();
  EXPECT_EQ(CountOf("supervisor: daemon process", unshare->Err()), 1U);
}

TEST_F(FirstProcessTest, WithSuperviseTheDaemonIsStartedAnew) {
  const auto unshare = StartAsFirst({"--supervise"});
  const v1::ServerInfoReply before = Info().value();
  ASSERT_EQ(::kill(ListenerAt(socket()), SIGKILL), 0);
  const v1::ServerInfoReply after = AwaitSuccessor(before.epoch(), 5s);
  EXPECT_EQ(after.restarts(), 1U);
  EXPECT_GT(after.pid(), 1);
  ASSERT_EQ(::kill(First(), SIGTERM), 0);
  EXPECT_EQ(unshare->Wait(20s), 0) << unshare->Err();
}

TEST_F(FirstProcessTest, OrphansAreReaped) {
  // A shell becomes tesserad, which so inherits the shell's children; each waits for a writer of the pipe.
  const std::string pipe = other_files().File("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto unshare = StartAsFirst({}, {"/bin/sh", "-c", "for i in 1 2 3 4; do cat \"$0\" & done; exec \"$@\"", pipe});
  const pid_t first = First();
  ASSERT_EQ(ChildrenOf(first).size(), 5U) << "the daemon and four others";
  { const UniqueFd writer(::open(pipe.c_str(), O_WRONLY | O_CLOEXEC)); }
  EXPECT_TRUE(Eventually(10s, [&] { return ChildrenOf(first).size() == 1; })) << ChildrenOf(first).size();
  EXPECT_TRUE(TryConnect().ok());
}

}  // namespace
}  // namespace tessera::e2e
