// Calls that are given up at any moment of their life, amid streams and waits: each ends once, is counted once, and
// leaves nothing behind.

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <deque>
#include <iostream>
#include <list>
#include <map>
#include <random>
#include <thread>

#include "tests/e2e/daemon_process.h"
#include "tests/e2e/exact_product.h"
#include "tests/e2e/raw_order.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using Clock = std::chrono::steady_clock;

class OrderCancelTest : public DaemonFixture {
 protected:
  static constexpr int kSlots = 64;

  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cpu_threads", "1"}});
    raw_.emplace(socket());
    client_.emplace(Connect());
    session_.emplace(client_->OpenSession("giving up").value());
    order_.emplace(*raw_, session_->token());
    memory_.emplace(session_->Allocate(kSlots * kSlotBytes).value());
    slow_.emplace(session_->Allocate(kSlowProduct.BufferBytes()).value());
  }
  void TearDown() override {
    slow_.reset();
    memory_.reset();
    order_.reset();
    session_.reset();
    client_.reset();
    raw_.reset();
    DaemonFixture::TearDown();
  }

  // One in three is small enough for the thread of its call.
  ExactProduct Product(int slot) const {
    return {*memory_, 8, 8, slot % 3 == 0 ? 16 : 1024, static_cast<std::uint64_t>(slot) * kSlotBytes};
  }

  static double Or0(double value) { return std::max(0.0, value); }
  double Operations(const std::vector<std::string>& labels = {}) const {
    return Or0(MetricSum(Metrics(), "tessera_operations_total", labels));
  }
  double Answers() const {
    const std::string metrics = Metrics();
    const std::string method = "method=\"Compute.Gemm\"";
    // Requests of calls that were cancelled before they were read count as unreadable.
    return Or0(MetricSum(metrics, "tessera_rpcs_total", {method})) -
           Or0(MetricSum(metrics, "tessera_rpcs_total", {method, "code=\"INVALID_ARGUMENT\""}));
  }
  double Launches() const { return Or0(MetricSum(Metrics(), "tessera_kernel_launches_total")); }

  void ExpectIdle() const {
    const auto idle = [this] {
      const std::string metrics = Metrics();
      return MetricSum(metrics, "tessera_in_flight") == 0 && MetricSum(metrics, "tessera_queue_depth") == 0 &&
             MetricSum(metrics, "tessera_gated") == 0;
    };
    EXPECT_TRUE(Eventually(20s, idle)) << Metrics();
    const v1::ListSessionsReply sessions = raw_->ListSessions().value();
    ASSERT_EQ(sessions.sessions_size(), 1);
    EXPECT_EQ(sessions.sessions(0).in_flight(), 0U);
    EXPECT_EQ(sessions.sessions(0).gated(), 0U);
    const v1::ListBuffersReply buffers = raw_->ListBuffers().value();
    for (const v1::BufferInfo& buffer : buffers.buffers()) EXPECT_EQ(buffer.references(), 0U);
  }

  std::optional<RawClient> raw_;
  std::optional<client::Client> client_;
  std::optional<client::Session> session_;
  std::optional<RawOrder> order_;
  std::optional<client::Buffer> memory_;
  std::optional<client::Buffer> slow_;

 private:
  static constexpr std::uint64_t kSlotBytes = 64 << 10U;
};

// Each call has a stream, its product, and up to two waits for what others signal before or after it, or never; half
// are cancelled at some point of theirs.
TEST_F(OrderCancelTest, AThousandCallsCancelledAtRandom) {
  constexpr int kCalls = 1000;
  std::mt19937_64 random(TestSeed());
  const auto below = [&](std::uint64_t bound) { return random() % bound; };

  std::vector<std::string> streams = {""};
  for (int i = 0; i < 4; ++i) streams.push_back(order_->OpenStream().value());
  std::vector<std::string> timelines;

  struct Sent {
    int slot = 0;
    std::uint64_t number = 0;
    Clock::time_point cancel_at;
    std::unique_ptr<GemmUnderWay> call;
    bool cancelled = false;
  };
  std::deque<int> free_slots;
  for (int i = 0; i < kSlots; ++i) free_slots.push_back(i);
  std::list<Sent> open;
  std::map<StatusCode, int> answers;
  int sent = 0;
  int cancelled = 0;
  std::uint64_t next_signal = 1;

  const auto settle = [&](Sent& of) {
    const absl::Status status = of.call->Await();
    ++answers[status.code()];
    EXPECT_EQ(of.call->answers(), 1);
    // A cancelled call may be running still: its slot is used again only once that is over.
    if (status.ok()) {
      EXPECT_TRUE(Product(of.slot).Right(of.number)) << of.slot;
    } else {
      EXPECT_TRUE(status.code() == StatusCode::kAborted || status.code() == StatusCode::kCancelled) << status;
      EXPECT_TRUE(status.code() == StatusCode::kAborted || of.cancelled) << status;
    }
  };
  while (sent < kCalls || !open.empty()) {
    const Clock::time_point now = Clock::now();
    for (auto each = open.begin(); each != open.end();) {
      if (!each->cancelled && now >= each->cancel_at) {
        each->cancelled = true;
        ++cancelled;
        each->call->Cancel();
      }
      if (!each->call->Answered()) {
        ++each;
        continue;
      }
      settle(*each);
      if (!each->cancelled) free_slots.push_back(each->slot);
      each = open.erase(each);
    }
    if (free_slots.empty() && open.empty()) {
      ExpectIdle();
      for (int i = 0; i < kSlots; ++i) free_slots.push_back(i);
    }
    if (sent == kCalls || free_slots.empty()) {
      // Whoever waits for what was cancelled out of turn, or for a signal beyond the last, is let go.
      if (below(20) == 0) {
        for (const std::string& each : timelines) EXPECT_TRUE(order_->Signal(each, next_signal + 8).ok());
      }
      std::this_thread::sleep_for(100us);
      continue;
    }
    // An error stays on its timeline: a new one now and then, so that not all waits meet one.
    if (sent % 10 == 0) timelines.push_back(order_->CreateTimeline().value());
    const std::string& timeline = timelines.back();
    Sent& one = open.emplace_back();
    one.slot = free_slots.front();
    free_slots.pop_front();
    one.number = random();
    ExactProduct product = Product(one.slot);
    product.Fill(one.number);
    client::OrderSpec order{.stream = streams[below(streams.size())]};
    if (below(3) == 0) order.wait.push_back({timeline, next_signal > 4 ? next_signal - below(4) : 0});
    if (below(8) == 0) order.wait.push_back({timeline, next_signal + below(3)});
    if (below(3) == 0) order.signal.push_back({timeline, next_signal++});
    one.cancel_at = below(2) == 0 ? Clock::time_point::max() : now + std::chrono::microseconds(below(3000));
    one.call = std::make_unique<GemmUnderWay>(*raw_, session_->token(), RequestOf(product.spec(), order));
    ++sent;
    if (below(10) == 0) {
      const absl::Status signalled = order_->Signal(timelines.back(), next_signal);
      EXPECT_TRUE(signalled.ok()) << signalled;
    }
    if (below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(below(500)));
  }

  int total = 0;
  for (const auto& [code, count] : answers) total += count;
  EXPECT_EQ(total, kCalls);
  RecordProperty("cancelled", cancelled);
  std::cout << cancelled << " cancelled;";
  for (const auto& [code, count] : answers) std::cout << ' ' << absl::StatusCodeToString(code) << ' ' << count;
  std::cout << std::endl;
  EXPECT_GT(answers[StatusCode::kOk], 0);
  EXPECT_GT(answers[StatusCode::kCancelled], 0) << "no cancel came in time: the test tests nothing";
  ExpectIdle();
  // A call that is cancelled before the daemon has read it never becomes one there.
  EXPECT_TRUE(Eventually(20s, [&] { return Operations() == Answers(); }))
      << Operations() << " operations, " << Answers() << " calls";
  EXPECT_LE(Operations(), kCalls);
  EXPECT_GE(Operations(), answers[StatusCode::kOk] + answers[StatusCode::kAborted]);
  double outcomes = 0;
  for (const char* outcome : {"ok", "failed", "cancelled", "expired", "aborted"}) {
    outcomes += Operations({"outcome=\"" + std::string(outcome) + "\""});
  }
  EXPECT_EQ(outcomes, Operations());
  EXPECT_EQ(Operations({"outcome=\"ok\""}), Launches());
  EXPECT_EQ(Operations({"outcome=\"failed\""}), 0);

  // And all streams work.
  for (const std::string& stream : streams) {
    ExactProduct product = Product(0);
    product.Fill(7);
    const absl::Status status = order_->Gemm(RequestOf(product.spec(), {.stream = stream}));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(product.Right(7));
  }
}

TEST_F(OrderCancelTest, FiftyPastTheirDeadlineBehindALongOne) {
  const std::string stream = order_->OpenStream().value();
  const std::string timeline = order_->CreateTimeline().value();
  GemmUnderWay slow(*raw_, session_->token(),
                    Ordered(ProductOf(kSlowProduct, slow_->id(), slow_->id()), {.stream = stream}));
  ASSERT_TRUE(Eventually(20s, [this] { return Launches() == 1; }));
  std::list<GemmUnderWay> late;
  for (int i = 0; i < 50; ++i) {
    Product(i).Fill(static_cast<std::uint64_t>(i));
    const std::uint64_t value = static_cast<std::uint64_t>(i) + 1;
    late.emplace_back(*raw_, session_->token(),
                      RequestOf(Product(i).spec(), {.stream = stream, .signal = {{timeline, value}}}), 200ms);
  }
  ASSERT_TRUE(Eventually(20s, [&] { return client_->ServerInfo()->in_flight() == 51; }));
  int ran = 0;
  int number = 0;
  for (GemmUnderWay& call : late) {
    const absl::Status status = call.Await();
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kDeadlineExceeded) << status;
    ran += status.ok() ? 1 : 0;
    const ExactProduct product = Product(number);
    EXPECT_TRUE(status.ok() ? product.Right(static_cast<std::uint64_t>(number)) : product.Untouched()) << number;
    ++number;
  }
  EXPECT_FALSE(slow.Answered()) << "the slow product was over before the deadlines: use a larger one";
  EXPECT_LE(ran, 2);
  EXPECT_TRUE(slow.Await().ok());
  ExpectIdle();
  EXPECT_LE(Launches(), 3);
  EXPECT_EQ(Operations(), 51);
  // The daemon may hear of a client that has left before it sees that the deadline is over.
  EXPECT_EQ(Operations({"outcome=\"expired\""}) + Operations({"outcome=\"cancelled\""}), 50 - ran);
  // Their signals came all the same, with the error.
  const auto told = order_->Synchronize(RawOrder::OfPoint(timeline, 50));
  ASSERT_TRUE(told.ok()) << told.status();
  EXPECT_TRUE(told->code() == static_cast<int>(StatusCode::kDeadlineExceeded) ||
              told->code() == static_cast<int>(StatusCode::kCancelled))
      << told->code();
}

}  // namespace
}  // namespace tessera::e2e
