// The end of a daemon as its clients see it: killed, with a new one on the same socket, and terminated in the middle of
// their work.

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "client/gemm_stream.h"
#include "common/unique_fd.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/exact_product.h"
#include "tests/oracle/codec.h"
#include "tests/server/session/posix_fixtures.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;
using ::testing::Not;
using Result = absl::StatusOr<client::GemmResult>;

// ---- Killed ----

// A product of which a few keep a daemon of one thread busy for a second.
constexpr std::int64_t kLongExtent = 512;
constexpr std::int64_t kLongTerms = kSanitized ? 512 : 4096;
constexpr int kOnTheWay = 24;  // of one client

// Of one client: a session with memory of the client's and of the daemon's, and calls on the way.
class Tenant {
 public:
  explicit Tenant(client::Client client)
      : client_(std::move(client)),
        session_(client_.OpenSession("tenant").value()),
        shared_(session_->Share(2 * kLongTerms * kLongExtent * 2 + kLongExtent * kLongExtent * 4).value()),
        allocated_(session_->Allocate(1 << 20).value()) {}

  client::Client& client() { return client_; }
  client::Session& session() { return *session_; }
  const client::Buffer& shared() const { return *shared_; }
  const client::Buffer& allocated() const { return *allocated_; }

  client::GemmSpec LongSpec() const {
    const auto operand = [this](std::uint64_t at) {
      return shared_->Tensor(DType::kBf16, {kLongExtent, kLongTerms}, at);
    };
    constexpr std::uint64_t kOperandBytes = 2 * kLongTerms * kLongExtent;
    return {.a = operand(0),
            .b = operand(kOperandBytes),
            .d = shared_->Tensor(DType::kF32, {kLongExtent, kLongExtent}, 2 * kOperandBytes)};
  }

  void SendCalls() {
    for (int i = 0; i < kOnTheWay; ++i) answers_.push_back(session_->GemmAsync(LongSpec()));
  }
  void SendStream() {
    stream_.emplace(session_->OpenStream());
    for (int i = 0; i < kOnTheWay; ++i) answers_.push_back(stream_->Gemm(LongSpec()));
  }

  // Every call is answered: with a result if it was there before the kill, else as nothing was.
  int ExpectCutOff() {
    int cut_off = 0;
    for (auto& answer : answers_) {
      EXPECT_EQ(answer.wait_for(20s), std::future_status::ready) << "a call without an answer";
      const Result result = answer.get();
      if (result.ok()) continue;
      EXPECT_EQ(result.status().code(), StatusCode::kUnavailable) << result.status();
      ++cut_off;
    }
    answers_.clear();
    if (stream_.has_value()) {
      EXPECT_EQ(stream_->Finish().code(), StatusCode::kUnavailable);
    }
    stream_.reset();
    return cut_off;
  }

 private:
  client::Client client_;
  std::optional<client::Session> session_;
  std::optional<client::Buffer> shared_;
  std::optional<client::Buffer> allocated_;
  std::optional<client::GemmStream> stream_;
  std::vector<std::future<Result>> answers_;
};

void ExpectOfAFormerDaemon(const absl::Status& status) {
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(Text(status), HasSubstr("former daemon process"));
}

class RestartTest : public ::testing::Test {
 protected:
  DaemonProcess daemon_{TESSERAD, {"--cpu-threads", "1", "--log-level", "info"}};
};

TEST_F(RestartTest, ClientsOfAKilledDaemonGoOnWithTheNextOne) {
  client::Client client = daemon_.Connect().value();  // the same through all that follows
  const UniqueFd memfd = server::MakeMemfd(ExactProduct::Bytes(24, 24, 64));
  std::optional<client::Session> session(client.OpenSession("survivor").value());
  std::optional<client::Buffer> mine(session->Import(memfd.get()).value());
  std::optional<ExactProduct> product(std::in_place, *mine, 24, 24, 64);

  for (std::uint64_t life = 1; life <= 3; ++life) {
    SCOPED_TRACE("life " + std::to_string(life));
    product->Fill(life);
    ASSERT_TRUE(session->Gemm(product->spec()).ok());
    ASSERT_TRUE(product->Right(life));
    Tenant calling(daemon_.Connect().value());
    Tenant streaming(daemon_.Connect().value());
    const Tenant idle(daemon_.Connect().value());
    calling.SendCalls();
    streaming.SendStream();
    ASSERT_TRUE(Eventually(20s, [&] { return client.ServerInfo().value().in_flight() > kOnTheWay; }));
    daemon_.child().Signal(SIGKILL);
    ASSERT_EQ(daemon_.child().Wait(), -SIGKILL);
    const int cut_off = calling.ExpectCutOff() + streaming.ExpectCutOff();
    EXPECT_GT(cut_off, 0) << "all calls were over before the kill: use larger products";
    EXPECT_EQ(session->Gemm(product->spec()).status().code(), StatusCode::kUnavailable) << "with no daemon there";

    daemon_.StartAgain();
    // Until its channel has connected again, a client is answered UNAVAILABLE.
    absl::Status old_token;
    ASSERT_TRUE(Eventually(30s, [&] {
      old_token = session->Gemm(product->spec()).status();
      return old_token.code() != StatusCode::kUnavailable;
    }));
    ExpectOfAFormerDaemon(old_token);
    ExpectOfAFormerDaemon(session->Close());
    EXPECT_EQ(session->Share(4096).status().code(), StatusCode::kUnavailable) << "its side channel has ended";

    std::optional<client::Session> next(client.OpenSession("survivor").value());
    ExpectOfAFormerDaemon(next->Gemm(product->spec()).status());  // the old buffer's id
    // What was computed before is still there, in memory of this process, and that is shared anew.
    EXPECT_TRUE(product->Right(life));
    std::optional<client::Buffer> again(next->Import(memfd.get()).value());
    ExactProduct same(*again, 24, 24, 64);
    EXPECT_TRUE(same.Right(life)) << "the data did not survive";
    std::memset(same.spec().d.data, 0, 4 * static_cast<std::size_t>(same.spec().d.elements()));
    ASSERT_TRUE(next->Gemm(same.spec()).ok());  // from operands that the former daemon was given
    EXPECT_TRUE(same.Right(life));
    EXPECT_TRUE(product->Right(life)) << "another mapping of the same memory";
    ExpectOfAFormerDaemon(mine->Release());

    product.emplace(*again, 24, 24, 64);
    mine = std::move(again);
    session = std::move(next);
    EXPECT_EQ(client.ServerInfo().value().sessions(), 1U) << "sessions of the former daemon";
  }
}

// ---- Terminated ----

constexpr int kClients = 8;
constexpr int kWindow = 16;  // calls of one client that are on the way together
constexpr std::int64_t kExtent = 128;
constexpr std::int64_t kTerms = kSanitized ? 512 : 8192;

// One product whose D is the client's own: all of it is `number` times kTerms once the product is done.
class Slot {
 public:
  Slot(const client::Buffer& buffer, std::uint64_t index)
      : a_(buffer.Tensor(DType::kBf16, {kExtent, kTerms}, index * kBytes, {0, 1})),
        b_(buffer.Tensor(DType::kBf16, {kExtent, kTerms}, index * kBytes + 2 * kTerms, {0, 1})),
        d_(buffer.Tensor(DType::kF32, {kExtent, kExtent}, index * kBytes + 4 * kTerms)) {
    for (std::int64_t i = 0; i < kTerms; ++i) oracle::Encode(DType::kBf16, 1, b_.data + 2 * i);
  }

  static constexpr std::uint64_t kBytes = 4 * kTerms + 4 * kExtent * kExtent;

  client::GemmSpec Begin(int number) {
    number_ = 1 + number % 255;  // exact in bf16, as the sums are in f32
    for (std::int64_t i = 0; i < kTerms; ++i) oracle::Encode(DType::kBf16, number_, a_.data + 2 * i);
    std::memset(d_.data, kUntouched, 4 * kExtent * kExtent);
    return {.a = a_, .b = b_, .d = d_};
  }
  bool Right() const {
    const auto expected = static_cast<double>(number_ * kTerms);
    for (std::int64_t i = 0; i < kExtent * kExtent; ++i) {
      if (oracle::Decode(DType::kF32, d_.data + 4 * i) != expected) return false;
    }
    return true;
  }
  bool Untouched() const {
    for (std::int64_t i = 0; i < 4 * kExtent * kExtent; ++i) {
      if (d_.data[i] != static_cast<std::byte>(kUntouched)) return false;
    }
    return true;
  }

 private:
  static constexpr int kUntouched = 0x7b;
  client::TensorView a_, b_, d_;
  std::int64_t number_ = 0;
};

// Sends products without a pause until the daemon turns it away, and goes on sending until the daemon is gone.
class Worker {
 public:
  Worker(const DaemonProcess& daemon, bool streams)
      : client_(daemon.Connect().value()),
        session_(client_.OpenSession(streams ? "streaming" : "calling").value()),
        buffer_(session_.Share((kWindow + 1) * Slot::kBytes).value()),
        http_(daemon.http_address()) {
    for (std::uint64_t i = 0; i < kWindow; ++i) slots_.emplace_back(buffer_, i);
    if (streams) stream_.emplace(session_.OpenStream());
    thread_ = std::thread([this] {
      Work();
      SendLate();
    });
  }

  void DaemonIsGone() { gone_.store(true); }
  void Join() { thread_.join(); }

  // After Join. What was accepted is done and right; what was not is left alone, now that nothing runs any more.
  void ExpectAllAccountedFor() const {
    SCOPED_TRACE(stream_.has_value() ? "a client that streams" : "a client that calls");
    EXPECT_GT(right_, 0);
    EXPECT_EQ(wrong_, 0) << "answers OK whose results are not there";
    ASSERT_FALSE(refused_.empty()) << "it was never turned away";
    for (const auto& [status, slot] : refused_) {
      EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
      EXPECT_TRUE(slot->Untouched()) << "refused, and yet computed: " << status;
    }
    EXPECT_GT(late_, 0);
    EXPECT_EQ(late_otherwise_, "");
    EXPECT_TRUE(late_slot_.Untouched());
    EXPECT_NE(ready_at_refusal_, 200) << "turned away while the daemon said that it was ready";
  }

  // After Join.
  bool WasToldWhy() const {
    return std::any_of(refused_.begin(), refused_.end(),
                       [](const auto& refusal) { return Text(refusal.first).find("draining") != std::string::npos; });
  }
  Clock::time_point first_refusal() const { return *first_refusal_; }  // after Join

 private:
  struct OnTheWay {
    Slot* slot;
    std::future<Result> answer;
  };

  std::future<Result> Send(const client::GemmSpec& spec) {
    return stream_.has_value() ? stream_->Gemm(spec) : session_.GemmAsync(spec);
  }

  void Work() {
    std::list<OnTheWay> calls;
    int number = 0;
    for (Slot& slot : slots_) calls.push_back({&slot, Send(slot.Begin(number++))});
    while (!calls.empty()) {
      OnTheWay call = std::move(calls.front());
      calls.pop_front();
      const Result result = call.answer.get();
      if (!result.ok()) {
        if (!first_refusal_.has_value()) Refused();
        refused_.emplace_back(result.status(), call.slot);
        continue;
      }
      ++(call.slot->Right() ? right_ : wrong_);
      if (!first_refusal_.has_value()) calls.push_back({call.slot, Send(call.slot->Begin(number++))});
    }
  }

  void Refused() {
    first_refusal_ = Clock::now();
    ready_at_refusal_ = HttpGet(http_, "/readyz").code;
  }

  void SendLate() {
    const client::GemmSpec spec = late_slot_.Begin(1);
    do {
      const absl::Status status = Send(spec).get().status();
      ++late_;
      if (status.code() != StatusCode::kUnavailable) late_otherwise_ = Text(status);
      std::this_thread::sleep_for(5ms);  // a pace, not a wait
    } while (!gone_.load());
  }

  client::Client client_;
  client::Session session_;
  client::Buffer buffer_;
  const std::string http_;
  std::list<Slot> slots_;
  Slot late_slot_{buffer_, kWindow};
  std::optional<client::GemmStream> stream_;
  std::atomic<bool> gone_{false};
  std::optional<Clock::time_point> first_refusal_;
  int ready_at_refusal_ = 0;
  int right_ = 0;
  int wrong_ = 0;
  int late_ = 0;
  std::string late_otherwise_;  // a late call that was not turned away
  std::vector<std::pair<absl::Status, const Slot*>> refused_;
  std::thread thread_;
};

// Watches how a daemon says that it is, 20 times a second.
class Watcher {
 public:
  struct Sample {
    Clock::time_point start;
    int readyz = 0;  // 0: nobody answered
    int healthz = 0;
    std::optional<bool> serving;  // grpc.health.v1; nullopt: nobody answered
    double not_ok = 0;            // operations that ended in another way; -1: nobody answered
  };

  explicit Watcher(const DaemonProcess& daemon) : client_(daemon.Connect().value()), http_(daemon.http_address()) {
    thread_ = std::thread([this] {
      while (!stop_.load()) {
        Take();
        std::this_thread::sleep_for(50ms);
      }
    });
  }

  std::vector<Sample> Stop() {
    stop_.store(true);
    thread_.join();
    return samples_;
  }
  std::size_t count() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return samples_.size();
  }

 private:
  void Take() {
    Sample sample{.start = Clock::now()};
    sample.readyz = HttpGet(http_, "/readyz").code;
    sample.serving = CheckHealth();
    sample.healthz = HttpGet(http_, "/healthz").code;
    const std::string metrics = HttpGet(http_, "/metrics").body;
    const double all = MetricSum(metrics, "tessera_operations_total");
    sample.not_ok = all < 0 ? -1 : all - MetricSum(metrics, "tessera_operations_total", {"outcome=\"ok\""});
    const std::lock_guard<std::mutex> lock(mutex_);
    samples_.push_back(sample);
  }

  std::optional<bool> CheckHealth() {
    const grpc::Slice empty;  // HealthCheckRequest: the whole server
    const grpc::ByteBuffer request(&empty, 1);
    grpc::ByteBuffer reply;
    grpc::GenericStub stub(client_.channel());
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 20s);
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &reply,
                   [&done](grpc::Status status) { done.set_value(std::move(status)); });
    grpc::Slice bytes;
    if (!done.get_future().get().ok() || !reply.DumpToSingleSlice(&bytes).ok()) return std::nullopt;
    const std::string_view status(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
    return status == std::string_view("\x08\x01", 2);  // field 1: SERVING
  }

  const client::Client client_;
  const std::string http_;
  std::atomic<bool> stop_{false};
  mutable std::mutex mutex_;
  std::vector<Sample> samples_;
  std::thread thread_;
};

TEST_F(RestartTest, SigtermUnderLoadFinishesWhatWasAcceptedAndSaysSoBeforeItRefuses) {
  std::list<Worker> workers;
  for (int i = 0; i < kClients; ++i) workers.emplace_back(daemon_, /*streams=*/i % 2 == 1);
  Watcher watcher(daemon_);
  ASSERT_TRUE(Eventually(30s, [&] {
    return watcher.count() >= 3 &&
           MetricSum(daemon_.Metrics(), "tessera_operations_total", {"outcome=\"ok\""}) > 2 * kClients;
  }));
  const auto terminated = Clock::now();
  daemon_.child().Signal(SIGTERM);
  EXPECT_EQ(daemon_.child().Wait(), 0) << daemon_.child().Err();
  for (Worker& worker : workers) worker.DaemonIsGone();
  for (Worker& worker : workers) worker.Join();
  const std::vector<Watcher::Sample> samples = watcher.Stop();
  for (const Worker& worker : workers) worker.ExpectAllAccountedFor();
  EXPECT_TRUE(std::any_of(workers.begin(), workers.end(), [](const Worker& worker) { return worker.WasToldWhy(); }));
  EXPECT_THAT(daemon_.child().Err(), HasSubstr("draining: "));
  EXPECT_THAT(daemon_.child().Err(), Not(HasSubstr("draining: 0 operations"))) << "no load";

  Clock::time_point first_refusal = Clock::time_point::max();
  for (const Worker& worker : workers) first_refusal = std::min(first_refusal, worker.first_refusal());
  int draining = 0;
  bool dropped = false;
  for (const Watcher::Sample& sample : samples) {
    const bool ready = sample.readyz == 200 || sample.serving == true;
    if (sample.start < terminated && sample.readyz == 200 && sample.serving == true && !dropped) continue;
    // While it drains the daemon lives, and does not become ready again.
    EXPECT_FALSE(ready && dropped) << "ready again";
    EXPECT_FALSE(ready && sample.start > first_refusal) << "ready after somebody was turned away";
    dropped = dropped || sample.readyz == 503;
    draining += sample.readyz == 503 && sample.healthz == 200 && sample.serving == false ? 1 : 0;
    EXPECT_LE(sample.not_ok, 0) << "work that was accepted did not end well";
  }
  EXPECT_GE(draining, 2) << "the drain was over too soon to be seen: use larger products";
}

}  // namespace
}  // namespace tessera::e2e
