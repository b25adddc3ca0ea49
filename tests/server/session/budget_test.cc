// Budgets of memory and the accounts of principals: what counts, which limit a refusal names, that it changes nothing,
// and that accounts come and go without a trace.
#include "server/session/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "server/session/account.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

class BudgetTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryBudget> Daemons(std::uint64_t bytes, std::uint64_t buffers = kMax) {
    return std::make_shared<MemoryBudget>(MemoryLimits{.bytes_limit = Limit::kBufferBytes,
                                                       .bytes_max = bytes,
                                                       .buffers_limit = Limit::kBuffers,
                                                       .buffers_max = buffers},
                                          metrics_);
  }
  std::shared_ptr<MemoryBudget> Principals(std::shared_ptr<MemoryBudget> parent, std::uint64_t bytes,
                                           std::uint64_t buffers = kMax) {
    return std::make_shared<MemoryBudget>(MemoryLimits{.bytes_limit = Limit::kBufferBytesPerPrincipal,
                                                       .bytes_max = bytes,
                                                       .buffers_limit = Limit::kBuffersPerPrincipal,
                                                       .buffers_max = buffers},
                                          metrics_, std::move(parent));
  }
  std::shared_ptr<MemoryBudget> Sessions(std::shared_ptr<MemoryBudget> parent, std::uint64_t bytes,
                                         std::uint64_t buffers = kMax) {
    return std::make_shared<MemoryBudget>(MemoryLimits{.bytes_limit = Limit::kSessionBufferBytes,
                                                       .bytes_max = bytes,
                                                       .buffers_limit = Limit::kBuffersPerSession,
                                                       .buffers_max = buffers},
                                          metrics_, std::move(parent));
  }

  static void ExpectUse(const MemoryBudget& budget, std::uint64_t bytes, std::uint64_t buffers) {
    EXPECT_EQ(budget.used().bytes, bytes);
    EXPECT_EQ(budget.used().buffers, buffers);
  }

  // Refused by the limit that `setting` sets, and by no other.
  void ExpectRefused(const std::string& setting, const std::shared_ptr<MemoryBudget>& budget, std::uint64_t bytes) {
    const std::string series = "tessera_refused_total{limit=\"" + setting + "\"}";
    const double before = MetricValue(metrics_, series);
    const absl::Status status = Reservation::Make(budget, bytes).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(MessageOf(status), StartsWith(setting + ": "));
    EXPECT_EQ(MetricValue(metrics_, series), before + 1);
  }

  static Reservation Must(const std::shared_ptr<MemoryBudget>& budget, std::uint64_t bytes) {
    auto reservation = Reservation::Make(budget, bytes);
    EXPECT_TRUE(reservation.ok()) << reservation.status();
    return *std::move(reservation);
  }

  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
};

TEST_F(BudgetTest, SessionIsWithinPrincipalIsWithinAll) {
  const auto all = Daemons(150);
  const auto alice = Principals(all, 120);
  const auto bob = Principals(all, 120);
  const auto first = Sessions(alice, 100);
  const auto second = Sessions(alice, 100);
  const auto bobs = Sessions(bob, 100);
  {
    const Reservation hundred = Must(first, 100);
    ExpectRefused("session_buffer_bytes_max", first, 1);
    ExpectRefused("buffer_bytes_per_principal_max", second, 21);
    ExpectRefused("buffer_bytes_max", bobs, 51);
    for (const auto& budget : {second, bob, bobs}) ExpectUse(*budget, 0, 0);
    for (const auto& budget : {first, alice, all}) ExpectUse(*budget, 100, 1);
    const Reservation twenty = Must(second, 20);
    const Reservation thirty = Must(bobs, 30);
    ExpectUse(*all, 150, 3);
    ExpectUse(*alice, 120, 2);
    ExpectRefused("buffer_bytes_max", bobs, 1);
    ExpectUse(*bobs, 30, 1);
  }
  for (const auto& budget : {first, second, bobs, alice, bob, all}) ExpectUse(*budget, 0, 0);
}

TEST_F(BudgetTest, BuffersAreCountedAsBytesAre) {
  const auto all = Daemons(kMax, 4);
  const auto alice = Principals(all, kMax, 3);
  const auto bob = Principals(all, kMax, 3);
  const auto first = Sessions(alice, kMax, 2);
  const auto second = Sessions(alice, kMax, 2);
  const auto bobs = Sessions(bob, kMax, 2);
  std::vector<Reservation> held;
  held.push_back(Must(first, 0));
  held.push_back(Must(first, 7));
  ExpectRefused("buffers_per_session_max", first, 0);
  held.push_back(Must(second, 1));
  ExpectRefused("buffers_per_principal_max", second, 1);
  ExpectUse(*second, 1, 1);
  held.push_back(Must(bobs, 1));
  ExpectRefused("buffers_max", bobs, 1);
  ExpectUse(*bobs, 1, 1);
  ExpectUse(*bob, 1, 1);
  ExpectUse(*all, 9, 4);
  held.pop_back();
  held.push_back(Must(bobs, 5));
  ExpectUse(*all, 13, 4);
  while (!held.empty()) held.pop_back();
  ExpectUse(*all, 0, 0);
}

TEST_F(BudgetTest, RefusalTellsWhatIsLeft) {
  const auto budget = Daemons(100);
  const Reservation held = Must(budget, 60);
  const absl::Status status = Reservation::Make(budget, 41).status();
  EXPECT_THAT(MessageOf(status), HasSubstr("41 bytes asked for, 40 of 100 left"));
}

TEST_F(BudgetTest, DoesNotWrapAround) {
  constexpr std::uint64_t kLargest = kMax - 1;  // kMax is no limit
  const auto all = Daemons(kLargest);
  const auto session = Sessions(all, kLargest);
  const Reservation nearly_all = Must(session, kLargest - 1);
  ExpectRefused("session_buffer_bytes_max", session, 2);
  ExpectRefused("session_buffer_bytes_max", session, 3);  // the sum is 2^64
  ExpectRefused("session_buffer_bytes_max", session, kMax);
  ExpectRefused("buffer_bytes_max", all, kMax);
  const Reservation last = Must(session, 1);
  ExpectUse(*all, kLargest, 2);
}

TEST_F(BudgetTest, WithoutALimitOfItsOwnTheParentsDecides) {
  const auto all = Daemons(100);
  const auto session = Sessions(all, kNoLimit);
  const Reservation held = Must(session, 60);
  ExpectRefused("buffer_bytes_max", session, kMax);
  ExpectRefused("buffer_bytes_max", session, kMax - 59);  // with what is held the sum is 2^64
  ExpectRefused("buffer_bytes_max", session, 41);
  ExpectUse(*session, 60, 1);
  ExpectUse(*all, 60, 1);
}

TEST_F(BudgetTest, AMovedReservationReturnsOnce) {
  const auto budget = Daemons(100);
  {
    Reservation first = Must(budget, 30);
    const Reservation second(std::move(first));
    ExpectUse(*budget, 30, 1);
  }
  ExpectUse(*budget, 0, 0);
}

TEST_F(BudgetTest, ReservationsKeepTheirBudgets) {
  const auto all = Daemons(100);
  auto alice = Principals(all, 100);
  auto session = Sessions(alice, 100);
  {
    const Reservation held = Must(session, 30);
    session.reset();
    alice.reset();
    ExpectUse(*all, 30, 1);
  }
  ExpectUse(*all, 0, 0);
}

TEST_F(BudgetTest, ThreadsNeverPassTheLimitsAndLeaveNothing) {
  constexpr std::uint64_t kBytesMax = 1'000;
  const auto all = Daemons(kBytesMax, 9);
  const auto alice = Principals(all, 700, 5);
  const auto bob = Principals(all, 700, 5);
  std::atomic<std::uint64_t> bytes{0}, buffers{0};
  std::atomic<int> passed{0}, made{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto session = Sessions(t % 2 == 0 ? alice : bob, 600, 4);
      for (std::uint64_t i = 0; i < 20'000; ++i) {
        const std::uint64_t size = (i * 7 + t * 13) % 400;
        std::vector<Reservation> held;
        for (int n = 0; n < 3; ++n) {
          auto reservation = Reservation::Make(session, size);
          if (!reservation.ok()) continue;
          ++made;
          held.push_back(*std::move(reservation));
          const std::uint64_t sum = bytes += size;
          const std::uint64_t number = ++buffers;
          if (sum > kBytesMax || number > 9) ++passed;
        }
        bytes -= held.size() * size;
        buffers -= held.size();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(passed, 0);
  EXPECT_GT(made, 10'000);
  for (const auto& budget : {alice, bob, all}) ExpectUse(*budget, 0, 0);
}

class AccountsTest : public BudgetTest {
 protected:
  static Peer User(std::uint32_t uid) { return {.pid = 1, .uid = uid, .gid = 1}; }

  const std::shared_ptr<MemoryBudget> all_ = Daemons(1'000);
  Accounts accounts_{{.bytes_limit = Limit::kBufferBytesPerPrincipal,
                      .bytes_max = 100,
                      .buffers_limit = Limit::kBuffersPerPrincipal,
                      .buffers_max = 10},
                     metrics_,
                     all_};
};

TEST_F(AccountsTest, OneForEachPrincipal) {
  const auto alice = accounts_.Of(User(1));
  EXPECT_EQ(alice->principal, "uid:1");
  EXPECT_EQ(accounts_.Of({.pid = 99, .uid = 1, .gid = 7}), alice) << "another process of the same user";
  const auto bob = accounts_.Of(User(2));
  EXPECT_NE(bob, alice);
  const auto trainer = accounts_.Of({.kind = PeerKind::kCertificate, .subject = "CN=trainer"});
  EXPECT_EQ(trainer->principal, "subject:CN=trainer");
  EXPECT_EQ(accounts_.size(), 3U);
  const Reservation held = Must(alice->memory, 100);
  ExpectRefused("buffer_bytes_per_principal_max", alice->memory, 1);
  const Reservation bobs = Must(bob->memory, 100);
  ExpectUse(*all_, 200, 2);
}

TEST_F(AccountsTest, GoesWithItsLastUser) {
  auto first = accounts_.Of(User(1));
  auto second = accounts_.Of(User(1));
  first->leases = 7;
  first.reset();
  EXPECT_EQ(accounts_.size(), 1U);
  EXPECT_EQ(accounts_.Of(User(1))->leases, 7U);
  second.reset();
  EXPECT_EQ(accounts_.size(), 0U);
  EXPECT_EQ(accounts_.Of(User(1))->leases, 0U) << "a new one";
  EXPECT_EQ(accounts_.size(), 0U);
}

TEST_F(AccountsTest, LeavesNoTraceOfAHundredThousandPrincipals) {
  std::vector<std::shared_ptr<Account>> recent(10);
  for (std::uint32_t uid = 0; uid < 100'000; ++uid) {
    recent[uid % recent.size()] = accounts_.Of(User(uid));
    ASSERT_LE(accounts_.size(), recent.size() + 1);
  }
  recent.clear();
  EXPECT_EQ(accounts_.size(), 0U);
}

TEST_F(AccountsTest, MayOutliveTheAccounts) {
  auto accounts = std::make_unique<Accounts>(MemoryLimits{}, metrics_, all_);
  auto account = accounts->Of(User(1));
  accounts.reset();
  { const Reservation held = Must(account->memory, 10); }
  account.reset();
  ExpectUse(*all_, 0, 0);
}

// An account that dies while another of its principal is made must not take that one out of the map.
TEST_F(AccountsTest, ANewOneMayComeWhileTheOldOneDies) {
  std::atomic<int> strangers{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20'000; ++i) {
        const auto held = accounts_.Of(User(1));
        if (accounts_.Of(User(1)) != held) ++strangers;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(strangers, 0) << "two accounts of one principal";
  EXPECT_EQ(accounts_.size(), 0U);
}

}  // namespace
}  // namespace tessera::server
