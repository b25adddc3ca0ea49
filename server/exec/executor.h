// Bound call -> plan -> launch -> completion. Owns the devices and the planner, counts what is in flight, bounds the
// queues, and drains.
//
// Thread-safe. Free of gRPC and protobuf: concurrency is tested here, without them. Sessions must end before their
// executor: the lane that they keep for it has streams on its devices.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "planner/gemm_planner.h"
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
  std::uint64_t plan_ns = 0;
  std::uint64_t run_ns = 0;
};

struct Operation {
  BoundGemm gemm;
  std::shared_ptr<Session> session;         // null for calls without one
  std::shared_ptr<Account> account;         // whose place in the queue it takes; null: the session's, or nobody's
  std::optional<kernels::Backend> backend;  // strict; nullopt = the default
  // Asked right before the launch: CANCELLED or DEADLINE_EXCEEDED drops the operation.
  std::function<absl::Status()> still_wanted;
  // Called exactly once: on the submitting thread, before Submit returns, for a refusal or a small operation, else on a
  // device thread.
  std::function<void(const absl::Status&, const OperationReport&)> done;
};

struct ExecutorOptions {
  std::int64_t queue_max = 0;              // operations of all sessions, waiting or running
  std::int64_t queue_per_session_max = 0;  // of one
  std::int64_t queue_per_principal_max = std::numeric_limits<std::int64_t>::max();
  // Why a backend that the build has is not there; for operators and callers.
  std::map<kernels::Backend, std::string> unavailable = {};
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
  // `devices`.
  Executor(std::vector<std::unique_ptr<Device>> devices, std::optional<kernels::Backend> default_backend,
           const ExecutorOptions& options, Metrics& metrics);
  ~Executor();  // waits for operations in flight

  std::shared_ptr<SessionLane> MakeLane();
  void Submit(Operation operation);

  // From now on Submit answers UNAVAILABLE.
  void StopAccepting();
  // True once nothing is in flight; false after `timeout`. The last `done` may still be running.
  bool AwaitIdle(std::chrono::milliseconds timeout);

  std::uint32_t in_flight() const;
  kernels::Backend default_backend() const { return default_backend_; }
  std::vector<BackendState> Backends() const;

 private:
  struct Pending;
  class Lane;

  // A device under one of the backends that it serves.
  struct Server {
    Device* device = nullptr;
    const planner::DeviceFacts* facts = nullptr;
  };
  struct Choice {
    Server server;
    planner::Plan plan;
  };
  const Server* Find(kernels::Backend backend) const;
  absl::StatusOr<Choice> Choose(const Operation& operation) const;
  absl::StatusOr<Choice> TryServer(const Server& server, const planner::GemmProblem& problem,
                                   const BoundGemm& gemm) const;
  absl::Status Admit(Lane* lane, Account* account);
  void Leave(Lane* lane, Account* account);
  void Enqueue(const std::shared_ptr<Pending>& pending);
  void Finish(Pending& pending, const JobResult& result);

  const ExecutorOptions options_;
  Metrics& metrics_;
  const planner::GemmPlanner gemm_planner_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<Server> servers_;  // in order of preference
  kernels::Backend default_backend_ = kernels::Backend::kCpu;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::int64_t in_flight_ = 0;
  bool accepting_ = true;
};

}  // namespace tessera::server
