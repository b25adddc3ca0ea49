#include "server/exec/cuda_device.h"

#include <cuda_runtime_api.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shared_thread.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/gemm/vendor/cublaslt.h"
#include "kernels/launch/gemm_launch.h"
#include "server/exec/cuda_driver.h"

namespace tessera::server {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Launches of one stream that the GPU may have before it: enough that it never waits for the host between kernels of
// some microseconds, few enough that a deadline or a cancel still reaches most of a long queue.
constexpr std::size_t kLaunchedMax = 16;
// Streams that are kept when their owner goes, for calls without a session, which take one each.
constexpr std::size_t kIdleStreamsMax = 32;

// How the completer waits: it polls for as long as most kernels take, then sleeps between looks, so that a long kernel
// costs no core. A look at the streams' errors, which polling cannot see, comes now and then.
constexpr auto kPollFor = 200us;
constexpr auto kSleepBetweenPolls = 50us;
constexpr auto kErrorCheckEvery = 5ms;
// Of an idle device: under MPS another client's fault ends this context, and MPS takes no new client until this process
// has gone.
constexpr auto kIdleCheckEvery = 250ms;

std::uint64_t Nanoseconds(Clock::duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
}

absl::Status Unavailable(cudaError_t error, const char* what) {
  return CudaStatus(error, what, absl::StatusCode::kUnavailable);
}

// A 64-bit word of pinned host memory that the GPU writes. Words come from pages that live as long as the pool.
class FlagPool {
 public:
  struct Flag {
    std::uint64_t* host = nullptr;
    CUdeviceptr device = 0;
  };

  ~FlagPool() {
    for (void* page : pages_)
      cudaFreeHost(page);  // at the end of the process's CUDA: nobody is left to tell of an error
  }

  absl::StatusOr<Flag> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) RETURN_IF_ERROR(AddPage());
    const Flag flag = free_.back();
    free_.pop_back();
    __atomic_store_n(flag.host, 0, __ATOMIC_RELAXED);
    return flag;
  }

  void Return(const Flag& flag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(flag);
  }

 private:
  static constexpr std::size_t kFlagBytes = 64;  // a cache line each
  static constexpr std::size_t kPageBytes = 4096;

  absl::Status AddPage() {
    void* page = nullptr;
    RETURN_IF_ERROR(CudaStatus(cudaHostAlloc(&page, kPageBytes, cudaHostAllocMapped | cudaHostAllocPortable),
                               "cudaHostAlloc", absl::StatusCode::kResourceExhausted));
    pages_.push_back(page);
    void* device = nullptr;
    RETURN_IF_ERROR(CudaStatus(cudaHostGetDevicePointer(&device, page, 0), "cudaHostGetDevicePointer"));
    for (std::size_t offset = 0; offset < kPageBytes; offset += kFlagBytes) {
      free_.push_back({.host = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(page) + offset),
                       .device = reinterpret_cast<CUdeviceptr>(device) + offset});
    }
    return absl::OkStatus();
  }

  std::mutex mutex_;
  std::vector<void*> pages_;
  std::vector<Flag> free_;
};

// A CUDA stream with its flag and its workspace, handed from one owner to the next.
struct Channel {
  StreamPriority priority = StreamPriority::kNormal;
  cudaStream_t stream = nullptr;
  FlagPool::Flag flag;
  std::uint64_t launched = 0;  // number of the last job; the flag holds that of the last one done
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

// Whether the context is alive; shared by all streams.
class Health {
 public:
  explicit Health(std::function<void(const absl::Status&)> lost) : lost_(std::move(lost)) {}

  absl::Status status() const {
    if (!is_lost_.load(std::memory_order_acquire)) return absl::OkStatus();
    const std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

  bool is_lost() const { return is_lost_.load(std::memory_order_acquire); }

  // The first report counts. Under any lock: the listener is told later, by the completer.
  void Lose(cudaError_t error, const char* what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) return;
    status_ = absl::UnavailableError(absl::StrCat("the GPU's context is lost: ", what, ": ", cudaGetErrorString(error),
                                                  " (", cudaGetErrorName(error), "); the daemon must restart"));
    is_lost_.store(true, std::memory_order_release);
  }

  // By the completer, with no lock held.
  void TellOnce() {
    if (!is_lost() || told_) return;
    told_ = true;
    if (lost_) lost_(status());
  }

 private:
  const std::function<void(const absl::Status&)> lost_;
  mutable std::mutex mutex_;
  absl::Status status_;
  std::atomic<bool> is_lost_{false};
  bool told_ = false;  // of the completer
};

class CudaStream;

// The thread that sees completions. A stream is watched from its first job under way to its last.
class Completer {
 public:
  Completer(int ordinal, Health& health) : ordinal_(ordinal), health_(health), thread_([this] { Run(); }) {}
  ~Completer();

  void Watch(std::shared_ptr<CudaStream> stream);
  void Wake();  // to tell of a lost context

 private:
  void Run();
  void TakeNew();
  bool Poll();
  void CheckErrors();

  const int ordinal_;
  Health& health_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<CudaStream>> new_;
  std::atomic<bool> called_{false};  // there is something to look at, seen without the lock
  bool stopping_ = false;

  // Of the thread alone.
  std::vector<std::shared_ptr<CudaStream>> watched_;
  cudaStream_t probe_ = nullptr;  // has no work; asked for errors of the context
  std::thread thread_;            // last: it uses the members above
};

class CudaDeviceImpl;

// Jobs in order. One mutex orders the launches of all threads that enqueue; callbacks of `done` run outside it.
class CudaStream final : public Stream, public std::enable_shared_from_this<CudaStream> {
 public:
  CudaStream(CudaDeviceImpl& device, Channel channel) : device_(device), channel_(channel) {}
  ~CudaStream() override;

  void Enqueue(Job job) override;
  void DropUnwanted() override;

  // By the completer. True if a job was done since the last look.
  bool Retire();
  bool idle();
  cudaError_t Query() const { return cudaStreamQuery(channel_.stream); }
  void FailAll();  // the context is lost

 private:
  struct Waiting {
    Job job;
    Clock::time_point accepted;
  };
  struct UnderWay {
    Job job;
    std::uint64_t number = 0;
    JobResult result;
    Clock::time_point launched;
  };
  // What came of looking at the queue, to be told without the lock.
  struct Refused : std::vector<std::pair<Job, JobResult>> {
    std::vector<std::function<void()>> launched;
    void Tell() const {
      for (const auto& callback : launched) callback();
      for (const auto& [job, result] : *this) job.done(result);
    }
  };

  // With mutex_ held: launches what the GPU may have. Jobs that are over without a launch go to `refused`. On the
  // completer a launch may not wait: all streams would.
  void LaunchWaiting(bool may_wait, Refused& refused);
  absl::Status Prepare(std::size_t workspace_bytes);
  absl::Status AwaitWords(const Job& job);
  absl::Status TellOthers(const Job& job);
  void Launch(const Job& job, bool may_wait, JobResult& result);
  // OK or why; a sticky error loses the context.
  absl::Status Judge(cudaError_t error, const char* what, absl::StatusCode code);
  void WatchIfBusy(std::unique_lock<std::mutex> lock);

  CudaDeviceImpl& device_;
  std::mutex mutex_;
  Channel channel_;
  std::deque<Waiting> waiting_;     // bounded by the executor
  std::deque<UnderWay> under_way_;  // at most kLaunchedMax
  bool watched_ = false;
  Clock::time_point last_done_;
};

class CudaDeviceImpl final : public CudaDevice {
 public:
  CudaDeviceImpl(CudaFacts facts, std::vector<planner::DeviceFacts> backends, const CudaDriver& driver,
                 std::function<void(const absl::Status&)> lost)
      : facts_(std::move(facts)),
        space_(MemorySpace::Gpu(facts_.uuid)),
        backends_(std::move(backends)),
        driver_(driver),
        health_(std::move(lost)),
        completer_(std::make_unique<Completer>(facts_.ordinal, health_)) {}

  ~CudaDeviceImpl() override {
    completer_.reset();  // answers what is under way, and lets go of its streams
    for (const Channel& channel : idle_) Destroy(channel);
  }

  std::span<const planner::DeviceFacts> facts() const override { return backends_; }
  const MemorySpace& space() const override { return space_; }
  bool keeps_waits() const override { return true; }
  const CudaFacts& cuda_facts() const override { return facts_; }

  std::string Describe() const override {
    return absl::StrCat(facts_.name, ", sm_", facts_.compute_capability, ", ", facts_.multiprocessors, " SMs, ",
                        facts_.memory_bytes >> 30U, " GiB, ", facts_.uuid, ", driver for CUDA ",
                        CudaVersionText(facts_.driver_version), facts_.mps ? ", MPS" : "");
  }

  std::shared_ptr<Stream> OpenStream(StreamPriority priority) override {
    absl::StatusOr<Channel> channel = TakeChannel(priority);
    if (!channel.ok()) return std::make_shared<LateStream>(*this, priority);
    return std::make_shared<CudaStream>(*this, *channel);
  }

  cudaError_t MakeCurrent() const { return cudaSetDevice(facts_.ordinal); }
  const CudaDriver& driver() const { return driver_; }
  Health& health() { return health_; }
  Completer& completer() { return *completer_; }

  void ReturnChannel(const Channel& channel) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (idle_.size() < kIdleStreamsMax && !health_.is_lost()) return idle_.push_back(channel);
    }
    Destroy(channel);
  }

 private:
  // For an owner that came when there was nothing for a stream: takes one at the first job that finds it.
  class LateStream final : public Stream {
   public:
    LateStream(CudaDeviceImpl& device, StreamPriority priority) : device_(device), priority_(priority) {}

    void Enqueue(Job job) override {
      const absl::StatusOr<std::shared_ptr<Stream>> stream = Get();
      stream.ok() ? (*stream)->Enqueue(std::move(job)) : job.done({.status = stream.status()});
    }

    void DropUnwanted() override {
      std::unique_lock<std::mutex> lock(mutex_);
      const std::shared_ptr<Stream> stream = stream_;
      lock.unlock();  // callbacks run here
      if (stream != nullptr) stream->DropUnwanted();
    }

   private:
    absl::StatusOr<std::shared_ptr<Stream>> Get() {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stream_ == nullptr) {
        ASSIGN_OR_RETURN(const Channel channel, device_.TakeChannel(priority_));
        stream_ = std::make_shared<CudaStream>(device_, channel);
      }
      return stream_;
    }

    CudaDeviceImpl& device_;
    const StreamPriority priority_;
    std::mutex mutex_;
    std::shared_ptr<Stream> stream_;
  };

  absl::StatusOr<Channel> TakeChannel(StreamPriority priority) {
    RETURN_IF_ERROR(health_.status());
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto fitting = std::find_if(idle_.begin(), idle_.end(),
                                        [&](const Channel& channel) { return channel.priority == priority; });
      if (fitting != idle_.end()) {
        const Channel channel = *fitting;
        *fitting = idle_.back();
        idle_.pop_back();
        return channel;
      }
    }
    RETURN_IF_ERROR(Unavailable(MakeCurrent(), "cudaSetDevice"));
    Channel channel{.priority = priority};
    ASSIGN_OR_RETURN(const int level, LevelOf(priority));
    ASSIGN_OR_RETURN(channel.flag, flags_.Take());
    const cudaError_t error = cudaStreamCreateWithPriority(&channel.stream, cudaStreamNonBlocking, level);
    if (error != cudaSuccess) flags_.Return(channel.flag);
    RETURN_IF_ERROR(CudaStatus(error, "cudaStreamCreate", absl::StatusCode::kResourceExhausted));
    return channel;
  }

  // CUDA's own number: the greater the priority, the smaller.
  static absl::StatusOr<int> LevelOf(StreamPriority priority) {
    int least = 0;
    int greatest = 0;
    RETURN_IF_ERROR(
        Unavailable(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange"));
    switch (priority) {
      case StreamPriority::kLow:
        return least;
      case StreamPriority::kHigh:
        return greatest;
      case StreamPriority::kNormal:
        break;
    }
    return (least + greatest) / 2;
  }

  // All work of the channel is done.
  void Destroy(const Channel& channel) {
    if (!health_.is_lost() && MakeCurrent() == cudaSuccess) {
      const auto warn = [](cudaError_t error, const char* what) {
        if (error != cudaSuccess) spdlog::warn("{}: {}", what, cudaGetErrorString(error));
      };
      if (channel.workspace != nullptr) warn(cudaFreeAsync(channel.workspace, channel.stream), "cudaFreeAsync");
      warn(cudaStreamDestroy(channel.stream), "cudaStreamDestroy");
    }
    flags_.Return(channel.flag);
  }

  const CudaFacts facts_;
  const MemorySpace space_;
  const std::vector<planner::DeviceFacts> backends_;
  const CudaDriver driver_;
  FlagPool flags_;
  Health health_;
  std::mutex mutex_;
  std::vector<Channel> idle_;
  std::unique_ptr<Completer> completer_;
};

CudaStream::~CudaStream() {
  device_.ReturnChannel(channel_);
}

void CudaStream::Enqueue(Job job) {
  Refused refused;
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_.push_back({std::move(job), Clock::now()});
  LaunchWaiting(/*may_wait=*/!on_shared_thread, refused);  // a gate may open there
  WatchIfBusy(std::move(lock));
  if (device_.health().is_lost()) device_.completer().Wake();
  refused.Tell();
}

void CudaStream::DropUnwanted() {
  Refused refused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::deque<Waiting> wanted;
    for (Waiting& waiting : waiting_) {
      if (absl::Status status = waiting.job.admit(); status.ok()) {
        wanted.push_back(std::move(waiting));
      } else {
        JobResult result{.status = std::move(status), .queue_ns = Nanoseconds(Clock::now() - waiting.accepted)};
        refused.emplace_back(std::move(waiting.job), std::move(result));
      }
    }
    waiting_ = std::move(wanted);
  }
  refused.Tell();
}

// The completer lets go of an idle stream and takes it again: its owner may drop it at any time.
void CudaStream::WatchIfBusy(std::unique_lock<std::mutex> lock) {
  if (watched_ || under_way_.empty()) return;
  watched_ = true;
  lock.unlock();
  device_.completer().Watch(shared_from_this());
}

void CudaStream::LaunchWaiting(bool may_wait, Refused& refused) {
  while (!waiting_.empty() && under_way_.size() < kLaunchedMax) {
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    JobResult result;
    const Clock::time_point now = Clock::now();
    result.queue_ns = Nanoseconds(now - next.accepted);
    result.status = device_.health().status();
    if (result.status.ok()) result.status = next.job.admit();
    if (result.status.ok()) result.status = Prepare(static_cast<std::size_t>(next.job.workspace_bytes));
    if (result.status.ok()) result.status = AwaitWords(next.job);
    if (result.status.ok()) {
      Launch(next.job, may_wait, result);
      if (result.status.ok() && next.job.launched) refused.launched.push_back(std::move(next.job.launched));
      // Whatever came of it: what was enqueued before an error still runs.
      under_way_.push_back({std::move(next.job), channel_.launched, result, now});
    } else {
      refused.emplace_back(std::move(next.job), result);
    }
  }
}

absl::Status CudaStream::Judge(cudaError_t error, const char* what, absl::StatusCode code) {
  if (error == cudaSuccess) return absl::OkStatus();
  if (!IsSticky(error)) return CudaStatus(error, what, code);
  device_.health().Lose(error, what);
  return device_.health().status();
}

// Makes the device current and the workspace large enough; in stream order, since what is under way still has the old
// one.
absl::Status CudaStream::Prepare(std::size_t workspace_bytes) {
  RETURN_IF_ERROR(Judge(device_.MakeCurrent(), "cudaSetDevice", absl::StatusCode::kUnavailable));
  if (workspace_bytes <= channel_.workspace_bytes) return absl::OkStatus();
  if (channel_.workspace != nullptr) {
    RETURN_IF_ERROR(Judge(cudaFreeAsync(channel_.workspace, channel_.stream), "workspace: cudaFreeAsync",
                          absl::StatusCode::kInternal));
    channel_.workspace = nullptr;
    channel_.workspace_bytes = 0;
  }
  RETURN_IF_ERROR(Judge(cudaMallocAsync(&channel_.workspace, workspace_bytes, channel_.stream),
                        "workspace: cudaMallocAsync", absl::StatusCode::kResourceExhausted));
  channel_.workspace_bytes = workspace_bytes;
  return absl::OkStatus();
}

absl::Status CudaStream::AwaitWords(const Job& job) {
  for (const DeviceWord& word : job.wait) {
    const CUresult waits =
        device_.driver().stream_wait_value64(channel_.stream, word.address, word.value, CU_STREAM_WAIT_VALUE_GEQ);
    RETURN_IF_ERROR(
        Judge(static_cast<cudaError_t>(waits), "cuStreamWaitValue64", absl::StatusCode::kResourceExhausted));
  }
  return absl::OkStatus();
}

// What work on the GPU waits for, before the host is told: it sees that first.
absl::Status CudaStream::TellOthers(const Job& job) {
  for (const DeviceWord& word : job.write) {
    const CUresult written =
        device_.driver().stream_write_value64(channel_.stream, word.address, word.value, CU_STREAM_WRITE_VALUE_DEFAULT);
    RETURN_IF_ERROR(Judge(static_cast<cudaError_t>(written), "cuStreamWriteValue64", absl::StatusCode::kInternal));
  }
  for (const std::shared_ptr<DeviceEvent>& event : job.record) RETURN_IF_ERROR(event->Record(channel_.stream));
  return absl::OkStatus();
}

void CudaStream::Launch(const Job& job, bool may_wait, JobResult& result) {
  const kernels::LaunchContext context{
      .stream = channel_.stream,
      .workspace = {.scratch = channel_.workspace, .bytes = static_cast<std::size_t>(job.workspace_bytes)},
      .may_wait = may_wait};
  // What an earlier call of this thread left would be taken for this launch's error.
  static_cast<void>(cudaGetLastError());
  result.launched = true;
  const auto error = static_cast<cudaError_t>(job.launch(context));
  // A library may have no kernel for what it can state, and only find that out here.
  const bool unsupported = error == cudaErrorNotSupported;
  result.status = Judge(error, "launch", unsupported ? absl::StatusCode::kUnimplemented : absl::StatusCode::kInternal);
  if (result.status.ok()) result.status = TellOthers(job);
  ++channel_.launched;
  const CUresult written = device_.driver().stream_write_value64(channel_.stream, channel_.flag.device,
                                                                 channel_.launched, CU_STREAM_WRITE_VALUE_DEFAULT);
  // Without it nothing would ever tell of the job's end.
  if (written != CUDA_SUCCESS) device_.health().Lose(static_cast<cudaError_t>(written), "cuStreamWriteValue64");
}

bool CudaStream::Retire() {
  std::vector<UnderWay> done;
  Refused refused;
  // A thread that launches has the lock, for long if a library measures its choices: the other streams do not wait for
  // it.
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  const std::uint64_t number = __atomic_load_n(channel_.flag.host, __ATOMIC_ACQUIRE);
  const Clock::time_point now = Clock::now();
  while (!under_way_.empty() && under_way_.front().number <= number) {
    UnderWay& job = under_way_.front();
    job.result.run_ns = Nanoseconds(now - std::max(job.launched, last_done_));
    last_done_ = now;
    done.push_back(std::move(job));
    under_way_.pop_front();
  }
  if (!done.empty()) LaunchWaiting(/*may_wait=*/false, refused);
  lock.unlock();
  for (const UnderWay& job : done) job.job.done(job.result);
  refused.Tell();
  return !done.empty();
}

bool CudaStream::idle() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  watched_ = !under_way_.empty();
  return !watched_;
}

void CudaStream::FailAll() {
  std::vector<std::pair<Job, JobResult>> failed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (UnderWay& job : under_way_) failed.emplace_back(std::move(job.job), job.result);
    for (Waiting& job : waiting_) failed.emplace_back(std::move(job.job), JobResult{});
    under_way_.clear();
    waiting_.clear();
  }
  for (auto& [job, result] : failed) {
    result.status = device_.health().status();
    job.done(result);
  }
}

Completer::~Completer() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Completer::Watch(std::shared_ptr<CudaStream> stream) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    new_.push_back(std::move(stream));
    called_.store(true, std::memory_order_release);
  }
  wake_.notify_one();
}

void Completer::Wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    called_.store(true, std::memory_order_release);
  }
  wake_.notify_one();
}

void Completer::TakeNew() {
  if (!called_.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::shared_ptr<CudaStream>& stream : new_) watched_.push_back(std::move(stream));
  new_.clear();
  called_.store(false, std::memory_order_release);
}

// Serves until told to stop and nothing is under way.
void Completer::Run() {
  on_shared_thread = true;
  if (const cudaError_t error = cudaSetDevice(ordinal_); error != cudaSuccess) {
    spdlog::error("cudaSetDevice on the completer: {}", cudaGetErrorString(error));
  }
  if (const cudaError_t error = cudaStreamCreateWithFlags(&probe_, cudaStreamNonBlocking); error != cudaSuccess) {
    spdlog::error("the completer's stream: {}", cudaGetErrorString(error));
  }
  Clock::time_point progress = Clock::now();
  Clock::time_point checked = progress;
  while (true) {
    const bool resting = Clock::now() - progress > kPollFor;
    if (watched_.empty() && !called_.load(std::memory_order_acquire)) {
      if (!resting) continue;  // the next job of a busy client is on its way: waking up would take longer
      std::unique_lock<std::mutex> lock(mutex_);
      const bool woken = wake_.wait_for(lock, kIdleCheckEvery, [this] { return stopping_ || called_.load(); });
      if (woken && !called_.load()) break;
      lock.unlock();
      if (woken) {
        progress = checked = Clock::now();
      } else {
        CheckErrors();
      }
    } else if (resting) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait_for(lock, kSleepBetweenPolls, [this] { return called_.load(); });
    }
    TakeNew();
    const bool any = Poll();
    const Clock::time_point now = Clock::now();
    if (any) progress = now;
    if (now - std::max(progress, checked) > kErrorCheckEvery) {
      CheckErrors();
      checked = now;
    }
    health_.TellOnce();
  }
  if (probe_ != nullptr && !health_.is_lost()) cudaStreamDestroy(probe_);  // at the end: nobody to tell of an error
}

bool Completer::Poll() {
  bool any = false;
  for (const std::shared_ptr<CudaStream>& stream : watched_) {
    any |= stream->Retire();
    if (health_.is_lost()) stream->FailAll();
  }
  std::erase_if(watched_, [](const std::shared_ptr<CudaStream>& stream) { return stream->idle(); });
  return any;
}

void Completer::CheckErrors() {
  if (health_.is_lost()) return;
  if (probe_ != nullptr) {
    const cudaError_t error = cudaStreamQuery(probe_);
    if (error != cudaSuccess && error != cudaErrorNotReady) return health_.Lose(error, "the context");
  }
  for (const std::shared_ptr<CudaStream>& stream : watched_) {
    const cudaError_t error = stream->Query();
    if (error == cudaSuccess || error == cudaErrorNotReady) continue;
    health_.Lose(error, "a kernel");
    return;
  }
}

// What CUDA answers for a kernel whose module has no image for the GPU.
bool IsMissingImage(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
}

// A kernel that is loaded at its first launch can wait for all that runs, and whatever runs may wait for it: load all
// now. Returns the trees whose kernels run on this device; an error if those that every device needs fail although the
// build has them.
absl::StatusOr<kernels::ArchSet> LoadKernels(int compute_capability) {
  const kernels::ArchSet fitting = ArchsOf(compute_capability);
  kernels::ArchSet archs;
  std::set<kernels::Arch> failed;
  const std::span<const kernels::GemmVariant> variants = kernels::GemmVariants();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const kernels::Arch arch = variants[i].info.arch;
    if (!fitting.Has(arch) || !kernels::GemmBuilt(i) || failed.contains(arch)) continue;
    kernels::KernelFacts facts;
    const auto error = static_cast<cudaError_t>(kernels::PrepareGemm(i, facts));
    if (error == cudaSuccess) {
      archs.Add(arch);
      continue;
    }
    failed.insert(arch);
    if (arch == kernels::Arch::kVendor) {
      spdlog::info("backend vendor is off: {}", kernels::VendorUnavailable());
      continue;
    }
    spdlog::info("kernels of {} are left out: {}: {}", kernels::ArchName(arch), variants[i].info.id,
                 cudaGetErrorString(error));
    if (arch == kernels::Arch::kSm80 && !IsMissingImage(error)) return Unavailable(error, "loading kernels");
  }
  return archs;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenCudaDevice(const CudaDeviceOptions& options) {
  // Before the first CUDA call; an operator's own choice stands.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  ASSIGN_OR_RETURN(const int count, CountCudaDevices());
  ASSIGN_OR_RETURN(CudaFacts facts, ChooseDevice(options.device, count, CudaFactsOf));
  // First by what the device is: one that cannot serve gets no context. A MIG instance tells by its name.
  if (absl::StrContains(facts.name, " MIG ")) {
    return absl::UnavailableError(absl::StrCat(facts.name, " is a MIG instance; only whole GPUs are served"));
  }
  RETURN_IF_ERROR(CheckKernels(facts, ArchsOf(facts.compute_capability)));
  const Clock::time_point start = Clock::now();
  RETURN_IF_ERROR(Unavailable(cudaSetDevice(facts.ordinal), "cudaSetDevice"));
  RETURN_IF_ERROR(CudaDriver::Get().status());
  ASSIGN_OR_RETURN(const kernels::ArchSet archs, LoadKernels(facts.compute_capability));
  RETURN_IF_ERROR(CheckKernels(facts, archs));
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  RETURN_IF_ERROR(Unavailable(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
  spdlog::info("GPU {} {} ({}): kernels loaded in {} ms, {} MiB of its memory free", facts.ordinal, facts.name,
               facts.uuid, Nanoseconds(Clock::now() - start) / 1'000'000, free_bytes >> 20U);
  const planner::DeviceFacts cuda{.backend = kernels::Backend::kCuda,
                                  .archs = archs,
                                  .processors = facts.multiprocessors,
                                  .workspace_bytes_max = options.workspace_bytes_max,
                                  .l2_bytes = facts.l2_bytes,
                                  .shared_bytes_per_block = facts.shared_bytes_per_block,
                                  .shared_bytes_per_processor = facts.shared_bytes_per_multiprocessor,
                                  .threads_per_processor = facts.threads_per_multiprocessor};
  std::vector<planner::DeviceFacts> backends = {cuda};
  if (archs.Has(kernels::Arch::kVendor)) {
    backends.push_back(cuda);
    backends.back().backend = kernels::Backend::kVendor;
  }
  return std::make_unique<CudaDeviceImpl>(std::move(facts), std::move(backends), *CudaDriver::Get(), options.lost);
}

}  // namespace tessera::server
