#include "tests/gpu/bench_gemm_cell.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/gemm_planner.h"
#include "tests/gpu/bench_gemm.h"
#include "tests/gpu/bench_gemm_check.h"
#include "tests/gpu/bench_gemm_data.h"
#include "tests/gpu/bench_gemm_operands.h"
#include "tests/gpu/bench_gemm_peer.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

// Which of the library's proposals is best is decided among the first few of a short race: two runs of it rank close
// ones differently.
constexpr int kFinalists = 2;

// Short enough for the card not to lower its clocks.
constexpr int kBursts = 2;
constexpr RaceRules kBurst = {.idle = 250ms, .rounds = 6, .sample_us = 600};
constexpr RaceRules kBurstTuning = {.rounds = 2, .sample_us = 600};

constexpr RaceRules kSustained = {.warm_up_us = 150e3, .rounds = 9, .sample_us = 6e3};
constexpr RaceRules kSustainedTuning = {.warm_up_us = 100e3, .rounds = 2, .sample_us = 600};
constexpr double kSustainedUs = 160e3;  // of all samples together; long kernels get fewer rounds
constexpr int kSustainedRoundsMin = 5;

class CellBench {
 public:
  CellBench(const BenchCell& cell, const BenchOperands& operands, const planner::Plan& plan, BenchStream stream,
            Stopwatch& watch)
      : cell_(cell), operands_(operands), plan_(plan), stream_(std::move(stream)), watch_(watch) {}

  absl::StatusOr<BenchResult> Run() {
    ASSIGN_OR_RETURN(peer_memory_, AllocatePlain(kPeerWorkspaceBytes));
    peer_workspace_ = {.scratch = peer_memory_->data(), .bytes = peer_memory_->bytes()};
    ASSIGN_OR_RETURN(const Referee referee, Referee::Make(cell_, operands_.Params(0), stream_));
    RETURN_IF_ERROR(EnterOurs());
    watch_.Lap("preparing");
    RETURN_IF_ERROR(referee.CheckOurs(operands_.ours(0)));
    watch_.Lap("checking");
    RETURN_IF_ERROR(EnterPeers(referee));
    RETURN_IF_ERROR(FinalRace());
    RETURN_IF_ERROR(CheckSets(referee));
    watch_.Lap("checking");
    return Result();
  }

 private:
  absl::Status EnterOurs() {
    const auto enqueue = [this](int i) {
      return Launch(operands_.Params(i), plan_, stream_.workspace(), stream_.get());
    };
    ASSIGN_OR_RETURN(Contender ours, Contender::Make(enqueue, operands_.sets(), stream_));
    ours_.emplace(std::move(ours));
    return absl::OkStatus();
  }

  PeerSpec Spec(DType out) const {
    PeerSpec spec = {.cell = cell_, .out = out, .a_scale = operands_.a_scale(), .b_scale = operands_.b_scale()};
    // A deviation of a product of two numbers, uniform over s8, is 74^2; one in a thousand sums is beyond the range.
    spec.s8_factor = static_cast<float>(40.0 / (74.0 * 74.0 * std::sqrt(static_cast<double>(cell_.k))));
    return spec;
  }

  absl::Status EnterPeers(const Referee& referee) {
    if (cell_.gemm_class.a != DType::kS8) {
      ASSIGN_OR_RETURN(peer_, MakePeer(cell_.gemm_class.out));
      return peer_.has_value() ? Tune(*peer_, PeerEnqueue(), &referee, kFinalists, finalists_) : absl::OkStatus();
    }
    const auto bytes = static_cast<std::size_t>(cell_.m * cell_.n);
    ASSIGN_OR_RETURN(sums_, AllocatePlain(bytes * sizeof(std::int32_t)));
    ASSIGN_OR_RETURN(narrow_, AllocatePlain(bytes));
    ASSIGN_OR_RETURN(peer_, MakePeer(DType::kS32));
    ASSIGN_OR_RETURN(s8_peer_, MakePeer(DType::kS8));
    if (peer_.has_value()) RETURN_IF_ERROR(Tune(*peer_, Int8Enqueue(), &referee, kFinalists, finalists_));
    // A type that ours does not give: there is nothing to hold its numbers against.
    if (s8_peer_.has_value()) RETURN_IF_ERROR(Tune(*s8_peer_, NarrowEnqueue(), nullptr, 1, s8_finalists_));
    return absl::OkStatus();
  }

  absl::StatusOr<std::optional<PeerProduct>> MakePeer(DType out) const {
    absl::StatusOr<PeerProduct> peer = PeerProduct::Make(Spec(out));
    if (peer.ok()) return std::optional<PeerProduct>(*std::move(peer));
    if (absl::IsUnimplemented(peer.status())) return std::optional<PeerProduct>();
    return peer.status();
  }

  // What enqueues a run of proposal `proposal` on set `i`.
  using PeerRun = std::function<absl::Status(int proposal, int i)>;

  PeerRun PeerEnqueue() const {
    return [this](int proposal, int i) {
      return peer_->Enqueue(proposal, operands_.a(i), operands_.b(i), operands_.peers(i), peer_workspace_,
                            stream_.get());
    };
  }

  // What it takes with the library to get what ours gives: its product to s32, then one more pass.
  PeerRun Int8Enqueue() const {
    return [this](int proposal, int i) -> absl::Status {
      RETURN_IF_ERROR(
          peer_->Enqueue(proposal, operands_.a(i), operands_.b(i), sums_->data(), peer_workspace_, stream_.get()));
      return ToStatus(Dequantise({.sums = reinterpret_cast<const std::int32_t*>(sums_->data()),
                                  .row_scale = operands_.a_scale(),
                                  .col_scale = operands_.b_scale(),
                                  .out = operands_.peers(i),
                                  .rows = cell_.m,
                                  .cols = cell_.n},
                                 stream_.get()),
                      "Dequantise");
    };
  }

  PeerRun NarrowEnqueue() const {
    return [this](int proposal, int i) {
      return s8_peer_->Enqueue(proposal, operands_.a(i), operands_.b(i), narrow_->data(), peer_workspace_,
                               stream_.get());
    };
  }

  // Races all proposals and leaves the best `count` in `finalists`. Those that the library then refuses to run drop
  // out.
  absl::Status Tune(const PeerProduct& peer, const PeerRun& run, const Referee* referee, int count,
                    std::vector<Contender>& finalists) {
    std::vector<Contender> all;
    std::vector<int> proposals;
    for (int proposal = 0; proposal < peer.proposals(); ++proposal) {
      absl::StatusOr<Contender> made =
          Contender::Make([&](int i) { return run(proposal, i); }, operands_.sets(), stream_);
      if (absl::IsUnimplemented(made.status())) continue;
      RETURN_IF_ERROR(made.status());
      all.push_back(*std::move(made));
      proposals.push_back(proposal);
    }
    watch_.Lap("preparing");
    if (all.empty()) return absl::OkStatus();
    std::vector<Contender*> racers;
    for (Contender& contender : all) racers.push_back(&contender);
    RETURN_IF_ERROR(Race(racers, cell_.Sustained() ? kSustainedTuning : kBurstTuning, stream_, watch_));
    watch_.Lap("choosing the peer");
    std::stable_sort(racers.begin(), racers.end(), [](const Contender* left, const Contender* right) {
      return left->samples().Quantile(0) < right->samples().Quantile(0);
    });
    racers.resize(std::min(racers.size(), static_cast<std::size_t>(count)));
    for (Contender* const best : racers) {
      if (referee != nullptr) {
        RETURN_IF_ERROR(
            CheckPeer(*referee, [&] { return run(proposals[static_cast<std::size_t>(best - all.data())], 0); }));
      }
      best->Forget();
      finalists.push_back(std::move(*best));
    }
    watch_.Lap("checking");
    return absl::OkStatus();
  }

  absl::Status CheckPeer(const Referee& referee, const std::function<absl::Status()>& run) const {
    RETURN_IF_ERROR(run());
    const absl::Status right = referee.CheckPeer(operands_.peers(0));
    if (!right.ok()) return InField("cuBLASLt", right);
    return referee.CheckAlike(operands_.ours(0), operands_.peers(0));
  }

  std::vector<Contender*> Finalists() {
    std::vector<Contender*> racers = {&*ours_};
    for (Contender& contender : finalists_) racers.push_back(&contender);
    for (Contender& contender : s8_finalists_) racers.push_back(&contender);
    return racers;
  }

  absl::Status FinalRace() {
    const std::vector<Contender*> racers = Finalists();
    if (cell_.Sustained()) {
      RETURN_IF_ERROR(Race(racers, SustainedRules(racers), stream_, watch_));
    } else {
      for (int burst = 0; burst < kBursts; ++burst) RETURN_IF_ERROR(Race(racers, kBurst, stream_, watch_));
    }
    watch_.Lap("timing");
    return absl::OkStatus();
  }

  static RaceRules SustainedRules(const std::vector<Contender*>& racers) {
    RaceRules rules = kSustained;
    double round_us = 0;
    for (const Contender* const contender : racers) round_us += std::max(rules.sample_us, contender->GraphUs());
    rules.rounds = std::clamp(static_cast<int>(kSustainedUs / round_us), kSustainedRoundsMin, rules.rounds);
    return rules;
  }

  // What ours left in every set after it was timed: a race that is lost once in a while shows here.
  absl::Status CheckSets(const Referee& referee) const {
    RETURN_IF_ERROR(referee.CheckOurs(operands_.ours(0)));
    if (finalists_.empty()) return absl::OkStatus();
    for (int i = 0; i < operands_.sets(); ++i) {
      RETURN_IF_ERROR(referee.CheckAlike(operands_.ours(i), operands_.peers(i)));
    }
    return absl::OkStatus();
  }

  BenchResult Result() const {
    const auto best = [](const std::vector<Contender>& contenders) {
      double us = 0;
      for (const Contender& contender : contenders) {
        const double median = contender.samples().Median();
        if (us == 0 || median < us) us = median;
      }
      return us;
    };
    return {.variant = std::string(kernels::GemmVariants()[plan_.variant].info.id),
            .source = std::string(planner::SourceName(plan_.source)),
            .us = ours_->samples().Median(),
            .peer_us = best(finalists_),
            .peer_s8_us = best(s8_finalists_)};
  }

  const BenchCell& cell_;
  const BenchOperands& operands_;
  const planner::Plan plan_;
  const BenchStream stream_;  // with the workspace of the plan
  Stopwatch& watch_;

  std::unique_ptr<DeviceAllocation> peer_memory_;
  kernels::Workspace peer_workspace_;
  std::unique_ptr<DeviceAllocation> sums_;    // s32 [M, N]
  std::unique_ptr<DeviceAllocation> narrow_;  // s8 [M, N]
  std::optional<PeerProduct> peer_;
  std::optional<PeerProduct> s8_peer_;

  std::optional<Contender> ours_;
  std::vector<Contender> finalists_;
  std::vector<Contender> s8_finalists_;
};

}  // namespace

absl::StatusOr<BenchResult> MeasureCell(const BenchCell& cell, const planner::DeviceFacts& facts, Stopwatch& watch) {
  // Refused whatever the strides are: known before anything is allocated.
  RETURN_IF_ERROR(planner::GemmPlanner(kernels::GemmVariants())
                      .Decide({.gemm_class = cell.gemm_class, .m = cell.m, .n = cell.n, .k = cell.k}, facts)
                      .status());
  ASSIGN_OR_RETURN(const BenchStream fill_stream, BenchStream::Make(0));
  ASSIGN_OR_RETURN(const BenchOperands operands, BenchOperands::Make(cell, fill_stream));
  ASSIGN_OR_RETURN(const planner::Plan plan, PlanOf(cell.gemm_class, operands.Params(0), facts));
  ASSIGN_OR_RETURN(BenchStream stream, BenchStream::Make(static_cast<std::size_t>(plan.workspace_bytes)));
  return CellBench(cell, operands, plan, std::move(stream), watch).Run();
}

}  // namespace tessera::gpu_test
