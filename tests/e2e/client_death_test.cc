// Clients that are killed at each point of their lives: whatever they were doing, the daemon gives back all that it
// held for them, runs nothing more of theirs, and serves the others as if nothing had happened.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/unique_fd.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/exact_product.h"
#include "tests/e2e/victim.h"
#include "tests/oracle/codec.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// From the kill until all is back. A sanitizer slows down kernels and exits by far.
constexpr std::chrono::milliseconds kPatience = kSanitized ? 20s : 2s;

int RoundsOfRun() {
  if (std::getenv("TESSERA_SOAK") != nullptr) return 1000;
  return kSanitized ? 36 : 100;
}

// ---- The memory that victims compute in ----

class Ground : public VictimGround {
 public:
  // Not close-on-exec: victims inherit it. The daemon must be there already, so that it does not.
  Ground() : memfd_(::memfd_create("client-death", MFD_ALLOW_SEALING)) {
    EXPECT_EQ(::ftruncate(memfd_.get(), kBytes), 0);
    EXPECT_EQ(::fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd_.get(), 0);
    EXPECT_NE(memory, MAP_FAILED);
    memory_ = static_cast<std::byte*>(memory);
    for (std::int64_t i = 0; i < kSlowTerms; ++i) oracle::Encode(DType::kBf16, 1, memory_ + 2 * i);
  }
  ~Ground() { ::munmap(memory_, kBytes); }
  Ground(const Ground&) = delete;
  Ground& operator=(const Ground&) = delete;

  int memfd() const { return memfd_.get(); }

  void Forget() { std::memset(memory_ + kSlowAt, kUntouched, kBytes - kSlowAt); }
  bool SlowIsRight() const { return Holds(kSlowAt, kSlowExtent * kSlowExtent, kSlowTerms); }
  bool SlowIsUntouched() const { return IsUntouched(kSlowAt, kSmallAt - kSlowAt); }
  bool SmallIsRight(int number) const { return Holds(SmallAt(number), kSmallExtent * kSmallExtent, kSmallTerms); }
  bool SmallIsUntouched(int number) const { return IsUntouched(SmallAt(number), kSmallBytes); }

 private:
  static constexpr int kUntouched = 0x7b;

  static std::uint64_t SmallAt(int number) { return kSmallAt + static_cast<std::uint64_t>(number) * kSmallBytes; }
  bool Holds(std::uint64_t at, std::int64_t elements, std::int64_t value) const {
    for (std::int64_t i = 0; i < elements; ++i) {
      if (oracle::Decode(DType::kF32, memory_ + at + 4 * i) != static_cast<double>(value)) return false;
    }
    return true;
  }
  bool IsUntouched(std::uint64_t at, std::uint64_t bytes) const {
    return std::all_of(memory_ + at, memory_ + at + bytes,
                       [](std::byte byte) { return byte == static_cast<std::byte>(kUntouched); });
  }

  const UniqueFd memfd_;
  std::byte* memory_ = nullptr;
};

// ---- A client that lives ----

// Computes all the time, on its own thread, products that run where they arrive and products that wait for a worker.
class Bystander {
 public:
  explicit Bystander(const DaemonProcess& daemon)
      : client_(daemon.Connect().value()), session_(client_.OpenSession("bystander").value()) {
    thread_ = std::thread([this] { Compute(); });
  }
  ~Bystander() {
    stop_.store(true);
    thread_.join();
  }

  std::uint64_t right() const { return right_.load(); }  // results so far
  bool unharmed() const { return !harmed_.load(); }
  std::string complaint() const { return unharmed() ? "" : complaint_; }

 private:
  void Compute() {
    auto buffer = session_.Share(64 << 10);
    if (!buffer.ok()) return Complain("memory", buffer.status());
    ExactProduct small(*buffer, 16, 16, 16);
    ExactProduct large(*buffer, 48, 48, 48, 16 << 10);
    for (std::uint64_t number = 0; !stop_.load(); ++number) {
      for (ExactProduct* product : {&small, &large}) {
        product->Fill(number);
        const auto result = session_.Gemm(product->spec());
        if (!result.ok()) return Complain("call", result.status());
        if (!product->Right(number)) return Complain("result", absl::DataLossError(std::to_string(number)));
        right_.fetch_add(1);
      }
    }
  }

  void Complain(const char* what, const absl::Status& status) {
    complaint_ = std::string(what) + ": " + Text(status);
    harmed_.store(true);
  }

  client::Client client_;
  client::Session session_;
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> right_{0};
  std::string complaint_;  // written before harmed_ is set
  std::atomic<bool> harmed_{false};
  std::thread thread_;
};

// ---- What the daemon holds ----

constexpr const char* kGauges[] = {"tessera_in_flight",         "tessera_queue_depth",      "tessera_sessions",
                                   "tessera_sessions_ending",   "tessera_buffers",          "tessera_buffer_bytes",
                                   "tessera_buffer_held_bytes", "tessera_side_connections", "tessera_rpc_connections",
                                   "tessera_cleanups_waiting",  "tessera_cleanups_stuck"};
constexpr const char* kLeaseKinds[] = {"kind=\"side_channel\"", "kind=\"attach\"", "kind=\"ttl\""};

struct Held {
  std::map<std::string, double> gauges;
  std::size_t listed_sessions = 0;
  std::size_t listed_buffers = 0;
  std::size_t file_mappings = 0;
  std::size_t memfd_mappings = 0;
  std::map<std::string, std::size_t> descriptors;
  bool operator==(const Held&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Held& held) {
  for (const auto& [name, value] : held.gauges) out << name << " " << value << ", ";
  out << held.listed_sessions << " sessions and " << held.listed_buffers << " buffers listed, " << held.file_mappings
      << " files mapped, " << held.memfd_mappings << " of them memfds; descriptors:";
  for (const auto& [kind, count] : held.descriptors) out << " " << count << " " << kind;
  return out;
}

class ClientDeathTest : public ::testing::Test {
 protected:
  Held Look() const {
    Held held;
    // First: a scrape's connection is open for a moment longer than the scrape.
    const ProcessView process = ViewProcess(daemon_.pid());
    held.file_mappings = process.file_mappings;
    held.memfd_mappings = process.memfd_mappings;
    held.descriptors = process.descriptors;
    held.listed_sessions = static_cast<std::size_t>(observer_.ListSessions(true).value().sessions_size());
    held.listed_buffers = static_cast<std::size_t>(observer_.ListBuffers(true).value().buffers_size());
    const std::string metrics = daemon_.Metrics();
    for (const char* name : kGauges) held.gauges[name] = MetricSum(metrics, name);
    for (const char* kind : kLeaseKinds) held.gauges[kind] = MetricSum(metrics, "tessera_leases", {kind});
    return held;
  }

  double Cancelled() const {
    return MetricSum(daemon_.Metrics(), "tessera_operations_total", {"outcome=\"cancelled\""});
  }
  double Ends(const std::string& reason) const {
    return MetricSum(daemon_.Metrics(), "tessera_session_ends_total", {"reason=\"" + reason + "\""});
  }

  // With nobody but the observer and the bystander: what their libraries keep for good must be there already.
  Held AwaitRest() const {
    Held rest;
    EXPECT_TRUE(Eventually(30s, [&] {
      const Held now = Look();
      return std::exchange(rest, now) == now && now.gauges.at("tessera_in_flight") == 0 && now.listed_sessions == 1 &&
             now.gauges.at("tessera_rpc_connections") == 2;
    })) << rest;
    return rest;
  }

  // Until the daemon has taken all work of the victim and has finished none that counts; false if that went by unseen.
  bool AwaitWork(const VictimPoint& point) const {
    const bool releasing = std::string_view(point.name) == "releasing";
    bool there = false;
    bool gone_by = false;
    bool worked = false;
    EXPECT_TRUE(Eventually(30s, [&] {
      bool listed = false;
      const v1::ListSessionsReply sessions = observer_.ListSessions(true).value();
      for (const v1::SessionInfo& row : sessions.sessions()) {
        if (row.label() == "bystander") continue;
        listed = true;
        there = row.in_flight() == static_cast<std::uint32_t>(point.waiting) + 1;
        gone_by = worked && row.in_flight() == 0;
        worked = worked || row.in_flight() > 0;
      }
      // It waits for the answer once its buffer is held but no longer there.
      if (releasing) there = there && observer_.ListBuffers(true).value().buffers_size() == 1;
      return there || gone_by || (worked && !listed);
    })) << point.name;
    return there;
  }

  void Round(const VictimPoint& point, std::chrono::microseconds delay, const Held& rest);
  void ExpectWorkOfTheDeadWasDropped(const VictimPoint& point, double cancelled);
  void ExpectSessionEnded(const VictimPoint& point, double lost, double expired);

  DaemonProcess daemon_{TESSERAD, {"--cpu-threads", "1", "--log-level", "warn"}};
  Ground ground_;
  client::Client observer_ = daemon_.Connect().value();
  std::optional<Bystander> bystander_{std::in_place, daemon_};
  int missed_ = 0;       // rounds in which the work was over before the kill
  int should_wait_ = 0;  // calls that waited when their client was killed
  int ran_ = 0;          // of those
};

bool Works(std::string_view point) {
  constexpr std::string_view kWorking[] = {"running",   "enqueued", "queued",      "stream",
                                           "releasing", "attached", "time-to-live"};
  return std::find(std::begin(kWorking), std::end(kWorking), point) != std::end(kWorking);
}

void ClientDeathTest::Round(const VictimPoint& point, std::chrono::microseconds delay, const Held& rest) {
  ground_.Forget();
  const double cancelled = Cancelled();
  const double lost = Ends("lease_lost");
  const double expired = Ends("expired");
  ChildProcess victim({TESSERA_VICTIM, daemon_.socket(), point.name, std::to_string(ground_.memfd())});
  ASSERT_TRUE(Eventually(60s, [&] { return victim.Out() == "ready\n" || victim.Wait(0ms).has_value(); }));
  const bool at_work = !Works(point.name) || AwaitWork(point);
  std::this_thread::sleep_for(delay);  // the one thing that nothing tells of: where in its loop the victim is
  ASSERT_FALSE(victim.Wait(0ms).has_value()) << victim.Err();
  const auto killed = Clock::now();
  victim.Signal(SIGKILL);
  ASSERT_EQ(victim.Wait(), -SIGKILL);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(killed + kPatience - Clock::now());
  Held now;
  EXPECT_TRUE(Eventually(left, [&] { return (now = Look()) == rest; })) << "now:    " << now << "\nbefore: " << rest;

  const std::uint64_t right = bystander_->right();
  EXPECT_TRUE(Eventually(kPatience, [&] { return bystander_->right() > right + 2 || !bystander_->unharmed(); }));
  ASSERT_TRUE(bystander_->unharmed()) << bystander_->complaint();
  if (!at_work) {
    ++missed_;
  } else if (point.waiting > 0) {
    ExpectWorkOfTheDeadWasDropped(point, Cancelled() - cancelled);
  } else if (Works(point.name)) {
    const bool launched = std::string_view(point.name) == "enqueued";  // and so nothing can stop it
    EXPECT_TRUE(ground_.SlowIsRight() || (!launched && ground_.SlowIsUntouched())) << "it was cut off while it ran";
  }
  ExpectSessionEnded(point, Ends("lease_lost") - lost, Ends("expired") - expired);
}

void ClientDeathTest::ExpectWorkOfTheDeadWasDropped(const VictimPoint& point, double cancelled) {
  should_wait_ += point.waiting;
  const bool in_daemons_memory =
      std::string_view(point.name) == "attached" || point.name == std::string("time-to-live");
  if (in_daemons_memory) {  // which went with the session
    EXPECT_LE(cancelled, point.waiting + 1);
    ran_ += std::max(0, point.waiting - static_cast<int>(cancelled));
    return;
  }
  int ran = 0;
  for (int i = 0; i < point.waiting; ++i) {
    const bool right = ground_.SmallIsRight(i);
    EXPECT_TRUE(right || ground_.SmallIsUntouched(i)) << i << " is neither done nor left alone";
    ran += right ? 1 : 0;
  }
  ran_ += ran;
  const bool slow_ran = ground_.SlowIsRight();
  EXPECT_TRUE(slow_ran || ground_.SlowIsUntouched()) << "it was cut off while it ran";
  EXPECT_EQ(cancelled, point.waiting - ran + (slow_ran ? 0 : 1)) << ran << " ran";
}

void ClientDeathTest::ExpectSessionEnded(const VictimPoint& point, double lost, double expired) {
  const std::string_view name = point.name;
  if (name == "connecting") return;  // ends many
  const bool has_session = name != "side-channel" && name != "half-connected" && name != "descriptors-passed";
  EXPECT_EQ(expired, name == "time-to-live" ? 1 : 0);
  EXPECT_EQ(lost, has_session && name != "time-to-live" ? 1 : 0);
}

TEST_F(ClientDeathTest, EverythingIsBackSoonAfterAKill) {
  constexpr std::int64_t kGrowthAllowed = 8 << 20;
  constexpr std::size_t kThreadsAllowed = 16;                    // gRPC starts and ends threads as it likes
  constexpr std::size_t kMappingsAllowed = 4 * kThreadsAllowed;  // a stack, its guard, a heap and its rest
  std::mt19937_64 random(TestSeed());
  const auto delay = [&random] { return std::chrono::microseconds(random() % 20'000); };
  for (const VictimPoint& point : kVictimPoints) {  // what gRPC keeps for good is there now
    SCOPED_TRACE(std::string("warming up with ") + point.name);
    ChildProcess victim({TESSERA_VICTIM, daemon_.socket(), point.name, std::to_string(ground_.memfd())});
    ASSERT_TRUE(Eventually(60s, [&] { return victim.Out() == "ready\n"; })) << victim.Err();
  }
  const Held rest = AwaitRest();
  ASSERT_EQ(rest.memfd_mappings, 1U) << rest;  // the bystander's
  ASSERT_EQ(rest.gauges.at("tessera_buffers"), 1) << rest;
  ASSERT_EQ(rest.gauges.at("tessera_side_connections"), 1) << rest;
  const ProcessView before = ViewProcess(daemon_.pid());

  const int rounds = RoundsOfRun();
  std::vector<VictimPoint> order;
  for (int i = 0; i < rounds; ++i) order.push_back(kVictimPoints[static_cast<std::size_t>(i) % kVictimPoints.size()]);
  std::shuffle(order.begin(), order.end(), random);
  int with_work = 0;
  for (int i = 0; i < rounds && !HasFailure(); ++i) {
    SCOPED_TRACE("round " + std::to_string(i) + ": " + order[i].name);
    with_work += Works(order[i].name) ? 1 : 0;
    Round(order[i], delay(), rest);
  }

  const ProcessView after = ViewProcess(daemon_.pid());
  std::printf(
      "%d rounds; %d of %d with work were over too early; %d of %d waiting calls ran; %llu other results right\n"
      "before: %s\nafter:  %s\n",
      rounds, missed_, with_work, ran_, should_wait_, static_cast<unsigned long long>(bystander_->right()),
      ::testing::PrintToString(before).c_str(), ::testing::PrintToString(after).c_str());
  EXPECT_LE(after.threads, before.threads + kThreadsAllowed);
  EXPECT_LE(after.mappings, before.mappings + kMappingsAllowed);
  if (!kSanitized) {
    EXPECT_LE(after.resident_bytes, before.resident_bytes + kGrowthAllowed);
  }
  // Else the test has looked at something else than it says.
  EXPECT_LE(missed_, with_work / 4);
  EXPECT_LE(ran_, should_wait_ / 10);
}

// One client for each point, all killed together: their slow calls are in each other's way.
TEST_F(ClientDeathTest, EverythingIsBackAfterManyKillsAtOnce) {
  constexpr int kRounds = 3;
  std::mt19937_64 random(TestSeed());
  ground_.Forget();
  Held rest;
  for (int round = 0; round <= kRounds && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::list<ChildProcess> victims;
    for (const VictimPoint& point : kVictimPoints) {
      victims.emplace_back(
          std::vector<std::string>{TESSERA_VICTIM, daemon_.socket(), point.name, std::to_string(ground_.memfd())});
    }
    for (ChildProcess& victim : victims) {
      ASSERT_TRUE(Eventually(60s, [&] { return victim.Out() == "ready\n"; })) << victim.Err();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    const auto killed = Clock::now();
    for (const ChildProcess& victim : victims) victim.Signal(SIGKILL);
    for (ChildProcess& victim : victims) ASSERT_EQ(victim.Wait(), -SIGKILL);
    if (round == 0) {  // what gRPC keeps for good is there now
      rest = AwaitRest();
      continue;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(killed + 3 * kPatience - Clock::now());
    Held now;
    EXPECT_TRUE(Eventually(left, [&] { return (now = Look()) == rest; })) << "now:    " << now << "\nbefore: " << rest;
    EXPECT_TRUE(bystander_->unharmed()) << bystander_->complaint();
  }
  EXPECT_EQ(rest.memfd_mappings, 1U) << rest;  // the bystander's
  EXPECT_EQ(MetricSum(daemon_.Metrics(), "tessera_quarantines_total"), 0);
}

}  // namespace
}  // namespace tessera::e2e
