// Our kernels beside cuBLASLt's, as the planner would choose them, in turns in one process. Two regimes, for the card
// is limited by its power: `burst` after the GPU has idled, `sustained` after both have kept it busy.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/gemm/vendor/cublaslt.h"
#include "server/exec/devices.h"
#include "server/telemetry/log.h"
#include "tests/gpu/bench_gemm.h"
#include "tests/gpu/bench_samples.h"
#include "tests/gpu/bench_workers.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr GemmShape kShapes[] = {{4096, 4096, 4096}, {8192, 8192, 8192}, {512, 4096, 4096}, {16, 4096, 4096}};
// Operands of a shape are as many sets as take this much, so that no launch finds its own in the L2 cache.
constexpr std::int64_t kSetsBytes = std::int64_t{256} << 20;
constexpr std::int64_t kWorkspaceBytesMax = std::int64_t{256} << 20;

constexpr auto kIdleBeforeBurst = 250ms;
constexpr double kBurstUs = 2e3;  // too short for the card to lower its clocks
constexpr int kBurstRounds = 9;
constexpr double kWarmUpUs = 250e3;
constexpr double kSustainedUs = 10e3;
constexpr int kSustainedRounds = 21;

// One of the two, ready to be replayed.
struct Contender {
  planner::Plan plan;
  Graph graph;
  double estimate_us = 0;  // of a replay
  Samples samples;         // of a launch

  std::string Id() const { return std::string(kernels::GemmVariants()[plan.variant].info.id); }
  int ReplaysFor(double us) const { return std::max(1, static_cast<int>(std::lround(us / estimate_us))); }
};

class Match {
 public:
  Match(const GemmShape& shape, std::vector<BenchGemm> gemms, BenchStream stream, StreamTimer timer)
      : shape_(shape), gemms_(std::move(gemms)), stream_(std::move(stream)), timer_(std::move(timer)) {}

  absl::Status Add(const planner::DeviceFacts& facts) {
    ASSIGN_OR_RETURN(const planner::Plan plan, PlanOf(gemms_.front(), facts));
    ASSIGN_OR_RETURN(Graph graph, Graph::Record(gemms_, plan, 1, stream_));
    Contender contender{.plan = plan, .graph = std::move(graph)};
    RETURN_IF_ERROR(timer_.Time(contender.graph, 3, stream_).status());
    ASSIGN_OR_RETURN(const double us, timer_.Time(contender.graph, 3, stream_));
    contender.estimate_us = us / 3;
    contenders_.push_back(std::move(contender));
    return absl::OkStatus();
  }

  absl::Status Burst() {
    for (int round = 0; round < kBurstRounds; ++round) {
      for (Contender* const contender : Order(round)) {
        std::this_thread::sleep_for(kIdleBeforeBurst);
        RETURN_IF_ERROR(Measure(*contender, kBurstUs));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Sustained() {
    for (double busy = 0; busy < kWarmUpUs;) {
      for (const Contender& contender : contenders_) {
        ASSIGN_OR_RETURN(const double us, timer_.Time(contender.graph, contender.ReplaysFor(kSustainedUs), stream_));
        busy += us;
      }
    }
    for (int round = 0; round < kSustainedRounds; ++round) {
      for (Contender* const contender : Order(round)) RETURN_IF_ERROR(Measure(*contender, kSustainedUs));
    }
    return absl::OkStatus();
  }

  // Ours beside the vendor's. `ratio` over 1: ours is faster.
  nlohmann::ordered_json Line(const std::string& regime) {
    const double us = contenders_[0].samples.Median();
    const double peer_us = contenders_[1].samples.Median();
    for (Contender& contender : contenders_) contender.samples = {};
    return {{"bench", "gemm_vendor"},
            {"pair", "bf16_bf16"},
            {"layout", "NT"},
            {"m", shape_.m},
            {"n", shape_.n},
            {"k", shape_.k},
            {"out", "bf16"},
            {"variant", contenders_[0].Id()},
            {"us", us},
            {"tflops", shape_.Flops() / us * 1e-6},
            {"peer", contenders_[1].Id()},
            {"peer_us", peer_us},
            {"ratio", peer_us / us},
            {"regime", regime}};
  }

 private:
  // Who is first changes from round to round.
  std::vector<Contender*> Order(int round) {
    std::vector<Contender*> order;
    for (Contender& contender : contenders_) order.push_back(&contender);
    if (round % 2 == 1) std::reverse(order.begin(), order.end());
    return order;
  }

  absl::Status Measure(Contender& contender, double for_us) {
    const int replays = contender.ReplaysFor(for_us);
    ASSIGN_OR_RETURN(const double us, timer_.Time(contender.graph, replays, stream_));
    contender.samples.Add(us / replays / contender.graph.launches());
    return absl::OkStatus();
  }

  const GemmShape shape_;
  const std::vector<BenchGemm> gemms_;
  const BenchStream stream_;
  const StreamTimer timer_;
  std::vector<Contender> contenders_;
};

absl::StatusOr<planner::DeviceFacts> FactsOf(const server::OpenedDevices& opened, kernels::Backend backend) {
  for (const auto& device : opened.devices) {
    for (const planner::DeviceFacts& facts : device->facts()) {
      if (facts.backend == backend) return facts;
    }
  }
  return absl::UnavailableError(
      absl::StrCat("backend ", Av(kernels::BackendName(backend)), " is not there: ", kernels::VendorUnavailable()));
}

absl::StatusOr<std::vector<BenchGemm>> MakeSets(const GemmShape& shape) {
  const std::int64_t sets = std::max<std::int64_t>(1, (kSetsBytes + shape.Bytes() - 1) / shape.Bytes());
  std::vector<BenchGemm> gemms;
  for (std::int64_t i = 0; i < sets; ++i) {
    ASSIGN_OR_RETURN(BenchGemm gemm, BenchGemm::Make(shape));
    gemms.push_back(std::move(gemm));
  }
  return gemms;
}

}  // namespace

absl::Status BenchVendor(const std::string& lines) {
  RETURN_IF_ERROR(server::InitLogging("warn", "text"));
  ASSIGN_OR_RETURN(const server::OpenedDevices opened,
                   server::OpenDevices(
                       {.cpu_threads = 1, .cuda_device = "0", .workspace_bytes_max = kWorkspaceBytesMax, .lost = {}}));
  ASSIGN_OR_RETURN(const planner::DeviceFacts ours, FactsOf(opened, kernels::Backend::kCuda));
  ASSIGN_OR_RETURN(const planner::DeviceFacts vendors, FactsOf(opened, kernels::Backend::kVendor));
  LineFile file(lines);
  for (const GemmShape& shape : kShapes) {
    ASSIGN_OR_RETURN(std::vector<BenchGemm> gemms, MakeSets(shape));
    ASSIGN_OR_RETURN(BenchStream stream, BenchStream::Make(static_cast<std::size_t>(kWorkspaceBytesMax)));
    ASSIGN_OR_RETURN(StreamTimer timer, StreamTimer::Make());
    Match match(shape, std::move(gemms), std::move(stream), std::move(timer));
    RETURN_IF_ERROR(match.Add(ours));
    RETURN_IF_ERROR(match.Add(vendors));
    RETURN_IF_ERROR(match.Burst());
    file.Add(match.Line("burst"));
    RETURN_IF_ERROR(match.Sustained());
    file.Add(match.Line("sustained"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::gpu_test
