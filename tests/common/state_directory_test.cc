// What stands in a directory is somebody else's until it is proven: names that lead out of it, links, FIFOs, files
// without end, locks that are never released, disks that are full.
#include "common/state_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "tests/common/children.h"

namespace tessera {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;
namespace fs = std::filesystem;

constexpr std::size_t kLimit = 1 << 20;

class StateDirectoryTest : public ::testing::Test {
 protected:
  std::string path() const { return (root_ / "deep" / "state").string(); }
  fs::path File(const std::string& name) const { return fs::path(path()) / name; }
  StateDirectory Opened() const { return StateDirectory::Open(path(), /*create=*/true).value(); }

  // Every file and link below the root.
  std::vector<std::string> Everything() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      names.push_back(entry.path().lexically_relative(root_).string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  const ScratchDirectory scratch_;
  const fs::path& root_ = scratch_.path();
};

TEST_F(StateDirectoryTest, FilesAreReadAsTheyWereWritten) {
  const StateDirectory directory = Opened();
  EXPECT_EQ(fs::status(path()).permissions(), fs::perms(0700));
  EXPECT_EQ(directory.Read("rows", kLimit).status().code(), StatusCode::kNotFound);
  std::string text(300'000, 'x');
  text += std::string("\0\xff\n", 3);
  for (const std::string& contents : {std::string(), std::string("a"), text}) {
    ASSERT_TRUE(directory.Replace("rows", contents).ok());
    EXPECT_EQ(directory.Read("rows", kLimit).value(), contents);
    EXPECT_EQ(directory.Read("rows", contents.size()).value(), contents);
  }
  EXPECT_EQ(directory.Read("rows", text.size() - 1).status().code(), StatusCode::kOutOfRange);
  ASSERT_TRUE(directory.Rename("rows", "other").ok());
  EXPECT_EQ(Everything(), (std::vector<std::string>{"deep", "deep/state", "deep/state/other"}));
}

TEST_F(StateDirectoryTest, NamesDoNotLeaveTheDirectory) {
  const StateDirectory directory = Opened();
  const std::vector<std::string> before = Everything();
  const std::vector<std::string> names = {"",
                                          ".",
                                          "..",
                                          "../out",
                                          "a/b",
                                          "/tmp/tessera-out",
                                          "a\\b",
                                          ".hidden",
                                          "a b",
                                          std::string("a\0b", 3),
                                          "\xc3\xa4",
                                          "a\n",
                                          std::string(5000, 'x'),
                                          std::string(129, 'x')};
  for (const std::string& name : names) {
    EXPECT_EQ(CheckFileName(name).code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(directory.Replace(name, "x").code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(directory.Read(name, kLimit).status().code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(directory.Rename(name, "a").code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(directory.Rename("a", name).code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(directory.Lock(name, milliseconds(0)).status().code(), StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(Everything(), before);
  EXPECT_TRUE(CheckFileName(std::string(128, 'x')).ok());
}

TEST_F(StateDirectoryTest, PathsThatAreNone) {
  for (const std::string& bad : {std::string(), std::string("relative"), std::string("/a\0b", 4)}) {
    EXPECT_EQ(StateDirectory::Open(bad, true).status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(StateDirectory::Open(path(), false).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(StateDirectory::Open("/proc/tessera/x", true).ok());
  std::ofstream(root_ / "file") << "x";
  EXPECT_EQ(StateDirectory::Open((root_ / "file").string(), true).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(StateDirectory::Open((root_ / "file" / "below").string(), true).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(StateDirectory::Open(root_.string() + "/" + std::string(5000, 'x'), true).ok());
}

TEST_F(StateDirectoryTest, LinksAreNotFollowed) {
  const StateDirectory directory = Opened();
  const fs::path outside = root_ / "outside";
  std::ofstream(outside) << "theirs";
  for (const char* name : {"rows", "rows.tmp", "rows.lock"}) fs::create_symlink(outside, File(name));
  EXPECT_EQ(directory.Read("rows", kLimit).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(directory.Lock("rows.lock", milliseconds(50)).status().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(directory.Replace("rows", "ours").ok()) << "the links themselves are replaced";
  EXPECT_FALSE(fs::is_symlink(File("rows")));
  EXPECT_EQ(directory.Read("rows", kLimit).value(), "ours");
  EXPECT_EQ(FileContents(outside), "theirs");
}

TEST_F(StateDirectoryTest, NothingBlocks) {
  const StateDirectory directory = Opened();
  ASSERT_EQ(::mkfifo(File("fifo").c_str(), 0600), 0);
  fs::create_directory(File("folder"));
  ::alarm(20);  // whoever waits for the FIFO's other end waits for ever
  for (const char* name : {"fifo", "folder"}) {
    EXPECT_EQ(directory.Read(name, kLimit).status().code(), StatusCode::kFailedPrecondition) << name;
    EXPECT_EQ(directory.Lock(name, milliseconds(50)).status().code(), StatusCode::kFailedPrecondition) << name;
  }
  ASSERT_EQ(::mkfifo(File("fifo.tmp").c_str(), 0600), 0);
  EXPECT_TRUE(directory.Replace("fifo", "x").ok());
  EXPECT_FALSE(directory.Replace("folder", "x").ok());
  EXPECT_FALSE(fs::exists(File("folder.tmp")));
  ::alarm(0);
}

TEST_F(StateDirectoryTest, OfAFileWithoutEndNothingIsRead) {
  const StateDirectory directory = Opened();
  std::ofstream(File("sparse")) << "x";
  fs::resize_file(File("sparse"), std::uintmax_t{1} << 30);
  rusage before{};
  rusage after{};
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &before), 0);
  EXPECT_EQ(directory.Read("sparse", kLimit).status().code(), StatusCode::kOutOfRange);
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &after), 0);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 64 << 10) << "KiB";
}

TEST_F(StateDirectoryTest, ALockExcludesHoldersOfThisProcessToo) {
  const StateDirectory directory = Opened();
  {
    const auto held = directory.Lock("lock", milliseconds(0));
    ASSERT_TRUE(held.ok()) << held.status();
    EXPECT_EQ(directory.Lock("lock", milliseconds(20)).status().code(), StatusCode::kDeadlineExceeded);
    fs::remove(File("lock"));
    EXPECT_TRUE(directory.Lock("lock", milliseconds(0)).ok()) << "one that has lost its name excludes nobody";
  }
  EXPECT_TRUE(directory.Lock("lock", milliseconds(0)).ok());
}

TEST_F(StateDirectoryTest, ALockOfAStoppedProcessIsWaitedForAsLongAsOneWants) {
  const StateDirectory directory = Opened();
  const pid_t holder = ::fork();
  if (holder == 0) {
    const auto lock = directory.Lock("lock", milliseconds(0));
    ::raise(SIGSTOP);
    ::_exit(lock.ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(holder, &status, WUNTRACED), holder);
  ASSERT_TRUE(WIFSTOPPED(status));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(directory.Lock("lock", milliseconds(200)).status().code(), StatusCode::kDeadlineExceeded);
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_GE(waited, milliseconds(200));
  EXPECT_LT(waited, milliseconds(5000));
  ASSERT_EQ(::kill(holder, SIGKILL), 0);
  ASSERT_EQ(::waitpid(holder, &status, 0), holder);
  EXPECT_TRUE(directory.Lock("lock", milliseconds(200)).ok()) << "a lock ends with its process";
}

TEST_F(StateDirectoryTest, AFileThatMayNotGrowLeavesTheOldOne) {
  const StateDirectory directory = Opened();
  ASSERT_TRUE(directory.Replace("rows", "old").ok());
  EXPECT_EQ(InChild([&] {
              if (!LimitFileSize(1000)) return kSkipped;
              return static_cast<int>(directory.Replace("rows", std::string(5000, 'x')).code());
            }),
            static_cast<int>(StatusCode::kResourceExhausted));
  EXPECT_EQ(directory.Read("rows", kLimit).value(), "old");
  EXPECT_FALSE(fs::exists(File("rows.tmp")));
}

// In the child's own mount namespace, which ends with it. The exit code tells the line of a failure from 10 on.
int FillADisk(const std::string& path) {
  if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("tmpfs", path.c_str(), "tmpfs", 0, "size=64k") != 0) {
    return kSkipped;
  }
  const auto directory = StateDirectory::Open(path, /*create=*/true);
  if (!directory.ok()) return 10;
  if (!directory->Replace("rows", "old").ok()) return 11;
  if (directory->Replace("rows", std::string(1 << 20, 'x')).code() != StatusCode::kResourceExhausted) return 12;
  const auto left = directory->Read("rows", kLimit);
  if (!left.ok() || *left != "old") return 13;
  if (!directory->Replace("rows", std::string(8000, 'y')).ok()) return 14;  // the space of the failure is free again
  return 0;
}

TEST_F(StateDirectoryTest, AFullDiskLeavesTheOldFile) {
  fs::create_directories(path());
  const int code = InChild([&] { return FillADisk(path()); });
  if (code == kSkipped) GTEST_SKIP() << "this user may not mount a small file system";
  EXPECT_EQ(code, 0);
}

TEST_F(StateDirectoryTest, WhatIsNotAllowedIsSaid) {
  const StateDirectory ours = Opened();
  ASSERT_TRUE(ours.Replace("rows", "ours").ok());
  fs::permissions(path(), fs::perms(0555));
  fs::permissions(root_ / "deep", fs::perms(0755));
  fs::permissions(File("rows"), fs::perms(0600));
  const auto code = [](const absl::Status& status) { return static_cast<int>(status.code()); };
  const std::vector<std::function<absl::Status()>> attempts = {
      [&] { return StateDirectory::Open(path(), true)->CheckWritable(); },
      [&] { return StateDirectory::Open(path(), true)->Read("rows", kLimit).status(); },
      [&] { return StateDirectory::Open(path(), true)->Replace("rows", "x"); },
      [&] { return StateDirectory::Open(path(), true)->Rename("rows", "x"); },
      [&] { return StateDirectory::Open(path(), true)->Lock("lock", milliseconds(50)).status(); },
      [&] { return StateDirectory::Open(path() + "/new", true).status(); }};
  for (std::size_t i = 0; i < attempts.size(); ++i) {
    const int result = AsNobody([&] { return code(attempts[i]()); });
    if (result == kSkipped) GTEST_SKIP() << "only root can become another user";
    EXPECT_EQ(result, static_cast<int>(StatusCode::kPermissionDenied)) << i;
  }
  EXPECT_EQ(ours.Read("rows", kLimit).value(), "ours");
}

}  // namespace
}  // namespace tessera
