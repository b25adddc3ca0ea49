#include "server/telemetry/metrics.h"

#include <prometheus/client_metric.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/text.h"

namespace tessera::server {
namespace {

constexpr std::string_view kOther = "other";

// Vocabulary<Label>: the label's name and, where they are known at compile time, its texts indexed by value.
template <typename Label>
struct Vocabulary;

#define TESSERA_VALUE(constant, text) text,
#define TESSERA_LABEL(type, label, values)                 \
  template <>                                              \
  struct Vocabulary<type> {                                \
    static constexpr std::string_view kLabel = label;      \
    static constexpr std::string_view kTexts[] = {values}; \
  };
#define TESSERA_LABEL_OF(type, label, texts)          \
  template <>                                         \
  struct Vocabulary<type> {                           \
    static constexpr std::string_view kLabel = label; \
    static constexpr const auto& kTexts = texts;      \
  };
#define TESSERA_RUNTIME_LABEL(type, label, values)    \
  template <>                                         \
  struct Vocabulary<type> {                           \
    static constexpr std::string_view kLabel = label; \
  };
#include "server/telemetry/metrics.def"

// The naming rules of the table.
#define TESSERA_COUNTER(name, exported, help, ...) static_assert(std::string_view(exported).ends_with("_total"));
#define TESSERA_GAUGE(name, exported, help, ...) static_assert(!std::string_view(exported).ends_with("_total"));
#define TESSERA_HISTOGRAM(name, exported, help, ...) static_assert(std::string_view(exported).ends_with("_seconds"));
#include "server/telemetry/metrics.def"

template <typename Label>
std::vector<std::string> LabelValues(const MetricsOptions&) {
  return {std::begin(Vocabulary<Label>::kTexts), std::end(Vocabulary<Label>::kTexts)};
}

template <>
std::vector<std::string> LabelValues<VariantLabel>(const MetricsOptions& options) {
  std::vector<std::string> values = options.variants;
  values.emplace_back(kOther);
  return values;
}

template <>
std::vector<std::string> LabelValues<ClassLabel>(const MetricsOptions& options) {
  std::vector<std::string> values = options.classes;
  values.emplace_back(kOther);
  return values;
}

template <>
std::vector<std::string> LabelValues<VersionLabel>(const MetricsOptions& options) {
  return {options.version};
}

// One value with a GPU, none without.
std::vector<std::string> GpuLabelValues(const MetricsOptions& options, std::string GpuIdentity::*field) {
  if (!options.gpu.has_value()) return {};
  return {(*options.gpu).*field};
}

template <>
std::vector<std::string> LabelValues<GpuName>(const MetricsOptions& options) {
  return GpuLabelValues(options, &GpuIdentity::name);
}

template <>
std::vector<std::string> LabelValues<GpuUuid>(const MetricsOptions& options) {
  return GpuLabelValues(options, &GpuIdentity::uuid);
}

template <>
std::vector<std::string> LabelValues<GpuDriver>(const MetricsOptions& options) {
  return GpuLabelValues(options, &GpuIdentity::driver_version);
}

// A histogram without a lock (prometheus::Histogram takes one for every observation). A scrape may see an observation
// in its bucket and not yet in the sum.
class LatencyHistogram {
 public:
  void Observe(double seconds) {
    const double value = std::max(0.0, seconds);  // also turns NaN into 0
    const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), value);
    counts_[static_cast<std::size_t>(bound - kBounds.begin())].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }

  prometheus::ClientMetric::Histogram Collect() const {
    prometheus::ClientMetric::Histogram histogram;
    for (std::size_t i = 0; i < kBounds.size(); ++i) {
      histogram.sample_count += counts_[i].load(std::memory_order_relaxed);
      histogram.bucket.push_back({.cumulative_count = histogram.sample_count, .upper_bound = kBounds[i]});
    }
    histogram.sample_count += counts_[kBounds.size()].load(std::memory_order_relaxed);  // the serializer adds le="+Inf"
    histogram.sample_sum = sum_.load(std::memory_order_relaxed);
    return histogram;
  }

 private:
  // Seconds: three steps a decade from 1 us (below any operation) to 10 s (beyond any sensible deadline).
  static constexpr std::array kBounds = {1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3,
                                         5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.0,  2.0,  5.0,  10.0};

  std::array<std::atomic<std::uint64_t>, kBounds.size() + 1> counts_{};
  std::atomic<double> sum_{0.0};
};

// The histograms of one name.
struct HistogramFamily {
  struct Member {
    std::vector<prometheus::ClientMetric::Label> labels;
    std::unique_ptr<LatencyHistogram> histogram;
  };

  prometheus::MetricFamily Collect() const {
    prometheus::MetricFamily family{
        .name = name, .help = help, .type = prometheus::MetricType::Histogram, .metric = {}};
    for (const Member& member : members) {
      prometheus::ClientMetric& metric = family.metric.emplace_back();
      metric.label = member.labels;
      metric.histogram = member.histogram->Collect();
    }
    return family;
  }

  std::string name;
  std::string help;
  std::vector<Member> members;
};

// All series of one metric: an array over every combination of its labels, the last label fastest.
template <typename Child, typename... Labels>
class Series {
 public:
  Child& operator()(Labels... labels) const {
    std::size_t index = 0;
    [[maybe_unused]] std::size_t axis = 0;
    ((index = index * extents_[axis++] + static_cast<std::size_t>(labels)), ...);
    return *children_[index];
  }

  // Values of a label, of the first one if none is named.
  std::size_t extent(std::size_t axis = 0) const { return extents_[axis]; }

  // Creates every child through add(prometheus::Labels) -> Child&.
  template <typename Add>
  void Fill(const MetricsOptions& options, const Add& add) {
    const std::vector<std::string> names = {std::string(Vocabulary<Labels>::kLabel)...};
    const std::vector<std::vector<std::string>> values = {LabelValues<Labels>(options)...};
    std::size_t total = 1;
    for (std::size_t axis = 0; axis < values.size(); ++axis) total *= extents_[axis] = values[axis].size();
    for (std::size_t index = 0; index < total; ++index) {
      prometheus::Labels labels;
      std::size_t rest = index;
      for (std::size_t axis = values.size(); axis-- > 0; rest /= extents_[axis]) {
        labels[names[axis]] = values[axis][rest % extents_[axis]];
      }
      children_.push_back(&add(labels));
    }
  }

 private:
  std::array<std::size_t, sizeof...(Labels)> extents_{};
  std::vector<Child*> children_;
};

// Second field of /proc/self/statm, which counts pages; 0 if it cannot be read.
double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  double total_pages = 0;
  double resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

// Entries of /proc/self/fd without the one that reads it; 0 if it cannot be read.
double OpenFds() {
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error);
  double count = 0;
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) count += 1;
  return error ? 0 : count - 1;
}

}  // namespace

#define TESSERA_LABEL(type, label, values)                            \
  std::string_view LabelText(type value) {                            \
    return Vocabulary<type>::kTexts[static_cast<std::size_t>(value)]; \
  }
#include "server/telemetry/metrics.def"

struct Metrics::Table {
  explicit Table(const MetricsOptions& options) {
#define TESSERA_COUNTER(name, exported, help, ...) Register(options, exported, help, name);
#define TESSERA_GAUGE(name, exported, help, ...) Register(options, exported, help, name);
#define TESSERA_HISTOGRAM(name, exported, help, ...) Register(options, exported, help, name);
#include "server/telemetry/metrics.def"
    for (std::size_t i = 0; i < options.variants.size(); ++i) variants.try_emplace(options.variants[i], i);
    for (std::size_t i = 0; i < options.classes.size(); ++i) classes.try_emplace(options.classes[i], i);
  }

  template <typename... Labels>
  void Register(const MetricsOptions& options, const char* name, const char* help,
                Series<prometheus::Counter, Labels...>& series) {
    auto& family = prometheus::BuildCounter().Name(name).Help(help).Register(registry);
    series.Fill(options, [&](const prometheus::Labels& labels) -> auto& { return family.Add(labels); });
  }

  template <typename... Labels>
  void Register(const MetricsOptions& options, const char* name, const char* help,
                Series<prometheus::Gauge, Labels...>& series) {
    auto& family = prometheus::BuildGauge().Name(name).Help(help).Register(registry);
    series.Fill(options, [&](const prometheus::Labels& labels) -> auto& { return family.Add(labels); });
  }

  template <typename... Labels>
  void Register(const MetricsOptions& options, const char* name, const char* help,
                Series<LatencyHistogram, Labels...>& series) {
    HistogramFamily& family = histograms.emplace_back(HistogramFamily{.name = name, .help = help, .members = {}});
    series.Fill(options, [&](const prometheus::Labels& labels) -> auto& {
      HistogramFamily::Member& member = family.members.emplace_back();
      for (const auto& [label, value] : labels) member.labels.push_back({.name = label, .value = value});
      member.histogram = std::make_unique<LatencyHistogram>();
      return *member.histogram;
    });
  }

  prometheus::Registry registry;            // counters and gauges
  std::vector<HistogramFamily> histograms;  // fixed after construction
  std::unordered_map<std::string, std::size_t> variants;
  std::unordered_map<std::string, std::size_t> classes;
  std::mutex readings;  // of those that bring counters up to a reading

#define TESSERA_COUNTER(name, exported, help, ...) Series<prometheus::Counter __VA_OPT__(, ) __VA_ARGS__> name;
#define TESSERA_GAUGE(name, exported, help, ...) Series<prometheus::Gauge __VA_OPT__(, ) __VA_ARGS__> name;
#define TESSERA_HISTOGRAM(name, exported, help, ...) Series<LatencyHistogram __VA_OPT__(, ) __VA_ARGS__> name;
#include "server/telemetry/metrics.def"
};

Metrics::Metrics(const MetricsOptions& options) : table_(std::make_unique<Table>(options)) {
  table_->build_info(VersionLabel{}).Set(1);
  if (options.gpu.has_value()) table_->gpu_info(GpuName{}, GpuUuid{}, GpuDriver{}).Set(1);
}

Metrics::~Metrics() = default;

void Metrics::SetReady(bool ready) {
  table_->ready().Set(ready ? 1 : 0);
}

void Metrics::SetIsolationMode(IsolationMode mode) {
  for (std::size_t i = 0; i < table_->isolation_mode.extent(); ++i) {
    const auto each = static_cast<IsolationMode>(i);
    table_->isolation_mode(each).Set(each == mode ? 1 : 0);
  }
}

void Metrics::SetRpcConnections(std::size_t open) {
  table_->rpc_connections().Set(static_cast<double>(open));
}

void Metrics::SetRestarts(std::uint32_t restarts) {
  table_->restarts().Set(restarts);
}

void Metrics::SetGpu(const GpuReading& reading) {
  if (table_->gpu_info.extent() == 0) return;
  const auto set = [](prometheus::Gauge& gauge, const auto& value) {
    gauge.Set(static_cast<double>(value.value_or(0)));
  };
  constexpr GpuUuid kGpu{0};
  table_->gpu_readable(kGpu).Set(1);
  set(table_->gpu_power_watts(kGpu), reading.power_watts);
  set(table_->gpu_power_limit_watts(kGpu), reading.power_limit_watts);
  set(table_->gpu_power_capped(kGpu), reading.power_capped);
  set(table_->gpu_temperature_celsius(kGpu), reading.temperature_celsius);
  set(table_->gpu_sm_clock_hertz(kGpu), reading.sm_clock_hertz);
  set(table_->gpu_memory_used_bytes(kGpu), reading.memory_used_bytes);
  set(table_->gpu_memory_total_bytes(kGpu), reading.memory_total_bytes);
  set(table_->gpu_utilization_ratio(kGpu), reading.utilization_ratio);
}

void Metrics::SetGpuUnreadable() {
  if (table_->gpu_info.extent() == 0) return;
  SetGpu({});
  table_->gpu_readable(GpuUuid{0}).Set(0);
}

void Metrics::RpcFinished(RpcMethod method, int code, double seconds) {
  const bool known = code >= 0 && code <= static_cast<int>(RpcCode::kUnauthenticated);
  table_->rpcs(method, known ? static_cast<RpcCode>(code) : RpcCode::kUnknown).Increment();
  table_->rpc_seconds(method).Observe(seconds);
}

void Metrics::Refused(Limit limit) {
  table_->refused(limit).Increment();
}

void Metrics::SessionOpened() {
  table_->sessions().Increment();
}

void Metrics::SessionEnded(SessionEnd reason) {
  table_->sessions().Decrement();
  table_->session_ends(reason).Increment();
}

void Metrics::SetSessionsEnding(std::size_t ending, std::size_t quarantined) {
  table_->sessions_ending().Set(static_cast<double>(ending));
  table_->sessions_quarantined().Set(static_cast<double>(quarantined));
}

void Metrics::LeaseOpened(LeaseKind kind) {
  table_->leases(kind).Increment();
}

void Metrics::LeaseClosed(LeaseKind kind) {
  table_->leases(kind).Decrement();
}

void Metrics::Quarantined() {
  table_->quarantines().Increment();
}

void Metrics::SideConnectionOpened() {
  table_->side_connections().Increment();
}

void Metrics::SideConnectionClosed() {
  table_->side_connections().Decrement();
}

void Metrics::SideMessageReceived(SideMessage kind) {
  table_->side_messages(kind).Increment();
}

void Metrics::BufferAdded(BufferOrigin origin, std::uint64_t bytes) {
  table_->buffers(origin).Increment();
  table_->buffer_bytes(origin).Increment(static_cast<double>(bytes));
}

void Metrics::BufferRemoved(BufferOrigin origin, std::uint64_t bytes) {
  table_->buffers(origin).Decrement();
  table_->buffer_bytes(origin).Decrement(static_cast<double>(bytes));
}

void Metrics::SetBufferHeldBytes(std::uint64_t bytes) {
  table_->buffer_held_bytes().Set(static_cast<double>(bytes));
}

void Metrics::SetCleanups(std::size_t waiting, std::size_t stuck) {
  table_->cleanups_waiting().Set(static_cast<double>(waiting));
  table_->cleanups_stuck().Set(static_cast<double>(stuck));
}

void Metrics::CleanupDone() {
  table_->cleanups().Increment();
}

void Metrics::OperationAccepted() {
  table_->in_flight().Increment();
  table_->queue_depth().Increment();
}

void Metrics::OperationLaunched() {
  table_->queue_depth().Decrement();
}

void Metrics::OperationFinished(const OperationSample& sample) {
  table_->in_flight().Decrement();
  if (!sample.launched) table_->queue_depth().Decrement();
  table_->operations(sample.op, sample.backend, sample.outcome).Increment();
  table_->queue_seconds(sample.op).Observe(sample.queue_seconds);
  if (sample.launched) {
    table_->run_seconds(sample.op, sample.backend).Observe(sample.run_seconds);
    table_->device_seconds(sample.op, sample.backend).Increment(sample.run_seconds);
  }
  if (sample.outcome == OperationOutcome::kOk) {
    table_->flops(sample.op, sample.backend).Increment(static_cast<double>(sample.flops));
  }
}

void Metrics::OperationsGated(std::int64_t operations) {
  table_->gated().Increment(static_cast<double>(operations));
}

void Metrics::DeviceWaits(std::int64_t waits) {
  table_->device_waits().Increment(static_cast<double>(waits));
}

void Metrics::OperationsUngated(std::int64_t operations) {
  table_->gated().Decrement(static_cast<double>(operations));
}

void Metrics::GateTime(OpFamily op, double seconds) {
  table_->gate_seconds(op).Observe(seconds);
}

void Metrics::SetSyncs(std::size_t streams, std::size_t timelines) {
  table_->streams().Set(static_cast<double>(streams));
  table_->timelines().Set(static_cast<double>(timelines));
}

void Metrics::PlannerDecided(OpFamily op, ClassLabel of, planner::Source source) {
  const std::size_t other = table_->planner_decisions.extent(1) - 1;
  const std::size_t index = std::min(static_cast<std::size_t>(of), other);
  table_->planner_decisions(op, static_cast<ClassLabel>(index), source).Increment();
}

void Metrics::PlannerRefused(OpFamily op) {
  table_->planner_refusals(op).Increment();
}

void Metrics::KernelLaunched(VariantLabel variant) {
  const std::size_t other = table_->kernel_launches.extent() - 1;
  const std::size_t index = std::min(static_cast<std::size_t>(variant), other);
  table_->kernel_launches(static_cast<VariantLabel>(index)).Increment();
}

VariantLabel Metrics::FindVariant(std::string_view id) const {
  const auto found = table_->variants.find(std::string(id));
  const std::size_t other = table_->kernel_launches.extent() - 1;
  return static_cast<VariantLabel>(found == table_->variants.end() ? other : found->second);
}

ClassLabel Metrics::FindClass(std::string_view name) const {
  const auto found = table_->classes.find(std::string(name));
  const std::size_t other = table_->planner_decisions.extent(1) - 1;
  return static_cast<ClassLabel>(found == table_->classes.end() ? other : found->second);
}

void Metrics::SetPlanner(const PlannerReading& reading) {
  const std::lock_guard<std::mutex> lock(table_->readings);
  const auto raise = [](prometheus::Counter& counter, std::uint64_t value) {
    const double by = static_cast<double>(value) - counter.Value();
    if (by > 0) counter.Increment(by);
  };
  raise(table_->planner_cache_lookups(CacheResult::kHit), reading.cache_hits);
  raise(table_->planner_cache_lookups(CacheResult::kMiss), reading.cache_misses);
  raise(table_->planner_changes(), reading.changes);
  raise(table_->planner_audit_errors(), reading.audit_errors);
  raise(table_->planner_watch_lost(), reading.watch_lost);
  table_->planner_cached_plans().Set(static_cast<double>(reading.cached_plans));
  table_->planner_revision().Set(static_cast<double>(reading.revision));
  table_->planner_watchers().Set(static_cast<double>(reading.watchers));
  for (std::size_t i = 0; i < reading.rows.size(); ++i) {
    table_->planner_rows(static_cast<planner::Tier>(i)).Set(static_cast<double>(reading.rows[i]));
  }
  for (std::size_t i = 0; i < reading.passed_over.size(); ++i) {
    raise(table_->planner_rows_passed_over(static_cast<planner::Reason>(i)), reading.passed_over[i]);
  }
  raise(table_->planner_store_loads(), reading.store.loads);
  raise(table_->planner_store_rows(StoredRows::kLoaded), reading.store.rows_loaded);
  raise(table_->planner_store_rows(StoredRows::kStale), reading.store.rows_stale);
  raise(table_->planner_store_rows(StoredRows::kRefused), reading.store.rows_refused);
  raise(table_->planner_store_rows(StoredRows::kEvicted), reading.store.rows_evicted);
  raise(table_->planner_store_saves(), reading.store.saves);
  for (std::size_t i = 0; i < reading.store.set_aside.size(); ++i) {
    raise(table_->planner_store_set_aside(static_cast<planner::SetAside>(i)), reading.store.set_aside[i]);
  }
  for (std::size_t i = 0; i < reading.store.save_failures.size(); ++i) {
    raise(table_->planner_store_save_failures(static_cast<planner::SaveFailure>(i)), reading.store.save_failures[i]);
  }
}

std::string Metrics::Serialize() const {
  table_->process_resident_bytes().Set(ResidentBytes());
  table_->process_open_fds().Set(OpenFds());
  std::vector<prometheus::MetricFamily> families = table_->registry.Collect();
  for (const HistogramFamily& histogram : table_->histograms) families.push_back(histogram.Collect());
  return prometheus::TextSerializer().Serialize(families);
}

namespace {

template <typename... Labels>
std::string MetricRow(std::string_view exported, std::string_view kind, std::string_view help) {
  const std::vector<std::string> labels = {std::string(Vocabulary<Labels>::kLabel)...};
  return absl::StrCat("| `", Av(exported), "` | ", Av(kind), " | ", absl::StrJoin(labels, ", "), " | ", Av(help),
                      " |\n");
}

std::string LabelRow(std::string_view label, std::string_view values) {
  return absl::StrCat("| `", Av(label), "` | ", Av(values), " |\n");
}

template <typename Label>
std::string LabelRow() {
  return LabelRow(Vocabulary<Label>::kLabel, absl::StrJoin(LabelValues<Label>({}), ", "));
}

}  // namespace

std::string MetricsMarkdown() {
  std::string text = "| Metric | Type | Labels | Meaning |\n| --- | --- | --- | --- |\n";
#define TESSERA_COUNTER(name, exported, help, ...) text += MetricRow<__VA_ARGS__>(exported, "counter", help);
#define TESSERA_GAUGE(name, exported, help, ...) text += MetricRow<__VA_ARGS__>(exported, "gauge", help);
#define TESSERA_HISTOGRAM(name, exported, help, ...) text += MetricRow<__VA_ARGS__>(exported, "histogram", help);
#include "server/telemetry/metrics.def"
  text += "\n| Label | Values |\n| --- | --- |\n";
#define TESSERA_LABEL(type, label, values) text += LabelRow<type>();
#define TESSERA_LABEL_OF(type, label, texts) text += LabelRow<type>();
#define TESSERA_RUNTIME_LABEL(type, label, values) text += LabelRow(label, values);
#include "server/telemetry/metrics.def"
  return text;
}

}  // namespace tessera::server
