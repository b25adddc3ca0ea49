// Planner.WatchDecisions: what is shown, and that a watcher who does not read costs nobody anything.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/planner.h"
#include "tessera/v1/planner.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/inline_problem.h"

namespace tessera::e2e {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

class PlannerWatchTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cache_dir", "off"}, {"planner_watchers_max", "3"}});
  }

  static void Compute(const client::Client& client, std::int64_t m, std::int64_t n, std::int64_t k) {
    InlineProblem problem(m, n, k);
    client::Client& mutable_client = const_cast<client::Client&>(client);
    const auto result = mutable_client.Gemm(problem.spec());
    ASSERT_TRUE(result.ok()) << result.status();
    problem.ExpectRight();
  }

  double Watchers() const { return MetricSum(Metrics(), "tessera_planner_watchers"); }
};

// A watch whose messages a thread collects.
class Watcher {
 public:
  Watcher(const client::Client& client, v1::WatchDecisionsRequest request)
      : thread_([this, planner = client::Planner(client), request = std::move(request)] {
          status_ = planner.WatchDecisions(request, [this](const v1::WatchDecisionsReply& reply) {
            const std::lock_guard<std::mutex> lock(mutex_);
            begun_ = true;
            lost_ = reply.lost();
            decisions_.insert(decisions_.end(), reply.decisions().begin(), reply.decisions().end());
            return !stop_;
          });
        }) {
    EXPECT_TRUE(Eventually(10s, [this] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return begun_;
    }));
  }
  ~Watcher() {
    if (thread_.joinable()) thread_.join();
  }

  std::vector<v1::Decision> decisions() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return decisions_;
  }
  bool Saw(std::size_t count) {
    return Eventually(10s, [&] { return decisions().size() >= count; });
  }
  // Ends with the next message.
  void Stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  absl::Status Join() {
    thread_.join();
    return status_;
  }

 private:
  std::mutex mutex_;
  bool begun_ = false;
  bool stop_ = false;
  std::uint64_t lost_ = 0;
  std::vector<v1::Decision> decisions_;
  absl::Status status_;
  std::thread thread_;
};

TEST_F(PlannerWatchTest, ShowsEachProblemOnceAndAgainAfterAChange) {
  const client::Client client = Connect();
  Watcher watcher(client, {});
  for (int i = 0; i < 3; ++i) Compute(client, 24, 40, 96);
  Compute(client, 25, 40, 96);
  ASSERT_TRUE(watcher.Saw(2));
  const client::Planner planner(client);
  v1::SetTableRequest table;
  table.set_text("gemm.cpu.bf16_bf16.f32.fast.NT -> reference\n");
  const auto changed = planner.SetTable(table);
  ASSERT_TRUE(changed.ok()) << changed.status();
  Compute(client, 24, 40, 96);
  ASSERT_TRUE(watcher.Saw(3));
  const std::vector<v1::Decision> seen = watcher.decisions();
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].family(), "gemm");
  EXPECT_THAT(seen[0].problem(), HasSubstr("bf16_bf16.f32.fast.NT"));
  EXPECT_THAT(seen[0].problem(), HasSubstr("m=24"));
  EXPECT_EQ(seen[0].plan().source(), "degraded");
  EXPECT_FALSE(seen[0].cached());
  EXPECT_THAT(seen[1].problem(), HasSubstr("m=25"));
  EXPECT_EQ(seen[2].plan().source(), "override");
  EXPECT_EQ(seen[2].revision(), changed->new_revision());
  EXPECT_EQ(Watchers(), 1);
  watcher.Stop();
  Compute(client, 26, 40, 96);
  EXPECT_TRUE(watcher.Join().ok());
  EXPECT_TRUE(Eventually(10s, [&] { return Watchers() == 0; }));
}

TEST_F(PlannerWatchTest, ShowsEveryLaunchAndOnlyTheClassIfAskedTo) {
  const client::Client client = Connect();
  v1::WatchDecisionsRequest every;
  every.set_cached(true);
  every.set_class_prefix("gemm.cpu.bf16_bf16.f32.");
  v1::WatchDecisionsRequest other;
  other.set_cached(true);
  other.set_class_prefix("gemm.cuda.");
  {
    Watcher watcher(client, every);
    Watcher others(client, other);
    for (int i = 0; i < 4; ++i) Compute(client, 24, 40, 96);
    ASSERT_TRUE(watcher.Saw(4));
    EXPECT_FALSE(watcher.decisions()[0].cached());
    EXPECT_TRUE(watcher.decisions()[3].cached());
    EXPECT_TRUE(others.decisions().empty());
    StopDaemon();  // which ends the calls
  }
}

TEST_F(PlannerWatchTest, MoreWatchersThanAllowedAreRefused) {
  const client::Client client = Connect();
  const client::Planner planner(client);
  {
    Watcher first(client, {});
    Watcher second(client, {});
    Watcher third(client, {});
    const absl::Status fourth = planner.WatchDecisions({}, [](const v1::WatchDecisionsReply&) { return true; });
    EXPECT_EQ(fourth.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(fourth.message()), HasSubstr("planner_watchers_max"));
    v1::WatchDecisionsRequest huge;
    huge.set_buffer(70'000);
    EXPECT_EQ(planner.WatchDecisions(huge, [](const v1::WatchDecisionsReply&) { return true; }).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(MetricSum(Metrics(), "tessera_refused_total", {R"(limit="planner_watchers_max")"}), 1);
    StopDaemon();
  }
}

// It reads one message and no more: its decisions pile up in the daemon, beyond what the connection takes.
TEST_F(PlannerWatchTest, ASlowWatcherLosesEntriesAndNobodyWaitsForIt) {
  const client::Client client = Connect();
  const client::Client watching = Connect();
  const auto stub = v1::Planner::NewStub(watching.channel());
  grpc::ClientContext context;
  v1::WatchDecisionsRequest request;
  request.set_cached(true);
  request.set_buffer(16);
  const auto reader = stub->WatchDecisions(&context, request);
  v1::WatchDecisionsReply reply;
  ASSERT_TRUE(reader->Read(&reply));
  EXPECT_EQ(reply.decisions_size(), 0);

  int calls = 0;
  const auto lost = [&] { return MetricSum(Metrics(), "tessera_planner_watch_lost_total"); };
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  InlineProblem problem(3, 3, 3);
  client::Client& computing = const_cast<client::Client&>(client);
  while (std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < 500; ++i, ++calls) ASSERT_TRUE(computing.Gemm(problem.spec()).ok());
    if (lost() > 0) break;
  }
  EXPECT_GT(lost(), 0);
  problem.ExpectRight();
  EXPECT_EQ(client::Planner(client).State()->watch_entries_lost(), static_cast<std::uint64_t>(lost()));

  // Once it reads again, it is told how many are missing, and sees what comes from then on.
  std::uint64_t told = 0;
  std::uint64_t seen = 0;
  std::thread caller([&] {
    for (int i = 0; i < 200; ++i) Compute(client, 4, 4, 4);
  });
  while (told == 0 && reader->Read(&reply)) {
    told = reply.lost();
    seen += static_cast<std::uint64_t>(reply.decisions_size());
  }
  caller.join();
  EXPECT_GT(told, 0U);
  EXPECT_GT(seen, 0U);
  context.TryCancel();
  while (reader->Read(&reply)) continue;
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

}  // namespace
}  // namespace tessera::e2e
