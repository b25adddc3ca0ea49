// The record of changes on real files: restarts, damage, bounds, and directories that cannot be written.
#include "planner/audit_log.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace tessera::planner {
namespace {

namespace fs = std::filesystem;

class AuditLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "audit.XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }

  fs::path file() const { return directory_ / "planner_changes.log"; }
  std::string Contents() const {
    std::ifstream input(file(), std::ios::binary);
    std::ostringstream text;
    text << input.rdbuf();
    return text.str();
  }
  void SetContents(const std::string& text) const { std::ofstream(file(), std::ios::binary | std::ios::trunc) << text; }

  static AuditEntry Entry(std::uint64_t revision) {
    return {.old_revision = revision - 1,
            .revision = revision,
            .epoch = "e1",
            .who = "uid 0",
            .what = "SetTable",
            .old_value = "with\ttabs, \"quotes\" and \\",
            .new_value = "two\nlines \xff\x01"};
  }

  fs::path directory_;
};

TEST_F(AuditLogTest, AnEntrySurvivesBeingALine) {
  AuditEntry entry = Entry(7);
  entry.sequence = 3;
  entry.time_unix_ms = 1'700'000'000'123;
  const std::string line = AuditLine(entry);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  AuditEntry again;
  ASSERT_TRUE(ParseAuditLine(line, again));
  EXPECT_EQ(again, entry);
  for (std::size_t i = 0; i < line.size(); ++i) {
    std::string damaged = line;
    damaged[i] = damaged[i] == '0' ? '1' : '0';
    AuditEntry ignored;
    EXPECT_FALSE(ParseAuditLine(damaged, ignored)) << i;
    EXPECT_FALSE(ParseAuditLine(line.substr(0, i), ignored)) << i;
  }
}

TEST_F(AuditLogTest, SurvivesARestart) {
  {
    AuditLog log(directory_.string());
    log.Append(Entry(2));
    log.Append(Entry(3));
    EXPECT_TRUE(log.Stats().persisted);
  }
  AuditLog log(directory_.string());
  log.Append(Entry(2));
  const AuditPage page = log.List(10, 0);
  ASSERT_EQ(page.entries.size(), 3U);
  EXPECT_EQ(page.entries[0].sequence, 3U);
  EXPECT_EQ(page.entries[0].revision, 2U);
  EXPECT_EQ(page.entries[2].sequence, 1U);
  EXPECT_EQ(page.entries[1].new_value, Entry(3).new_value);
  EXPECT_FALSE(page.more);
  EXPECT_EQ(log.Stats().damaged_lines, 0U);
  struct stat status = {};
  ASSERT_EQ(::stat(file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
}

TEST_F(AuditLogTest, PagesGoBackwards) {
  AuditLog log;
  for (std::uint64_t i = 2; i < 12; ++i) log.Append(Entry(i));
  const AuditPage newest = log.List(4, 0);
  ASSERT_EQ(newest.entries.size(), 4U);
  EXPECT_EQ(newest.entries.front().sequence, 10U);
  EXPECT_TRUE(newest.more);
  const AuditPage last = log.List(100, newest.entries.back().sequence);
  ASSERT_EQ(last.entries.size(), 6U);
  EXPECT_EQ(last.entries.back().sequence, 1U);
  EXPECT_FALSE(last.more);
  EXPECT_FALSE(log.Stats().persisted) << "without a directory";
}

TEST_F(AuditLogTest, DamageAnywhereCostsOneLine) {
  {
    AuditLog log(directory_.string());
    for (std::uint64_t i = 2; i < 5; ++i) log.Append(Entry(i));
  }
  const std::string whole = Contents();
  const std::size_t second = whole.find('\n') + 1;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = '\0';
    SetContents(damaged);
    AuditLog log(directory_.string());
    const std::size_t left = log.List(10, 0).entries.size();
    // A newline that is gone makes one line of two.
    EXPECT_EQ(left, whole[at] == '\n' ? (at + 1 == whole.size() ? 2U : 1U) : 2U) << at;
    EXPECT_GE(log.Stats().damaged_lines, 1U) << at;
  }
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SetContents(whole.substr(0, size));
    AuditLog log(directory_.string());
    log.Append(Entry(9));
    const AuditPage page = AuditLog(directory_.string()).List(10, 0);
    ASSERT_FALSE(page.entries.empty()) << size;
    EXPECT_EQ(page.entries.front().revision, 9U) << size << ": what is appended behind a cut line is read again";
    EXPECT_EQ(page.entries.size(), size + 1 < second ? 1U : page.entries.size());
  }
}

TEST_F(AuditLogTest, IsBounded) {
  AuditEntry large = Entry(2);
  large.new_value = std::string(3 * kAuditValueBytesMax, '\xff');
  {
    AuditLog log(directory_.string());
    for (std::uint64_t i = 0; i < 2 * kAuditEntriesMax; ++i) log.Append(large);
    EXPECT_EQ(log.Stats().entries, kAuditEntriesMax);
    EXPECT_LE(fs::file_size(file()), kAuditFileBytesMax);
  }
  AuditLog log(directory_.string());
  EXPECT_EQ(log.Stats().damaged_lines, 0U);
  const AuditPage page = log.List(1, 0);
  ASSERT_EQ(page.entries.size(), 1U);
  EXPECT_EQ(page.entries.front().sequence, 2 * kAuditEntriesMax);
  EXPECT_EQ(page.entries.front().new_value.size(), kAuditValueBytesMax);
}

TEST_F(AuditLogTest, WhatIsNoRecordIsSetAside) {
  SetContents(std::string(100, '\0'));
  fs::resize_file(file(), 4 * kAuditFileBytesMax);  // sparse
  AuditLog log(directory_.string());
  log.Append(Entry(2));
  EXPECT_TRUE(log.Stats().persisted) << log.Stats().error;
  EXPECT_EQ(log.Stats().damaged_lines, 1U);
  EXPECT_TRUE(fs::exists(file().string() + ".damaged"));

  fs::remove(file());
  ASSERT_EQ(::mkfifo(file().c_str(), 0600), 0);
  AuditLog beside_fifo(directory_.string());
  beside_fifo.Append(Entry(2));
  EXPECT_EQ(beside_fifo.List(10, 0).entries.size(), 1U);

  fs::remove(file());
  const fs::path target = directory_ / "other";
  fs::create_symlink(target, file());
  AuditLog beside_link(directory_.string());
  beside_link.Append(Entry(2));
  EXPECT_FALSE(fs::exists(target)) << "a link is not followed";
}

TEST_F(AuditLogTest, GoesOnWithoutAFile) {
  AuditLog log("/proc/no such directory");
  log.Append(Entry(2));
  EXPECT_EQ(log.List(10, 0).entries.size(), 1U);
  EXPECT_FALSE(log.Stats().persisted);
  EXPECT_GE(log.Stats().write_failures, 1U);
  EXPECT_FALSE(log.Stats().error.empty());
}

TEST_F(AuditLogTest, KnowsBeforeTheFirstChangeWhetherItIsKept) {
  EXPECT_FALSE(AuditLog().Stats().persisted);
  EXPECT_TRUE(AuditLog(directory_.string()).Stats().persisted) << "a new file";
  EXPECT_TRUE(AuditLog(directory_.string()).Stats().persisted) << "an empty one";
  const AuditLog nowhere("/proc/no such directory");
  EXPECT_FALSE(nowhere.Stats().persisted);
  EXPECT_FALSE(nowhere.Stats().error.empty());

  AuditLog(directory_.string()).Append(Entry(2));
  ASSERT_EQ(::chmod(file().c_str(), 0444), 0);
  ASSERT_EQ(::chmod(directory_.c_str(), 0555), 0);
  // Of root, who may write all the same, as somebody else.
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr uid_t kSomebody = 12'345;
    if (::getuid() == 0 && (::setgid(kSomebody) != 0 || ::setuid(kSomebody) != 0)) ::_exit(3);
    const AuditStats stats = AuditLog(directory_.string()).Stats();
    ::_exit(stats.entries > 1 ? 2 : (stats.persisted || stats.error.empty() ? 1 : 0));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "a file that can be read and not be written";
  ASSERT_EQ(::chmod(directory_.c_str(), 0755), 0);
}

TEST_F(AuditLogTest, RecoversWhenTheFileIsTakenAway) {
  AuditLog log(directory_.string());
  log.Append(Entry(2));
  fs::remove(file());
  log.Append(Entry(3));
  EXPECT_TRUE(log.Stats().persisted) << log.Stats().error;
  EXPECT_EQ(log.Stats().write_failures, 0U);
  EXPECT_EQ(AuditLog(directory_.string()).List(10, 0).entries.size(), 2U) << "what was in it is made up for";
}

TEST_F(AuditLogTest, EntriesOfManyThreadsStandInTheirOrder) {
  constexpr int kThreads = 4;
  constexpr int kEach = 25;
  {
    AuditLog log(directory_.string());
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int n = 0; n < kEach; ++n) {
          log.Append(Entry(2));
          EXPECT_FALSE(log.List(3, 0).entries.empty());
          EXPECT_TRUE(log.Stats().persisted);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  AuditLog log(directory_.string());
  EXPECT_EQ(log.Stats().damaged_lines, 0U) << "lines that are not in order are taken for damage";
  EXPECT_EQ(log.Stats().entries, static_cast<std::size_t>(kThreads * kEach));
}

// Opening a pipe would wait for a reader, and a link would be written through.
TEST_F(AuditLogTest, WhatStandsWhereTheNewFileIsMadeDoesNotMatter) {
  const std::string place = file().string() + ".tmp";
  const fs::path target = directory_ / "other";
  ASSERT_EQ(::mkfifo(place.c_str(), 0600), 0);
  AuditLog log(directory_.string());
  EXPECT_TRUE(log.Stats().persisted) << log.Stats().error;
  for (const bool link : {false, true}) {
    fs::remove(file());
    link ? fs::create_symlink(target, place) : static_cast<void>(std::ofstream(place) << "left behind");
    log.Append(Entry(2));
    EXPECT_TRUE(log.Stats().persisted) << log.Stats().error;
    EXPECT_FALSE(fs::exists(target));
  }
  EXPECT_EQ(AuditLog(directory_.string()).List(10, 0).entries.size(), 2U);
}

TEST_F(AuditLogTest, RecoversWhenTheDirectoryComesBack) {
  AuditLog log(directory_.string());
  log.Append(Entry(2));
  fs::remove_all(directory_);
  log.Append(Entry(3));
  EXPECT_FALSE(log.Stats().persisted);
  fs::create_directory(directory_);
  log.Append(Entry(4));
  EXPECT_TRUE(log.Stats().persisted);
  EXPECT_EQ(AuditLog(directory_.string()).List(10, 0).entries.size(), 3U) << "what could not be written is made up for";
}

}  // namespace
}  // namespace tessera::planner
