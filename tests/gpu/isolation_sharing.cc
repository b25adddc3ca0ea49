// Jobs that measure what sharing costs: handovers, two busy clients, a stream that waits for ever.
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/gemm_stream.h"
#include "common/status_macros.h"
#include "tests/gpu/bench_samples.h"
#include "tests/gpu/isolation_client.h"
#include "tests/gpu/isolation_kernels.h"
#include "tests/gpu/isolation_worker.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Gemm = std::function<absl::Status()>;
using Future = std::future<absl::StatusOr<client::GemmResult>>;

// A product of some 22 us whose weights are read once: what a decoding step sends.
constexpr std::int64_t kM = 16;
constexpr std::int64_t kN = 4096;
constexpr std::int64_t kK = 4096;

constexpr int kWarmUpRounds = 50;
constexpr int kRounds = 300;
constexpr int kBusyDepth = 8;
constexpr auto kBusyTime = 1s;
constexpr int kLatencyCalls = 200;
constexpr auto kLatencyTime = 3s;  // whatever number that makes, if they are slow
constexpr auto kAnswerLimit = 5s;
constexpr std::size_t kFreeStreams = 16;
constexpr auto kProgressLimit = 1s;
constexpr auto kReleaseLimit = 5s;

// Own kernel, product, own kernel: each of the three may be left out, the waits stay.
struct Sequence {
  bool kernels = true;
  const Gemm* gemm = nullptr;

  absl::Status Own(const OwnWork& own) const {
    if (kernels) RETURN_IF_ERROR(own.Tiny());
    return own.Wait();
  }

  absl::Status Run(const OwnWork& own) const {
    RETURN_IF_ERROR(Own(own));
    if (gemm != nullptr) RETURN_IF_ERROR((*gemm)());
    return Own(own);
  }

  // The second of two in a row: the first one leaves the GPU with the process that begins the second.
  absl::StatusOr<double> Time(const OwnWork& own) const {
    RETURN_IF_ERROR(Run(own));
    const Clock::time_point start = Clock::now();
    RETURN_IF_ERROR(Run(own));
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  }
};

absl::StatusOr<Json> TimeHandover(const OwnWork& own, const Gemm& gemm) {
  const Sequence all{.kernels = true, .gemm = &gemm};
  const Sequence gemm_alone{.kernels = false, .gemm = &gemm};
  const Sequence kernels_alone{.kernels = true, .gemm = nullptr};
  Samples handover;
  Samples full;
  Samples gemms;
  Samples kernels;
  for (int round = -kWarmUpRounds; round < kRounds; ++round) {
    ASSIGN_OR_RETURN(const double full_us, all.Time(own));
    ASSIGN_OR_RETURN(const double gemm_us, gemm_alone.Time(own));
    ASSIGN_OR_RETURN(const double kernels_us, kernels_alone.Time(own));
    if (round < 0) continue;
    full.Add(full_us);
    gemms.Add(gemm_us);
    kernels.Add(kernels_us);
    handover.Add((full_us - gemm_us - kernels_us) / 2);  // to the daemon and back
  }
  return Json{{"us", handover.Median()},
              {"p90_us", handover.Quantile(0.9)},
              {"full_us", full.Median()},
              {"gemm_us", gemms.Median()},
              {"kernels_us", kernels.Median()}};
}

absl::StatusOr<double> ProductsPerSecond(const OwnWork& own, client::GemmStream& stream, const client::GemmSpec& spec) {
  const Clock::time_point start = Clock::now();
  std::int64_t products = 0;
  while (Clock::now() < start + kBusyTime) {
    std::vector<Future> under_way;
    for (int i = 0; i < kBusyDepth; ++i) {
      RETURN_IF_ERROR(own.Busy());
      under_way.push_back(stream.Gemm(spec));
    }
    for (Future& product : under_way) RETURN_IF_ERROR(product.get().status());
    RETURN_IF_ERROR(own.Wait());
    products += kBusyDepth;
  }
  return static_cast<double>(products) / std::chrono::duration<double>(Clock::now() - start).count();
}

// The median time of some calls, or -1 if one is not answered in time.
absl::StatusOr<double> CallLatency(GemmClient& client) {
  Samples samples;
  const Clock::time_point deadline = Clock::now() + kLatencyTime;
  for (int i = 0; i < kLatencyCalls && Clock::now() < deadline; ++i) {
    const Clock::time_point start = Clock::now();
    Future product = client.session().GemmAsync(client.spec());
    if (product.wait_for(kAnswerLimit) != std::future_status::ready) return -1;
    samples.Add(Clock::now() - start);
    RETURN_IF_ERROR(product.get().status());
  }
  return samples.Median();
}

// Streams of this process beside one that waits for a word of host memory.
class StuckStream {
 public:
  static absl::StatusOr<StuckStream> Make() {
    StuckStream stuck;
    void* word = nullptr;
    RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&word, sizeof(std::uint64_t), cudaHostAllocMapped), "cudaHostAlloc"));
    stuck.word_ = static_cast<std::uint64_t*>(word);
    __atomic_store_n(stuck.word_, 0, __ATOMIC_RELEASE);
    RETURN_IF_ERROR(ToStatus(cudaHostGetDevicePointer(&stuck.device_word_, word, 0), "cudaHostGetDevicePointer"));
    void* wait = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    RETURN_IF_ERROR(
        ToStatus(cudaGetDriverEntryPointByVersion("cuStreamWaitValue64", &wait, 12000, cudaEnableDefault, &found),
                 "cuStreamWaitValue64"));
    if (found != cudaDriverEntryPointSuccess) return absl::UnavailableError("the driver has no cuStreamWaitValue64");
    stuck.wait_value_ = reinterpret_cast<decltype(&cuStreamWaitValue64)>(wait);
    ASSIGN_OR_RETURN(stuck.counts_, AllocatePlain((kFreeStreams + 1) * sizeof(std::uint64_t)));
    for (std::size_t i = 0; i <= kFreeStreams; ++i) {
      RETURN_IF_ERROR(
          ToStatus(cudaStreamCreateWithFlags(&stuck.streams_.emplace_back(), cudaStreamNonBlocking), "a stream"));
      RETURN_IF_ERROR(stuck.Launch(i));
      RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stuck.streams_[i]), "a stream's first kernel"));
    }
    return stuck;
  }

  // The last stream waits, then kernels for all.
  absl::Status Stick() const {
    const CUresult error =
        wait_value_(streams_.back(), reinterpret_cast<CUdeviceptr>(device_word_), 1, CU_STREAM_WAIT_VALUE_GEQ);
    if (error != CUDA_SUCCESS) {
      return absl::InternalError(absl::StrCat("cuStreamWaitValue64: CUDA error ", static_cast<int>(error)));
    }
    for (std::size_t i = 0; i <= kFreeStreams; ++i) RETURN_IF_ERROR(Launch(i));
    return absl::OkStatus();
  }

  bool StillWaits() const { return cudaStreamQuery(streams_.back()) == cudaErrorNotReady; }
  void Release() const { __atomic_store_n(word_, 1, __ATOMIC_RELEASE); }

  // How many of the first `streams` are done, at the latest after `limit`.
  absl::StatusOr<std::size_t> DoneOf(std::size_t streams, std::chrono::milliseconds limit) const {
    const Clock::time_point deadline = Clock::now() + limit;
    while (true) {
      std::size_t done = 0;
      for (std::size_t i = 0; i < streams; ++i) {
        const cudaError_t error = cudaStreamQuery(streams_[i]);
        if (error != cudaErrorNotReady) RETURN_IF_ERROR(ToStatus(error, "a stream"));
        if (error == cudaSuccess) ++done;
      }
      if (done == streams || Clock::now() >= deadline) return done;
      std::this_thread::sleep_for(1ms);
    }
  }

 private:
  StuckStream() = default;
  absl::Status Launch(std::size_t i) const {
    return ToStatus(LaunchTiny(reinterpret_cast<std::uint64_t*>(counts_->data()) + i, streams_[i]),
                    "a stream's kernel");
  }

  // All of it goes with the process.
  std::uint64_t* word_ = nullptr;
  void* device_word_ = nullptr;
  decltype(&cuStreamWaitValue64) wait_value_ = nullptr;
  std::unique_ptr<DeviceAllocation> counts_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace

absl::StatusOr<Json> RunHandover(const WorkerSpec& spec) {
  ASSIGN_OR_RETURN(GemmClient client, GemmClient::Connect(spec.socket, "handover", kM, kN, kK, /*random=*/true));
  ASSIGN_OR_RETURN(const OwnWork own, OwnWork::Make());
  client::GemmStream stream = client.session().OpenStream();
  const Gemm over_stream = [&] { return stream.Gemm(client.spec()).get().status(); };
  const Gemm unary = [&] { return client.session().Gemm(client.spec()).status(); };
  ASSIGN_OR_RETURN(const Json stream_times, TimeHandover(own, over_stream));
  RETURN_IF_ERROR(stream.Finish());
  ASSIGN_OR_RETURN(const Json unary_times, TimeHandover(own, unary));
  return Json{{"stream", stream_times}, {"unary", unary_times}};
}

absl::StatusOr<Json> RunBusy(const WorkerSpec& spec, const Marks& marks) {
  ASSIGN_OR_RETURN(GemmClient client, GemmClient::Connect(spec.socket, "busy", kM, kN, kK, /*random=*/true));
  ASSIGN_OR_RETURN(const OwnWork own, OwnWork::Make());
  client::GemmStream stream = client.session().OpenStream();
  RETURN_IF_ERROR(stream.Gemm(client.spec()).get().status());
  RETURN_IF_ERROR(marks.Set("ready"));
  for (const char* phase : {"1", "2"}) {
    marks.Await(absl::StrCat("go", phase));
    ASSIGN_OR_RETURN(const double rate, ProductsPerSecond(own, stream, client.spec()));
    RETURN_IF_ERROR(marks.Set(absl::StrCat("done", phase), {{"products_per_s", rate}}));
  }
  RETURN_IF_ERROR(stream.Finish());
  return Json::object();
}

absl::StatusOr<Json> RunLatency(const WorkerSpec& spec, const Marks& marks) {
  ASSIGN_OR_RETURN(GemmClient client, GemmClient::Connect(spec.socket, "latency", kM, kN, kK, /*random=*/true));
  RETURN_IF_ERROR(CallLatency(client).status());  // to warm up
  ASSIGN_OR_RETURN(const double before, CallLatency(client));
  RETURN_IF_ERROR(marks.Set("ready", {{"us", before}}));
  marks.Await("go");
  ASSIGN_OR_RETURN(const double after, CallLatency(client));
  AnswerAndExit(spec, {{"us", after}});  // a product that is still under way would be waited for
}

absl::StatusOr<Json> RunStuck(const Marks& marks) {
  ASSIGN_OR_RETURN(const StuckStream stuck, StuckStream::Make());
  RETURN_IF_ERROR(marks.Set("ready"));
  marks.Await("go");
  RETURN_IF_ERROR(stuck.Stick());
  ASSIGN_OR_RETURN(const std::size_t moved, stuck.DoneOf(kFreeStreams, kProgressLimit));
  RETURN_IF_ERROR(marks.Set("stuck", {{"moved", moved}, {"streams", kFreeStreams}, {"waits", stuck.StillWaits()}}));
  marks.Await("release");
  stuck.Release();
  ASSIGN_OR_RETURN(const std::size_t ended, stuck.DoneOf(kFreeStreams + 1, kReleaseLimit));
  if (ended == kFreeStreams + 1) return Json::object();
  return absl::DeadlineExceededError(absl::StrCat(ended, " of ", kFreeStreams + 1, " streams end after the release"));
}

}  // namespace tessera::gpu_test
