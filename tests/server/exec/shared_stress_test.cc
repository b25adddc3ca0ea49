// Many clients on one executor and one session table, without gRPC: sessions that come and go under their own work,
// buffers released while kernels use them, a drain in the middle. Meant for ThreadSanitizer as much as for its checks.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "server/exec/cpu_device.h"
#include "server/exec/executor.h"
#include "tests/oracle/codec.h"
#include "tests/server/exec/bound_memory.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using namespace std::chrono_literals;

constexpr std::int64_t kK = 24;
// M = N: small enough for the caller, and large enough for the device's threads.
constexpr std::int64_t kExtents[] = {8, 40};
constexpr std::uint64_t kOperandBytes = 4096;

double ValueA(std::int64_t i) {
  return static_cast<double>(i % 7 - 3);
}
double ValueB(std::int64_t i) {
  return static_cast<double>(i % 5 - 2);
}

// What all clients share, and the sums that must come out even.
struct World {
  World() {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeCpuDevice({.threads = 3, .workspace_bytes_max = 1 << 24}));
    executor = std::make_unique<Executor>(std::move(devices), std::nullopt,
                                          ExecutorOptions{.queue_max = 64, .queue_per_session_max = 16}, metrics);
  }

  ~World() {
    table.EndAllSessions(SessionEnd::kDrained);
    EXPECT_TRUE(AwaitIdle(reaper));
    executor.reset();
  }

  static std::vector<std::string> CatalogueIds() {
    std::vector<std::string> ids;
    for (const kernels::GemmVariant& variant : kernels::GemmVariants()) ids.emplace_back(variant.info.id);
    return ids;
  }

  bool Shows(const std::string& line) const {
    return ("\n" + metrics.Serialize()).find("\n" + line + "\n") != std::string::npos;
  }

  // Operations that were computed, as the metric counts them: before their session can see it.
  int Finished() const {
    const std::string text = metrics.Serialize();
    const std::string name = "tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"ok\"} ";
    return std::stoi(text.substr(text.find(name) + name.size()));
  }

  void ExpectQuiet() {
    EXPECT_TRUE(executor->AwaitIdle(60s));
    EXPECT_TRUE(AwaitIdle(reaper));
    EXPECT_EQ(submitted, answered);
    EXPECT_EQ(wrong, 0);
    const SessionCounts counts = table.Counts();
    EXPECT_EQ(counts.sessions, 0U);
    EXPECT_EQ(counts.ending, 0U);
    EXPECT_EQ(counts.buffers, 0U);
    EXPECT_EQ(counts.bytes_held, 0U);
    EXPECT_TRUE(Shows("tessera_in_flight 0"));
    EXPECT_TRUE(Shows("tessera_queue_depth 0"));
    EXPECT_TRUE(Shows("tessera_buffer_bytes{origin=\"allocated\"} 0"));
  }

  Metrics metrics{MetricsOptions{.version = "test", .variants = CatalogueIds()}};
  Reaper reaper{10s, metrics};
  std::unique_ptr<Executor> executor;
  SessionTable table{1,
                     {.sessions_max = 99,
                      .leases_max = 99,
                      .buffers_per_session_max = 99,
                      .buffer_bytes_max = 1U << 24U,
                      .session_buffer_bytes_max = 1U << 24U},
                     metrics,
                     reaper,
                     [this](const StreamSpec& spec) { return executor->MakeLane(spec); }};

  std::atomic<int> submitted{0};
  std::atomic<int> answered{0};
  std::atomic<int> computed{0};
  std::atomic<int> dropped{0};  // cancelled with their session, or refused by a queue or the drain
  std::atomic<int> wrong{0};    // results or codes that must not be
};

// One process: a session at a time, with memory of its own for every operation.
class Client {
 public:
  Client(World& world, std::uint32_t seed) : world_(world), random_(seed) {}

  void RunSession() {
    const auto lease = world_.table.OpenLease(kTestPeer);
    ASSERT_TRUE(lease.ok()) << lease.status();
    const auto token = world_.table.OpenSession(kTestPeer, *lease, "stress");
    ASSERT_TRUE(token.ok()) << token.status();
    session_ = *world_.table.FindSession(kTestPeer, *token);
    const int operations = Below(20);
    for (int i = 0; i < operations; ++i) SubmitOne();
    // The session ends with whatever of it is still on the way.
    if (Below(2) == 0) world_.table.EndSession(*token, SessionEnd::kClosed).status().IgnoreError();
    world_.table.CloseLease(*lease);
    session_.reset();
  }

 private:
  int Below(int end) { return std::uniform_int_distribution<int>(0, end - 1)(random_); }

  void SubmitOne() {
    const std::int64_t extent = kExtents[Below(2)];
    std::array<Id, 3> ids;
    std::array<BufferPin, 3> pins;  // to fill, and to look at D when the session may be gone
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::uint64_t bytes = i == 2 ? 4 * kOperandBytes : kOperandBytes;
      absl::StatusOr<SessionTable::NewBuffer> buffer = absl::UnknownError("");
      // Memory of sessions that ended counts until the reaper has had its turn.
      ASSERT_TRUE(Eventually([&] {
        buffer = world_.table.AllocateBuffer(*session_, bytes);
        return buffer.status().code() != StatusCode::kResourceExhausted;
      }));
      ASSERT_TRUE(buffer.ok()) << buffer.status();
      ids[i] = buffer->id;
      pins[i] = *world_.table.PinBuffer(*session_, ids[i], BufferAccess::kReadWrite);
    }
    for (std::int64_t i = 0; i < extent * kK; ++i) {
      oracle::Encode(DType::kBf16, ValueA(i), pins[0]->data() + 2 * i);
      oracle::Encode(DType::kBf16, ValueB(i), pins[1]->data() + 2 * i);
    }
    GemmCall call;
    call.a = BufferView("op.a", ids[0], DType::kBf16, {extent, kK});
    call.b = BufferView("op.b", ids[1], DType::kBf16, {extent, kK});
    call.d = BufferView("op.d", ids[2], DType::kF32, {extent, extent});
    auto bound = BindGemm(call, {.sessions = &world_.table,
                                 .session = session_.get(),
                                 .inline_result = nullptr,
                                 .inline_bytes_max = 0,
                                 .metrics = &world_.metrics});
    ASSERT_TRUE(bound.ok()) << bound.status();
    Submission operation{.session = session_};
    operation.ops.push_back(*std::move(bound));
    operation.still_wanted = [] { return absl::OkStatus(); };
    auto d = std::make_shared<BufferPin>(std::move(pins[2]));
    operation.done = [&world = world_, d = std::move(d), extent](const absl::Status& status,
                                                                 std::span<const OperationReport>) {
      Judge(world, status, *d, extent);
    };
    ++world_.submitted;
    world_.executor->Submit(std::move(operation));
    // Released while in use, half of the time.
    for (const Id& id : ids) {
      if (Below(2) == 1) continue;
      EXPECT_TRUE(world_.table.ReleaseBuffer(*session_, id).ok());
    }
  }

  static void Judge(World& world, const absl::Status& status, const BufferPin& d, std::int64_t extent) {
    ++world.answered;
    switch (status.code()) {
      case StatusCode::kOk:
        ++world.computed;
        if (!Right(d, extent)) ++world.wrong;
        return;
      case StatusCode::kCancelled:
      case StatusCode::kResourceExhausted:
      case StatusCode::kUnavailable:
        ++world.dropped;
        return;
      default:
        ++world.wrong;
    }
  }

  static bool Right(const BufferPin& d, std::int64_t extent) {
    for (std::int64_t m = 0; m < extent; ++m) {
      const std::int64_t n = (m * 5 + 3) % extent;  // one element a row: the check must not hide the races behind it
      double sum = 0;
      for (std::int64_t k = 0; k < kK; ++k) sum += ValueA(m * kK + k) * ValueB(n * kK + k);
      if (oracle::Decode(DType::kF32, d->data() + 4 * (m * extent + n)) != sum) return false;
    }
    return true;
  }

  World& world_;
  std::minstd_rand random_;
  std::shared_ptr<Session> session_;
};

// Looks at everything that can be looked at until it is destroyed.
class Observer {
 public:
  explicit Observer(World& world)
      : thread_([this, &world] {
          while (!stop_.load()) {
            world.table.Counts();
            for (const BufferRow& row : world.table.ListBuffers([](const Peer&) { return true; }).rows) {
              if (row.bytes == 0 || row.session_label != "stress") ++world.wrong;
            }
            if (world.executor->Backends().empty() || world.executor->in_flight() > 64) ++world.wrong;
            if (world.metrics.Serialize().empty()) ++world.wrong;
          }
        }) {}
  ~Observer() {
    stop_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

constexpr std::uint32_t kSeed = 20'240'911;
constexpr int kClients = 4;

TEST(SharedStressTest, SessionsComeAndGoUnderTheirWork) {
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  World world;
  {
    const Observer observer(world);
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < kClients; ++t) {
      threads.emplace_back([&world, t] {
        Client client(world, kSeed + t);
        for (int i = 0; i < 60 && !testing::Test::HasFailure(); ++i) client.RunSession();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  world.ExpectQuiet();
  EXPECT_GT(world.computed, 100);  // how many are dropped with their sessions is up to the machine
}

TEST(SharedStressTest, ADrainInTheMiddleAnswersEverybody) {
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  World world;
  {
    const Observer observer(world);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < kClients; ++t) {
      threads.emplace_back([&, t] {
        Client client(world, kSeed + 100 + t);
        while (!stop.load() && !testing::Test::HasFailure()) client.RunSession();
      });
    }
    const auto patience = std::chrono::steady_clock::now() + 60s;
    while (world.computed < 200 && std::chrono::steady_clock::now() < patience) std::this_thread::sleep_for(1ms);
    world.executor->StopAccepting();
    EXPECT_TRUE(world.executor->AwaitIdle(60s));
    const int before = world.Finished();
    const int answered = world.answered;
    while (world.answered < answered + 50 && std::chrono::steady_clock::now() < patience) {
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_EQ(world.Finished(), before) << "nothing runs after the drain";
    stop.store(true);
    for (std::thread& thread : threads) thread.join();
  }
  world.ExpectQuiet();
  EXPECT_GE(world.dropped, 50);
}

}  // namespace
}  // namespace tessera::server
