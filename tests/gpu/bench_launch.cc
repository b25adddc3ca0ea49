// What one small product costs on its way, inside one process: M = 16, N = K = 4096, bf16 NT, the same operands each
// time (34 MiB, which the L2 cache of an H200 holds).
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/launch/gemm_addressable.h"
#include "server/exec/devices.h"
#include "server/exec/executor.h"
#include "server/session/reaper.h"
#include "server/session/session_table.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"
#include "tests/gpu/bench_empty.h"
#include "tests/gpu/bench_gemm.h"
#include "tests/gpu/bench_samples.h"
#include "tests/gpu/bench_workers.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::gpu_test {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr GemmShape kShape{.m = 16, .n = 4096, .k = 4096};
constexpr std::int64_t kWorkspaceBytesMax = std::int64_t{256} << 20;
// Launches between two waits where only the host's share is timed: fewer than a stream takes before it blocks.
constexpr int kLaunchesAhead = 128;
// Plans in one sample: a single one takes about as long as reading the clock.
constexpr int kPlansPerSample = 64;
constexpr int kKernelsPerGraph = 20;

// The daemon's way from a bound call to its answer, without gRPC.
class Submission {
 public:
  Submission(server::OpenedDevices opened, const BenchGemm& gemm)
      : metrics_(MetricsOptions()),
        gpu_memory_(std::move(opened.gpu_memory)),
        reaper_(10s, metrics_),
        executor_(std::move(opened.devices), kernels::Backend::kCuda, {.queue_max = 16, .queue_per_session_max = 16},
                  metrics_),
        sessions_(/*epoch=*/1, {.sessions_max = 1, .leases_max = 1}, metrics_, reaper_,
                  [this](const server::StreamSpec& spec) { return executor_.MakeLane(spec); }),
        space_(server::MemorySpace::Gpu(gpu_memory_->uuid())),
        gemm_(gemm) {}

  ~Submission() {
    session_.reset();
    sessions_.EndAllSessions(server::SessionEnd::kDrained);
    server::AwaitIdle(reaper_);  // the session's lane has streams of the executor's devices
  }

  absl::Status Open() {
    const server::Peer self{.pid = ::getpid(), .uid = ::getuid(), .gid = ::getgid()};
    ASSIGN_OR_RETURN(const server::Id lease, sessions_.OpenLease(self));
    ASSIGN_OR_RETURN(const server::Id token, sessions_.OpenSession(self, lease, "bench"));
    ASSIGN_OR_RETURN(session_, sessions_.FindSession(self, token));
    return absl::OkStatus();
  }

  // Until `done` is called, on the completer's thread; what it takes to wake this one is not part of it.
  absl::StatusOr<Clock::duration> Run() {
    struct Answer {
      absl::Status status;
      Clock::time_point time;
      std::atomic<bool> there{false};
    } answer;
    server::Submission operation{.session = session_, .backend = kernels::Backend::kCuda};
    operation.ops.push_back({.problem = gemm_.Problem(), .params = gemm_.params(), .space = space_, .pins = {}});
    operation.still_wanted = [] { return absl::OkStatus(); };
    operation.done = [&answer](const absl::Status& status, std::span<const server::OperationReport>) {
      answer.time = Clock::now();
      answer.status = status;
      answer.there.store(true, std::memory_order_release);
    };
    const Clock::time_point start = Clock::now();
    executor_.Submit(std::move(operation));
    while (!answer.there.load(std::memory_order_acquire)) {
    }
    RETURN_IF_ERROR(answer.status);
    return answer.time - start;
  }

 private:
  static server::MetricsOptions MetricsOptions() {
    server::MetricsOptions options{.version = "bench", .variants = {}};
    for (const auto& variant : kernels::GemmVariants()) options.variants.emplace_back(variant.info.id);
    return options;
  }

  server::Metrics metrics_;
  const std::unique_ptr<server::DeviceMemory> gpu_memory_;
  server::Reaper reaper_;
  server::Executor executor_;
  server::SessionTable sessions_;
  const server::MemorySpace space_;
  const BenchGemm& gemm_;
  std::shared_ptr<server::Session> session_;
};

absl::StatusOr<planner::DeviceFacts> CudaFacts(const server::OpenedDevices& opened) {
  for (const auto& device : opened.devices) {
    for (const planner::DeviceFacts& facts : device->facts()) {
      if (facts.backend == kernels::Backend::kCuda) return facts;
    }
  }
  return absl::UnavailableError("no device serves backend cuda");
}

absl::StatusOr<Samples> TimePlan(const BenchGemm& gemm, const planner::DeviceFacts& facts) {
  const planner::GemmPlanner planner(kernels::GemmVariants());
  absl::Status failed;
  volatile std::size_t sink = 0;  // keeps the plans from being optimised away
  const auto plan = [&] {
    planner::GemmProblem problem = gemm.Problem();
    problem.addressable = kernels::AddressableBy(problem.gemm_class, gemm.params());
    const absl::StatusOr<planner::Plan> decided = planner.Decide(problem, facts);
    if (!decided.ok()) failed = decided.status();
    sink = decided.ok() ? decided->variant : 0;
  };
  Samples samples;
  for (int i = -kWarmUpCalls; i < kMeasuredCalls && failed.ok(); ++i) {
    const Clock::time_point start = Clock::now();
    for (int repeat = 0; repeat < kPlansPerSample; ++repeat) plan();
    const std::chrono::duration<double, std::micro> time = Clock::now() - start;
    if (i >= 0) samples.Add(time.count() / kPlansPerSample);
  }
  RETURN_IF_ERROR(failed);
  return samples;
}

// The host's time of `launch` alone.
template <typename LaunchOne>
absl::StatusOr<Samples> TimeLaunches(const BenchStream& stream, const LaunchOne& launch) {
  Samples samples;
  for (int i = -kWarmUpCalls; i < kMeasuredCalls; ++i) {
    if (i % kLaunchesAhead == 0) RETURN_IF_ERROR(stream.Wait());
    const Clock::time_point start = Clock::now();
    const absl::Status status = launch();
    const Clock::time_point end = Clock::now();
    RETURN_IF_ERROR(status);
    if (i >= 0) samples.Add(end - start);
  }
  RETURN_IF_ERROR(stream.Wait());
  return samples;
}

template <typename RunOne>
absl::StatusOr<Samples> TimeRuns(const RunOne& run) {
  absl::Status failed;
  Samples samples = TimeCalls([&] {
    failed = run();
    return failed.ok();
  });
  RETURN_IF_ERROR(failed);
  return samples;
}

absl::StatusOr<Samples> TimeSubmissions(Submission& submission) {
  RETURN_IF_ERROR(submission.Open());
  Samples samples;
  for (int i = -kWarmUpCalls; i < kMeasuredCalls; ++i) {
    ASSIGN_OR_RETURN(const Clock::duration time, submission.Run());
    if (i >= 0) samples.Add(time);
  }
  return samples;
}

// Per kernel, averaged over a graph of some.
absl::StatusOr<Samples> TimeKernel(const std::vector<BenchGemm>& gemms, const planner::Plan& plan,
                                   const BenchStream& stream) {
  ASSIGN_OR_RETURN(const Graph graph, Graph::Record(gemms, plan, kKernelsPerGraph, stream));
  ASSIGN_OR_RETURN(const StreamTimer timer, StreamTimer::Make());
  Samples samples;
  for (int i = -kWarmUpCalls / kKernelsPerGraph; i < kMeasuredCalls / kKernelsPerGraph; ++i) {
    ASSIGN_OR_RETURN(const double us, timer.Time(graph, 1, stream));
    if (i >= 0) samples.Add(us / graph.launches());
  }
  return samples;
}

absl::Status Add(LineFile& file, const std::string& name, const absl::StatusOr<Samples>& samples) {
  if (!samples.ok()) return absl::InternalError(absl::StrCat(name, ": ", samples.status().message()));
  file.Add(CaseLine(name, *samples));
  return absl::OkStatus();
}

}  // namespace

absl::Status BenchLaunch(const std::string& lines) {
  RETURN_IF_ERROR(server::InitLogging("warn", "text"));
  ASSIGN_OR_RETURN(server::OpenedDevices opened,
                   server::OpenDevices(
                       {.cpu_threads = 1, .cuda_device = "0", .workspace_bytes_max = kWorkspaceBytesMax, .lost = {}}));
  ASSIGN_OR_RETURN(const planner::DeviceFacts facts, CudaFacts(opened));
  std::vector<BenchGemm> gemms;
  ASSIGN_OR_RETURN(BenchGemm made, BenchGemm::Make(kShape));
  gemms.push_back(std::move(made));
  const BenchGemm& gemm = gemms.front();
  ASSIGN_OR_RETURN(const planner::Plan plan, PlanOf(gemm, facts));
  ASSIGN_OR_RETURN(const BenchStream stream, BenchStream::Make(static_cast<std::size_t>(plan.workspace_bytes)));
  const auto launch = [&] { return Launch(gemm, plan, stream.workspace(), stream.get()); };
  const auto launch_empty = [&] { return ToStatus(LaunchEmpty(stream.get()), "an empty kernel"); };
  const auto launch_and_wait = [&]() -> absl::Status {
    RETURN_IF_ERROR(launch());
    return stream.Wait();
  };

  LineFile file(lines);
  RETURN_IF_ERROR(Add(file, "plan", TimePlan(gemm, facts)));
  RETURN_IF_ERROR(Add(file, "launch", TimeLaunches(stream, launch)));
  RETURN_IF_ERROR(Add(file, "empty_launch", TimeLaunches(stream, launch_empty)));
  RETURN_IF_ERROR(Add(file, "launch_sync", TimeRuns(launch_and_wait)));
  RETURN_IF_ERROR(Add(file, "kernel", TimeKernel(gemms, plan, stream)));
  Submission submission(std::move(opened), gemm);
  return Add(file, "submit", TimeSubmissions(submission));
}

}  // namespace tessera::gpu_test
