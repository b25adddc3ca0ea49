// Times of many calls, and the two numbers of them that reports have.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::gpu_test {

inline constexpr int kWarmUpCalls = 300;
inline constexpr int kMeasuredCalls = 3000;

// In microseconds.
class Samples {
 public:
  void Add(double us) { values_.push_back(us); }
  void Add(std::chrono::steady_clock::duration time) { Add(std::chrono::duration<double, std::micro>(time).count()); }

  double Median() const { return Quantile(0.5); }
  // The value that a share of `q` of the samples does not exceed; 0 without samples.
  double Quantile(double q) const {
    if (values_.empty()) return 0;
    std::vector<double> sorted = values_;
    const auto at = std::min(sorted.size() - 1, static_cast<std::size_t>(q * static_cast<double>(sorted.size())));
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(at), sorted.end());
    return sorted[at];
  }

 private:
  std::vector<double> values_;
};

// Calls `call` often enough and takes the time of each; it returns false to end early, on an error that it keeps. A
// call of several operations, `operations`, counts as many times and as the mean of them.
template <typename Call>
Samples TimeCalls(const Call& call, int operations = 1) {
  using Clock = std::chrono::steady_clock;
  Samples samples;
  for (int i = -kWarmUpCalls; i < kMeasuredCalls; i += operations) {
    const Clock::time_point start = Clock::now();
    if (!call()) break;
    if (i >= 0) samples.Add((Clock::now() - start) / operations);
  }
  return samples;
}

// Lines of JSON, appended to a file one by one, so that what was measured before a failure is there.
class LineFile {
 public:
  explicit LineFile(const std::string& path) : file_(path, std::ios::app) {}
  void Add(const nlohmann::ordered_json& line) { file_ << line.dump() << std::endl; }
  bool ok() const { return file_.good(); }

 private:
  std::ofstream file_;
};

inline nlohmann::ordered_json CaseLine(const std::string& name, const Samples& samples) {
  return {{"case", name}, {"us", samples.Median()}, {"p99_us", samples.Quantile(0.99)}};
}

}  // namespace tessera::gpu_test
