// Rows over restarts on real files: several processes at once, killed ones, files that were damaged or come from
// elsewhere, directories in which nothing can be kept.
#include "planner/tuning_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <thread>

#include "common/text.h"
#include "planner/gemm/family.h"
#include "planner/row_set.h"
#include "planner/tuning_directory.h"
#include "tests/common/children.h"

namespace tessera::planner {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

constexpr char kHash[] = "0123456789abcdef";
constexpr char kClass[] = "gemm.cpu.bf16_bf16.f32.fast.NT";

DeviceSignature Gpu() {
  return {.device = "NVIDIA H200", .capability = "9.0", .processors = "132", .driver = "570.124.06", .cuda = "12.8"};
}

TunedRow RowFor(int m, std::int64_t when_s = 1'700'000'000, const std::string& recipe = "reference") {
  return {.text = std::string(kClass) + " m(" + std::to_string(m) + "," + std::to_string(m + 1) + "] -> " + recipe,
          .variant = std::string(kClass) + "/" + recipe,
          .source_hash = kHash,
          .us = m + 0.5,
          .when = absl::FromUnixSeconds(when_s)};
}

std::vector<TunedRow> RowsFor(int first, int count) {
  std::vector<TunedRow> rows;
  for (int i = 0; i < count; ++i) rows.push_back(RowFor(first + i));
  return rows;
}

std::set<std::string> TextsOf(const std::vector<TunedRow>& rows) {
  std::set<std::string> texts;
  for (const TunedRow& row : rows) texts.insert(row.text);
  return texts;
}

absl::Status CheckText(const TunedRow& row) {
  const RowSchema* const schemas[] = {&GemmFamily::Schema()};
  return ParseRows(row.text, schemas).status();
}

class TuningStoreTest : public ::testing::Test {
 protected:
  TuningStore::Options Options() {
    return {.directory = directory(),
            .signature = Gpu(),
            .source_hash_of = [this](std::string_view /*variant*/) { return hash_; },
            .check = CheckText,
            .warn = [this](std::string_view text) { warnings_.emplace_back(text); },
            .patience = milliseconds(10'000)};
  }
  std::string directory() const { return (scratch_.path() / "cache" / "tessera").string(); }
  fs::path file() const { return fs::path(directory()) / (FileStemOf(Gpu()) + ".v1.rows"); }
  fs::path Aside(SetAside reason) const {
    return file().string() + "." + std::string(kSetAsideNames[static_cast<std::size_t>(reason)]);
  }

  std::vector<TunedRow> Load() { return TuningStore(Options()).Load(); }
  void SaveRows(const std::vector<TunedRow>& rows) {
    const auto saved = TuningStore(Options()).Save(rows);
    EXPECT_TRUE(saved.ok()) << saved.status();
  }

  // `text` in the file's place is no rows, counted as `reason`, warned of once, and not there after the next save.
  void ExpectSetAside(const std::string& text, SetAside reason) {
    fs::create_directories(directory());
    WriteFile(file(), text);
    warnings_.clear();
    TuningStore store(Options());
    EXPECT_THAT(store.Load(), IsEmpty());
    EXPECT_THAT(store.Load(), IsEmpty());
    EXPECT_EQ(store.counters().set_aside[static_cast<std::size_t>(reason)], 1U);
    ASSERT_THAT(warnings_, ElementsAre(HasSubstr(std::string(kSetAsideNames[static_cast<std::size_t>(reason)]))));
    EXPECT_EQ(FileContents(Aside(reason)), text);
    ASSERT_TRUE(store.Save(RowsFor(1, 2)).ok());
    EXPECT_EQ(Load(), RowsFor(1, 2)) << "nothing of it is merged back";
    fs::remove(file());
  }

  const ScratchDirectory scratch_;
  std::string hash_ = kHash;
  std::vector<std::string> warnings_;
};

// ---- Rows ----

TEST_F(TuningStoreTest, RowsComeBackAsTheyWere) {
  const std::vector<TunedRow> rows = RowsFor(0, 100);
  TuningStore store(Options());
  EXPECT_THAT(store.Load(), IsEmpty());
  EXPECT_EQ(store.Save(rows).value(), 100U);
  EXPECT_EQ(store.Load(), rows);
  EXPECT_EQ(Load(), rows);
  EXPECT_THAT(warnings_, IsEmpty());
  const TuningCounters counters = store.counters();
  EXPECT_EQ(counters.loads, 2U);
  EXPECT_EQ(counters.rows_loaded, 100U);
  EXPECT_EQ(counters.saves, 1U);
}

TEST_F(TuningStoreTest, OfOneQuestionTheLaterMeasurementStays) {
  SaveRows({RowFor(1, 2000), RowFor(2, 2000)});
  SaveRows({RowFor(1, 1000, "other"), RowFor(2, 3000, "other"), RowFor(3, 1)});
  EXPECT_THAT(Load(), ElementsAre(RowFor(2, 3000, "other"), RowFor(3, 1), RowFor(1, 2000)));
}

TEST_F(TuningStoreTest, AClockThatWasWrongWinsOnce) {
  const std::int64_t next_century = 4'000'000'000;
  SaveRows({RowFor(1, next_century)});
  SaveRows({RowFor(1, next_century - 1, "other")});
  EXPECT_THAT(Load(), ElementsAre(RowFor(1, next_century - 1, "other")));
}

TEST_F(TuningStoreTest, RowsThatAreAskedInOrderStayInOrder) {
  const std::vector<TunedRow> rows = {RowFor(5), RowFor(1), RowFor(1, 1'700'000'000, "other"), RowFor(3)};
  SaveRows({RowFor(9), RowFor(1, 5)});
  SaveRows(rows);
  std::vector<TunedRow> expected = rows;
  expected.push_back(RowFor(9));
  EXPECT_EQ(Load(), expected);
}

TEST_F(TuningStoreTest, WhatIsForgottenGoesUnlessItWasMeasuredAnew) {
  SaveRows(RowsFor(0, 4));
  SaveRows({RowFor(1, 1'800'000'000)});
  TuningStore store(Options());
  EXPECT_EQ(store.Save(RowsFor(0, 1), RowsFor(1, 2)).value(), 3U);
  EXPECT_THAT(Load(), ElementsAre(RowFor(0), RowFor(1, 1'800'000'000), RowFor(3)));
  ASSERT_TRUE(store.Clear().ok());
  EXPECT_THAT(Load(), IsEmpty());
  EXPECT_TRUE(fs::exists(file()));
}

TEST_F(TuningStoreTest, RowsOfAnotherBuildAreNotUsedAndNotLost) {
  SaveRows(RowsFor(0, 2));
  hash_ = "fedcba9876543210";
  TuningStore other(Options());
  EXPECT_THAT(other.Load(), IsEmpty());
  EXPECT_EQ(other.counters().rows_stale, 2U);
  TunedRow row = RowFor(0, 1);
  row.source_hash = hash_;
  EXPECT_EQ(other.Save(std::vector{row}).value(), 3U);
  EXPECT_THAT(other.Load(), ElementsAre(row));
  hash_ = kHash;
  EXPECT_EQ(Load(), RowsFor(0, 2));
  EXPECT_THAT(warnings_, IsEmpty()) << "an update is no trouble";
}

TEST_F(TuningStoreTest, AFullFileForgetsWhatWasSavedLongestAgo) {
  const int limit = static_cast<int>(kTunedRowsLimit);
  SaveRows(RowsFor(0, limit));
  TuningStore store(Options());
  EXPECT_EQ(store.Save(RowsFor(limit, 3)).value(), kTunedRowsLimit);
  EXPECT_EQ(store.counters().rows_evicted, 3U);
  const std::set<std::string> left = TextsOf(Load());
  EXPECT_TRUE(left.contains(RowFor(limit).text));
  EXPECT_TRUE(left.contains(RowFor(0).text));
  EXPECT_FALSE(left.contains(RowFor(limit - 1).text));
  EXPECT_FALSE(store.Save(RowsFor(0, limit + 1)).ok());
}

TEST_F(TuningStoreTest, WhatIsNoRowIsNotSaved) {
  SaveRows(RowsFor(0, 1));
  TuningStore store(Options());
  TunedRow bad = RowFor(1);
  bad.us = -1;
  EXPECT_TRUE(absl::IsInvalidArgument(store.Save(std::vector{RowFor(2), bad}).status()));
  EXPECT_EQ(store.counters().save_failures[static_cast<std::size_t>(SaveFailure::kRefused)], 1U);
  EXPECT_EQ(Load(), RowsFor(0, 1));
}

// ---- Files from elsewhere ----

TEST_F(TuningStoreTest, AFileOfAnotherDeviceIsNotUsed) {
  for (const auto& [field, value] : std::vector<std::pair<std::string DeviceSignature::*, std::string>>{
           {&DeviceSignature::device, "NVIDIA H100 80GB HBM3"},
           {&DeviceSignature::capability, "10.0"},
           {&DeviceSignature::processors, "114"},
           {&DeviceSignature::driver, "580.00"},
           {&DeviceSignature::cuda, "13.0"}}) {
    DeviceSignature other = Gpu();
    other.*field = value;
    ExpectSetAside(ToText(other, RowsFor(50, 3)), SetAside::kForeign);
    EXPECT_THAT(warnings_, ElementsAre(HasSubstr(value)));
  }
}

TEST_F(TuningStoreTest, EachDeviceHasAFileOfItsOwn) {
  TuningStore::Options options = Options();
  options.signature.device = "NVIDIA B200";
  TuningStore other(options);
  ASSERT_TRUE(other.Save(RowsFor(0, 2)).ok());
  EXPECT_THAT(Load(), IsEmpty());
  EXPECT_FALSE(fs::exists(file()));
  EXPECT_EQ(other.Load(), RowsFor(0, 2));
}

TEST_F(TuningStoreTest, DamagedFilesAreSetAside) {
  const std::string good = ToText(Gpu(), RowsFor(0, 2));
  ExpectSetAside("", SetAside::kDamaged);
  ExpectSetAside("\xff\xfe\x00garbage", SetAside::kDamaged);
  ExpectSetAside(good + "more\n", SetAside::kDamaged);
  ExpectSetAside(std::string(100'000, '\0'), SetAside::kDamaged);
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{{"us=0.5", "us=nan"},
                                                                                 {"us=0.5", "us=-1"},
                                                                                 {"rows 1", "rows 2"},
                                                                                 {"gemm", "g\xc3mm"},
                                                                                 {"hash=0", "hash=g"}}) {
    std::string bad = good;
    bad.replace(bad.find(from), from.size(), to);
    ExpectSetAside(bad, SetAside::kDamaged);
  }
}

TEST_F(TuningStoreTest, AFileCutAtAnyByteIsSetAside) {
  const std::string good = ToText(Gpu(), RowsFor(0, 2));
  for (std::size_t length = 0; length < good.size(); ++length)
    ExpectSetAside(good.substr(0, length), SetAside::kDamaged);
}

TEST_F(TuningStoreTest, AFileWithoutEndIsNotRead) {
  fs::create_directories(directory());
  WriteFile(file(), "#! tessera tuned rows 1\n");
  fs::resize_file(file(), std::uintmax_t{1} << 30);
  TuningStore store(Options());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(store.Load(), IsEmpty());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_EQ(store.counters().set_aside[static_cast<std::size_t>(SetAside::kTooLarge)], 1U);
  EXPECT_EQ(warnings_.size(), 1U);
}

TEST_F(TuningStoreTest, RowsThatSayNothingLegalAreLeftOut) {
  std::vector<TunedRow> rows = RowsFor(0, 3);
  rows[1].text = std::string(kClass) + " m(9,9] -> reference";  // min >= max
  rows[2].text = "gemm.cpu.no_such.class -> reference";
  fs::create_directories(directory());
  WriteFile(file(), ToText(Gpu(), rows));
  TuningStore store(Options());
  EXPECT_EQ(store.Load(), RowsFor(0, 1));
  EXPECT_EQ(store.Load(), RowsFor(0, 1));
  EXPECT_EQ(store.counters().rows_refused, 4U);
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("2 tuned rows")));
}

TEST_F(TuningStoreTest, WhatIsNoFileIsNotFollowedAndDoesNotBlock) {
  const fs::path outside = scratch_.path() / "outside";
  WriteFile(outside, ToText(Gpu(), RowsFor(7, 1)));
  const std::string before = FileContents(outside);
  fs::create_directories(directory());
  ::alarm(20);
  const std::vector<std::function<void()>> in_its_place = {
      [&] { fs::create_symlink(outside, file()); }, [&] { ASSERT_EQ(::mkfifo(file().c_str(), 0600), 0); },
      [&] { fs::create_directory(file()); }, [&] { fs::create_symlink("/dev/zero", file()); }};
  for (const auto& place : in_its_place) {
    fs::remove_all(Aside(SetAside::kNotAFile));
    place();
    warnings_.clear();
    TuningStore store(Options());
    EXPECT_THAT(store.Load(), IsEmpty());
    EXPECT_EQ(store.counters().set_aside[static_cast<std::size_t>(SetAside::kNotAFile)], 1U);
    EXPECT_EQ(warnings_.size(), 1U);
    EXPECT_TRUE(store.Save(RowsFor(1, 1)).ok());
    EXPECT_EQ(Load(), RowsFor(1, 1));
    fs::remove_all(file());
  }
  ::alarm(0);
  EXPECT_EQ(FileContents(outside), before);
}

// ---- Several processes ----

// Each of four processes saves rows of its own, one is killed while it may be anywhere in a save. What every survivor
// was told is saved, is there; and at every moment the file is one that parses.
TEST_F(TuningStoreTest, ProcessesThatSaveAtOnceLoseNothing) {
  constexpr int kProcesses = 4;
  constexpr int kSaves = 8;
  for (int round = 0; round < 20; ++round) {
    fs::remove_all(directory());
    std::vector<pid_t> children;
    for (int process = 0; process < kProcesses; ++process) {
      const pid_t child = ::fork();
      if (child == 0) {
        TuningStore store(Options());
        const bool victim = process == 0;
        for (int i = 0; victim || i < kSaves; ++i) {
          if (!store.Save(std::vector{RowFor(process * 1000 + i % 1000)}).ok()) ::_exit(1);
        }
        ::_exit(0);
      }
      children.push_back(child);
    }
    std::this_thread::sleep_for(milliseconds(2 + 3 * round));
    ASSERT_EQ(::kill(children[0], SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(children[0], &status, 0), children[0]);
    ASSERT_TRUE(WIFSIGNALED(status));
    for (int process = 1; process < kProcesses; ++process) {
      while (::waitpid(children[process], &status, WNOHANG) == 0) {
        if (fs::exists(file())) {
          ASSERT_TRUE(ParseTunedRows(FileContents(file())).ok());
        }
        std::this_thread::sleep_for(milliseconds(1));
      }
      ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << round;
    }
    warnings_.clear();
    const std::set<std::string> texts = TextsOf(Load());
    for (int process = 1; process < kProcesses; ++process) {
      for (int i = 0; i < kSaves; ++i) EXPECT_TRUE(texts.contains(RowFor(process * 1000 + i).text)) << round;
    }
    EXPECT_THAT(warnings_, IsEmpty());
  }
}

TEST_F(TuningStoreTest, AStoppedProcessWithTheLockCostsASaveAndAWait) {
  SaveRows(RowsFor(0, 1));
  const pid_t holder = ::fork();
  if (holder == 0) {
    const auto lock =
        StateDirectory::Open(directory(), false)->Lock(file().filename().string() + ".lock", milliseconds(0));
    ::raise(SIGSTOP);
    ::_exit(lock.ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(holder, &status, WUNTRACED), holder);
  TuningStore::Options options = Options();
  options.patience = milliseconds(100);
  TuningStore store(options);
  EXPECT_EQ(store.Load(), RowsFor(0, 1)) << "reading needs no lock";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(store.Save(RowsFor(1, 1)).ok());
  EXPECT_FALSE(store.Save(RowsFor(1, 1)).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(5000));
  EXPECT_EQ(store.counters().save_failures[static_cast<std::size_t>(SaveFailure::kLocked)], 2U);
  EXPECT_EQ(warnings_.size(), 1U);
  ASSERT_EQ(::kill(holder, SIGKILL), 0);
  ASSERT_EQ(::waitpid(holder, &status, 0), holder);
  EXPECT_TRUE(store.Save(RowsFor(1, 1)).ok());
}

// ---- Nowhere to keep them ----

// Loads nothing, saves nothing, fails for `reason`, and warns once. An exit code: 0 is right.
int ExpectKeepsNothing(const TuningStore::Options& base, SaveFailure reason) {
  std::vector<std::string> warnings;
  TuningStore::Options options = base;
  options.warn = [&](std::string_view text) { warnings.emplace_back(text); };
  TuningStore store(options);
  if (!store.Load().empty() || !store.Load().empty()) return 1;
  if (store.Save(RowsFor(0, 1)).ok() || store.Save(RowsFor(0, 1)).ok()) return 2;
  if (store.counters().save_failures[static_cast<std::size_t>(reason)] != 2) return 3;
  return warnings.size() == 1 ? 0 : 4;
}

TEST_F(TuningStoreTest, NoDirectory) {
  TuningStore::Options options = Options();
  options.directory = "";
  EXPECT_EQ(ExpectKeepsNothing(options, SaveFailure::kNoDirectory), 0);
  options.directory = "relative";
  EXPECT_EQ(ExpectKeepsNothing(options, SaveFailure::kNoDirectory), 0);
  WriteFile(scratch_.path() / "file", "x");
  options.directory = (scratch_.path() / "file" / "below").string();
  EXPECT_EQ(ExpectKeepsNothing(options, SaveFailure::kNoDirectory), 0);
  options.directory = directory();
  options.signature.driver = "";
  EXPECT_EQ(ExpectKeepsNothing(options, SaveFailure::kNoDirectory), 0);
}

TEST_F(TuningStoreTest, AUserWhoMayWriteNowhere) {
  const int code = AsNobody([&] { return ExpectKeepsNothing(Options(), SaveFailure::kNotPermitted); });
  if (code == kSkipped) GTEST_SKIP() << "only root can become another user";
  EXPECT_EQ(code, 0);
}

TEST_F(TuningStoreTest, AReadOnlyDirectoryIsReadAndLeftAlone) {
  SaveRows(RowsFor(0, 3));
  fs::permissions(scratch_.path() / "cache", fs::perms(0555));
  fs::permissions(directory(), fs::perms(0555));
  const std::string before = FileContents(file());
  const auto read = [&](std::size_t rows) {
    return AsNobody([this, rows] {
      TuningStore store(Options());
      if (store.Load().size() != rows || warnings_.size() != 1 + (rows == 0 ? 1 : 0)) return 1;
      if (store.Save(RowsFor(5, 1)).ok() || warnings_.size() != 1 + (rows == 0 ? 1 : 0)) return 2;
      return store.counters().save_failures[static_cast<std::size_t>(SaveFailure::kNotPermitted)] == 1 ? 0 : 3;
    });
  };
  const int code = read(3);
  if (code == kSkipped) GTEST_SKIP() << "only root can become another user";
  EXPECT_EQ(code, 0);
  EXPECT_EQ(FileContents(file()), before);
  fs::permissions(file(), fs::perms(0600));
  EXPECT_EQ(read(0), 0) << "a file of somebody else";
  EXPECT_EQ(FileContents(file()), before);
}

TEST_F(TuningStoreTest, PermissionsThatGoAwayMidWay) {
  fs::create_directories(directory());
  fs::permissions(directory(), fs::perms(0777));
  const int code = AsNobody([&] {
    const fs::path mine = fs::path(directory()) / "mine";
    TuningStore::Options options = Options();
    options.directory = mine.string();
    TuningStore store(options);
    if (!store.Load().empty() || !store.Save(RowsFor(0, 1)).ok()) return 1;
    fs::permissions(mine, fs::perms(0555));
    if (!absl::IsPermissionDenied(store.Save(RowsFor(1, 1)).status()) || warnings_.size() != 1) return 2;
    fs::permissions(mine, fs::perms(0000));
    if (!absl::IsPermissionDenied(store.Save(RowsFor(1, 1)).status()) || warnings_.size() != 1) return 3;
    fs::permissions(mine, fs::perms(0700));
    if (!store.Save(RowsFor(1, 1)).ok()) return 4;
    return store.Load().size() == 2 ? 0 : 5;
  });
  if (code == kSkipped) GTEST_SKIP() << "only root can become another user";
  EXPECT_EQ(code, 0);
}

TEST_F(TuningStoreTest, ADirectoryThatIsRemovedIsMadeAgain) {
  TuningStore store(Options());
  ASSERT_TRUE(store.Save(RowsFor(0, 1)).ok());
  fs::remove_all(scratch_.path() / "cache");
  ASSERT_TRUE(store.Save(RowsFor(1, 1)).ok());
  EXPECT_EQ(Load(), RowsFor(1, 1));
}

int ExpectNoSpace(TuningStore& store, const std::vector<std::string>& warnings) {
  const absl::Status full = store.Save(RowsFor(0, 2000)).status();
  if (!absl::IsResourceExhausted(full)) return 1;
  if (store.counters().save_failures[static_cast<std::size_t>(SaveFailure::kNoSpace)] != 1) return 2;
  if (warnings.size() != 1) return 3;
  return store.Load() == RowsFor(0, 1) ? 0 : 4;
}

TEST_F(TuningStoreTest, AFullDiskLeavesTheOldRows) {
  SaveRows(RowsFor(0, 1));
  EXPECT_EQ(InChild([&] {
              TuningStore store(Options());
              return LimitFileSize(4096) ? ExpectNoSpace(store, warnings_) : kSkipped;
            }),
            0);
  EXPECT_EQ(Load(), RowsFor(0, 1));
}

TEST_F(TuningStoreTest, ASmallDiskLeavesTheOldRows) {
  fs::create_directories(directory());
  const int code = InChild([&] {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", directory().c_str(), "tmpfs", 0, "size=64k") != 0) {
      return kSkipped;
    }
    TuningStore store(Options());
    if (!store.Save(RowsFor(0, 1)).ok()) return 10;
    return ExpectNoSpace(store, warnings_);
  });
  if (code == kSkipped) GTEST_SKIP() << "this user may not mount a small file system";
  EXPECT_EQ(code, 0);
}

// ---- Where ----

TEST(TuningDirectoryTest, TheFirstThatNamesADirectory) {
  EXPECT_EQ(ChooseTuningDirectory("/rows", "/xdg", "/home/x").path, "/rows");
  EXPECT_EQ(ChooseTuningDirectory("", "/xdg/", "/home/x").path, "/xdg/tessera");
  EXPECT_EQ(ChooseTuningDirectory("", "", "/home/x").path, "/home/x/.cache/tessera");
  EXPECT_EQ(ChooseTuningDirectory("", "relative", "/home/x").path, "/home/x/.cache/tessera");
  for (const char* home : {"", "/", "//", "relative"}) {
    const TuningDirectory nowhere = ChooseTuningDirectory("", "", home);
    EXPECT_EQ(nowhere.path, "") << home;
    EXPECT_FALSE(nowhere.off);
  }
  const TuningDirectory off = ChooseTuningDirectory("off", "/xdg", "/home/x");
  EXPECT_EQ(off.path, "");
  EXPECT_TRUE(off.off);
}

}  // namespace
}  // namespace tessera::planner
