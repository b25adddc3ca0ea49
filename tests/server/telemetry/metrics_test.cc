// What a scrape shows: every series at zero before any event, what each verb moves, and that nothing ever adds a
// series.
#include "server/telemetry/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "absl/status/status.h"
#include "server/config/settings.h"

namespace tessera::server {
namespace {

using Samples = std::map<std::string, double>;  // by name and labels, as printed

const MetricsOptions kOptions = {
    .version = "1.2.3", .variants = {"gemm.cpu.a/blocked", "gemm.cpu.a/reference"}, .classes = {"a", "b"}};
const MetricsOptions kGpuOptions = {
    .version = "1.2.3", .variants = {}, .gpu = GpuIdentity{.name = "H", .uuid = "GPU-1", .driver_version = "570"}};

Samples Scrape(const Metrics& metrics) {
  Samples samples;
  std::istringstream lines(metrics.Serialize());
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('#')) continue;
    const std::size_t space = line.rfind(' ');
    EXPECT_TRUE(samples.emplace(line.substr(0, space), std::stod(line.substr(space + 1))).second) << "twice: " << line;
  }
  return samples;
}

// What `act` changed in a new Metrics, process gauges aside.
template <typename Act>
Samples ChangesOf(const Act& act) {
  Metrics metrics(kOptions);
  const Samples before = Scrape(metrics);
  act(metrics);
  Samples changes;
  for (const auto& [name, value] : Scrape(metrics)) {
    EXPECT_TRUE(before.contains(name)) << "new series: " << name;
    if (!name.starts_with("tessera_process_") && value != before.at(name)) changes[name] = value - before.at(name);
  }
  return changes;
}

std::size_t CountOf(const Samples& samples, std::string_view prefix) {
  return static_cast<std::size_t>(std::count_if(samples.begin(), samples.end(),
                                                [&](const auto& sample) { return sample.first.starts_with(prefix); }));
}

TEST(MetricsTest, EverySeriesIsThereAtZeroBeforeAnyEvent) {
  const Samples samples = Scrape(Metrics(kOptions));
  for (const auto& [name, value] : samples) {
    EXPECT_TRUE(name.starts_with("tessera_")) << name;
    if (name.starts_with("tessera_build_info") || name.starts_with("tessera_process_")) {
      EXPECT_GT(value, 0) << name;
    } else {
      EXPECT_EQ(value, 0) << name;
    }
  }
  EXPECT_TRUE(samples.contains("tessera_build_info{version=\"1.2.3\"}"));
  EXPECT_EQ(CountOf(samples, "tessera_rpcs_total{"), 38 * 17);
  EXPECT_EQ(CountOf(samples, "tessera_operations_total{"), 3 * 5);
  EXPECT_EQ(CountOf(samples, "tessera_isolation_mode{"), 3);
  EXPECT_EQ(CountOf(samples, "tessera_buffers{"), 2);
  EXPECT_EQ(CountOf(samples, "tessera_planner_decisions_total{"), 3 * 5);
  EXPECT_EQ(CountOf(samples, "tessera_kernel_launches_total{"), 3);
  EXPECT_EQ(CountOf(samples, "tessera_session_ends_total{"), 6);
  EXPECT_EQ(CountOf(samples, "tessera_leases{"), 3);
  EXPECT_EQ(CountOf(samples, "tessera_side_messages_total{"), 4);
  EXPECT_EQ(CountOf(samples, "tessera_refused_total{"), 19);
  EXPECT_EQ(CountOf(samples, "tessera_rpc_seconds_bucket{"), 38 * 23);
  EXPECT_EQ(CountOf(samples, "tessera_run_seconds_count{"), 3);
  EXPECT_EQ(CountOf(samples, "tessera_gate_seconds_count{"), 1);
  EXPECT_EQ(CountOf(samples, "tessera_gpu_"), 0);
}

TEST(MetricsTest, EverySeriesHasHelpAndType) {
  const std::string text = Metrics(kOptions).Serialize();
  for (const char* line : {"# TYPE tessera_rpcs_total counter\n", "# TYPE tessera_ready gauge\n",
                           "# TYPE tessera_run_seconds histogram\n", "# HELP tessera_ready 1 while"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line;
  }
}

TEST(MetricsTest, CodeTextsAreTheCanonicalNames) {
  for (int code = 0; code <= 16; ++code) {
    EXPECT_EQ(LabelText(static_cast<RpcCode>(code)), absl::StatusCodeToString(static_cast<absl::StatusCode>(code)));
  }
}

TEST(MetricsTest, LimitsAreSettings) {
  std::set<std::string_view> settings;
  for (const SettingRow& row : SettingRows()) settings.insert(row.name);
  for (int limit = 0; limit <= static_cast<int>(Limit::kWorkspaceBytes); ++limit) {
    EXPECT_TRUE(settings.contains(LabelText(static_cast<Limit>(limit)))) << LabelText(static_cast<Limit>(limit));
  }
}

TEST(MetricsTest, RpcFinished) {
  EXPECT_THAT(ChangesOf([](Metrics& metrics) { metrics.RpcFinished(RpcMethod::kComputeGemm, 8, 0.3); }),
              testing::UnorderedElementsAre(
                  testing::Pair("tessera_rpcs_total{code=\"RESOURCE_EXHAUSTED\",method=\"Compute.Gemm\"}", 1),
                  testing::Pair("tessera_rpc_seconds_count{method=\"Compute.Gemm\"}", 1),
                  testing::Pair("tessera_rpc_seconds_sum{method=\"Compute.Gemm\"}", 0.3),
                  testing::Pair("tessera_rpc_seconds_bucket{method=\"Compute.Gemm\",le=\"0.5\"}", 1),
                  testing::Pair("tessera_rpc_seconds_bucket{method=\"Compute.Gemm\",le=\"1\"}", 1),
                  testing::Pair("tessera_rpc_seconds_bucket{method=\"Compute.Gemm\",le=\"2\"}", 1),
                  testing::Pair("tessera_rpc_seconds_bucket{method=\"Compute.Gemm\",le=\"5\"}", 1),
                  testing::Pair("tessera_rpc_seconds_bucket{method=\"Compute.Gemm\",le=\"10\"}", 1),
                  testing::Pair("tessera_rpc_seconds_bucket{method=\"Compute.Gemm\",le=\"+Inf\"}", 1)));
}

TEST(MetricsTest, AnUnknownCodeCountsAsUnknown) {
  for (const int code : {-1, 2, 17, 1'000'000}) {
    const Samples changes =
        ChangesOf([&](Metrics& metrics) { metrics.RpcFinished(RpcMethod::kAdminDrain, code, 0.0); });
    EXPECT_EQ(changes.count("tessera_rpcs_total{code=\"UNKNOWN\",method=\"Admin.Drain\"}"), 1) << code;
  }
}

TEST(MetricsTest, BucketBoundsAreInclusiveAndOddTimesHarmless) {
  Metrics metrics(kOptions);
  for (const double seconds : {1e-6, 2e-6, 10.0, 10.1, -5.0, std::nan("")}) {
    metrics.RpcFinished(RpcMethod::kComputeGemm, 0, seconds);
  }
  const Samples samples = Scrape(metrics);
  const std::string prefix = "tessera_rpc_seconds_bucket{method=\"Compute.Gemm\",le=";
  EXPECT_EQ(samples.at(prefix + "\"1e-06\"}"), 3);  // with the negative one and the NaN, which count as 0
  EXPECT_EQ(samples.at(prefix + "\"2e-06\"}"), 4);
  EXPECT_EQ(samples.at(prefix + "\"10\"}"), 5);
  EXPECT_EQ(samples.at(prefix + "\"+Inf\"}"), 6);
  EXPECT_NEAR(samples.at("tessera_rpc_seconds_sum{method=\"Compute.Gemm\"}"), 20.1, 1e-3);
}

TEST(MetricsTest, OneOperationFromAcceptanceToResult) {
  Metrics metrics(kOptions);
  metrics.OperationAccepted();
  EXPECT_EQ(Scrape(metrics)["tessera_in_flight"], 1);
  EXPECT_EQ(Scrape(metrics)["tessera_queue_depth"], 1);
  metrics.OperationLaunched();
  EXPECT_EQ(Scrape(metrics)["tessera_in_flight"], 1);
  EXPECT_EQ(Scrape(metrics)["tessera_queue_depth"], 0);
  metrics.OperationFinished({.backend = kernels::Backend::kCuda,
                             .outcome = OperationOutcome::kOk,
                             .launched = true,
                             .queue_seconds = 0.25,
                             .run_seconds = 0.5,
                             .flops = 1000});
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples["tessera_in_flight"], 0);
  EXPECT_EQ(samples["tessera_queue_depth"], 0);
  EXPECT_EQ(samples["tessera_operations_total{backend=\"cuda\",op=\"gemm\",outcome=\"ok\"}"], 1);
  EXPECT_EQ(samples["tessera_flops_total{backend=\"cuda\",op=\"gemm\"}"], 1000);
  EXPECT_EQ(samples["tessera_device_seconds_total{backend=\"cuda\",op=\"gemm\"}"], 0.5);
  EXPECT_EQ(samples["tessera_run_seconds_sum{backend=\"cuda\",op=\"gemm\"}"], 0.5);
  EXPECT_EQ(samples["tessera_run_seconds_count{backend=\"cpu\",op=\"gemm\"}"], 0);
  EXPECT_EQ(samples["tessera_queue_seconds_sum{op=\"gemm\"}"], 0.25);
}

TEST(MetricsTest, AnOperationThatNeverRanLeavesNoFlopsAndNoRunTime) {
  Metrics metrics(kOptions);
  metrics.OperationAccepted();
  metrics.OperationFinished({.outcome = OperationOutcome::kExpired, .queue_seconds = 2, .run_seconds = 3, .flops = 4});
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples["tessera_in_flight"], 0);
  EXPECT_EQ(samples["tessera_queue_depth"], 0);
  EXPECT_EQ(samples["tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"expired\"}"], 1);
  EXPECT_EQ(samples["tessera_flops_total{backend=\"cpu\",op=\"gemm\"}"], 0);
  EXPECT_EQ(samples["tessera_run_seconds_count{backend=\"cpu\",op=\"gemm\"}"], 0);
  EXPECT_EQ(samples["tessera_queue_seconds_count{op=\"gemm\"}"], 1);
}

TEST(MetricsTest, OperationsHeldBackAndWhatTheyWaitFor) {
  EXPECT_THAT(ChangesOf([](Metrics& metrics) {
                metrics.OperationsGated(5);
                metrics.OperationsUngated(3);
                metrics.GateTime(OpFamily::kGemm, 7);
                metrics.SetSyncs(9, 9);
                metrics.SetSyncs(4, 6);
              }),
              testing::UnorderedElementsAre(testing::Pair("tessera_gated", 2), testing::Pair("tessera_streams", 4),
                                            testing::Pair("tessera_timelines", 6),
                                            testing::Pair("tessera_gate_seconds_count{op=\"gemm\"}", 1),
                                            testing::Pair("tessera_gate_seconds_sum{op=\"gemm\"}", 7),
                                            testing::Pair("tessera_gate_seconds_bucket{op=\"gemm\",le=\"10\"}", 1),
                                            testing::Pair("tessera_gate_seconds_bucket{op=\"gemm\",le=\"+Inf\"}", 1)));
}

TEST(MetricsTest, AnAbortedOperationIsNoneThatFailed) {
  const Samples changes = ChangesOf([](Metrics& metrics) {
    metrics.OperationAccepted();
    metrics.OperationFinished({.outcome = OperationOutcome::kAborted});
  });
  EXPECT_EQ(changes.count("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"aborted\"}"), 1);
  EXPECT_EQ(CountOf(changes, "tessera_operations_total{"), 1);
}

TEST(MetricsTest, SessionsBuffersAndTheSideChannel) {
  EXPECT_THAT(ChangesOf([](Metrics& metrics) {
                metrics.SessionOpened();
                metrics.SessionOpened();
                metrics.SessionEnded(SessionEnd::kLeaseLost);
                metrics.SideConnectionOpened();
                metrics.SideConnectionOpened();
                metrics.SideConnectionClosed();
                metrics.SideMessageReceived(SideMessage::kFetch);
                metrics.BufferAdded(BufferOrigin::kImported, 300);
                metrics.BufferAdded(BufferOrigin::kImported, 20);
                metrics.BufferRemoved(BufferOrigin::kImported, 300);
                metrics.BufferAdded(BufferOrigin::kAllocated, 7);
              }),
              testing::UnorderedElementsAre(testing::Pair("tessera_sessions", 1),
                                            testing::Pair("tessera_session_ends_total{reason=\"lease_lost\"}", 1),
                                            testing::Pair("tessera_side_connections", 1),
                                            testing::Pair("tessera_side_messages_total{kind=\"fetch\"}", 1),
                                            testing::Pair("tessera_buffers{origin=\"imported\"}", 1),
                                            testing::Pair("tessera_buffer_bytes{origin=\"imported\"}", 20),
                                            testing::Pair("tessera_buffers{origin=\"allocated\"}", 1),
                                            testing::Pair("tessera_buffer_bytes{origin=\"allocated\"}", 7)));
}

TEST(MetricsTest, LeasesAndWhatHasNotGone) {
  EXPECT_THAT(ChangesOf([](Metrics& metrics) {
                metrics.LeaseOpened(LeaseKind::kTtl);
                metrics.LeaseOpened(LeaseKind::kAttach);
                metrics.LeaseClosed(LeaseKind::kAttach);
                metrics.SetSessionsEnding(3, 1);
                metrics.SetBufferHeldBytes(4096);
                metrics.SetCleanups(5, 2);
                metrics.CleanupDone();
                metrics.Quarantined();
                metrics.SetRestarts(7);
              }),
              testing::UnorderedElementsAre(
                  testing::Pair("tessera_leases{kind=\"ttl\"}", 1), testing::Pair("tessera_sessions_ending", 3),
                  testing::Pair("tessera_sessions_quarantined", 1), testing::Pair("tessera_buffer_held_bytes", 4096),
                  testing::Pair("tessera_cleanups_waiting", 5), testing::Pair("tessera_cleanups_stuck", 2),
                  testing::Pair("tessera_cleanups_total", 1), testing::Pair("tessera_quarantines_total", 1),
                  testing::Pair("tessera_restarts", 7)));
}

TEST(MetricsTest, PlannerAndLimits) {
  EXPECT_THAT(ChangesOf([](Metrics& metrics) {
                metrics.PlannerDecided(OpFamily::kGemm, metrics.FindClass("b"), planner::Source::kModel);
                metrics.PlannerDecided(OpFamily::kGemm, metrics.FindClass("c"), planner::Source::kOverride);
                metrics.PlannerRefused(OpFamily::kGemm);
                metrics.Refused(Limit::kQueue);
              }),
              testing::UnorderedElementsAre(
                  testing::Pair(R"(tessera_planner_decisions_total{class="b",op="gemm",source="model"})", 1),
                  testing::Pair(R"(tessera_planner_decisions_total{class="other",op="gemm",source="override"})", 1),
                  testing::Pair("tessera_planner_refusals_total{op=\"gemm\"}", 1),
                  testing::Pair("tessera_refused_total{limit=\"queue_max\"}", 1)));
}

TEST(MetricsTest, CountersFollowThePlannersReadingsAndNeverFall) {
  const PlannerReading reading = {.revision = 4,
                                  .changes = 3,
                                  .audit_errors = 1,
                                  .cache_hits = 10,
                                  .cache_misses = 7,
                                  .cached_plans = 6,
                                  .rows = {5, 0, 2},
                                  .passed_over = {0, 8},
                                  .watchers = 1,
                                  .watch_lost = 9,
                                  .store = {.loads = 2,
                                            .rows_loaded = 11,
                                            .rows_stale = 12,
                                            .rows_refused = 13,
                                            .rows_evicted = 14,
                                            .saves = 15,
                                            .set_aside = {0, 16},
                                            .save_failures = {0, 0, 17}}};
  const auto changes = ChangesOf([&](Metrics& metrics) {
    metrics.SetPlanner(reading);
    metrics.SetPlanner(reading);  // not twice as much
    PlannerReading smaller = reading;
    smaller.cache_hits = 1;
    metrics.SetPlanner(smaller);
  });
  EXPECT_THAT(changes,
              testing::UnorderedElementsAre(
                  testing::Pair("tessera_planner_revision", 4), testing::Pair("tessera_planner_changes_total", 3),
                  testing::Pair("tessera_planner_audit_errors_total", 1),
                  testing::Pair(R"(tessera_planner_cache_lookups_total{result="hit"})", 10),
                  testing::Pair(R"(tessera_planner_cache_lookups_total{result="miss"})", 7),
                  testing::Pair("tessera_planner_cached_plans", 6),
                  testing::Pair(R"(tessera_planner_rows{tier="override"})", 5),
                  testing::Pair(R"(tessera_planner_rows{tier="builtin"})", 2),
                  testing::Pair(R"(tessera_planner_rows_passed_over_total{reason="not_on_device"})", 8),
                  testing::Pair("tessera_planner_watchers", 1), testing::Pair("tessera_planner_watch_lost_total", 9),
                  testing::Pair("tessera_planner_store_loads_total", 2),
                  testing::Pair(R"(tessera_planner_store_rows_total{use="loaded"})", 11),
                  testing::Pair(R"(tessera_planner_store_rows_total{use="stale"})", 12),
                  testing::Pair(R"(tessera_planner_store_rows_total{use="refused"})", 13),
                  testing::Pair(R"(tessera_planner_store_rows_total{use="evicted"})", 14),
                  testing::Pair("tessera_planner_store_saves_total", 15),
                  testing::Pair(R"(tessera_planner_store_set_aside_total{reason="foreign"})", 16),
                  testing::Pair(R"(tessera_planner_store_save_failures_total{reason="no_space"})", 17)));
}

TEST(MetricsTest, StateGauges) {
  Metrics metrics(kOptions);
  metrics.SetReady(true);
  metrics.SetIsolationMode(IsolationMode::kNone);
  metrics.SetIsolationMode(IsolationMode::kStrict);
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples["tessera_ready"], 1);
  EXPECT_EQ(samples["tessera_isolation_mode{mode=\"none\"}"], 0);
  EXPECT_EQ(samples["tessera_isolation_mode{mode=\"shared\"}"], 0);
  EXPECT_EQ(samples["tessera_isolation_mode{mode=\"strict\"}"], 1);
  metrics.SetReady(false);
  EXPECT_EQ(Scrape(metrics)["tessera_ready"], 0);
  EXPECT_EQ(LabelText(IsolationMode::kStrict), "strict");
}

TEST(MetricsTest, AGpuHasItsSeriesFromTheStartAndTheyFollowTheReading) {
  Metrics metrics(kGpuOptions);
  const std::string uuid = "{uuid=\"GPU-1\"}";
  const Samples start = Scrape(metrics);
  EXPECT_EQ(start.at("tessera_gpu_info{driver=\"570\",name=\"H\",uuid=\"GPU-1\"}"), 1);
  EXPECT_EQ(CountOf(start, "tessera_gpu_"), 10);
  for (const auto& [name, value] : start) {
    if (!name.starts_with("tessera_gpu_") || name.starts_with("tessera_gpu_info")) continue;
    EXPECT_EQ(value, 0) << name;
  }
  metrics.SetGpu({.power_watts = 650.5, .memory_used_bytes = 7, .utilization_ratio = 0.25, .power_capped = true});
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples["tessera_gpu_readable" + uuid], 1);
  EXPECT_EQ(samples["tessera_gpu_power_watts" + uuid], 650.5);
  EXPECT_EQ(samples["tessera_gpu_memory_used_bytes" + uuid], 7);
  EXPECT_EQ(samples["tessera_gpu_utilization_ratio" + uuid], 0.25);
  EXPECT_EQ(samples["tessera_gpu_power_capped" + uuid], 1);
  EXPECT_EQ(samples["tessera_gpu_temperature_celsius" + uuid], 0);
  metrics.SetGpu({.power_capped = false});
  samples = Scrape(metrics);
  EXPECT_EQ(samples["tessera_gpu_power_watts" + uuid], 0) << "what a reading lacks keeps no former value";
  EXPECT_EQ(samples["tessera_gpu_power_capped" + uuid], 0);
  metrics.SetGpu({.sm_clock_hertz = 1e9});
  metrics.SetGpuUnreadable();
  samples = Scrape(metrics);
  ASSERT_EQ(samples.size(), start.size());
  for (const auto& [name, value] : samples) {
    if (name.starts_with("tessera_process_")) continue;
    EXPECT_EQ(value, start.at(name)) << name;
  }
}

TEST(MetricsTest, WithoutAGpuItsVerbsDoNothing) {
  EXPECT_THAT(ChangesOf([](Metrics& metrics) {
                metrics.SetGpu({.power_watts = 1});
                metrics.SetGpuUnreadable();
              }),
              testing::IsEmpty());
}

TEST(MetricsTest, UnknownVariantsCountAsOtherAndAddNoSeries) {
  Metrics metrics(kOptions);
  const std::size_t series = Scrape(metrics).size();
  std::mt19937_64 random(7);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t value = random();
    metrics.KernelLaunched(metrics.FindVariant("gemm." + std::to_string(value)));
    metrics.KernelLaunched(VariantLabel{static_cast<std::size_t>(value | 64)});
  }
  metrics.KernelLaunched(metrics.FindVariant("gemm.cpu.a/reference"));
  metrics.KernelLaunched(VariantLabel{1});
  metrics.KernelLaunched(VariantLabel{0});
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples.size(), series);
  EXPECT_EQ(samples["tessera_kernel_launches_total{variant=\"other\"}"], 200'000);
  EXPECT_EQ(samples["tessera_kernel_launches_total{variant=\"gemm.cpu.a/reference\"}"], 2);
  EXPECT_EQ(samples["tessera_kernel_launches_total{variant=\"gemm.cpu.a/blocked\"}"], 1);
}

TEST(MetricsTest, WithoutACatalogueAllLaunchesAreOther) {
  Metrics metrics({.version = "", .variants = {}});
  metrics.KernelLaunched(VariantLabel{0});
  EXPECT_EQ(Scrape(metrics)["tessera_kernel_launches_total{variant=\"other\"}"], 1);
}

TEST(MetricsTest, ScrapesGrowNothing) {
  const Metrics metrics(kOptions);
  const Samples first = Scrape(metrics);
  const Samples second = Scrape(metrics);
  ASSERT_EQ(first.size(), second.size());
  for (const auto& [name, value] : first) EXPECT_TRUE(second.contains(name)) << name;
}

TEST(MetricsTest, VerbsAndScrapesOfManyThreadsLoseNothing) {
  constexpr int kThreads = 4;
  constexpr int kEvents = 5'000;
  Metrics metrics(kOptions);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int event = 0; event < kEvents; ++event) metrics.RpcFinished(RpcMethod::kComputeGemm, 0, 0.5);
      });
    }
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) Scrape(metrics);
    });
  }
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples["tessera_rpcs_total{code=\"OK\",method=\"Compute.Gemm\"}"], kThreads * kEvents);
  EXPECT_EQ(samples["tessera_rpc_seconds_count{method=\"Compute.Gemm\"}"], kThreads * kEvents);
  EXPECT_EQ(samples["tessera_rpc_seconds_sum{method=\"Compute.Gemm\"}"], kThreads * kEvents * 0.5);
}

TEST(MetricsTest, MarkdownListsEveryMetricAndVocabulary) {
  const std::string markdown = MetricsMarkdown();
  for (const auto& [name, value] : Scrape(Metrics(kGpuOptions))) {
    std::string metric = name.substr(0, name.find('{'));
    for (const std::string_view suffix : {"_bucket", "_sum", "_count"}) {
      if (metric.ends_with("seconds" + std::string(suffix))) metric.resize(metric.size() - suffix.size());
    }
    EXPECT_NE(markdown.find("| `" + metric + "` |"), std::string::npos) << metric;
  }
  EXPECT_NE(markdown.find("| `tessera_run_seconds` | histogram | op, backend |"), std::string::npos);
  EXPECT_NE(markdown.find("| `outcome` | ok, failed, cancelled, expired, aborted |"), std::string::npos);
  EXPECT_NE(markdown.find("| `backend` | cpu, cuda, vendor |"), std::string::npos);
}

}  // namespace
}  // namespace tessera::server
