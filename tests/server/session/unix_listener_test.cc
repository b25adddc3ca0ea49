// The listening socket's directory, what happens to files already there, and that nothing is left behind.
#include "server/session/unix_listener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <fstream>
#include <utility>

#include "common/fd_message.h"
#include "common/text.h"
#include "tests/server/session/posix_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

class UnixListenerTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_FALSE(directory_.path().empty()); }

  std::string In(const std::string& name) const { return (directory_.path() / name).string(); }

  static mode_t ModeOf(const std::string& path) {
    struct stat info {};
    return ::lstat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
  }

  // A socket file that nobody serves, as a killed daemon leaves it.
  static void LeaveStaleSocket(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }

  const TemporaryDirectory directory_;  // 0700
};

TEST_F(UnixListenerTest, MissingDirectoryIsMadeForOwnerAndGroup) {
  const std::string path = In("a/b/tessera.sock");
  const auto listener = UnixListener::Open(path, SOCK_SEQPACKET);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_EQ(ModeOf(In("a/b")), 0750U);
  EXPECT_EQ(ModeOf(path), 0666U);
  EXPECT_EQ(listener->path(), path);
}

TEST_F(UnixListenerTest, ExistingDirectoryKeepsItsMode) {
  ASSERT_EQ(::chmod(directory_.path().c_str(), 0755), 0);
  ASSERT_TRUE(UnixListener::Open(In("s"), SOCK_STREAM).ok());
  EXPECT_EQ(ModeOf(directory_.path()), 0755U);
}

TEST_F(UnixListenerTest, ListenerIsNonBlockingAndClosesOnExec) {
  const auto listener = UnixListener::Open(In("s"), SOCK_STREAM);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_NE(::fcntl(listener->fd(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(listener->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(UnixListenerTest, ClientsConnect) {
  const auto listener = UnixListener::Open(In("s"), SOCK_SEQPACKET);
  ASSERT_TRUE(listener.ok()) << listener.status();
  const auto client = ConnectSeqpacket(In("s"));
  ASSERT_TRUE(client.ok()) << client.status();
  const UniqueFd accepted(::accept4(listener->fd(), nullptr, nullptr, SOCK_CLOEXEC));
  EXPECT_TRUE(accepted);
}

TEST_F(UnixListenerTest, StaleSocketIsReplaced) {
  LeaveStaleSocket(In("s"));
  ASSERT_FALSE(ConnectSeqpacket(In("s")).ok());
  const auto listener = UnixListener::Open(In("s"), SOCK_SEQPACKET);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(ConnectSeqpacket(In("s")).ok());
}

TEST_F(UnixListenerTest, LeftOverLockFileIsNoObstacle) {
  std::ofstream(In("s.lock")) << "";
  EXPECT_TRUE(UnixListener::Open(In("s"), SOCK_SEQPACKET).ok());
}

TEST_F(UnixListenerTest, SecondDaemonIsRefusedAndTheFirstServesOn) {
  const auto first = UnixListener::Open(In("s"), SOCK_SEQPACKET);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = UnixListener::Open(In("s"), SOCK_SEQPACKET).status();
  EXPECT_EQ(second.code(), StatusCode::kAlreadyExists) << second;
  EXPECT_THAT(MessageOf(second), HasSubstr(In("s")));
  EXPECT_TRUE(ConnectSeqpacket(In("s")).ok());
  EXPECT_EQ(UnixListener::Open(In("s"), SOCK_SEQPACKET).status().code(), StatusCode::kAlreadyExists);
}

TEST_F(UnixListenerTest, PathIsFreeAfterTheFirstDaemonEnds) {
  ASSERT_TRUE(UnixListener::Open(In("s"), SOCK_SEQPACKET).ok());
  EXPECT_TRUE(UnixListener::Open(In("s"), SOCK_SEQPACKET).ok());
}

TEST_F(UnixListenerTest, FileThatIsNoSocketIsLeftAlone) {
  std::ofstream(In("s")) << "precious";
  const absl::Status status = UnixListener::Open(In("s"), SOCK_SEQPACKET).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr(In("s")));
  std::string text;
  std::ifstream(In("s")) >> text;
  EXPECT_EQ(text, "precious");
}

TEST_F(UnixListenerTest, SymbolicLinksAreNotFollowed) {
  std::ofstream(In("target")) << "precious";
  ASSERT_EQ(::symlink(In("target").c_str(), In("s").c_str()), 0);
  EXPECT_EQ(UnixListener::Open(In("s"), SOCK_STREAM).status().code(), StatusCode::kFailedPrecondition);
  ASSERT_EQ(::symlink(In("target").c_str(), In("t.lock").c_str()), 0);
  EXPECT_EQ(UnixListener::Open(In("t"), SOCK_STREAM).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::filesystem::exists(In("target")));
}

TEST_F(UnixListenerTest, DirectoriesThatOthersMayWriteAreRefused) {
  for (const mode_t mode : {0777U, 0770U, 01777U, 0702U}) {
    ASSERT_EQ(::chmod(directory_.path().c_str(), mode), 0);
    const absl::Status status = UnixListener::Open(In("s"), SOCK_STREAM).status();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << std::oct << mode << " " << status;
    EXPECT_FALSE(std::filesystem::exists(In("s")));
  }
}

TEST_F(UnixListenerTest, DirectoryUnderAFileIsRefused) {
  std::ofstream(In("file")) << "";
  EXPECT_EQ(UnixListener::Open(In("file/s"), SOCK_STREAM).status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(UnixListenerTest, PathMustFitTheAddress) {
  const std::size_t room = sizeof(sockaddr_un::sun_path) - 1 - In("").size();
  const absl::Status status = UnixListener::Open(In(std::string(room + 1, 'x')), SOCK_STREAM).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr(std::to_string(sizeof(sockaddr_un::sun_path) - 1)));
  const std::string longest = In(std::string(room, 'x'));
  const auto listener = UnixListener::Open(longest, SOCK_SEQPACKET);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(ConnectSeqpacket(longest).ok());
}

TEST_F(UnixListenerTest, FilesGoWithTheListener) {
  {
    auto listener = UnixListener::Open(In("s"), SOCK_STREAM);
    ASSERT_TRUE(listener.ok()) << listener.status();
    const UnixListener moved = *std::move(listener);
    listener = absl::CancelledError("gone");  // destroys the moved-from listener
    EXPECT_TRUE(std::filesystem::exists(In("s")));
    EXPECT_TRUE(std::filesystem::exists(In("s.lock")));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

}  // namespace
}  // namespace tessera::server
