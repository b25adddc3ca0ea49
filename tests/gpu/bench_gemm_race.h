// Kernels timed against one another on one stream: in turns, without a gap in which the GPU would idle.
#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/gpu/bench_gemm.h"
#include "tests/gpu/bench_samples.h"

namespace tessera::gpu_test {

// Where the time of a run goes, by name; in seconds.
class Stopwatch {
 public:
  // What has passed since the last call, or the construction, went into `phase`.
  void Lap(const std::string& phase);
  std::string Text() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Phase {
    std::string name;
    double seconds = 0;
  };
  Clock::time_point last_ = Clock::now();
  std::vector<Phase> phases_;  // in the order in which they first came
};

// Something to time.
class Contender {
 public:
  // `enqueue` enqueues one run on the operands of set i % `sets` on `stream`. Runs it for real a few times, so that all
  // is loaded, and records as many runs as are worth a sample, at least one for each set.
  static absl::StatusOr<Contender> Make(const std::function<absl::Status(int)>& enqueue, int sets,
                                        const BenchStream& stream);

  const Graph& graph() const { return graph_; }
  const Samples& samples() const { return samples_; }
  double GraphUs() const { return run_us_ * graph_.launches(); }
  void Add(double run_us) { samples_.Add(run_us); }
  void Forget() { samples_ = {}; }
  // Of one run: an estimate, until samples say it better.
  void set_run_us(double us) { run_us_ = us; }

 private:
  explicit Contender(Graph graph) : graph_(std::move(graph)) {}

  Graph graph_;
  double run_us_ = 0;
  Samples samples_;
};

struct RaceRules {
  std::chrono::milliseconds idle{0};  // before all else
  double warm_up_us = 0;              // then all of them in turns, for at least so long; 0 = each once
  int rounds = 0;                     // then a sample of each, the first of a round last in the next
  double sample_us = 0;               // the length of a sample, or one replay of its graph
};

// Adds a sample a round to each of `contenders`. The host enqueues all of it and then waits: no sample waits for the
// host, and the GPU is as hot at the first as at the last.
absl::Status Race(std::span<Contender* const> contenders, const RaceRules& rules, const BenchStream& stream,
                  Stopwatch& watch);

}  // namespace tessera::gpu_test
