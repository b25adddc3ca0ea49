#include "server/exec/executor.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/launch/gemm_launch.h"

namespace tessera::server {
namespace {

using Clock = std::chrono::steady_clock;

std::uint64_t NanosecondsSince(Clock::time_point start) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

OperationOutcome OutcomeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return OperationOutcome::kOk;
    case absl::StatusCode::kCancelled:
      return OperationOutcome::kCancelled;
    case absl::StatusCode::kDeadlineExceeded:
      return OperationOutcome::kExpired;
    default:
      return OperationOutcome::kFailed;
  }
}

void LogPlan(const planner::GemmProblem& problem, const OperationReport& report) {
  spdlog::trace("gemm {} m={} n={} k={} batch={} -> {} ({}, split {})", problem.gemm_class.ToString(), problem.m,
                problem.n, problem.k, problem.batch, report.variant, planner::SourceName(report.source), report.split);
}

}  // namespace

// A session's stream on each device, and its share of the queue.
class Executor::Lane : public SessionLane {
 public:
  explicit Lane(const std::vector<std::unique_ptr<Device>>& devices) {
    for (const auto& device : devices) streams.push_back({device.get(), device->OpenStream()});
  }

  std::shared_ptr<Stream> StreamOn(const Device* device) const {
    for (const auto& [of, stream] : streams) {
      if (of == device) return stream;
    }
    return nullptr;
  }

  std::vector<std::pair<const Device*, std::shared_ptr<Stream>>> streams;
  std::int64_t in_flight = 0;  // guarded by Executor::mutex_
};

struct Executor::Pending {
  Operation operation;
  OperationReport report;
  planner::Plan plan;
  Device* device = nullptr;
  Lane* lane = nullptr;  // kept alive by operation.session
};

Executor::Executor(std::vector<std::unique_ptr<Device>> devices, std::optional<kernels::Backend> default_backend,
                   const ExecutorOptions& options, Metrics& metrics)
    : options_(options),
      metrics_(metrics),
      gemm_planner_(kernels::GemmVariants()),
      devices_(std::move(devices)),
      default_backend_(devices_.front()->facts().backend) {
  if (!default_backend.has_value()) return;
  for (const auto& device : devices_) {
    if (device->facts().backend == *default_backend) default_backend_ = *default_backend;
  }
}

// Devices wait for their queued jobs, whose callbacks use the members below them.
Executor::~Executor() {
  devices_.clear();
}

std::shared_ptr<SessionLane> Executor::MakeLane() {
  return std::make_shared<Lane>(devices_);
}

absl::StatusOr<Device*> Executor::ChooseDevice(const Operation& operation) const {
  const kernels::Backend wanted = operation.backend.value_or(default_backend_);
  for (const auto& device : devices_) {
    if (device->facts().backend == wanted) return device.get();
  }
  return absl::UnimplementedError(absl::StrCat("options.backend: ", Av(kernels::BackendName(wanted)),
                                               " is not available in this daemon; `tessera status` lists what is"));
}

absl::Status Executor::Admit(Lane* lane) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!accepting_) return absl::UnavailableError("the daemon is draining and takes no new work");
  if (in_flight_ >= options_.queue_max) {
    metrics_.Refused(Limit::kQueue);
    return absl::ResourceExhaustedError(absl::StrCat("queue_max: ", in_flight_, " operations wait or run; try again"));
  }
  if (lane != nullptr && lane->in_flight >= options_.queue_per_session_max) {
    metrics_.Refused(Limit::kQueuePerSession);
    return absl::ResourceExhaustedError(
        absl::StrCat("queue_per_session_max: ", lane->in_flight, " operations of this session wait or run; try again"));
  }
  ++in_flight_;
  if (lane != nullptr) ++lane->in_flight;
  return absl::OkStatus();
}

void Executor::Leave(Lane* lane) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lane != nullptr) --lane->in_flight;
  if (--in_flight_ == 0) idle_.notify_all();
}

void Executor::Submit(Operation operation) {
  auto pending = std::make_shared<Pending>();
  pending->operation = std::move(operation);
  Operation& op = pending->operation;
  pending->lane = op.session == nullptr ? nullptr : static_cast<Lane*>(op.session->lane());

  auto device = ChooseDevice(op);
  if (!device.ok()) return op.done(device.status(), pending->report);
  pending->device = *device;
  pending->report.backend = pending->device->facts().backend;
  pending->report.flops = op.gemm.Flops();

  const Clock::time_point plan_start = Clock::now();
  auto plan = op.gemm.Empty() ? planner::Plan{} : gemm_planner_.Decide(op.gemm.problem, pending->device->facts());
  pending->report.plan_ns = NanosecondsSince(plan_start);
  if (!plan.ok()) {
    metrics_.PlannerRefused(OpFamily::kGemm);
    return op.done(plan.status(), pending->report);
  }
  pending->plan = *plan;

  if (absl::Status status = Admit(pending->lane); !status.ok()) return op.done(status, pending->report);
  metrics_.OperationAccepted();
  if (op.gemm.Empty()) return Finish(*pending, JobResult{});

  metrics_.PlannerDecided(OpFamily::kGemm, plan->source);
  pending->report.variant = kernels::GemmVariants()[plan->variant].info.id;
  pending->report.source = plan->source;
  pending->report.split = plan->split;
  Enqueue(pending);
}

void Executor::Enqueue(const std::shared_ptr<Pending>& pending) {
  if (spdlog::should_log(spdlog::level::trace)) LogPlan(pending->operation.gemm.problem, pending->report);
  // Calls without a session are not ordered among themselves: each has a stream of its own.
  const std::shared_ptr<Stream> stream =
      pending->lane != nullptr ? pending->lane->StreamOn(pending->device) : pending->device->OpenStream();
  Job job;
  job.workspace_bytes = pending->plan.workspace_bytes;
  job.scalar_operations = pending->operation.gemm.ScalarOperations();
  job.admit = [pending]() -> absl::Status {
    const Operation& op = pending->operation;
    if (op.session != nullptr && op.session->ended()) {
      return absl::CancelledError("the session ended before the launch");
    }
    return op.still_wanted();
  };
  job.launch = [this, pending](const kernels::LaunchContext& context) {
    metrics_.OperationLaunched();
    metrics_.KernelLaunched(VariantLabel{pending->plan.variant});
    return kernels::LaunchGemm(pending->plan.variant, pending->operation.gemm.params,
                               {.split = pending->plan.split, .raster = pending->plan.raster}, context);
  };
  job.done = [this, pending](const JobResult& result) { Finish(*pending, result); };
  stream->Enqueue(std::move(job));
}

void Executor::Finish(Pending& pending, const JobResult& result) {
  OperationReport& report = pending.report;
  report.queue_ns = result.queue_ns;
  report.run_ns = result.run_ns;
  metrics_.OperationFinished({.op = OpFamily::kGemm,
                              .backend = report.backend,
                              .outcome = OutcomeOf(result.status),
                              .launched = result.launched,
                              .queue_seconds = static_cast<double>(result.queue_ns) * 1e-9,
                              .run_seconds = static_cast<double>(result.run_ns) * 1e-9,
                              .flops = report.flops});
  // Before the answer: whoever has it may look at references at once, or send the next call into a full queue.
  pending.operation.gemm.pins.clear();
  Leave(pending.lane);
  pending.operation.done(result.status, report);
}

void Executor::StopAccepting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  accepting_ = false;
}

bool Executor::AwaitIdle(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, timeout, [this] { return in_flight_ == 0; });
}

std::uint32_t Executor::in_flight() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<std::uint32_t>(in_flight_);
}

std::vector<BackendState> Executor::Backends() const {
  std::vector<BackendState> states;
  for (std::size_t i = 0; i < std::size(kernels::kBackendNames); ++i) {
    BackendState state{.backend = static_cast<kernels::Backend>(i)};
    for (const kernels::GemmVariant& variant : kernels::GemmVariants()) {
      if (variant.info.backend == state.backend) ++state.variants;
    }
    state.reason = state.variants == 0 ? "not part of this build" : "no device";
    for (const auto& device : devices_) {
      if (device->facts().backend != state.backend) continue;
      state.available = true;
      state.reason = device->Describe();
    }
    states.push_back(std::move(state));
  }
  return states;
}

}  // namespace tessera::server
