#include "server/exec/cpu_device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tessera::server {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;

std::uint64_t NanosecondsSince(Clock::time_point start) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

// A job of at most this many scalar operations runs where it is enqueued: some 15 us with the slowest variant, less
// than waking a worker and answering from it costs (docs/decisions/0006-small-work-runs-on-the-caller.md).
constexpr std::uint64_t kCallerRunsMax = 16 * 1024;

// One parallel loop. Helpers that arrive after the last task was taken leave without touching `body` or `arg`, which
// belong to the caller's stack; the state itself is shared so that such a late helper finds it alive.
class ParallelLoop {
 public:
  ParallelLoop(std::int64_t tasks, int width, void (*body)(void*, std::int64_t), void* arg)
      : tasks_(tasks), chunk_(std::max<std::int64_t>(1, tasks / (std::int64_t{8} * width))), body_(body), arg_(arg) {}

  void Work() {
    while (true) {
      const std::int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= tasks_) return;
      const std::int64_t end = std::min(tasks_, begin + chunk_);
      for (std::int64_t task = begin; task < end; ++task) body_(arg_, task);
      const std::lock_guard<std::mutex> lock(mutex_);
      finished_ += end - begin;
      if (finished_ == tasks_) all_finished_.notify_one();
    }
  }

  void AwaitAll() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_finished_.wait(lock, [this] { return finished_ == tasks_; });
  }

 private:
  const std::int64_t tasks_;
  const std::int64_t chunk_;  // eight chunks a thread: even enough, and few trips through the mutex
  void (*const body_)(void*, std::int64_t);
  void* const arg_;
  std::atomic<std::int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_finished_;
  std::int64_t finished_ = 0;
};

// Scratch memory of one stream; grows to the largest plan it has seen, which the plan's limit bounds.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(data_); }

  // Null on exhaustion.
  void* Ensure(std::size_t bytes) {
    if (bytes <= bytes_) return data_;
    std::free(data_);
    bytes_ = (bytes + kernels::kWorkspaceAlignment - 1) / kernels::kWorkspaceAlignment * kernels::kWorkspaceAlignment;
    data_ = std::aligned_alloc(kernels::kWorkspaceAlignment, bytes_);
    if (data_ == nullptr) bytes_ = 0;
    return data_;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class CpuStream final : public Stream, public std::enable_shared_from_this<CpuStream> {
 public:
  CpuStream(asio::thread_pool& pool, kernels::HostParallel parallel) : pool_(pool), parallel_(parallel) {}

  void Enqueue(Job job) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!scheduled_ && job.scalar_operations <= kCallerRunsMax) {
      scheduled_ = true;
      lock.unlock();
      RunOnCaller(std::move(job));
      return;
    }
    queue_.push_back({std::move(job), Clock::now()});
    if (!scheduled_) Schedule();
  }

  void DropUnwanted() override {
    std::vector<std::pair<Job, JobResult>> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::deque<Queued> wanted;
      for (Queued& queued : queue_) {
        if (absl::Status status = queued.job.admit(); status.ok()) {
          wanted.push_back(std::move(queued));
        } else {
          JobResult result{.status = std::move(status), .queue_ns = NanosecondsSince(queued.accepted)};
          dropped.emplace_back(std::move(queued.job), std::move(result));
        }
      }
      queue_ = std::move(wanted);
    }
    for (const auto& [job, result] : dropped) job.done(result);
  }

 private:
  struct Queued {
    Job job;
    Clock::time_point accepted;
  };

  // With mutex_ held. One job a turn: a strand would run all that is queued before it yields, and a session with a long
  // queue would keep the others from a worker.
  void Schedule() {
    scheduled_ = true;
    asio::post(pool_, [self = shared_from_this()] { self->TakeTurn(); });
  }

  void TakeTurn() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (queue_.empty()) {  // all were dropped since the turn was posted
      scheduled_ = false;
      return;
    }
    std::optional<Queued> next = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Run(next->job, next->accepted, parallel_);
    next.reset();  // release what the callbacks hold before the stream takes its next job
    EndTurn();
  }

  // A turn without the way to a worker and back, which costs more than the job itself. It borrows no workers either.
  void RunOnCaller(std::optional<Job> job) {
    const std::shared_ptr<CpuStream> self = shared_from_this();  // the callbacks may drop the last other reference
    Run(*job, Clock::now(), kernels::HostParallel{});
    job.reset();
    EndTurn();
  }

  void EndTurn() {
    const std::lock_guard<std::mutex> lock(mutex_);
    scheduled_ = false;
    if (!queue_.empty()) Schedule();
  }

  void Run(const Job& job, Clock::time_point accepted, const kernels::HostParallel& parallel) {
    JobResult result;
    result.queue_ns = NanosecondsSince(accepted);
    result.status = job.admit();
    if (result.status.ok()) Launch(job, parallel, result);
    job.done(result);
  }

  void Launch(const Job& job, const kernels::HostParallel& parallel, JobResult& result) {
    kernels::LaunchContext context{.parallel = parallel};
    if (job.workspace_bytes > 0) {
      context.workspace.bytes = static_cast<std::size_t>(job.workspace_bytes);
      context.workspace.scratch = arena_.Ensure(context.workspace.bytes);
      if (context.workspace.scratch == nullptr) {
        result.status = absl::ResourceExhaustedError(
            absl::StrCat("the machine has no memory for a workspace of ", job.workspace_bytes, " bytes"));
        return;
      }
    }
    const Clock::time_point start = Clock::now();
    result.launched = true;
    if (job.launched) job.launched();
    const kernels::LaunchError error = job.launch(context);
    result.run_ns = NanosecondsSince(start);
    if (error != kernels::kLaunchOk) {
      result.status = absl::InternalError(absl::StrCat("launch failed with error ", error));
    }
  }

  asio::thread_pool& pool_;
  const kernels::HostParallel parallel_;
  Arena arena_;  // touched only by the turn's thread

  std::mutex mutex_;
  std::deque<Queued> queue_;  // bounded by the executor
  bool scheduled_ = false;    // a turn is posted or running: jobs of one stream never overlap
};

class CpuDevice final : public Device {
 public:
  CpuDevice(int threads, std::int64_t workspace_bytes_max)
      : facts_{{{.backend = kernels::Backend::kCpu,
                 .archs = {kernels::Arch::kCpu},
                 .processors = threads,
                 .workspace_bytes_max = workspace_bytes_max}}},
        pool_(static_cast<std::size_t>(threads)) {}

  ~CpuDevice() override { pool_.join(); }

  std::span<const planner::DeviceFacts> facts() const override { return facts_; }
  const MemorySpace& space() const override { return space_; }
  std::string Describe() const override { return absl::StrCat(threads(), " threads"); }

  std::shared_ptr<Stream> OpenStream(StreamPriority /*priority*/) override {
    return std::make_shared<CpuStream>(
        pool_, kernels::HostParallel{.run = &CpuDevice::RunParallel, .self = this, .width = threads()});
  }

 private:
  static void RunParallel(void* self, std::int64_t tasks, void (*body)(void*, std::int64_t), void* arg) {
    static_cast<CpuDevice*>(self)->ParallelFor(tasks, body, arg);
  }

  void ParallelFor(std::int64_t tasks, void (*body)(void*, std::int64_t), void* arg) {
    auto loop = std::make_shared<ParallelLoop>(tasks, threads(), body, arg);
    const auto helpers = std::min<std::int64_t>(threads() - 1, tasks - 1);
    for (std::int64_t i = 0; i < helpers; ++i) asio::post(pool_, [loop] { loop->Work(); });
    loop->Work();
    loop->AwaitAll();
  }

  int threads() const { return facts_.front().processors; }

  const std::array<planner::DeviceFacts, 1> facts_;
  const MemorySpace space_;  // the host's
  asio::thread_pool pool_;
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(const CpuDeviceOptions& options) {
  const int hardware = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::make_unique<CpuDevice>(options.threads > 0 ? options.threads : hardware, options.workspace_bytes_max);
}

}  // namespace tessera::server
