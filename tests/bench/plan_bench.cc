// What asking the daemon's planner costs: for plans that the cache has (warm) and problems that nobody has asked before
// (cold), by 1 to 8 threads at once, without rows and with a table of 1,000. A JSON object a line.
//
//   build/cpu/tests/bench/plan_bench --git "$(git rev-parse --short HEAD)" --out docs/perf/plan.jsonl
//
// Exit 1: a measurement was not of what it is called, or a warm plan takes one thread more than a microsecond.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <latch>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/known_devices.h"
#include "planner/planner.h"

namespace tessera::planner {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRuns = 9;                         // medians of these, after one that is not reported
constexpr std::uint64_t kWarmCalls = 2'000'000;  // of a run, by each thread: many turns of the scheduler
constexpr std::uint64_t kColdCalls = 50'000;
constexpr std::uint64_t kWarmProblems = 64;
constexpr int kTableRows = 1000;
constexpr double kWarmBarUs = 1.0;
constexpr std::int64_t kRowsOfA = 1500;  // M of every problem; the last row of the table is for it

struct Device {
  std::string_view name;
  DeviceFacts facts;
  std::string_view class_name;  // of the rows
  std::string_view recipe;
};

std::vector<Device> Devices() {
  const DeviceFacts cpu = {.processors = 8, .workspace_bytes_max = std::int64_t{1} << 28};
  return {{"cpu", cpu, "gemm.cpu.bf16_bf16.bf16.fast.NT", "blocked_96x96x256"},
          {"l20", FindDevice("l20")->facts, "gemm.sm80.bf16_bf16.bf16.fast.NT", "128x128x32_s4"},
          {"h200", FindDevice("h200")->facts, "gemm.sm90a.bf16_bf16.bf16.fast.NT", "128x128x64_s6"}};
}

// A problem of its own for each number.
GemmProblem ProblemOf(std::uint64_t number) {
  constexpr std::uint64_t kWidths = 2048;
  return {.gemm_class = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16},
          .m = kRowsOfA,
          .n = static_cast<std::int64_t>(16 * (1 + number % kWidths)),
          .k = static_cast<std::int64_t>(64 * (1 + number / kWidths))};
}

// Rows of the problems' class and other numbers of rows, but for the last.
std::string TableFor(const Device& device) {
  std::string text;
  for (int i = 1; i <= kTableRows; ++i) {
    const std::int64_t m = i == kTableRows ? kRowsOfA : i;
    absl::StrAppend(&text, Av(device.class_name), " m(", m - 1, ",", m, "] -> ", Av(device.recipe), "\n");
  }
  return text;
}

struct Case {
  bool warm = true;
  int threads = 1;
  int rows = 0;
};

struct Measured {
  double us = 0;    // of one call, as its thread sees it
  double rate = 0;  // calls a second of all threads
};

double Us(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

class Bench {
 public:
  Bench(const Device& device, int rows) : device_(device) {
    if (rows == 0) return;
    const auto set = planner_.SetTable(TableFor(device), {.who = "bench"});
    ok_ = set.ok() && set->rows[static_cast<std::size_t>(Tier::kOverride)] == static_cast<std::size_t>(rows);
  }

  Measured Run(const Case& of) {
    std::vector<Clock::time_point> starts(static_cast<std::size_t>(of.threads));
    std::vector<Clock::time_point> ends(starts.size());
    const std::uint64_t calls = of.warm ? kWarmCalls : kColdCalls;
    const std::uint64_t first = next_;
    if (!of.warm) next_ += calls * static_cast<std::uint64_t>(of.threads);
    if (of.warm) {
      for (std::uint64_t i = 0; i < kWarmProblems; ++i) ok_ = planner_.Decide(ProblemOf(i), device_.facts).ok() && ok_;
    }
    const PlannerState before = planner_.State();
    std::latch together(of.threads);
    std::atomic<std::uint64_t> wrongs{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < of.threads; ++i) {
      threads.emplace_back([&, i] {
        const std::uint64_t begin = of.warm ? 0 : first + static_cast<std::uint64_t>(i) * calls;
        std::uint64_t wrong = 0;
        together.arrive_and_wait();
        starts[static_cast<std::size_t>(i)] = Clock::now();
        for (std::uint64_t call = 0; call < calls; ++call) {
          const auto plan = planner_.Decide(ProblemOf(of.warm ? call % kWarmProblems : begin + call), device_.facts);
          if (!plan.ok() || (plan->source == Source::kOverride) != (of.rows > 0)) ++wrong;
        }
        ends[static_cast<std::size_t>(i)] = Clock::now();
        wrongs.fetch_add(wrong);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const PlannerState after = planner_.State();
    const std::uint64_t asked = calls * static_cast<std::uint64_t>(of.threads);
    const std::uint64_t hits = after.cache_hits - before.cache_hits;
    ok_ = ok_ && wrongs == 0 && hits == (of.warm ? asked : 0);
    double sum_us = 0;
    for (std::size_t i = 0; i < starts.size(); ++i) sum_us += Us(ends[i] - starts[i]) / static_cast<double>(calls);
    const double all_us =
        Us(*std::max_element(ends.begin(), ends.end()) - *std::min_element(starts.begin(), starts.end()));
    return {.us = sum_us / of.threads, .rate = static_cast<double>(asked) / all_us * 1e6};
  }

  // Every run was of what its case says.
  bool ok() const { return ok_; }

 private:
  const Device device_;
  Planner planner_;
  std::uint64_t next_ = kWarmProblems;  // problem that has not been asked
  bool ok_ = true;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string Cpu() {
  std::ifstream info("/proc/cpuinfo");
  std::string model = "unknown";
  constexpr std::string_view kName = "model name";
  for (std::string line; std::getline(info, line);) {
    if (line.compare(0, kName.size(), kName) != 0) continue;
    model = line.substr(std::min(line.size(), line.find(": ") + 2));
    break;
  }
  return absl::StrCat(model, ", ", ::sysconf(_SC_NPROCESSORS_ONLN), " threads");
}

double Rounded(double value) {
  return std::round(value * 1000) / 1000;
}

// The lines, or nothing where a measurement is not one.
bool Measure(const std::string& git, std::string& lines) {
  bool bar_held = true;
  for (const Device& device : Devices()) {
    for (const int rows : {0, kTableRows}) {
      for (const bool warm : {true, false}) {
        for (const int threads : {1, 2, 4, 8}) {
          const Case of = {.warm = warm, .threads = threads, .rows = rows};
          Bench bench(device, rows);
          std::vector<double> us;
          std::vector<double> rates;
          for (int run = 0; run <= kRuns; ++run) {
            const Measured measured = bench.Run(of);
            if (run == 0) continue;
            us.push_back(measured.us);
            rates.push_back(measured.rate);
          }
          if (!bench.ok()) {
            std::cerr << "plan_bench: not what was to be measured: " << device.name << (warm ? " warm" : " cold")
                      << " rows " << rows << "\n";
            return false;
          }
          const double median = Median(us);
          if (warm && threads == 1 && median > kWarmBarUs) bar_held = false;
          const nlohmann::ordered_json line = {{"bench", "plan"},
                                               {"case", warm ? "warm" : "cold"},
                                               {"threads", threads},
                                               {"rows", rows},
                                               {"us", Rounded(median)},
                                               {"us_min", Rounded(*std::min_element(us.begin(), us.end()))},
                                               {"us_max", Rounded(*std::max_element(us.begin(), us.end()))},
                                               {"rate", static_cast<std::int64_t>(Median(rates))},
                                               {"device", device.name},
                                               {"backend", kernels::BackendName(device.facts.backend)},
                                               {"cpu", Cpu()},
                                               {"git", git}};
          lines += line.dump() + "\n";
        }
      }
    }
  }
  if (!bar_held) std::cerr << "plan_bench: a warm plan takes one thread more than " << kWarmBarUs << " us\n";
  return bar_held;
}

int Main(int argc, char** argv) {
  std::string out;
  std::string git;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (i + 1 < argc && argument == "--out") {
      out = argv[++i];
    } else if (i + 1 < argc && argument == "--git") {
      git = argv[++i];
    } else {
      std::cerr << "usage: plan_bench [--git REVISION] [--out FILE]; about a minute\n";
      return 2;
    }
  }
  std::string lines;
  const bool held = Measure(git, lines);
  if (out.empty()) {
    std::cout << lines;
    return held ? 0 : 1;
  }
  std::ofstream file(out, std::ios::binary | std::ios::trunc);
  if (!(file << lines << std::flush)) {
    std::cerr << "plan_bench: cannot write " << out << "\n";
    return 1;
  }
  return held ? 0 : 1;
}

}  // namespace
}  // namespace tessera::planner

int main(int argc, char** argv) {
  return tessera::planner::Main(argc, argv);
}
