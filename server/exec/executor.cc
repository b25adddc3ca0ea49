#include "server/exec/executor.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <iterator>
#include <optional>
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
    case absl::StatusCode::kAborted:
      return OperationOutcome::kAborted;
    default:
      return OperationOutcome::kFailed;
  }
}

void LogPlan(const planner::GemmProblem& problem, const OperationReport& report) {
  spdlog::trace("gemm {} m={} n={} k={} batch={} -> {} ({}, split {})", problem.gemm_class.ToString(), problem.m,
                problem.n, problem.k, problem.batch, report.variant, planner::SourceName(report.source), report.split);
}

// Events of work that never came to record them itself.
void RecordNow(const std::vector<std::shared_ptr<DeviceEvent>>& events) {
  for (const std::shared_ptr<DeviceEvent>& event : events) {
    const absl::Status recorded = event->Record(nullptr);
    if (!recorded.ok()) spdlog::warn("an event of a client was not signalled: {}", MessageOf(recorded));
  }
}

bool AllEmpty(const Submission& submission) {
  return std::all_of(submission.ops.begin(), submission.ops.end(), [](const BoundGemm& gemm) { return gemm.Empty(); });
}

}  // namespace

struct Executor::Pending {
  Submission submission;
  absl::InlinedVector<OperationReport, 1> reports;
  absl::InlinedVector<planner::Plan, 1> plans;
  Device* device = nullptr;
  std::shared_ptr<Lane> lane;  // null without a session
  Clock::time_point accepted;
  std::uint64_t epoch = 0;                // of the lane, see Lane::epochs
  std::vector<Timeline::Ticket> tickets;  // one a wait, of those that will wake the lane; guarded by Lane::mutex
  std::vector<SyncTarget> device_waits;   // of submission.wait, those that are left to the device
  std::atomic<Clock::time_point> launched{Clock::time_point::max()};
  std::size_t num_launched = 0;
  std::uint64_t gate_ns = 0;
  bool was_gated = false;
  std::atomic<bool> answered{false};
  std::atomic<bool> stuck{false};  // in a wait that was left to the device, and ended its session
  std::atomic<bool> finished{false};

  Account* account() const { return submission.account.get(); }

  // What the submission may still be dropped by. An error is final, and seen by whoever waits for its signals from here
  // on: what stands behind it may signal later points before this one is told.
  absl::Status Check() const {
    absl::Status status = StillWanted();
    if (!status.ok()) Record(status);
    return status;
  }

  void Record(const absl::Status& error) const {
    for (const SyncTarget& signal : submission.signal) signal.timeline->Record(signal.value, error);
  }

  void ForgetWaits() {
    for (std::size_t i = 0; i < tickets.size(); ++i) submission.wait[i].timeline->Forget(tickets[i]);
    tickets.clear();
  }

  bool timed() const { return submission.launch_by != Clock::time_point::max(); }

  // Whether all is reached that the device waits for, or has failed: then the first error.
  std::optional<absl::Status> DeviceWaits() const {
    bool all = true;
    for (const SyncTarget& target : device_waits) {
      const std::optional<absl::Status> reached = target.timeline->Reached(target.value);
      if (reached.has_value() && !reached->ok()) return Failed(*reached);
      all = all && reached.has_value();
    }
    return all ? std::make_optional(absl::OkStatus()) : std::nullopt;
  }

  static absl::Status Failed(const absl::Status& reached) {
    return absl::AbortedError(absl::StrCat("what it waited for has failed: ", reached.message()));
  }

  // What became of it, which the device cannot tell: it goes on after a wait that failed.
  absl::Status Outcome(const JobResult& result) const {
    if (!result.launched || !result.status.ok()) return result.status;
    if (stuck.load()) {
      return absl::DeadlineExceededError(
          "the GPU waited for a timeline until options.timeout_ms or gpu_wait_timeout_ms had passed; the session has "
          "ended");
    }
    return DeviceWaits().value_or(absl::OkStatus());
  }

  absl::Status StillWanted() const {
    if (submission.session != nullptr && submission.session->ended()) {
      return absl::CancelledError("the session ended before the launch");
    }
    if (timed() && Clock::now() >= submission.launch_by) {
      return absl::DeadlineExceededError("options.timeout_ms passed before the launch; nothing ran");
    }
    if (const std::optional<absl::Status> reached = DeviceWaits(); reached.has_value() && !reached->ok()) {
      return *reached;
    }
    return submission.still_wanted();
  }

  void Answer(const absl::Status& status) {
    if (!answered.exchange(true)) submission.done(status, reports);
  }
};

// An in-order stream of a session: one on each device, the gate before them, and what Synchronize asks for.
class Executor::Lane : public SessionLane, public std::enable_shared_from_this<Executor::Lane> {
 public:
  Lane(Executor& executor, const StreamSpec& spec) : gpu_waits(spec.gpu_waits), executor_(executor) {
    for (const auto& device : executor.devices_) streams.push_back({device.get(), device->OpenStream(spec.priority)});
  }

  std::shared_ptr<Stream> StreamOn(const Device* device) const {
    for (const auto& [of, stream] : streams) {
      if (of == device) return stream;
    }
    return nullptr;
  }

  void DropUnwanted() override {
    const std::shared_ptr<Lane> self = shared_from_this();
    std::vector<std::pair<std::shared_ptr<Pending>, absl::Status>> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      std::deque<std::shared_ptr<Pending>> wanted;
      for (std::shared_ptr<Pending>& pending : gate) {
        absl::Status status = pending->Check();
        if (status.ok()) {
          wanted.push_back(std::move(pending));
        } else {
          pending->ForgetWaits();
          dropped.emplace_back(std::move(pending), std::move(status));
        }
      }
      gate = std::move(wanted);
    }
    for (const auto& [pending, status] : dropped) executor_.Refuse(*pending, status);
    if (!dropped.empty()) executor_.OpenGates(self);  // what was behind them may go
    for (const auto& [device, stream] : streams) stream->DropUnwanted();
  }

  std::int64_t in_flight() const override { return count.load(std::memory_order_relaxed); }
  std::int64_t gated() const override { return num_gated.load(std::memory_order_relaxed); }

  const bool gpu_waits;
  std::vector<std::pair<const Device*, std::shared_ptr<Stream>>> streams;
  std::atomic<std::int64_t> count{0};      // operations in flight; written under Executor::mutex_
  std::atomic<std::int64_t> num_gated{0};  // operations in the gate, or on their way out of it
  std::atomic<std::int64_t> num_timed{0};  // submissions in flight that may time out
  std::atomic<Clock::time_point> last_finish{Clock::time_point::min()};

  std::mutex mutex;  // guards the next five
  std::deque<std::shared_ptr<Pending>> gate;
  std::deque<std::weak_ptr<Pending>> with_device_waits;
  bool pumping = false;  // one thread opens the gate at a time, so that what leaves it keeps its order
  bool again = false;    // look again before that thread leaves
  bool watched = false;  // in Executor::watched_lanes_

  // Submissions counted since a Synchronize asked, oldest first; there is always one. Guarded by Executor::mutex_.
  struct Epoch {
    std::int64_t open = 0;
    std::vector<std::shared_ptr<Wait>> over;  // told once this one and all before it are
  };
  std::deque<Epoch> epochs = std::deque<Epoch>(1);
  std::uint64_t first_epoch = 0;
  absl::Status first_error;  // since the last Synchronize

 private:
  Executor& executor_;
};

// One who asked Synchronize.
class Executor::Wait {
 public:
  Wait(Executor& executor, const std::vector<std::shared_ptr<SessionLane>>& lanes,
       std::function<void(const absl::Status&)> done)
      : executor_(executor), done_(std::move(done)), open_(lanes.size() + 1) {
    for (const auto& lane : lanes) lanes_.push_back(std::static_pointer_cast<Lane>(lane));
  }

  const std::vector<std::shared_ptr<Lane>>& lanes() const { return lanes_; }

  // For each lane, and once more when all of them have been asked.
  void LaneIsOver() {
    if (open_.fetch_sub(1) != 1) return;
    absl::Status first;
    {
      const std::lock_guard<std::mutex> lock(executor_.mutex_);
      for (const auto& lane : lanes_) {
        if (first.ok()) first = lane->first_error;
        lane->first_error = absl::OkStatus();
      }
    }
    done_(first);
  }

 private:
  Executor& executor_;
  const std::function<void(const absl::Status&)> done_;
  std::atomic<std::size_t> open_;
  std::vector<std::shared_ptr<Lane>> lanes_;
};

Executor::Executor(std::vector<std::unique_ptr<Device>> devices, std::optional<kernels::Backend> default_backend,
                   const ExecutorOptions& options, Metrics& metrics, planner::Planner* planner)
    : options_(options),
      metrics_(metrics),
      own_planner_(planner == nullptr ? std::make_unique<planner::Planner>() : nullptr),
      planner_(planner == nullptr ? *own_planner_ : *planner),
      devices_(std::move(devices)) {
  for (const auto& device : devices_) {
    for (const planner::DeviceFacts& facts : device->facts()) servers_.push_back({device.get(), &facts});
  }
  std::stable_partition(servers_.begin(), servers_.end(),
                        [&](const Server& server) { return server.facts->backend == default_backend; });
  default_backend_ = servers_.front().facts->backend;
  for (const kernels::GemmVariant& variant : kernels::GemmVariants()) {
    class_labels_.push_back(metrics_.FindClass(variant.gemm_class.ToString()));
  }
}

// Devices wait for their queued jobs, whose callbacks use the members below them. The CPU, which is last, goes first:
// its workers may still drop a session whose lane has streams on the others.
Executor::~Executor() {
  while (!devices_.empty()) devices_.pop_back();
}

std::shared_ptr<SessionLane> Executor::MakeLane(const StreamSpec& spec) {
  return std::make_shared<Lane>(*this, spec);
}

const Executor::Server* Executor::Find(kernels::Backend backend) const {
  for (const Server& server : servers_) {
    if (server.facts->backend == backend) return &server;
  }
  return nullptr;
}

absl::StatusOr<planner::Plan> Executor::PlanOn(const Server& server, const BoundGemm& gemm) const {
  if (gemm.Empty()) return planner::Plan{};
  if (!(server.device->space() == gemm.space)) {
    return absl::UnimplementedError(absl::StrCat("backend ", Av(kernels::BackendName(server.facts->backend)),
                                                 " computes on memory of ", server.device->space().Name(),
                                                 "; these tensors are in memory of ", gemm.space.Name()));
  }
  planner::GemmProblem problem = gemm.problem;
  problem.addressable = kernels::AddressableBy(problem.gemm_class, gemm.params);
  return planner_.Decide(problem, *server.facts);
}

absl::StatusOr<Executor::Choice> Executor::TryServer(const Server& server, const Submission& submission) const {
  Choice choice{.server = server, .plans = {}};
  for (const BoundGemm& gemm : submission.ops) {
    absl::StatusOr<planner::Plan> plan = PlanOn(server, gemm);
    if (!plan.ok()) {
      if (submission.ops.size() == 1) return plan.status();
      return InField(absl::StrCat("ops[", choice.plans.size(), "]"), plan.status());
    }
    choice.plans.push_back(*plan);
  }
  return choice;
}

absl::Status Executor::Unavailable(kernels::Backend backend) const {
  const auto why = options_.unavailable.find(backend);
  return absl::UnimplementedError(
      absl::StrCat("options.backend: ", Av(kernels::BackendName(backend)), " is not available in this daemon",
                   why == options_.unavailable.end() ? "" : absl::StrCat(" (", why->second, ")"),
                   "; `tessera status` lists what is"));
}

std::vector<planner::DeviceFacts> Executor::Facts() const {
  std::vector<planner::DeviceFacts> facts;
  for (const Server& server : servers_) facts.push_back(*server.facts);
  return facts;
}

absl::StatusOr<planner::DeviceFacts> Executor::FactsOf(kernels::Backend backend) const {
  if (const Server* server = Find(backend); server != nullptr) return *server->facts;
  return Unavailable(backend);
}

// A backend that the request names is strict; else the first that can, in order of preference.
absl::StatusOr<Executor::Choice> Executor::Choose(const Submission& submission) const {
  if (submission.backend.has_value()) {
    if (const Server* server = Find(*submission.backend); server != nullptr) return TryServer(*server, submission);
    return Unavailable(*submission.backend);
  }
  absl::Status refused;
  for (const Server& server : servers_) {
    absl::StatusOr<Choice> choice = TryServer(server, submission);
    if (choice.ok()) return choice;
    // The word of the one that has the memory says most.
    if (refused.ok() || server.device->space() == submission.ops.front().space) refused = choice.status();
  }
  return refused;
}

absl::Status Executor::Admit(Pending& pending) {
  const auto full = [this](Limit limit, std::int64_t waiting, const char* whose) {
    metrics_.Refused(limit);
    return absl::ResourceExhaustedError(
        absl::StrCat(Av(LabelText(limit)), ": ", waiting, " operations", whose, " wait or run; try again"));
  };
  const auto ops = static_cast<std::int64_t>(pending.submission.ops.size());
  Account* const account = pending.account();
  Session* const session = pending.submission.session.get();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!accepting_) return absl::UnavailableError("the daemon is draining and takes no new work");
  if (in_flight_ > options_.queue_max - ops) return full(Limit::kQueue, in_flight_, "");
  if (account != nullptr && account->in_flight > options_.queue_per_principal_max - ops) {
    return full(Limit::kQueuePerPrincipal, account->in_flight, " of this user");
  }
  if (session != nullptr && session->in_flight > options_.queue_per_session_max - ops) {
    return full(Limit::kQueuePerSession, session->in_flight, " of this session");
  }
  in_flight_ += ops;
  arriving_.fetch_add(ops, std::memory_order_relaxed);
  if (account != nullptr) account->in_flight += ops;
  if (session != nullptr) session->in_flight += ops;
  if (Lane* const lane = pending.lane.get(); lane != nullptr) {
    lane->count.fetch_add(ops, std::memory_order_relaxed);
    ++lane->epochs.back().open;
    pending.epoch = lane->first_epoch + lane->epochs.size() - 1;
  }
  return absl::OkStatus();
}

void Executor::Leave(Pending& pending, const absl::Status& status) {
  const auto ops = static_cast<std::int64_t>(pending.submission.ops.size());
  std::vector<std::shared_ptr<Wait>> over;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Lane* const lane = pending.lane.get(); lane != nullptr) {
      lane->count.fetch_sub(ops, std::memory_order_relaxed);
      if (lane->first_error.ok()) lane->first_error = status;
      --lane->epochs[pending.epoch - lane->first_epoch].open;
      while (lane->epochs.size() > 1 && lane->epochs.front().open == 0) {
        for (auto& wait : lane->epochs.front().over) over.push_back(std::move(wait));
        lane->epochs.pop_front();
        ++lane->first_epoch;
      }
    }
    if (pending.account() != nullptr) pending.account()->in_flight -= ops;
    if (pending.submission.session != nullptr) pending.submission.session->in_flight -= ops;
    in_flight_ -= ops;
    if (in_flight_ == 0) idle_.notify_all();
  }
  for (const auto& wait : over) wait->LaneIsOver();
}

std::shared_ptr<Executor::Wait> Executor::Synchronize(const std::vector<std::shared_ptr<SessionLane>>& lanes,
                                                      std::function<void(const absl::Status&)> done) {
  auto wait = std::make_shared<Wait>(*this, lanes, std::move(done));
  std::size_t over = 1;
  for (const auto& lane : wait->lanes()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::deque<Lane::Epoch>& epochs = lane->epochs;
    if (epochs.back().open > 0) {
      epochs.back().over.push_back(wait);
      epochs.emplace_back();
    } else if (epochs.size() > 1) {
      epochs[epochs.size() - 2].over.push_back(wait);  // nothing came since the last one asked: this waits for the same
    } else {
      ++over;
    }
  }
  for (; over > 0; --over) wait->LaneIsOver();
  return wait;
}

void Executor::Forget(const std::shared_ptr<Wait>& wait) {
  if (wait == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& lane : wait->lanes()) {
    for (Lane::Epoch& epoch : lane->epochs) std::erase(epoch.over, wait);
  }
}

void Executor::Submit(Submission submission) {
  auto pending = std::make_shared<Pending>();
  pending->submission = std::move(submission);
  Submission& of = pending->submission;
  if (of.session != nullptr) {
    pending->lane = std::static_pointer_cast<Lane>(of.lane != nullptr ? of.lane : of.session->lane());
    if (of.account == nullptr) of.account = of.session->account();
  }
  pending->reports.resize(of.ops.size());

  const Clock::time_point plan_start = Clock::now();
  absl::StatusOr<Choice> choice = Choose(of);
  const Clock::time_point planned = Clock::now();
  const auto plan_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(planned - plan_start).count());
  if (!choice.ok()) {
    metrics_.PlannerRefused(OpFamily::kGemm);
    return pending->Answer(choice.status());
  }
  if (absl::Status status = Admit(*pending); !status.ok()) return pending->Answer(status);
  pending->accepted = planned;
  pending->device = choice->server.device;
  pending->plans = std::move(choice->plans);
  for (std::size_t i = 0; i < of.ops.size(); ++i) {
    OperationReport& report = pending->reports[i];
    const planner::Plan& plan = pending->plans[i];
    report.plan_ns = plan_ns / of.ops.size();
    report.backend = choice->server.facts->backend;
    report.flops = of.ops[i].Flops();
    metrics_.OperationAccepted();
    if (of.ops[i].Empty()) continue;
    metrics_.PlannerDecided(OpFamily::kGemm, class_labels_[plan.variant], plan.source);
    report.variant = kernels::GemmVariants()[plan.variant].info.id;
    report.source = plan.source;
    report.split = plan.split;
    if (spdlog::should_log(spdlog::level::trace)) LogPlan(of.ops[i].problem, report);
  }
  const auto ops = static_cast<std::int64_t>(of.ops.size());
  TakePlace(pending);
  arriving_.fetch_sub(ops, std::memory_order_release);
}

// Behind what came before it in its stream. It may be over when this returns.
void Executor::TakePlace(const std::shared_ptr<Pending>& pending) {
  const Submission& of = pending->submission;
  for (const SyncTarget& signal : of.signal) signal.timeline->Expect(signal.value);
  LeaveWaitsToDevice(*pending);
  if (pending->lane != nullptr && pending->timed()) {
    pending->lane->num_timed.fetch_add(1, std::memory_order_relaxed);
    Watch(pending->lane);
  }
  // Nothing to wait for, nothing to run, nobody to tell: it need not wait for its turn.
  const bool ordered = !of.wait.empty() || !of.signal.empty() || !of.record.empty() || !pending->device_waits.empty();
  if (!ordered && AllEmpty(of)) return Finish(*pending, JobResult{});
  const bool gated = !of.wait.empty() || (pending->lane != nullptr && pending->lane->gated() > 0);
  gated ? Gate(pending) : Enqueue(pending);
}

// What a stream with gpu_waits leaves to its device: waits for words of the session's own, which its end can raise.
void Executor::LeaveWaitsToDevice(Pending& pending) {
  std::vector<SyncTarget>& wait = pending.submission.wait;
  if (wait.empty() || !pending.lane->gpu_waits || !pending.device->keeps_waits()) return;
  const auto by_host = std::stable_partition(wait.begin(), wait.end(), [&](const SyncTarget& target) {
    const SharedWord* const word = target.timeline->word();
    return !target.own || word == nullptr || !word->AddressOn(pending.device->space()).has_value();
  });
  pending.device_waits.assign(std::make_move_iterator(by_host), std::make_move_iterator(wait.end()));
  wait.erase(by_host, wait.end());
}

// Tick looks at the lane until nothing is left that it could drop.
void Executor::Watch(const std::shared_ptr<Lane>& lane) {
  {
    const std::lock_guard<std::mutex> lock(lane->mutex);
    if (std::exchange(lane->watched, true)) return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  watched_lanes_.push_back(lane);
}

void Executor::Gate(const std::shared_ptr<Pending>& pending) {
  const std::shared_ptr<Lane> lane = pending->lane;
  const auto ops = static_cast<std::int64_t>(pending->submission.ops.size());
  pending->was_gated = true;
  metrics_.OperationsGated(ops);
  {
    const std::lock_guard<std::mutex> lock(lane->mutex);
    lane->num_gated.fetch_add(ops, std::memory_order_relaxed);
    lane->gate.push_back(pending);
  }
  Watch(lane);
  OpenGates(lane);
}

// What leaves a gate may complete at once and open another, and that one the next: one after the other, when the
// outermost turn of the thread ends, not one inside the other.
class Executor::GateTurn {
 public:
  explicit GateTurn(Executor& executor) : executor_(executor), outermost_(under_way_ == nullptr) {
    if (outermost_) under_way_ = &lanes_;
  }
  GateTurn(const GateTurn&) = delete;
  GateTurn& operator=(const GateTurn&) = delete;
  ~GateTurn() {
    if (!outermost_) return;
    while (!lanes_.empty()) {
      const std::shared_ptr<Lane> next = std::move(lanes_.front());
      lanes_.pop_front();
      executor_.Pump(*next);
    }
    under_way_ = nullptr;
  }

  void Add(const std::shared_ptr<Lane>& lane) { under_way_->push_back(lane); }

 private:
  inline static thread_local std::deque<std::shared_ptr<Lane>>* under_way_ = nullptr;

  Executor& executor_;
  const bool outermost_;
  std::deque<std::shared_ptr<Lane>> lanes_;
};

void Executor::OpenGates(const std::shared_ptr<Lane>& lane) {
  GateTurn turn(*this);
  turn.Add(lane);
}

// With lane.mutex held. nullopt: not all is reached, and the lane will be woken. Else OK, or what has failed.
std::optional<absl::Status> Executor::Arm(Lane& lane, Pending& pending) {
  const std::vector<SyncTarget>& waits = pending.submission.wait;
  pending.tickets.resize(waits.size());
  bool all = true;
  for (std::size_t i = 0; i < waits.size(); ++i) {
    const SyncTarget& target = waits[i];
    std::optional<absl::Status> reached = target.timeline->Reached(target.value);
    if (!reached.has_value() && !pending.tickets[i]) {
      const auto wake = [this, weak = lane.weak_from_this()] {
        if (const std::shared_ptr<Lane> woken = weak.lock(); woken != nullptr) OpenGates(woken);
      };
      pending.tickets[i] = target.timeline->WakeWhenReached(target.value, wake);
      if (!pending.tickets[i]) reached = target.timeline->Reached(target.value);
    }
    if (reached.has_value() && !reached->ok()) return reached;
    all = all && reached.has_value();
  }
  if (!all) return std::nullopt;
  return absl::OkStatus();
}

void Executor::Pump(Lane& lane) {
  std::unique_lock<std::mutex> lock(lane.mutex);
  lane.again = true;
  if (lane.pumping) return;
  lane.pumping = true;
  while (std::exchange(lane.again, false)) {
    while (!lane.gate.empty()) {
      const std::shared_ptr<Pending> first = lane.gate.front();
      const std::optional<absl::Status> reached = Arm(lane, *first);
      if (!reached.has_value()) break;
      absl::Status failed;
      if (!reached->ok()) {
        failed = Pending::Failed(*reached);
        first->Record(failed);
      }
      first->ForgetWaits();
      lane.gate.pop_front();
      lock.unlock();
      if (failed.ok()) {
        first->gate_ns = NanosecondsSince(first->accepted);
        Enqueue(first);
      } else {
        Refuse(*first, failed);
      }
      lock.lock();
      // Only now may what is submitted next pass by the gate.
      if (failed.ok()) Ungate(lane, first->submission.ops.size());
    }
  }
  lane.pumping = false;
}

void Executor::Ungate(Lane& lane, std::size_t ops) {
  lane.num_gated.fetch_sub(static_cast<std::int64_t>(ops), std::memory_order_relaxed);
  metrics_.OperationsUngated(static_cast<std::int64_t>(ops));
}

// Words that the device waits for and writes, and events that it records.
void Executor::AddWords(const Pending& pending, Job& job) {
  const MemorySpace& space = pending.device->space();
  for (const SyncTarget& target : pending.device_waits) {
    job.wait.push_back({.address = *target.timeline->word()->AddressOn(space), .value = target.value});
  }
  for (const SyncTarget& target : pending.submission.signal) {
    const SharedWord* const word = target.timeline->word();
    const std::optional<std::uint64_t> address = word == nullptr ? std::nullopt : word->AddressOn(space);
    if (address.has_value()) job.write.push_back({.address = *address, .value = target.value});
  }
  job.record = pending.submission.record;
}

void Executor::Enqueue(const std::shared_ptr<Pending>& pending) {
  // Calls without a session are not ordered among themselves: each has a stream of its own.
  const std::shared_ptr<Stream> stream = pending->lane != nullptr
                                             ? pending->lane->StreamOn(pending->device)
                                             : pending->device->OpenStream(StreamPriority::kNormal);
  Job job;
  for (std::size_t i = 0; i < pending->plans.size(); ++i) {
    job.workspace_bytes = std::max(job.workspace_bytes, pending->plans[i].workspace_bytes);
    if (!pending->submission.ops[i].Empty()) job.scalar_operations += pending->submission.ops[i].ScalarOperations();
  }
  // `done` keeps it for these two, which then need no memory of their own.
  Pending* const kept = pending.get();
  job.admit = [kept] { return kept->Check(); };
  job.launch = [this, kept](const kernels::LaunchContext& context) { return Launch(*kept, context); };
  if (pending->device->keeps_waits()) AddWords(*pending, job);
  if (!pending->device_waits.empty()) {
    metrics_.DeviceWaits(static_cast<std::int64_t>(pending->device_waits.size()));
    {
      const std::lock_guard<std::mutex> lock(pending->lane->mutex);
      pending->lane->with_device_waits.push_back(pending);
    }
    Watch(pending->lane);
  }
  if (pending->submission.answer_when_launched || !pending->device_waits.empty()) {
    job.launched = [pending] {
      pending->launched.store(Clock::now(), std::memory_order_relaxed);
      if (pending->submission.answer_when_launched) pending->Answer(absl::OkStatus());
    };
  }
  job.done = [this, pending](const JobResult& result) { Finish(*pending, result); };
  stream->Enqueue(std::move(job));
}

kernels::LaunchError Executor::Launch(Pending& pending, const kernels::LaunchContext& context) {
  for (std::size_t i = 0; i < pending.plans.size(); ++i) {
    const BoundGemm& gemm = pending.submission.ops[i];
    const planner::Plan& plan = pending.plans[i];
    pending.num_launched = i + 1;
    metrics_.OperationLaunched();
    if (gemm.Empty()) continue;
    metrics_.KernelLaunched(VariantLabel{plan.variant});
    const kernels::LaunchError error =
        kernels::LaunchGemm(plan.variant, gemm.params, {.split = plan.split, .raster = plan.raster}, context);
    if (error != kernels::kLaunchOk) return error;
  }
  return kernels::kLaunchOk;
}

// Of a submission in a gate, which never came to its device.
void Executor::Refuse(Pending& pending, const absl::Status& status) {
  const std::shared_ptr<Lane> lane = pending.lane;
  const std::size_t ops = pending.submission.ops.size();
  pending.gate_ns = NanosecondsSince(pending.accepted);
  Finish(pending, JobResult{.status = status});
  Ungate(*lane, ops);
}

void Executor::Finish(Pending& pending, const JobResult& result) {
  const std::size_t ops = pending.submission.ops.size();
  const absl::Status status = pending.Outcome(result);
  pending.finished.store(true, std::memory_order_relaxed);
  for (std::size_t i = 0; i < ops; ++i) {
    OperationReport report = pending.reports[i];
    report.gate_ns = pending.gate_ns;
    report.queue_ns = pending.gate_ns + result.queue_ns;
    report.run_ns = result.run_ns / ops;
    metrics_.OperationFinished({.op = OpFamily::kGemm,
                                .backend = report.backend,
                                .outcome = OutcomeOf(status),
                                .launched = i < pending.num_launched,
                                .queue_seconds = static_cast<double>(report.queue_ns) * 1e-9,
                                .run_seconds = static_cast<double>(report.run_ns) * 1e-9,
                                .flops = report.flops});
    // Where the launch is the answer, that may be reading them.
    if (!pending.submission.answer_when_launched) pending.reports[i] = report;
    if (pending.was_gated) metrics_.GateTime(OpFamily::kGemm, static_cast<double>(report.gate_ns) * 1e-9);
  }
  // Before the answer: whoever has it may look at references at once, send the next call into a full queue, or count on
  // the signals.
  for (BoundGemm& gemm : pending.submission.ops) gemm.pins.clear();
  // Whom they let go is answered after this one, though: causes come before their consequences.
  const GateTurn turn(*this);
  for (const SyncTarget& signal : pending.submission.signal) signal.timeline->Deliver(signal.value, status);
  const bool recorded = pending.device->keeps_waits() && result.launched && result.status.ok();
  if (!recorded) RecordNow(pending.submission.record);
  if (pending.lane != nullptr) {
    pending.lane->last_finish.store(Clock::now(), std::memory_order_relaxed);
    if (pending.timed()) pending.lane->num_timed.fetch_sub(1, std::memory_order_relaxed);
  }
  Leave(pending, status);
  pending.Answer(status);
}

// A wait that was left to the device has been under way for too long, as its submission or the daemon sees it. Its time
// begins when the stream has come to it.
bool Executor::IsStuck(const Lane& lane, const Pending& pending) const {
  const Clock::time_point launched = pending.launched.load(std::memory_order_relaxed);
  if (launched == Clock::time_point::max() || pending.DeviceWaits().has_value()) return false;
  const Clock::time_point now = Clock::now();
  const Clock::time_point begun = std::max(launched, lane.last_finish.load(std::memory_order_relaxed));
  return now >= pending.submission.launch_by || now - begun > options_.gpu_wait_timeout;
}

// A device cannot be told to give up a wait. So its session ends, whose timelines are raised; they are raised again for
// as long as work of an ended session may still wait, since that client's own work may have written them meanwhile.
void Executor::WatchDeviceWaits(const std::shared_ptr<Lane>& lane) {
  std::vector<std::shared_ptr<Pending>> under_way;
  {
    const std::lock_guard<std::mutex> lock(lane->mutex);
    std::erase_if(lane->with_device_waits, [&](const std::weak_ptr<Pending>& weak) {
      const std::shared_ptr<Pending> pending = weak.lock();
      if (pending == nullptr || pending->finished.load(std::memory_order_relaxed)) return true;
      under_way.push_back(pending);
      return false;
    });
  }
  for (const std::shared_ptr<Pending>& pending : under_way) {
    Session& session = *pending->submission.session;
    if (!session.ended()) {
      if (!IsStuck(*lane, *pending)) {
        for (const SyncTarget& target : pending->device_waits) target.timeline->ShowReached(target.value);
        continue;
      }
      pending->stuck.store(true);
      spdlog::warn("session {}.{} of {} (pid {}, \"{}\") ends: the GPU waits for one of its timelines for too long",
                   session.id().index, session.id().generation, session.peer().Principal(), session.peer().pid,
                   session.label());
      options_.end_session(session);
    }
    // Here, too: the thread that ends sessions may itself be waiting for the GPU.
    for (const SyncTarget& target : pending->device_waits) {
      target.timeline->Close(absl::AbortedError("the session of a timeline has ended"));
      target.timeline->RaiseClosed();
    }
  }
}

void Executor::Tick() {
  std::vector<std::weak_ptr<Lane>> lanes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    lanes.swap(watched_lanes_);
  }
  for (const std::weak_ptr<Lane>& weak : lanes) {
    const std::shared_ptr<Lane> lane = weak.lock();
    if (lane == nullptr) continue;
    lane->DropUnwanted();
    WatchDeviceWaits(lane);
    bool more = false;
    {
      const std::lock_guard<std::mutex> lock(lane->mutex);
      lane->watched = false;
      more = !lane->gate.empty() || !lane->with_device_waits.empty() ||
             lane->num_timed.load(std::memory_order_relaxed) > 0;
    }
    if (more) Watch(lane);
  }
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
  // What is over before it was counted as arrived is in neither number for a moment.
  return static_cast<std::uint32_t>(std::max<std::int64_t>(0, in_flight_ - arriving_.load(std::memory_order_acquire)));
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
