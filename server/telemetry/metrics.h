// The daemon's metrics behind verbs that say what happened. Which metrics and labels exist is the table metrics.def;
// this file adds what each event means for them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/catalog/variant.h"
#include "planner/config.h"
#include "planner/plan.h"
#include "planner/reason.h"
#include "planner/tuning_counters.h"
#include "server/telemetry/nvml.h"

namespace tessera::server {

// The number of values of a label that metrics.def defines.
template <typename Label>
inline constexpr std::size_t kLabelValues = 0;

// The label vocabularies: one enum class and its texts per TESSERA_LABEL row.
#define TESSERA_VALUE(constant, text) constant,
#define TESSERA_LABEL(type, label, values)   \
  enum class type : std::uint8_t { values }; \
  std::string_view LabelText(type value);
#define TESSERA_RUNTIME_LABEL(type, label, values) enum class type : std::size_t {};
#include "server/telemetry/metrics.def"

#define TESSERA_VALUE(constant, text) +1
#define TESSERA_LABEL(type, label, values) \
  template <>                              \
  inline constexpr std::size_t kLabelValues<type> = values;
#include "server/telemetry/metrics.def"

struct MetricsOptions {
  std::string version;
  std::vector<std::string> variants;      // VariantLabel{i} stands for variants[i]
  std::vector<std::string> classes = {};  // ClassLabel{i} stands for classes[i]
  std::optional<GpuIdentity> gpu;         // the one that is served; without it there are no series of a GPU
};

// How one accepted operation ended.
struct OperationSample {
  OpFamily op = OpFamily::kGemm;
  kernels::Backend backend = kernels::Backend::kCpu;
  OperationOutcome outcome = OperationOutcome::kOk;
  bool launched = false;     // whether OperationLaunched was called for it
  double queue_seconds = 0;  // from acceptance to launch or refusal
  double run_seconds = 0;    // on the device; ignored unless launched
  std::uint64_t flops = 0;   // counted only for kOk
};

// The planner's own counts, since the start.
struct PlannerReading {
  std::uint64_t revision = 0;
  std::uint64_t changes = 0;
  std::uint64_t audit_errors = 0;
  std::uint64_t cache_hits = 0;
  std::uint64_t cache_misses = 0;
  std::uint64_t cached_plans = 0;
  std::array<std::uint64_t, planner::kTiers> rows = {};                  // by Tier
  std::array<std::uint64_t, planner::kCountedReasons> passed_over = {};  // by Reason
  std::uint64_t watchers = 0;
  std::uint64_t watch_lost = 0;
  planner::TuningCounters store;  // of all its files of rows
};

// Every series exists, at zero, from construction on, and none is added later. Thread-safe; verbs neither lock nor
// allocate nor look anything up by name.
class Metrics {
 public:
  explicit Metrics(const MetricsOptions& options);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void SetReady(bool ready);
  void SetIsolationMode(IsolationMode mode);
  void SetRpcConnections(std::size_t open);
  void SetRestarts(std::uint32_t restarts);

  // What the GPU says at this scrape, in full: what a reading lacks becomes 0. Nothing happens without a GPU.
  void SetGpu(const GpuReading& reading);
  void SetGpuUnreadable();

  void RpcFinished(RpcMethod method, int code, double seconds);  // a code that is none of the 17 counts as UNKNOWN
  void Refused(Limit limit);

  void SessionOpened();
  void SessionEnded(SessionEnd reason);
  void SetSessionsEnding(std::size_t ending, std::size_t quarantined);  // the second are among the first
  void LeaseOpened(LeaseKind kind);
  void LeaseClosed(LeaseKind kind);
  void Quarantined();  // a session's end, or a clean-up
  void SideConnectionOpened();
  void SideConnectionClosed();
  void SideMessageReceived(SideMessage kind);
  void BufferAdded(BufferOrigin origin, std::uint64_t bytes);
  void BufferRemoved(BufferOrigin origin, std::uint64_t bytes);
  void SetBufferHeldBytes(std::uint64_t bytes);
  void SetCleanups(std::size_t waiting, std::size_t stuck);
  void CleanupDone();

  // The life of an operation: accepted, launched unless refused or empty, finished; each at most once.
  void OperationAccepted();
  void OperationLaunched();
  void OperationFinished(const OperationSample& sample);
  // Held back before its launch, and held back no more.
  void OperationsGated(std::int64_t operations);
  void DeviceWaits(std::int64_t waits);
  void OperationsUngated(std::int64_t operations);
  void GateTime(OpFamily op, double seconds);  // of one that was

  void SetSyncs(std::size_t streams, std::size_t timelines);

  // An unknown label counts as `other`.
  void PlannerDecided(OpFamily op, ClassLabel of, planner::Source source);
  void PlannerRefused(OpFamily op);
  void KernelLaunched(VariantLabel variant);  // an unknown label counts as `other`

  // The label of a catalogue id, `other` if it is not one of the options'. A search by name: resolve once, keep it.
  VariantLabel FindVariant(std::string_view id) const;
  ClassLabel FindClass(std::string_view name) const;

  // What the planner has counted by this scrape; counters never fall.
  void SetPlanner(const PlannerReading& reading);

  // All metrics in the Prometheus text format 0.0.4. Reads the process gauges first.
  std::string Serialize() const;

 private:
  struct Table;
  const std::unique_ptr<Table> table_;
};

// The metrics and the vocabularies of their labels as Markdown tables.
std::string MetricsMarkdown();

}  // namespace tessera::server
