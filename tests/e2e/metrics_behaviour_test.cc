// What /metrics shows over the life of a daemon: the same series with the same labels whatever has happened, however
// many clients came and went.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using workload::MemoryOwner;
using workload::SharedProblem;

// The samples of a scrape without their values: name{label="value",...}.
std::set<std::string> SeriesOf(const std::string& metrics) {
  std::set<std::string> series;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.front() == '#') continue;
    EXPECT_TRUE(series.insert(line.substr(0, line.rfind(' '))).second) << "twice: " << line;
  }
  return series;
}

// Name of a metric -> the lists of label names that its series have, such as "code,method".
std::map<std::string, std::set<std::string>> LabelNamesOf(const std::set<std::string>& series) {
  std::map<std::string, std::set<std::string>> names;
  for (const std::string& one : series) {
    const std::size_t brace = one.find('{');
    std::string labels;
    for (std::size_t at = brace; at != std::string::npos && one[at] != '}';) {
      const std::size_t equals = one.find("=\"", at);
      labels += one.substr(at + 1, equals - at - 1) + ",";
      at = one.find('"', equals + 2);  // values of this daemon hold no quotes
      EXPECT_NE(at, std::string::npos) << one;
      if (at != std::string::npos) ++at;
    }
    names[one.substr(0, brace)].insert(labels);
  }
  return names;
}

class MetricsBehaviourTest : public DaemonFixture {
 protected:
  std::set<std::string> Series() const { return SeriesOf(Metrics()); }

  // Something of everything that a client can make happen: results, refusals, lost leases, side messages, errors.
  void Work() {
    client::Client client = Connect();
    for (int round = 0; round < 3; ++round) {
      client::Session session = client.OpenSession("work").value();
      for (const MemoryOwner owner : {MemoryOwner::kDaemon, MemoryOwner::kClient}) {
        for (const auto& [a, b] : oracle::kGemmPairs) {
          oracle::GemmCase gemm_case{.a = a, .b = b, .m = 4 + round, .n = 9, .k = 20};
          gemm_case.a_scale = oracle::LegalScales(a)[0], gemm_case.b_scale = oracle::LegalScales(b)[0];
          SharedProblem problem = SharedProblem::Make(session, gemm_case, 7, owner).value();
          EXPECT_TRUE(session.Gemm(problem.spec()).ok());
          problem.spec().backend = v1::BACKEND_CUDA;
          EXPECT_FALSE(session.Gemm(problem.spec()).ok());
          problem.spec().d.shape[0] += 1;
          EXPECT_FALSE(session.Gemm(problem.spec()).ok());
        }
      }
      EXPECT_FALSE(session.Allocate(std::uint64_t{1} << 60U).ok());
      if (round == 0) {
        EXPECT_TRUE(session.Close().ok());
      }
    }
    EXPECT_FALSE(client.SetLogLevel("shout").ok());
    EXPECT_TRUE(client.GetConfig().ok());
    EXPECT_EQ(HttpGet(daemon().http_address(), "/nothing").code, 404);
  }
};

TEST_F(MetricsBehaviourTest, SeriesAndLabelsAreTheSameFreshBusyDrainingAndRestarted) {
  const std::set<std::string> fresh = Series();
  const auto label_names = LabelNamesOf(fresh);
  ASSERT_TRUE(label_names.contains("tessera_rpcs_total"));
  EXPECT_EQ(label_names.at("tessera_rpcs_total"), (std::set<std::string>{"code,method,"}));
  EXPECT_EQ(label_names.at("tessera_ready"), (std::set<std::string>{""}));
  EXPECT_EQ(label_names.at("tessera_run_seconds_bucket"), (std::set<std::string>{"backend,op,le,"}));
  for (const auto& [name, lists] : label_names) EXPECT_EQ(lists.size(), 1U) << name << ": more than one set of labels";

  Work();
  EXPECT_EQ(Series(), fresh);
  daemon().RequestDrain();
  EXPECT_EQ(Series(), fresh);
  // Also with other settings: what a dashboard finds does not depend on how the daemon was started.
  StartDaemon({{"cpu_threads", "1"}, {"backend", "vendor"}, {"sessions_max", "3"}, {"inline_bytes_max", "0"}});
  EXPECT_EQ(Series(), fresh);
  Work();
  EXPECT_EQ(Series(), fresh);
  EXPECT_EQ(LabelNamesOf(Series()), label_names);
}

// ---- Many short clients ----

// A sanitizer's allocator keeps freed memory for a while, so that the size of the process says nothing.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kResidentMemoryTells = false;
#else
constexpr bool kResidentMemoryTells = true;
#endif

struct Extent {
  int clients;
  int scrapes;
};

// The full length is minutes and runs under the label soak.
Extent ExtentOfRun() {
  return std::getenv("TESSERA_SOAK") == nullptr ? Extent{.clients = 300, .scrapes = 50}
                                                : Extent{.clients = 100'000, .scrapes = 1000};
}

class ManyClientsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    daemon_.emplace(std::vector<std::string>{TESSERAD, "--socket", socket(), "--http-address", "127.0.0.1:0",
                                             "--cpu-threads", "1", "--log-level", "warn"});
    ASSERT_TRUE(Eventually(20s, [&] {
      const auto client = Connect();
      if (!client.ok()) return false;
      const v1::ServerInfoReply info = client->ServerInfo().value();
      http_ = info.http_address();
      pid_ = info.pid();
      return true;
    })) << daemon_->Err();
  }

  std::string socket() const { return directory_.File("d.sock"); }
  absl::StatusOr<client::Client> Connect() const {
    return client::Client::Connect({.socket = socket(), .side_channel = {}, .timeout = 10s});
  }

  // Connects, opens a session, computes one product of a shape that only this number has, and goes.
  void RunClient(int number) const {
    auto client = Connect();
    ASSERT_TRUE(client.ok()) << client.status();
    auto session = client->OpenSession("client " + std::to_string(number));
    ASSERT_TRUE(session.ok()) << session.status();
    const std::int64_t m = 1 + number % 8;
    const std::int64_t n = 1 + number / 8 % 8;
    const std::int64_t k = 1 + number / 64;
    const auto buffer = session->Allocate(static_cast<std::uint64_t>(2 * k + 4 * m * n + 4));
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    const auto rows = [&](std::int64_t count) { return buffer->Tensor(DType::kBf16, {count, k}, 0, {0, 1}); };
    const auto d_at = static_cast<std::uint64_t>(2 * k + 3) / 4 * 4;
    const auto result = session->Gemm({.a = rows(m), .b = rows(n), .d = buffer->Tensor(DType::kF32, {m, n}, d_at)});
    ASSERT_TRUE(result.ok()) << result.status();
  }

  std::string Scrape() const { return HttpGet(http_, "/metrics").body; }

  // Of the daemon, once everything of former clients is gone: their connections close a little after them.
  std::int64_t ResidentBytesAtRest() const {
    EXPECT_TRUE(Eventually(20s, [this] {
      const std::string metrics = Scrape();
      return MetricSum(metrics, "tessera_sessions") == 0 && MetricSum(metrics, "tessera_side_connections") == 0 &&
             MetricSum(metrics, "tessera_buffer_bytes") == 0;
    }));
    std::int64_t pages = 0;
    std::ifstream("/proc/" + std::to_string(pid_) + "/statm") >> pages >> pages;
    return pages * ::sysconf(_SC_PAGESIZE);
  }

  const TemporaryDirectory directory_;
  std::optional<ChildProcess> daemon_;
  std::string http_;
  int pid_ = 0;
};

TEST_F(ManyClientsTest, SeriesAndMemoryStayBounded) {
  constexpr std::int64_t kAllowed = std::int64_t{4} << 20;
  constexpr int kWarmUp = 100;
  const Extent extent = ExtentOfRun();
  int number = 0;
  for (; number < kWarmUp && !HasFatalFailure(); ++number) RunClient(number);
  for (int i = 0; i < kWarmUp; ++i) Scrape();
  const std::set<std::string> series = SeriesOf(Scrape());
  ASSERT_GT(series.size(), 100U);
  const std::int64_t resident = ResidentBytesAtRest();
  ASSERT_GT(resident, 0);

  for (; number < kWarmUp + extent.clients && !HasFatalFailure(); ++number) RunClient(number);
  const std::int64_t after_clients = ResidentBytesAtRest();
  for (int i = 0; i < extent.scrapes; ++i) EXPECT_EQ(SeriesOf(Scrape()), series);
  const std::int64_t after_scrapes = ResidentBytesAtRest();
  RecordProperty("grown_by_clients", std::to_string(after_clients - resident));
  RecordProperty("grown_by_scrapes", std::to_string(after_scrapes - after_clients));
  if (kResidentMemoryTells) {
    EXPECT_LT(after_clients - resident, kAllowed) << "from " << resident << " by " << extent.clients << " clients";
    EXPECT_LT(after_scrapes - after_clients, kAllowed) << "from " << after_clients << " by scrapes";
  }
  EXPECT_EQ(MetricSum(Scrape(), "tessera_operations_total", {"outcome=\"ok\""}), number);
  EXPECT_EQ(MetricSum(Scrape(), "tessera_session_ends_total"), number);
}

}  // namespace
}  // namespace tessera::e2e
