// Imports of GPU memory: opened once, told apart from memory that took over an address, and waited for while they are
// closed.
#include "server/session/import_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

class ImportCacheTest : public ::testing::Test {
 protected:
  // Closing takes as long as `closing`, if there is one, holds it.
  class FakeMapping final : public Mapping {
   public:
    FakeMapping(ImportCacheTest& test, Turnstile* closing) : Mapping(nullptr, 16), test_(test), closing_(closing) {}
    ~FakeMapping() override {
      if (closing_ != nullptr) closing_->Pass();
      ++test_.closed_;
    }

   private:
    ImportCacheTest& test_;
    Turnstile* const closing_;
  };

  absl::StatusOr<std::shared_ptr<Mapping>> Get(const std::string& source, std::uint64_t allocation_id,
                                               Turnstile* closing = nullptr) {
    return cache_->Get(source, allocation_id, [&]() -> absl::StatusOr<std::unique_ptr<Mapping>> {
      ++opened_;
      return std::make_unique<FakeMapping>(*this, closing);
    });
  }
  std::shared_ptr<Mapping> Must(const std::string& source, std::uint64_t allocation_id, Turnstile* closing = nullptr) {
    auto mapping = Get(source, allocation_id, closing);
    EXPECT_TRUE(mapping.ok()) << mapping.status();
    return mapping.ok() ? *std::move(mapping) : nullptr;
  }

  std::unique_ptr<ImportCache> cache_ = std::make_unique<ImportCache>();
  std::atomic<int> opened_{0};
  std::atomic<int> closed_{0};
};

TEST_F(ImportCacheTest, LiveMappingsAreShared) {
  auto first = Must("a", 1);
  auto second = Must("a", 1);
  auto other = Must("b", 1);
  EXPECT_EQ(first, second);
  EXPECT_NE(first, other);
  EXPECT_EQ(opened_, 2);
  first.reset();
  EXPECT_EQ(closed_, 0);
  second.reset();
  EXPECT_EQ(closed_, 1) << "the cache holds no memory itself";
  Must("a", 1);
  EXPECT_EQ(opened_, 3);
}

TEST_F(ImportCacheTest, LiveMappingOfAnotherAllocationIsRefused) {
  auto old = Must("a", 1);
  const auto refused = Get("a", 2);
  EXPECT_EQ(CodeOf(refused), StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(refused.status()), HasSubstr("another allocation than 2"));
  EXPECT_EQ(opened_, 1) << "the driver was asked for memory that it has under another name";
  EXPECT_EQ(Must("a", 1), old) << "the refusal changed something";
  old.reset();
  EXPECT_NE(Must("a", 2), nullptr);
  EXPECT_EQ(opened_, 2);
}

TEST_F(ImportCacheTest, MappingThatTakesLongToCloseIsNotOpenedAnew) {
  Turnstile closing;
  auto old = Must("a", 1, &closing);
  std::thread closes([&old] { old.reset(); });
  ASSERT_TRUE(closing.AwaitArrivals(1));
  for (const std::uint64_t allocation_id : {1U, 2U}) {
    const auto start = Clock::now();
    EXPECT_EQ(CodeOf(Get("a", allocation_id)), StatusCode::kAborted);
    EXPECT_GE(Clock::now() - start, ImportCache::kClosingWait);
  }
  EXPECT_EQ(opened_, 1);
  EXPECT_NE(Must("b", 1), nullptr) << "other memory waits for nothing";
  closing.Open();
  closes.join();
  EXPECT_NE(Must("a", 2), nullptr);
  EXPECT_EQ(opened_, 3);
}

// Unless the machine is so busy that it takes longer: then once more.
TEST_F(ImportCacheTest, MappingThatIsClosedInTimeIsWaitedFor) {
  const bool waited = Eventually([&] {
    Turnstile closing;
    auto old = Must("a", 1, &closing);
    std::thread closes([&old] { old.reset(); });
    EXPECT_TRUE(closing.AwaitArrivals(1));
    std::thread opens([&closing] {
      std::this_thread::sleep_for(5ms);
      closing.Open();
    });
    const int closed_before = closed_;
    const auto again = Get("a", 2);
    const bool in_time = again.ok() && closed_ == closed_before + 1;
    opens.join();
    closes.join();
    return in_time;
  });
  EXPECT_TRUE(waited);
}

// Each of four threads imports and lets go: whatever the timing, nobody is refused, and no two mappings live at once.
TEST_F(ImportCacheTest, ComingAndGoingIsNeverRefused) {
  std::atomic<int> refused{0}, overlapping{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5'000; ++i) {
        auto mapping = Get("a", 1);
        if (!mapping.ok()) {
          ++refused;
          continue;
        }
        if (opened_ - closed_ > 1) ++overlapping;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 0);
  EXPECT_EQ(overlapping, 0);
  EXPECT_EQ(opened_, closed_);
}

TEST_F(ImportCacheTest, ConcurrentImportsOpenOnce) {
  std::array<std::shared_ptr<Mapping>, 8> mappings;
  std::vector<std::thread> threads;
  for (auto& mapping : mappings) {
    threads.emplace_back([this, &mapping] {
      auto made = cache_->Get("a", 1, [this]() -> absl::StatusOr<std::unique_ptr<Mapping>> {
        ++opened_;
        std::this_thread::sleep_for(5ms);
        return std::make_unique<FakeMapping>(*this, nullptr);
      });
      if (made.ok()) mapping = *std::move(made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(opened_, 1);
  EXPECT_NE(mappings.front(), nullptr);
  for (const auto& mapping : mappings) EXPECT_EQ(mapping, mappings.front());
}

TEST_F(ImportCacheTest, FailureToOpenIsForgotten) {
  const auto failed = cache_->Get("a", 1, [] { return absl::InvalidArgumentError("no such memory"); });
  EXPECT_EQ(CodeOf(failed), StatusCode::kInvalidArgument);
  EXPECT_NE(Must("a", 2), nullptr);
  EXPECT_EQ(opened_, 1);
}

TEST_F(ImportCacheTest, MappingsMayOutliveTheCache) {
  auto mapping = Must("a", 1);
  cache_.reset();
  EXPECT_EQ(closed_, 0);
  mapping.reset();
  EXPECT_EQ(closed_, 1);
}

}  // namespace
}  // namespace tessera::server
