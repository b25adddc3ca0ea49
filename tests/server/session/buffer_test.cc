// Which descriptors and ranges become buffers, that refused ones cost nothing, and how budgets and pins count.
#include "server/session/buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "common/text.h"
#include "tests/server/session/posix_fixtures.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::uint64_t kMiB = 1U << 20U;
constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

class BufferTest : public ::testing::Test {
 protected:
  BufferHome Home(std::uint64_t bytes_max) {
    const MemoryLimits limits{.bytes_limit = Limit::kSessionBufferBytes, .bytes_max = bytes_max};
    return {.budget = std::make_shared<MemoryBudget>(limits, metrics_), .reaper = &reaper_};
  }

  // Once what went has been cleaned up.
  std::uint64_t Used(const BufferHome& home) const {
    EXPECT_TRUE(AwaitIdle(reaper_));
    return home.budget->used().bytes;
  }
  std::uint64_t Used() const { return Used(home_); }

  // Expects INVALID_ARGUMENT that begins with `field`, and nothing left behind.
  void ExpectRefused(UniqueFd fd, std::uint64_t byte_offset, std::uint64_t bytes, const std::string& field) {
    ASSERT_TRUE(fd);
    const std::size_t descriptors = OpenDescriptors();
    auto buffer = Buffer::Import(std::move(fd), byte_offset, bytes, home_);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kInvalidArgument) << buffer.status();
    EXPECT_THAT(MessageOf(buffer.status()), StartsWith(field));
    EXPECT_EQ(Used(), 0U);
    EXPECT_EQ(OpenDescriptors(), descriptors - 1) << "the refused descriptor stays open";
  }

  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper_{std::chrono::seconds(10), metrics_};
  const BufferHome home_ = Home(64 * kMiB);
  const std::uint64_t page_ = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
};

TEST_F(BufferTest, SealedMemfdIsMappedAndShared) {
  UniqueFd fd = MakeMemfd(3 * page_);
  auto buffer = Buffer::Import(Duplicate(fd), 0, 0, home_);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ((*buffer)->bytes(), 3 * page_);
  EXPECT_EQ((*buffer)->origin(), BufferOrigin::kImported);
  EXPECT_EQ((*buffer)->fd(), -1);
  EXPECT_EQ((*buffer)->memory_offset(), 0U);
  const char text[] = "from the client";
  ASSERT_EQ(::pwrite(fd.get(), text, sizeof(text), 100), static_cast<ssize_t>(sizeof(text)));
  EXPECT_EQ(std::memcmp((*buffer)->data() + 100, text, sizeof(text)), 0);
  (*buffer)->data()[5] = std::byte{42};
  unsigned char seen = 0;
  ASSERT_EQ(::pread(fd.get(), &seen, 1, 5), 1);
  EXPECT_EQ(seen, 42);
}

TEST_F(BufferTest, ImportedMappingOutlivesTheClientsDescriptor) {
  auto buffer = Buffer::Import(MakeMemfd(page_), 0, 0, home_);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  (*buffer)->data()[page_ - 1] = std::byte{1};
  EXPECT_EQ((*buffer)->data()[page_ - 1], std::byte{1});
}

TEST_F(BufferTest, FilesThatAreNoMemfdAreRefused) {
  const TemporaryDirectory directory;
  UniqueFd file(::open((directory.path() / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_TRUE(file);
  ASSERT_EQ(::ftruncate(file.get(), static_cast<off_t>(page_)), 0);
  ExpectRefused(std::move(file), 0, 0, "descriptor: ");
  ExpectRefused(UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC)), 0, page_, "descriptor: ");
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd read_end(ends[0]);
  ExpectRefused(UniqueFd(ends[1]), 0, 0, "descriptor: ");
}

TEST_F(BufferTest, NoDescriptorIsRefused) {
  auto buffer = Buffer::Import(UniqueFd(), 0, page_, home_);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kInvalidArgument) << buffer.status();
}

TEST_F(BufferTest, MemfdsThatCouldShrinkAreRefused) {
  ExpectRefused(MakeMemfd(page_, 0), 0, 0, "descriptor: ");
  ExpectRefused(MakeMemfd(page_, F_SEAL_GROW), 0, 0, "descriptor: ");
  UniqueFd never_sealable(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_TRUE(never_sealable);
  ASSERT_EQ(::ftruncate(never_sealable.get(), static_cast<off_t>(page_)), 0);
  ExpectRefused(std::move(never_sealable), 0, 0, "descriptor: ");
}

TEST_F(BufferTest, MemfdsSealedAgainstWritingAreRefused) {
  ExpectRefused(MakeMemfd(page_, F_SEAL_SHRINK | F_SEAL_WRITE), 0, 0, "descriptor: ");
  ExpectRefused(MakeMemfd(page_, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE), 0, 0, "descriptor: ");
}

TEST_F(BufferTest, FurtherSealsDoNotMatter) {
  auto buffer = Buffer::Import(MakeMemfd(page_, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0, 0, home_);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
}

TEST_F(BufferTest, DescriptorMustReadAndWrite) {
  const UniqueFd fd = MakeMemfd(page_);
  ExpectRefused(Reopen(fd, O_RDONLY), 0, 0, "descriptor: ");
  ExpectRefused(Reopen(fd, O_WRONLY), 0, 0, "descriptor: ");
}

TEST_F(BufferTest, HugePagesAreRefused) {
  constexpr std::uint64_t kHugePage = 2 * kMiB;
  UniqueFd fd = MakeMemfd(kHugePage, F_SEAL_SHRINK, MFD_HUGETLB);
  if (!fd) GTEST_SKIP() << "this system makes no huge-page memfd";
  ExpectRefused(std::move(fd), 0, 0, "descriptor: ");
}

TEST_F(BufferTest, RangesOutsideTheMemfdAreRefused) {
  const UniqueFd fd = MakeMemfd(2 * page_);
  const struct {
    std::uint64_t byte_offset, bytes;
    const char* field;
  } rows[] = {
      {2 * page_, 0, "bytes: "},
      {2 * page_, 1, "bytes: "},
      {2 * page_ + 1, 0, "byte_offset: "},
      {2 * page_ + 1, 1, "byte_offset: "},
      {0, 2 * page_ + 1, "bytes: "},
      {1, 2 * page_, "bytes: "},
      {kMax - 7, 8, "byte_offset: "},  // the sum is 2^64
      {kMax - 7, 16, "byte_offset: "},
      {kMax, 1, "byte_offset: "},
      {std::uint64_t{1} << 63U, 1, "byte_offset: "},
      {0, std::uint64_t{1} << 63U, "bytes: "},
      {8, kMax - 7, "bytes: "},
      {0, kMax, "bytes: "},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(testing::Message() << row.byte_offset << " + " << row.bytes);
    ExpectRefused(Duplicate(fd), row.byte_offset, row.bytes, row.field);
  }
}

TEST_F(BufferTest, EmptyMemfdIsRefused) {
  ExpectRefused(MakeMemfd(0), 0, 0, "bytes: ");
}

TEST_F(BufferTest, AnyOffsetIsTaken) {
  const UniqueFd fd = MakeMemfd(4 * page_);
  for (std::uint64_t i = 0; i < 4 * page_; ++i) {
    const auto value = static_cast<unsigned char>(i * 31 + i / 256);
    ASSERT_EQ(::pwrite(fd.get(), &value, 1, static_cast<off_t>(i)), 1);
  }
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{1}, page_ - 1, page_, page_ + 1, 3 * page_ + 17, 4 * page_ - 1}) {
    SCOPED_TRACE(offset);
    auto buffer = Buffer::Import(Duplicate(fd), offset, 0, home_);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    ASSERT_EQ((*buffer)->bytes(), 4 * page_ - offset);
    EXPECT_EQ((*buffer)->memory_offset(), offset);
    EXPECT_EQ(Used(), 4 * page_ - offset);
    for (const std::uint64_t i : {std::uint64_t{0}, (*buffer)->bytes() - 1}) {
      const std::uint64_t at = offset + i;
      EXPECT_EQ((*buffer)->data()[i], static_cast<std::byte>(static_cast<unsigned char>(at * 31 + at / 256)));
    }
  }
  EXPECT_EQ(Used(), 0U);
}

TEST_F(BufferTest, RangeMayEndInsideTheMemfd) {
  auto buffer = Buffer::Import(MakeMemfd(2 * page_), 10, 100, home_);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ((*buffer)->bytes(), 100U);
  EXPECT_EQ(Used(), 100U);
}

TEST_F(BufferTest, AllocatedMemoryIsZeroedAndItsDescriptorShowsIt) {
  auto buffer = Buffer::Allocate(kMiB + 3, home_);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ((*buffer)->bytes(), kMiB + 3);
  EXPECT_EQ((*buffer)->origin(), BufferOrigin::kAllocated);
  std::byte* const data = (*buffer)->data();
  EXPECT_TRUE(std::all_of(data, data + kMiB + 3, [](std::byte b) { return b == std::byte{0}; }));
  data[kMiB + 2] = std::byte{9};
  unsigned char seen = 0;
  ASSERT_EQ(::pread((*buffer)->fd(), &seen, 1, kMiB + 2), 1);
  EXPECT_EQ(seen, 9);
}

TEST_F(BufferTest, AllocatedMemoryCannotBeResizedByItsClient) {
  auto buffer = Buffer::Allocate(2 * page_, home_);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_NE(::ftruncate((*buffer)->fd(), static_cast<off_t>(page_)), 0);
  EXPECT_NE(::ftruncate((*buffer)->fd(), static_cast<off_t>(4 * page_)), 0);
  EXPECT_NE(::fcntl((*buffer)->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST_F(BufferTest, AllocationsThatCannotBeAreRefused) {
  EXPECT_EQ(Buffer::Allocate(0, home_).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Buffer::Allocate(64 * kMiB + 1, home_).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Used(), 0U);
  const BufferHome endless = Home(kMax);
  const std::size_t descriptors = OpenDescriptors();
  for (const std::uint64_t bytes : {std::uint64_t{1} << 63U, kMax, (std::uint64_t{1} << 63U) - 1}) {
    errno = 0;  // an error of an earlier call is no reason for this one
    const absl::Status status = Buffer::Allocate(bytes, endless).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(MessageOf(status), testing::Not(HasSubstr("Success")));
    EXPECT_EQ(Used(endless), 0U);
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(BufferTest, BuffersOverOneMemfdHaveOneKey) {
  const UniqueFd fd = MakeMemfd(2 * page_);
  const UniqueFd other_fd = MakeMemfd(2 * page_);
  auto first = Buffer::Import(Duplicate(fd), 0, 0, home_);
  auto second = Buffer::Import(Reopen(fd, O_RDWR), page_ + 1, 8, home_);
  auto other = Buffer::Import(Duplicate(other_fd), 0, 0, home_);
  auto allocated = Buffer::Allocate(page_, home_);
  ASSERT_TRUE(first.ok() && second.ok() && other.ok() && allocated.ok());
  EXPECT_EQ((*first)->memory(), (*second)->memory());
  EXPECT_EQ((*second)->memory_offset(), page_ + 1);
  EXPECT_FALSE((*first)->memory() == (*other)->memory());
  EXPECT_FALSE((*first)->memory() == (*allocated)->memory());
  (*first)->data()[page_ + 1] = std::byte{7};
  EXPECT_EQ((*second)->data()[0], std::byte{7});
}

TEST_F(BufferTest, AllocatedMemoryPassedBackHasTheSameKey) {
  auto allocated = Buffer::Allocate(page_, home_);
  ASSERT_TRUE(allocated.ok());
  auto imported = Buffer::Import(UniqueFd(::fcntl((*allocated)->fd(), F_DUPFD_CLOEXEC, 0)), 0, 0, home_);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ((*allocated)->memory(), (*imported)->memory());
}

TEST_F(BufferTest, BudgetIsExactAndComesBack) {
  const BufferHome home = Home(100);
  auto sixty = Buffer::Allocate(60, home);
  ASSERT_TRUE(sixty.ok());
  EXPECT_EQ(Used(home), 60U);
  const absl::Status refused = Buffer::Import(MakeMemfd(41), 0, 0, home).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(refused), HasSubstr("session_buffer_bytes_max"));
  EXPECT_EQ(Used(home), 60U);
  auto forty = Buffer::Import(MakeMemfd(40), 0, 0, home);
  ASSERT_TRUE(forty.ok()) << forty.status();
  EXPECT_EQ(Used(home), 100U);
  EXPECT_FALSE(Buffer::Allocate(1, home).ok());
  sixty->reset();
  EXPECT_EQ(Used(home), 40U);
  forty->reset();
  EXPECT_EQ(Used(home), 0U);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("tessera_refused_total{limit=\"session_buffer_bytes_max\"} 2"));
}

TEST_F(BufferTest, PinsCountAndKeepMemoryMapped) {
  auto made = Buffer::Allocate(page_, home_);
  ASSERT_TRUE(made.ok());
  std::shared_ptr<Buffer> buffer = *std::move(made);
  EXPECT_EQ(buffer->users(), 0U);
  EXPECT_FALSE(BufferPin());
  BufferPin first(buffer);
  BufferPin second(buffer);
  EXPECT_TRUE(first);
  EXPECT_EQ(buffer->users(), 2U);
  BufferPin moved(std::move(first));
  EXPECT_EQ(buffer->users(), 2U);
  second = std::move(moved);  // lets go of its own, takes the other
  EXPECT_EQ(buffer->users(), 1U);
  EXPECT_FALSE(moved);  // NOLINT(bugprone-use-after-move): moved-from pins are empty
  BufferPin& same = second;
  second = std::move(same);
  EXPECT_EQ(buffer->users(), 1U);
  {
    const BufferPin third(buffer);
    EXPECT_EQ(buffer->users(), 2U);
  }
  EXPECT_EQ(buffer->users(), 1U);
  std::byte* const data = buffer->data();
  buffer.reset();
  EXPECT_EQ(Used(), page_);
  data[0] = std::byte{3};
  EXPECT_EQ(second->data()[0], std::byte{3});
  second = BufferPin();
  EXPECT_EQ(Used(), 0U);
}

}  // namespace
}  // namespace tessera::server
