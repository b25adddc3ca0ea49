// Jobs around processes that end badly: whose calls are under way when somebody faults, that are killed, and who sees
// their memory come back.
#include <unistd.h>

#include <chrono>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/isolation_client.h"
#include "tests/gpu/isolation_worker.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Future = std::future<absl::StatusOr<client::GemmResult>>;

constexpr std::size_t kUnderWay = 8;
constexpr std::int64_t kInFlightSide = 4096;  // products of some 0.2 ms
constexpr auto kAfterFailure = 3s;            // for the answers to what else is under way
constexpr std::int64_t kVictimSide = 8192;
constexpr std::uint64_t kVictimBytes = kVictimSide * kVictimSide * 2 * 2;  // of each of three: more than a tensor takes
constexpr int kKernelsBesideProduct = 64;  // as long as a product: at any time both are under way
constexpr std::int64_t kMemoryTolerance = std::int64_t{64} << 20;
constexpr auto kMemoryLimit = 5s;

// How calls ended.
class Tally {
 public:
  void Add(const absl::Status& status) {
    if (status.ok()) {
      ++ok_;
      return;
    }
    if (!failed()) first_failure_ns_ = NowNs();
    const bool expected = status.code() == absl::StatusCode::kUnavailable;
    ++(expected ? unavailable_ : other_);
    if (what_.empty() || !expected) what_ = std::string(Sv(status.ToString()));
  }
  void AddUnanswered() { ++unanswered_; }

  bool failed() const { return first_failure_ns_ != 0; }
  std::int64_t ok() const { return ok_; }
  Json ToJson() const {
    return {{"ok", ok_},     {"unavailable", unavailable_},          {"other", other_}, {"unanswered", unanswered_},
            {"what", what_}, {"first_failure_ns", first_failure_ns_}};
  }

 private:
  std::int64_t ok_ = 0;
  std::int64_t unavailable_ = 0;
  std::int64_t other_ = 0;
  std::int64_t unanswered_ = 0;
  std::int64_t first_failure_ns_ = 0;
  std::string what_;
};

}  // namespace

absl::StatusOr<Json> RunInFlight(const WorkerSpec& spec, const Marks& marks) {
  ASSIGN_OR_RETURN(GemmClient client, GemmClient::Connect(spec.socket, "inflight", kInFlightSide, kInFlightSide,
                                                          kInFlightSide, /*random=*/false));
  std::deque<Future> under_way;
  Tally tally;
  const Json says = {{"token", absl::BytesToHexString(client.session().token())}};
  while (!tally.failed() && !marks.IsSet("stop")) {
    while (under_way.size() < kUnderWay) under_way.push_back(client.session().GemmAsync(client.spec()));
    tally.Add(under_way.front().get().status());
    under_way.pop_front();
    if (tally.ok() == 2 * kUnderWay) RETURN_IF_ERROR(marks.Set("ready", says));
  }
  const Clock::time_point deadline = Clock::now() + kAfterFailure;
  for (Future& call : under_way) {
    if (call.wait_until(deadline) == std::future_status::ready) {
      tally.Add(call.get().status());
    } else {
      tally.AddUnanswered();
    }
  }
  AnswerAndExit(spec, tally.ToJson());
}

absl::StatusOr<Json> RunVictim(const WorkerSpec& spec, const Marks& marks) {
  ASSIGN_OR_RETURN(client::Client client,
                   client::Client::Connect({.socket = spec.socket, .side_channel = {}, .timeout = 10s}));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession("victim"));
  ASSIGN_OR_RETURN(const OwnWork own, OwnWork::Make());
  ASSIGN_OR_RETURN(const auto plain, AllocatePlain(kVictimBytes));
  ASSIGN_OR_RETURN(const auto vmm, AllocateVmm(kVictimBytes));
  for (const auto* memory : {&plain, &vmm}) {
    RETURN_IF_ERROR(ToStatus(cudaMemset((*memory)->data(), 0, kVictimBytes), "cudaMemset"));
  }
  RETURN_IF_ERROR(ToStatus(cudaDeviceSynchronize(), "cudaMemset"));
  ASSIGN_OR_RETURN(const client::Buffer a, session.ImportDevice(plain->data()));
  ASSIGN_OR_RETURN(const client::Buffer b, session.ImportDevice(vmm->data()));
  ASSIGN_OR_RETURN(const client::Buffer d, session.AllocateOnDevice(kVictimBytes));
  const auto view = [](const client::Buffer& buffer) {
    return buffer.Tensor(DType::kBf16, {kVictimSide, kVictimSide});
  };
  const client::GemmSpec product{.a = view(a), .b = view(b), .d = view(d), .backend = v1::BACKEND_CUDA};
  std::deque<Future> under_way;
  for (std::size_t done = 0;; ++done) {  // until it is killed, or by the watchdog
    while (under_way.size() < kUnderWay) under_way.push_back(session.GemmAsync(product));
    for (int i = 0; i < kKernelsBesideProduct; ++i) RETURN_IF_ERROR(own.Busy());
    RETURN_IF_ERROR(under_way.front().get().status());
    under_way.pop_front();
    RETURN_IF_ERROR(own.Wait());
    if (done == kUnderWay) RETURN_IF_ERROR(marks.Set("ready", {{"pid", ::getpid()}}));
  }
}

absl::StatusOr<Json> RunMemory(const Marks& marks) {
  ASSIGN_OR_RETURN(const OwnWork own, OwnWork::Make());
  const auto free_bytes = []() -> absl::StatusOr<std::int64_t> {
    ASSIGN_OR_RETURN(const std::uint64_t bytes, FreeDeviceBytes());
    return static_cast<std::int64_t>(bytes);
  };
  ASSIGN_OR_RETURN(const std::int64_t before, free_bytes());
  RETURN_IF_ERROR(marks.Set("ready"));
  marks.Await("go");
  ASSIGN_OR_RETURN(std::int64_t now, free_bytes());
  RETURN_IF_ERROR(marks.Set("armed", {{"used", before - now}}));
  const Clock::time_point deadline = Clock::now() + kMemoryLimit;
  while (now < before - kMemoryTolerance && Clock::now() < deadline) {
    std::this_thread::sleep_for(2ms);
    ASSIGN_OR_RETURN(now, free_bytes());
  }
  const std::int64_t back_ns = now < before - kMemoryTolerance ? -1 : NowNs();
  return Json{{"back_ns", back_ns}, {"missing", before - now}};
}

}  // namespace tessera::gpu_test
