#include "tests/gpu/bench_gemm_race.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "tests/gpu/e2e_memory.h"

namespace tessera::gpu_test {
namespace {

constexpr double kGraphUs = 600;  // of one replay, to make what lies between two of them small beside it
constexpr int kGraphLaunchesMax = 256;
constexpr double kWarmUpMargin = 1.15;  // estimates are made on a card that is faster or slower than it will be
constexpr int kWarmUpTries = 4;

// Points of a stream whose distances are asked for at the end.
class Marks {
 public:
  Marks() = default;
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  ~Marks() {
    for (cudaEvent_t event : events_) static_cast<void>(cudaEventDestroy(event));
  }

  absl::Status Set(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    RETURN_IF_ERROR(ToStatus(cudaEventCreate(&event), "cudaEventCreate"));
    events_.push_back(event);
    return ToStatus(cudaEventRecord(event, stream), "cudaEventRecord");
  }

  // Microseconds from mark `from` to the next one, once the stream has been waited for.
  absl::StatusOr<double> After(std::size_t from) const {
    float milliseconds = 0;
    RETURN_IF_ERROR(
        ToStatus(cudaEventElapsedTime(&milliseconds, events_[from], events_[from + 1]), "cudaEventElapsedTime"));
    return static_cast<double>(milliseconds) * 1e3;
  }

 private:
  std::vector<cudaEvent_t> events_;
};

// Microseconds that what `enqueue` enqueues takes.
template <typename Enqueue>
absl::StatusOr<double> TimeOnce(const BenchStream& stream, const Enqueue& enqueue) {
  Marks marks;
  RETURN_IF_ERROR(marks.Set(stream.get()));
  RETURN_IF_ERROR(enqueue());
  RETURN_IF_ERROR(marks.Set(stream.get()));
  RETURN_IF_ERROR(stream.Wait());
  return marks.After(0);
}

// One pass over the rules.
class Pass {
 public:
  Pass(std::span<Contender* const> contenders, const RaceRules& rules, const BenchStream& stream)
      : contenders_(contenders), rules_(rules), stream_(stream) {}

  // Returns false, and adds no samples, if the warm-up came out too short.
  absl::StatusOr<bool> Run(double warm_up_us) {
    RETURN_IF_ERROR(marks_.Set(stream_.get()));
    RETURN_IF_ERROR(WarmUp(warm_up_us));
    RETURN_IF_ERROR(marks_.Set(stream_.get()));
    for (int round = 0; round < rules_.rounds; ++round) RETURN_IF_ERROR(Round(round));
    RETURN_IF_ERROR(stream_.Wait());
    ASSIGN_OR_RETURN(const double warmed_us, marks_.After(0));
    if (warmed_us < rules_.warm_up_us) return false;
    for (std::size_t i = 0; i < turns_.size(); ++i) {
      ASSIGN_OR_RETURN(const double us, marks_.After(i + 1));
      turns_[i].contender->Add(us / turns_[i].runs);
    }
    return true;
  }

 private:
  struct Turn {
    Contender* contender;
    double runs;
  };

  int ReplaysFor(const Contender& contender) const {
    return std::max(1, static_cast<int>(std::lround(rules_.sample_us / contender.GraphUs())));
  }

  absl::Status Replay(const Contender& contender, int replays) {
    for (int i = 0; i < replays; ++i) RETURN_IF_ERROR(contender.graph().Replay(stream_.get()));
    return absl::OkStatus();
  }

  absl::Status WarmUp(double for_us) {
    double planned_us = 0;
    do {
      for (const Contender* const contender : contenders_) {
        const int replays = for_us > 0 ? ReplaysFor(*contender) : 1;
        RETURN_IF_ERROR(Replay(*contender, replays));
        planned_us += replays * contender->GraphUs();
      }
    } while (planned_us < for_us);
    return absl::OkStatus();
  }

  absl::Status Round(int round) {
    for (std::size_t i = 0; i < contenders_.size(); ++i) {
      Contender* const contender = contenders_[(i + static_cast<std::size_t>(round)) % contenders_.size()];
      const int replays = ReplaysFor(*contender);
      RETURN_IF_ERROR(Replay(*contender, replays));
      RETURN_IF_ERROR(marks_.Set(stream_.get()));
      turns_.push_back({.contender = contender, .runs = static_cast<double>(replays) * contender->graph().launches()});
    }
    return absl::OkStatus();
  }

  const std::span<Contender* const> contenders_;
  const RaceRules& rules_;
  const BenchStream& stream_;
  Marks marks_;  // begin, end of the warm-up, then the end of each turn
  std::vector<Turn> turns_;
};

}  // namespace

void Stopwatch::Lap(const std::string& phase) {
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  const auto found =
      std::find_if(phases_.begin(), phases_.end(), [&](const Phase& known) { return known.name == phase; });
  if (found == phases_.end()) {
    phases_.push_back({.name = phase, .seconds = seconds});
  } else {
    found->seconds += seconds;
  }
}

std::string Stopwatch::Text() const {
  std::string text;
  for (const Phase& phase : phases_) {
    absl::StrAppendFormat(&text, "%s%s %.1f s", text.empty() ? "" : ", ", phase.name, phase.seconds);
  }
  return text;
}

absl::StatusOr<Contender> Contender::Make(const std::function<absl::Status(int)>& enqueue, int sets,
                                          const BenchStream& stream) {
  RETURN_IF_ERROR(enqueue(0));
  RETURN_IF_ERROR(stream.Wait());
  ASSIGN_OR_RETURN(double run_us, TimeOnce(stream, [&] { return enqueue(1); }));
  const int launches = std::clamp(static_cast<int>(std::ceil(kGraphUs / std::max(run_us, 1.0))), 1, kGraphLaunchesMax);
  // Whole walks over the sets, so that the next replay does not begin with what the last one left in the cache.
  const int walks = (launches + sets - 1) / sets;
  ASSIGN_OR_RETURN(Graph graph, Graph::Record(enqueue, walks * sets, stream));
  // The time of one short run is half that of its launch. The first replay of a graph sends it to the GPU.
  if (run_us < kGraphUs) {
    RETURN_IF_ERROR(graph.Replay(stream.get()));
    ASSIGN_OR_RETURN(const double us, TimeOnce(stream, [&] { return graph.Replay(stream.get()); }));
    run_us = us / graph.launches();
  }
  Contender contender(std::move(graph));
  contender.set_run_us(run_us);
  return contender;
}

absl::Status Race(std::span<Contender* const> contenders, const RaceRules& rules, const BenchStream& stream,
                  Stopwatch& watch) {
  if (rules.idle.count() > 0) {
    RETURN_IF_ERROR(stream.Wait());
    std::this_thread::sleep_for(rules.idle);
    watch.Lap("idling");
  }
  double warm_up_us = rules.warm_up_us * kWarmUpMargin;
  bool warm = false;
  for (int tries = 0; tries < kWarmUpTries && !warm; ++tries) {
    Pass pass(contenders, rules, stream);
    ASSIGN_OR_RETURN(warm, pass.Run(warm_up_us));
    warm_up_us *= 2;
  }
  if (!warm) return absl::InternalError("the GPU cannot be kept busy for as long as the rules ask");
  for (Contender* const contender : contenders) contender->set_run_us(contender->samples().Median());
  return absl::OkStatus();
}

}  // namespace tessera::gpu_test
