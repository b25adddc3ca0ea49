// The real tesserad where there is nothing but the program: as a container starts it under a user id that nobody knows.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using workload::MemoryOwner;
using workload::SharedProblem;

// A user without a name, a home or a runtime directory, who can write nowhere but in /tmp.
class BareEnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can start a program as another user";
    constexpr auto kReadAndSearch = std::filesystem::perms(0555);
    // The build may lie where another user cannot reach it.
    std::filesystem::copy_file(TESSERAD, programs_.File("tesserad"));
    std::filesystem::copy_file(TESSERA_CLI, programs_.File("tessera"));
    for (const char* name : {"tesserad", "tessera", ""}) {
      std::filesystem::permissions(programs_.File(name), kReadAndSearch);
    }
  }

  void TearDown() override { std::filesystem::remove_all(home()); }

  static std::string HomeOf(const std::string& uid) { return "/tmp/tessera-" + uid; }
  std::string home() const { return HomeOf(uid_); }

  // One whose directory nobody has.
  static std::string FreeUid() {
    int uid = 20'000 + ::getpid() % 40'000;
    while (std::filesystem::exists(HomeOf(std::to_string(uid)))) ++uid;
    return std::to_string(uid);
  }

  // `arguments` of a program of this build, run with that user's rights in a directory where it can create nothing.
  std::vector<std::string> AsNobody(const std::string& program, const std::vector<std::string>& arguments) const {
    std::vector<std::string> argv = {"/usr/bin/env", "-i", "--chdir=" + programs_.File(""), "/usr/bin/setpriv"};
    argv.insert(argv.end(), {"--reuid=" + uid_, "--regid=" + uid_, "--clear-groups", programs_.File(program)});
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    return argv;
  }

  const TemporaryDirectory programs_;
  const std::string uid_ = FreeUid();
};

TEST_F(BareEnvironmentTest, ItServesAtThePathThatItsUserWouldGuess) {
  ChildProcess daemon(AsNobody("tesserad", {"--http-address", "127.0.0.1:0"}));
  const std::string socket = home() + "/tessera.sock";
  absl::StatusOr<client::Client> client = absl::UnknownError("");
  ASSERT_TRUE(Eventually(20s, [&] {
    client = client::Client::Connect({.socket = socket, .side_channel = {}, .timeout = 1s});
    return client.ok();
  })) << daemon.Err();
  struct stat directory {};
  ASSERT_EQ(::stat(home().c_str(), &directory), 0);
  EXPECT_EQ(std::to_string(directory.st_uid), uid_);
  EXPECT_EQ(directory.st_mode & 07777U, 0750U);

  client::Session session = client->OpenSession("bare").value();
  for (const MemoryOwner owner : {MemoryOwner::kDaemon, MemoryOwner::kClient}) {
    const auto problem = SharedProblem::Make(session, {.m = 20, .n = 30, .k = 40}, 9, owner).value();
    const auto result = session.Gemm(problem.spec());
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(problem.Check().ok);
  }
  EXPECT_EQ(HttpGet(client->ServerInfo().value().http_address(), "/readyz").code, 200);
  const Finished status = RunProgram(AsNobody("tessera", {"status"}));
  EXPECT_EQ(status.code, 0) << status.err;
  EXPECT_THAT(status.out, HasSubstr(socket));
  EXPECT_THAT(status.out, HasSubstr("uid:" + uid_ + ", administrator"));

  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(20s), 0) << daemon.Err();
  EXPECT_FALSE(std::filesystem::exists(socket));
}

}  // namespace
}  // namespace tessera::e2e
