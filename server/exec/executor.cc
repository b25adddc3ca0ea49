#include "server/exec/executor.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/launch/gemm_addressable.h"
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

  void DropUnwanted() override {
    for (const auto& [device, stream] : streams) stream->DropUnwanted();
  }
  std::int64_t in_flight() const override { return count.load(std::memory_order_relaxed); }

  std::vector<std::pair<const Device*, std::shared_ptr<Stream>>> streams;
  std::atomic<std::int64_t> count{0};  // in flight; written under Executor::mutex_
};

struct Executor::Pending {
  Operation operation;
  OperationReport report;
  planner::Plan plan;
  Device* device = nullptr;
  Lane* lane = nullptr;  // kept alive by operation.session
  Account* account() const { return operation.account.get(); }
};

Executor::Executor(std::vector<std::unique_ptr<Device>> devices, std::optional<kernels::Backend> default_backend,
                   const ExecutorOptions& options, Metrics& metrics)
    : options_(options), metrics_(metrics), gemm_planner_(kernels::GemmVariants()), devices_(std::move(devices)) {
  for (const auto& device : devices_) {
    for (const planner::DeviceFacts& facts : device->facts()) servers_.push_back({device.get(), &facts});
  }
  std::stable_partition(servers_.begin(), servers_.end(),
                        [&](const Server& server) { return server.facts->backend == default_backend; });
  default_backend_ = servers_.front().facts->backend;
}

// Devices wait for their queued jobs, whose callbacks use the members below them. The CPU, which is last, goes first:
// its workers may still drop a session whose lane has streams on the others.
Executor::~Executor() {
  while (!devices_.empty()) devices_.pop_back();
}

std::shared_ptr<SessionLane> Executor::MakeLane() {
  return std::make_shared<Lane>(devices_);
}

const Executor::Server* Executor::Find(kernels::Backend backend) const {
  for (const Server& server : servers_) {
    if (server.facts->backend == backend) return &server;
  }
  return nullptr;
}

absl::StatusOr<Executor::Choice> Executor::TryServer(const Server& server, const planner::GemmProblem& problem,
                                                     const BoundGemm& gemm) const {
  if (gemm.Empty()) return Choice{.server = server, .plan = {}};
  if (!(server.device->space() == gemm.space)) {
    return absl::UnimplementedError(absl::StrCat("backend ", Av(kernels::BackendName(server.facts->backend)),
                                                 " computes on memory of ", server.device->space().Name(),
                                                 "; these tensors are in memory of ", gemm.space.Name()));
  }
  ASSIGN_OR_RETURN(const planner::Plan plan, gemm_planner_.Decide(problem, *server.facts));
  return Choice{.server = server, .plan = plan};
}

// A backend that the request names is strict; else the first that can, in order of preference.
absl::StatusOr<Executor::Choice> Executor::Choose(const Operation& operation) const {
  planner::GemmProblem problem = operation.gemm.problem;
  problem.addressable = kernels::AddressableBy(problem.gemm_class, operation.gemm.params);
  if (operation.backend.has_value()) {
    if (const Server* server = Find(*operation.backend); server != nullptr) {
      return TryServer(*server, problem, operation.gemm);
    }
    const auto why = options_.unavailable.find(*operation.backend);
    return absl::UnimplementedError(absl::StrCat(
        "options.backend: ", Av(kernels::BackendName(*operation.backend)), " is not available in this daemon",
        why == options_.unavailable.end() ? "" : absl::StrCat(" (", why->second, ")"),
        "; `tessera status` lists what is"));
  }
  absl::Status refused;
  for (const Server& server : servers_) {
    absl::StatusOr<Choice> choice = TryServer(server, problem, operation.gemm);
    if (choice.ok()) return choice;
    // The word of the one that has the memory says most.
    if (refused.ok() || server.device->space() == operation.gemm.space) refused = choice.status();
  }
  return refused;
}

absl::Status Executor::Admit(Lane* lane, Account* account) {
  const auto full = [this](Limit limit, std::int64_t waiting, const char* whose) {
    metrics_.Refused(limit);
    return absl::ResourceExhaustedError(
        absl::StrCat(Av(LabelText(limit)), ": ", waiting, " operations", whose, " wait or run; try again"));
  };
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!accepting_) return absl::UnavailableError("the daemon is draining and takes no new work");
  if (in_flight_ >= options_.queue_max) return full(Limit::kQueue, in_flight_, "");
  if (account != nullptr && account->in_flight >= options_.queue_per_principal_max) {
    return full(Limit::kQueuePerPrincipal, account->in_flight, " of this user");
  }
  if (lane != nullptr && lane->in_flight() >= options_.queue_per_session_max) {
    return full(Limit::kQueuePerSession, lane->in_flight(), " of this session");
  }
  ++in_flight_;
  if (account != nullptr) ++account->in_flight;
  if (lane != nullptr) lane->count.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

void Executor::Leave(Lane* lane, Account* account) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lane != nullptr) lane->count.fetch_sub(1, std::memory_order_relaxed);
  if (account != nullptr) --account->in_flight;
  if (--in_flight_ == 0) idle_.notify_all();
}

void Executor::Submit(Operation operation) {
  auto pending = std::make_shared<Pending>();
  pending->operation = std::move(operation);
  Operation& op = pending->operation;
  pending->lane = op.session == nullptr ? nullptr : static_cast<Lane*>(op.session->lane());
  if (op.account == nullptr && op.session != nullptr) op.account = op.session->account();

  const Clock::time_point plan_start = Clock::now();
  const absl::StatusOr<Choice> choice = Choose(op);
  pending->report.plan_ns = NanosecondsSince(plan_start);
  if (!choice.ok()) {
    metrics_.PlannerRefused(OpFamily::kGemm);
    return op.done(choice.status(), pending->report);
  }
  pending->device = choice->server.device;
  pending->plan = choice->plan;
  pending->report.backend = choice->server.facts->backend;
  pending->report.flops = op.gemm.Flops();

  if (absl::Status status = Admit(pending->lane, pending->account()); !status.ok())
    return op.done(status, pending->report);
  metrics_.OperationAccepted();
  if (op.gemm.Empty()) return Finish(*pending, JobResult{});

  const planner::Plan& plan = pending->plan;
  metrics_.PlannerDecided(OpFamily::kGemm, plan.source);
  pending->report.variant = kernels::GemmVariants()[plan.variant].info.id;
  pending->report.source = plan.source;
  pending->report.split = plan.split;
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
  Leave(pending.lane, pending.account());
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
    const std::span<const kernels::GemmVariant> variants = kernels::GemmVariants();
    for (std::size_t index = 0; index < variants.size(); ++index) {
      if (variants[index].info.backend == state.backend && kernels::GemmBuilt(index)) ++state.variants;
    }
    const auto why = options_.unavailable.find(state.backend);
    state.reason = why != options_.unavailable.end() ? why->second : "not part of this build";
    if (const Server* server = Find(state.backend); server != nullptr) {
      state.available = true;
      state.reason = server->device->Describe();
    }
    states.push_back(std::move(state));
  }
  return states;
}

}  // namespace tessera::server
