// The lives of lifecycle_model_test.cc under threads that end, share and revoke under each other's operations. What a
// call answers then depends on the others; it must be one of the answers that it may give, every operation answers
// once, results are right, and nothing is left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "tests/server/exec/lifecycle_world.h"
#include "tests/server/session/posix_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using namespace std::chrono_literals;

constexpr std::size_t kThreads = 4;

SessionLimits Limits() {
  return {.sessions_max = 12,
          .sessions_per_principal_max = 8,
          .leases_max = 100,
          .buffers_max = 100,
          .buffers_per_principal_max = 60,
          .buffers_per_session_max = 12,
          .buffer_bytes_max = 80 * kOutputBytes,
          .principal_buffer_bytes_max = 50 * kOutputBytes,
          .ttl_max = 10h,
          .cleanup_patience = 10h};
}

struct PublicBuffer {
  Id id;
  std::uint32_t seed = 0;
};

// What the threads tell each other, and the sums that must come out even.
struct Shared {
  LifecycleWorld world{Limits(), {.queue_max = 40, .queue_per_session_max = 8, .queue_per_principal_max = 25}, 3};
  std::mutex mutex;
  std::vector<PublicBuffer> inputs;  // that are or were shared
  std::vector<Id> sessions;          // that are or were open
  std::atomic<int> submitted{0}, answered{0}, computed{0}, tokens{0}, tokens_gone{0};
  std::mutex wrong_mutex;
  std::set<std::string> wrong;  // answers that must not be

  void Wrong(const std::string& what) {
    const std::lock_guard<std::mutex> lock(wrong_mutex);
    wrong.insert(what);
  }
  void Expect(const char* what, const absl::Status& status, std::initializer_list<StatusCode> allowed) {
    if (status.ok() || std::find(allowed.begin(), allowed.end(), status.code()) != allowed.end()) return;
    Wrong(std::string(what) + ": " + status.ToString());
  }
  GoneToken Token() {
    ++tokens;
    return {new int(0), [this](const int* value) {
              delete value;
              ++tokens_gone;
            }};
  }
};

// One client at a time, of one of two principals.
class Client {
 public:
  Client(Shared& shared, std::size_t number, std::uint64_t seed)
      : shared_(shared), table_(shared.world.table), random_(seed + number) {
    const auto uid = static_cast<uid_t>(1'000 + number % 2);
    peer_ = {.pid = static_cast<pid_t>(number + 10), .uid = uid, .gid = uid};
  }

  void Run(int steps) {
    for (int i = 0; i < steps; ++i) Step();
    Close();
  }

 private:
  struct Mine {
    Id id;
    std::uint32_t seed = 0;
  };

  std::size_t Below(std::size_t end) { return random_() % end; }

  void Step() {
    if (session_ == nullptr) return Open();
    if (session_->ended() && Below(8) == 0) return Close();
    switch (Below(16)) {
      case 0:
      case 1:
        return Make(inputs_, /*input=*/true);
      case 2:
        return Make(outputs_, /*input=*/false);
      case 3:
        return Release();
      case 4:
        return Share();
      case 5:
        return Below(20) == 0 ? EndAnothers() : Look();
      case 6:
        return Below(6) == 0 ? Close() : Look();
      case 7:
        shared_.world.table.Tick(SessionTable::Clock::now() + (Below(100) == 0 ? 2h : 0h));
        return;
      default:
        return Submit();
    }
  }

  void Open() {
    absl::StatusOr<Id> token = absl::UnknownError("");
    if (Below(3) == 0) {
      token = table_.OpenSession(peer_, 1h, "threads");
    } else {
      lease_ = table_.OpenLease(peer_, Below(2) == 0 ? LeaseKind::kAttach : LeaseKind::kSideChannel).value_or(Id{});
      token = table_.OpenSession(peer_, *lease_, "threads");
    }
    shared_.Expect("OpenSession", token.status(), {StatusCode::kResourceExhausted});
    if (token.ok()) session_ = table_.FindSession(peer_, *token).value_or(nullptr);
    if (session_ == nullptr) return Close();  // over a limit, or somebody was quick
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    shared_.sessions.push_back(*token);
  }

  void Close() {
    if (session_ != nullptr && Below(2) == 0) {
      shared_.Expect("EndSession", table_.EndSession(session_->id(), SessionEnd::kClosed, shared_.Token()).status(),
                     {StatusCode::kNotFound});
    } else if (session_ != nullptr && !lease_.has_value()) {
      table_.EndSession(session_->id().index, session_->id().generation, SessionEnd::kEvicted).status().IgnoreError();
    }
    if (lease_.has_value()) table_.CloseLease(*lease_);
    if (session_ != nullptr && !session_->ended()) shared_.Wrong("a session lives on without its lease");
    lease_.reset();
    session_.reset();
    inputs_.clear();
    outputs_.clear();
  }

  void Make(std::vector<Mine>& to, bool input) {
    const auto made = table_.AllocateBuffer(*session_, kOutputBytes);
    shared_.Expect("AllocateBuffer", made.status(), {StatusCode::kResourceExhausted, StatusCode::kNotFound});
    if (!made.ok()) return;
    const Mine mine{.id = made->id, .seed = static_cast<std::uint32_t>(Below(1'000))};
    const auto pin = table_.PinBuffer(*session_, mine.id, BufferAccess::kReadWrite);
    shared_.Expect("PinBuffer", pin.status(), {StatusCode::kNotFound});
    if (!pin.ok()) return;
    if (input) FillOperand(mine.seed, (*pin)->data());
    to.push_back(mine);
  }

  void Release() {
    auto& from = Below(2) == 0 ? inputs_ : outputs_;
    if (from.empty()) return;
    std::swap(from[Below(from.size())], from.back());
    shared_.Expect("ReleaseBuffer", table_.ReleaseBuffer(*session_, from.back().id, shared_.Token()),
                   {StatusCode::kNotFound});
    from.pop_back();
  }

  void Share() {
    if (inputs_.empty()) return;
    const Mine& mine = inputs_[Below(inputs_.size())];
    std::optional<BufferAccess> access;
    if (Below(3) != 0) access = BufferAccess::kRead;
    const std::string principal = Below(2) == 0 ? "uid:1000" : "uid:1001";
    shared_.Expect("ShareBuffer", table_.ShareBuffer(*session_, mine.id, principal, access).status(),
                   {StatusCode::kNotFound});
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    if (access.has_value()) shared_.inputs.push_back({.id = mine.id, .seed = mine.seed});
  }

  void EndAnothers() {
    Id token;
    {
      const std::lock_guard<std::mutex> lock(shared_.mutex);
      token = shared_.sessions[Below(shared_.sessions.size())];
    }
    shared_.Expect("EndSession by name",
                   table_.EndSession(token.index, token.generation, SessionEnd::kEvicted).status(),
                   {StatusCode::kNotFound});
  }

  void Look() {
    const SessionCounts counts = table_.Counts();
    if (counts.sessions > Limits().sessions_max || counts.bytes_held > Limits().buffer_bytes_max) {
      shared_.Wrong("counts pass their limits");
    }
    for (const SessionRow& row : table_.ListSessions([](const Peer&) { return true; }).rows) {
      if (row.label != "threads" || row.in_flight < 0 || row.in_flight > 8) shared_.Wrong("a row of a session");
    }
    if (shared_.world.executor->in_flight() > 40) shared_.Wrong("in flight");
    shared_.Expect("FindSession", table_.FindSession(peer_, session_->id()).status(), {StatusCode::kNotFound});
  }

  void Submit() {
    if (inputs_.empty() || outputs_.empty()) return;
    const std::int64_t extent = Below(2) == 0 ? kSmallExtent : kLargeExtent;
    const Mine& a = inputs_[Below(inputs_.size())];
    PublicBuffer b{.id = inputs_.front().id, .seed = inputs_.front().seed};
    if (Below(2) == 0) {
      const std::lock_guard<std::mutex> lock(shared_.mutex);
      if (!shared_.inputs.empty())
        b = shared_.inputs[shared_.inputs.size() - 1 - Below(std::min<std::size_t>(8, shared_.inputs.size()))];
    }
    const Id d_id = outputs_[Below(outputs_.size())].id;
    auto bound = BindGemm(ProductOf({a.id, b.id, d_id}, extent), shared_.world.Scope(session_.get()));
    shared_.Expect("BindGemm", bound.status(), {StatusCode::kNotFound, StatusCode::kPermissionDenied});
    auto pin = table_.PinBuffer(*session_, d_id, BufferAccess::kReadWrite);
    if (!bound.ok() || !pin.ok()) return;
    Submission operation{.session = session_};
    operation.ops.push_back(*std::move(bound));
    const bool unwanted = Below(10) == 0;
    operation.still_wanted = [unwanted] {
      return unwanted ? absl::DeadlineExceededError("too late") : absl::OkStatus();
    };
    auto d = std::make_shared<BufferPin>(*std::move(pin));
    const auto calls = std::make_shared<std::atomic<int>>(0);
    operation.done = [&shared = shared_, d, calls, extent, unwanted, a = a.seed, b = b.seed](
                         const absl::Status& status, std::span<const OperationReport>) {
      if (++*calls != 1) shared.Wrong("answered twice");
      if (status.ok() && unwanted) shared.Wrong("computed what nobody wants");
      if (status.ok() && !IsProduct(a, b, extent, (*d)->data())) shared.Wrong("a wrong result");
      if (status.ok()) ++shared.computed;
      shared.Expect("operation", status,
                    {StatusCode::kCancelled, StatusCode::kDeadlineExceeded, StatusCode::kResourceExhausted});
      *d = BufferPin();
      ++shared.answered;
    };
    ++shared_.submitted;
    shared_.world.executor->Submit(std::move(operation));
  }

  Shared& shared_;
  SessionTable& table_;
  std::mt19937_64 random_;
  Peer peer_;
  std::optional<Id> lease_;
  std::shared_ptr<Session> session_;
  std::vector<Mine> inputs_;
  std::vector<Mine> outputs_;
};

TEST(LifecycleThreadsTest, RandomLivesUnderThreadsLeaveNothing) {
  spdlog::set_level(spdlog::level::off);
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "TESSERA_TEST_SEED=" << seed);
  Shared shared;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&shared, t, seed] { Client(shared, t, seed).Run(20'000); });
  }
  for (std::thread& thread : threads) thread.join();
  LifecycleWorld& world = shared.world;
  EXPECT_TRUE(world.executor->AwaitIdle(30s));
  EXPECT_TRUE(Eventually([&] { return shared.submitted == shared.answered; }));
  EXPECT_THAT(shared.wrong, testing::IsEmpty());
  EXPECT_TRUE(Eventually([&] { return world.table.Counts().ending == 0 && AwaitIdle(world.reaper); }));
  const SessionCounts counts = world.table.Counts();
  EXPECT_EQ(counts.sessions, 0U);
  EXPECT_EQ(counts.buffers, 0U);
  EXPECT_EQ(counts.bytes_held, 0U);
  EXPECT_EQ(shared.tokens, shared.tokens_gone);
  for (const char* zero :
       {"tessera_sessions", "tessera_in_flight", "tessera_queue_depth", "tessera_leases{kind=\"ttl\"}",
        "tessera_leases{kind=\"attach\"}", "tessera_leases{kind=\"side_channel\"}",
        "tessera_buffers{origin=\"allocated\"}", "tessera_buffer_bytes{origin=\"allocated\"}",
        "tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"failed\"}"}) {
    EXPECT_EQ(MetricValue(world.metrics, zero), 0) << zero;
  }
  std::cout << shared.submitted << " submitted, " << shared.computed << " computed\n";
  EXPECT_GT(shared.computed, 300);
}

}  // namespace
}  // namespace tessera::server
