// A daemon whose planner is changed all the time, while clients compute: each change gives a problem that they compute
// another plan, every result is right, no call fails, and replies name the kernels of several plans. A short run by
// default; ten thousand changes under the label soak.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/planner.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/exact_product.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;

constexpr int kClients = 16;
constexpr std::int64_t kM = 24;
constexpr std::int64_t kN = 40;
constexpr std::int64_t kK = 600;  // more than one block of the recipe that splits K
constexpr char kClass[] = "gemm.cpu.bf16_bf16.f32.fast.NT";
constexpr std::array<const char*, 3> kRecipes = {"reference", "splitk_48x48x512", "blocked_96x96x256"};

int ChangesWanted() {
  return std::getenv("TESSERA_SOAK") == nullptr ? 400 : 10'000;
}

class PlannerLiveTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cache_dir", "off"}, {"cpu_threads", "2"}});
  }

  // Until told to stop.
  void ComputeAll(int number) {
    client::Client client = Connect();
    client::Session session = client.OpenSession("live").value();
    const client::Buffer buffer = session.Allocate(ExactProduct::Bytes(kM, kN, kK)).value();
    ExactProduct product(buffer, kM, kN, kK);
    std::set<std::string> variants;
    for (auto i = static_cast<std::uint64_t>(number) << 32U; !stop_.load(); ++i) {
      product.Fill(i);
      const auto result = session.Gemm(product.spec());
      if (!result.ok()) {
        ++failed_;
        ADD_FAILURE() << result.status();
        return;
      }
      if (!product.Right(i)) ++wrong_;
      variants.insert(result->report.variant());
      ++calls_;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    variants_.insert(variants.begin(), variants.end());
  }

  std::atomic<bool> stop_{false};
  std::atomic<int> calls_{0};
  std::atomic<int> wrong_{0};
  std::atomic<int> failed_{0};
  std::mutex mutex_;
  std::set<std::string> variants_;
};

TEST_F(PlannerLiveTest, EveryResultIsRightWhileThePlannerChanges) {
  const client::Client client = Connect();
  const client::Planner planner(client);
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i) clients.emplace_back([this, i] { ComputeAll(i); });
  ASSERT_TRUE(Eventually(30s, [&] { return calls_.load() >= kClients; }));

  const int changes = ChangesWanted();
  std::uint64_t revision = 0;
  int altered = 0;
  for (int i = 0; i < changes && failed_.load() == 0; ++i) {
    v1::SetTableRequest request;
    request.set_text(std::string(kClass) + " -> " + kRecipes[static_cast<std::size_t>(i) % kRecipes.size()] + "\n");
    v1::GemmShape& shape = *request.mutable_options()->add_probes()->mutable_gemm();
    shape.set_d(v1::DTYPE_F32);
    shape.set_m(kM);
    shape.set_n(kN);
    shape.set_k(kK);
    const auto reply = planner.SetTable(request);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_GT(reply->new_revision(), revision);
    revision = reply->new_revision();
    altered += reply->probes_changed() > 0 ? 1 : 0;
  }
  const int during = calls_.load();
  stop_.store(true);
  for (std::thread& each : clients) each.join();
  EXPECT_EQ(altered, changes);
  EXPECT_EQ(wrong_.load(), 0);
  EXPECT_EQ(failed_.load(), 0);
  EXPECT_GE(variants_.size(), 3U);
  EXPECT_GE(during, changes / 10) << "the clients hardly computed";
  RecordProperty("calls", calls_.load());
  std::printf("%d changes, %d calls of %d clients, %zu variants\n", changes, calls_.load(), kClients, variants_.size());
}

}  // namespace
}  // namespace tessera::e2e
