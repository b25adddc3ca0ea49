// Bound calls -> plans -> gate -> launch -> completion. Owns the devices and the planner, counts what is in flight,
// bounds the queues, and drains.
//
// The gate holds a submission back, and with it what follows in its stream, until all that it waits for is reached;
// only then does its device see it.
//
// Thread-safe. Free of gRPC and protobuf: concurrency is tested here, without them. Sessions must end before their
// executor: the lane that they keep for it has streams on its devices.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "planner/planner.h"
#include "server/exec/bind.h"
#include "server/exec/device.h"
#include "server/session/session_table.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

struct OperationReport {
  std::string_view variant;  // catalogue id; empty: nothing had to run
  kernels::Backend backend = kernels::Backend::kCpu;
  planner::Source source = planner::Source::kDegraded;
  int split = 1;
  std::uint64_t flops = 0;
  std::uint64_t queue_ns = 0;
  std::uint64_t gate_ns = 0;  // of queue_ns
  std::uint64_t plan_ns = 0;
  std::uint64_t run_ns = 0;  // an equal share of the submission's
};

struct SyncTarget {
  std::shared_ptr<Timeline> timeline;
  std::uint64_t value = 0;
  bool own = false;  // of the submission's session
};

// Operations that run one after the other, with one completion.
struct Submission {
  absl::InlinedVector<BoundGemm, 1> ops;    // at least one
  std::shared_ptr<Session> session;         // null for calls without one
  std::shared_ptr<SessionLane> lane;        // a stream of the session; null: its own
  std::shared_ptr<Account> account;         // whose places in the queue it takes; null: the session's, or nobody's
  std::optional<kernels::Backend> backend;  // strict; nullopt = the default
  std::vector<SyncTarget> wait;             // of calls with a session, as the next
  std::vector<SyncTarget> signal;           // delivered once it is accepted, whatever becomes of it
  std::vector<std::shared_ptr<DeviceEvent>> record;  // events; likewise
  std::chrono::steady_clock::time_point launch_by = std::chrono::steady_clock::time_point::max();
  bool answer_when_launched = false;  // else when completed
  // Asked until the launch: CANCELLED or DEADLINE_EXCEEDED drops the submission.
  std::function<absl::Status()> still_wanted;
  // Called exactly once, with a report for each operation: on the submitting thread, before Submit returns, for a
  // refusal or a small operation, else on a device's thread or on that of whoever opened the gate.
  std::function<void(const absl::Status&, std::span<const OperationReport>)> done;
};

struct ExecutorOptions {
  std::int64_t queue_max = 0;              // operations of all sessions, waiting or running
  std::int64_t queue_per_session_max = 0;  // of one
  std::int64_t queue_per_principal_max = std::numeric_limits<std::int64_t>::max();
  // Why a backend that the build has is not there; for operators and callers.
  std::map<kernels::Backend, std::string> unavailable = {};
  // A wait that was left to a device and lasts longer ends its session by `end_session`, which frees the device.
  std::chrono::milliseconds gpu_wait_timeout = std::chrono::seconds(5);
  std::function<void(Session&)> end_session = [](Session&) {};
};

// What this build and machine offer, for operators.
struct BackendState {
  kernels::Backend backend = kernels::Backend::kCpu;
  bool available = false;
  std::string reason;  // why not, or what device
  std::uint32_t variants = 0;
};

class Executor {
 public:
  // `default_backend`: who computes what names no backend, where it can; nullopt = the first that can, in the order of
  // `devices`. `planner` outlives the executor and may be re-configured meanwhile; null: one of its own.
  Executor(std::vector<std::unique_ptr<Device>> devices, std::optional<kernels::Backend> default_backend,
           const ExecutorOptions& options, Metrics& metrics, planner::Planner* planner = nullptr);
  ~Executor();  // waits for operations in flight

  std::shared_ptr<SessionLane> MakeLane(const StreamSpec& spec = {});
  void Submit(Submission submission);

  // Calls `done` once all that was submitted to these streams before is over, with the first error since the last time
  // that this was asked of them; on the calling thread if all of it is. Who stops waiting must Forget.
  class Wait;
  std::shared_ptr<Wait> Synchronize(const std::vector<std::shared_ptr<SessionLane>>& lanes,
                                    std::function<void(const absl::Status& first_error)> done);
  void Forget(const std::shared_ptr<Wait>& wait);  // null: nothing

  // Drops what is not wanted any more: of ended sessions, and what has timed out. To be called now and then.
  void Tick();

  // From now on Submit answers UNAVAILABLE.
  void StopAccepting();
  // True once nothing is in flight; false after `timeout`. The last `done` may still be running.
  bool AwaitIdle(std::chrono::milliseconds timeout);

  // Operations that have their place in their stream and are not over: what is submitted after one was seen here comes
  // behind it.
  std::uint32_t in_flight() const;
  kernels::Backend default_backend() const { return default_backend_; }
  std::vector<BackendState> Backends() const;
  // Of the devices, in the order in which calls that name no backend try them.
  std::vector<planner::DeviceFacts> Facts() const;
  // UNIMPLEMENTED, with the reason, if it is not there.
  absl::StatusOr<planner::DeviceFacts> FactsOf(kernels::Backend backend) const;

 private:
  struct Pending;
  class Lane;
  class GateTurn;

  // A device under one of the backends that it serves.
  struct Server {
    Device* device = nullptr;
    const planner::DeviceFacts* facts = nullptr;
  };
  struct Choice {
    Server server;
    absl::InlinedVector<planner::Plan, 1> plans;  // one an operation
  };
  const Server* Find(kernels::Backend backend) const;
  absl::Status Unavailable(kernels::Backend backend) const;
  absl::StatusOr<Choice> Choose(const Submission& submission) const;
  absl::StatusOr<Choice> TryServer(const Server& server, const Submission& submission) const;
  absl::StatusOr<planner::Plan> PlanOn(const Server& server, const BoundGemm& gemm) const;
  absl::Status Admit(Pending& pending);
  void TakePlace(const std::shared_ptr<Pending>& pending);
  void Leave(Pending& pending, const absl::Status& status);
  void Watch(const std::shared_ptr<Lane>& lane);
  void LeaveWaitsToDevice(Pending& pending);
  static void AddWords(const Pending& pending, Job& job);
  bool IsStuck(const Lane& lane, const Pending& pending) const;
  void WatchDeviceWaits(const std::shared_ptr<Lane>& lane);
  void Gate(const std::shared_ptr<Pending>& pending);
  std::optional<absl::Status> Arm(Lane& lane, Pending& pending);
  void Ungate(Lane& lane, std::size_t ops);
  void OpenGates(const std::shared_ptr<Lane>& lane);
  void Pump(Lane& lane);
  void Enqueue(const std::shared_ptr<Pending>& pending);
  kernels::LaunchError Launch(Pending& pending, const kernels::LaunchContext& context);
  void Refuse(Pending& pending, const absl::Status& status);
  void Finish(Pending& pending, const JobResult& result);

  const ExecutorOptions options_;
  Metrics& metrics_;
  std::vector<ClassLabel> class_labels_;                 // of each variant
  const std::unique_ptr<planner::Planner> own_planner_;  // null: another's
  planner::Planner& planner_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<Server> servers_;  // in order of preference
  kernels::Backend default_backend_ = kernels::Backend::kCpu;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::int64_t in_flight_ = 0;
  std::atomic<std::int64_t> arriving_{0};  // of in_flight_, operations that are being submitted
  bool accepting_ = true;
  std::vector<std::weak_ptr<Lane>> watched_lanes_;  // that Tick looks at
};

}  // namespace tessera::server
