#include "tests/gpu/report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tessera::gpu_test {
namespace {

constexpr std::size_t kFailuresKept = 40;
constexpr std::int64_t kControlsMin = 3;  // a variant

std::string Id(const VariantResult& result) {
  return std::string(result.variant().info.id);
}

}  // namespace

void Report::AddVariant(std::size_t index, const kernels::KernelFacts& facts) {
  const std::lock_guard lock(mutex_);
  variants_.push_back({.index = index, .facts = facts});
}

void Report::CountCase(std::size_t position, double worst) {
  const std::lock_guard lock(mutex_);
  VariantResult& result = variants_[position];
  ++result.cases;
  result.worst = std::max(result.worst, worst);
}

void Report::CountRefusal(std::size_t position) {
  const std::lock_guard lock(mutex_);
  ++variants_[position].refused;
}

void Report::CountControl(std::size_t position, bool caught) {
  const std::lock_guard lock(mutex_);
  ++variants_[position].controls;
  variants_[position].controls_caught += caught ? 1 : 0;
}

void Report::CountOracleCheck() {
  const std::lock_guard lock(mutex_);
  ++oracle_checks_;
}

void Report::CountJob() {
  const std::lock_guard lock(mutex_);
  ++jobs_;
}

void Report::Fail(std::size_t position, const std::string& what) {
  const std::lock_guard lock(mutex_);
  ++variants_[position].failed;
  Note(Id(variants_[position]) + ": " + what);
}

void Report::Fail(const std::string& what) {
  const std::lock_guard lock(mutex_);
  Note(what);
}

void Report::Note(const std::string& what) {
  ++failed_;
  if (failures_.size() >= kFailuresKept) return;
  failures_.push_back(what);
  std::fprintf(stderr, "FAIL %s\n", what.c_str());
}

void Report::Conclude(bool controls_expected) {
  if (variants_.empty())
    Fail("no variant to run: none of the catalogue is built for this device and matches the filter");
  for (std::size_t position = 0; position < variants_.size(); ++position) {
    const VariantResult& result = variants_[position];
    if (result.cases == 0) Fail(position, "never ran");
    if (controls_expected && result.controls < kControlsMin) {
      Fail(position, "only " + std::to_string(result.controls) + " mutation controls could be launched");
    }
    if (result.controls_caught != result.controls) Fail(position, "a mutation control was not caught");
  }
}

Report::Totals Report::Sum() const {
  Totals totals;
  for (const VariantResult& result : variants_) {
    totals.ran += result.cases > 0 ? 1 : 0;
    totals.cases += result.cases;
    totals.refused += result.refused;
    totals.controls += result.controls;
    totals.caught += result.controls_caught;
  }
  return totals;
}

void Report::PrintTable(const GpuFacts& gpu) const {
  std::printf("%-64s %5s %7s %6s %6s %8s %6s %9s\n", "variant", "regs", "shared", "cases", "refus.", "controls",
              "failed", "worst");
  for (const VariantResult& result : variants_) {
    std::printf("%-64s %5d %7d %6lld %6lld %4lld/%-3lld %6lld %9.2g\n", Id(result).c_str(), result.facts.registers,
                result.facts.shared_bytes, static_cast<long long>(result.cases), static_cast<long long>(result.refused),
                static_cast<long long>(result.controls_caught), static_cast<long long>(result.controls),
                static_cast<long long>(result.failed), result.worst);
  }
  const Totals totals = Sum();
  std::printf("%s, driver %s, CUDA %s\n", gpu.name.c_str(), gpu.driver.c_str(), gpu.cuda.c_str());
  std::printf(
      "%lld of %zu variants ran, %lld cases, %lld refused, %lld/%lld controls caught, %lld oracle checks, "
      "%lld failed\n",
      static_cast<long long>(totals.ran), variants_.size(), static_cast<long long>(totals.cases),
      static_cast<long long>(totals.refused), static_cast<long long>(totals.caught),
      static_cast<long long>(totals.controls), static_cast<long long>(oracle_checks_), static_cast<long long>(failed_));
}

bool Report::WriteJson(const std::string& path, const GpuFacts& gpu, const std::string& git, std::uint64_t seed,
                       double seconds) const {
  const Totals totals = Sum();
  nlohmann::ordered_json variants = nlohmann::ordered_json::array();
  for (const VariantResult& result : variants_) {
    variants.push_back({{"id", Id(result)},
                        {"source_hash", std::string(result.variant().info.source_hash)},
                        {"registers", result.facts.registers},
                        {"shared_bytes", result.facts.shared_bytes},
                        {"local_bytes", result.facts.local_bytes},
                        {"threads", result.facts.threads},
                        {"cases", result.cases},
                        {"refused", result.refused},
                        {"failed", result.failed},
                        {"controls", result.controls},
                        {"controls_caught", result.controls_caught},
                        {"worst_error_over_bound", result.worst}});
  }
  const nlohmann::ordered_json report = {{"git", git},
                                         {"gpu", gpu.name},
                                         {"driver", gpu.driver},
                                         {"cuda", gpu.cuda},
                                         {"seed", seed},
                                         {"seconds", seconds},
                                         {"variants_in_catalogue", variants_.size()},
                                         {"variants_run", totals.ran},
                                         {"cases", totals.cases},
                                         {"refused", totals.refused},
                                         {"failed", failed_},
                                         {"controls", totals.controls},
                                         {"controls_caught", totals.caught},
                                         {"oracle_checks", oracle_checks_},
                                         {"failures", failures_},
                                         {"variants", variants}};
  std::ofstream file(path);
  file << report.dump(1) << "\n";
  file.close();
  return !file.fail();
}

}  // namespace tessera::gpu_test
