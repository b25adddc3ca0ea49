// Runs every GEMM variant that this build and device can run against the float64 oracle, and mutation controls against
// the same checker. Exit code 0 only if every variant ran and everything was right.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/catalog/gemm_catalog.h"
#include "kernels/launch/gemm_launch.h"
#include "tests/gpu/controls.h"
#include "tests/gpu/far_strides.h"
#include "tests/gpu/gemm_case.h"
#include "tests/gpu/gemm_problem.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/report.h"

namespace tessera::gpu_test {
namespace {

using kernels::Arch;
using kernels::GemmLayout;
using kernels::GemmVariant;
using kernels::LaunchShape;
using Clock = std::chrono::steady_clock;

constexpr double kNaiveTolerance = 1e-11;  // of the magnitude: two float64 sums in the same order

struct Options {
  std::string filter;
  bool reduced = false;
  bool no_vendor = false;
  std::string json;
  std::string git = "unknown";
  int budget_s = 0;  // 0 = none
  int threads = 0;   // 0 = one a processor
  std::uint64_t seed = 20260715;
};

// One problem in one layout, for every variant of its pair and layout.
struct Job {
  std::shared_ptr<SharedCase> shared;
  GemmLayout layout = GemmLayout::kNT;
  std::vector<std::size_t> positions;  // in the report
  bool controls = false;

  double Cost() const {
    const GpuCase& problem = shared->problem();
    return static_cast<double>(positions.size()) * static_cast<double>(problem.Elements()) +
           1e-3 * static_cast<double>(problem.Products());
  }
};

bool DeviceRuns(Arch arch, int capability) {
  switch (arch) {
    case Arch::kSm80:
      return capability >= 80;
    case Arch::kSm89:
      return capability >= 89;
    case Arch::kSm90a:
      return capability == 90;
    case Arch::kVendor:
      return true;
    case Arch::kCpu:
      break;
  }
  return false;
}

// Prepares the variants of this build, device and filter. A library that cannot be loaded is not here; any other
// variant that cannot be prepared is a failure.
void SelectVariants(const Options& options, const Gpu& gpu, Report& report) {
  bool vendor_missing = false;
  const auto variants = kernels::GemmVariants();
  for (std::size_t index = 0; index < variants.size(); ++index) {
    const kernels::VariantInfo& info = variants[index].info;
    const bool vendor = info.arch == Arch::kVendor;
    if (!kernels::GemmBuilt(index) || !DeviceRuns(info.arch, gpu.facts().capability)) continue;
    if (info.id.find(options.filter) == std::string_view::npos || (vendor && options.no_vendor)) continue;
    kernels::KernelFacts facts;
    const kernels::LaunchError error = kernels::PrepareGemm(index, facts);
    static_cast<void>(cudaGetLastError());
    if (error != kernels::kLaunchOk && vendor) {
      vendor_missing = true;
      continue;
    }
    report.AddVariant(index, facts);
    const std::size_t position = report.variants().size() - 1;
    if (error != kernels::kLaunchOk) report.Fail(position, "PrepareGemm returned " + std::to_string(error));
    if (facts.local_bytes != 0 && !vendor) {
      report.Fail(position, std::to_string(facts.local_bytes) + " bytes of local memory a thread: it spills");
    }
  }
  if (vendor_missing) std::printf("the vendor's library could not be loaded: its variants are left out\n");
}

// Splits of K to launch with; more than there are tiles of K may be refused.
std::vector<int> SplitsFor(const GemmVariant& variant, const GpuCase& problem) {
  if (!kernels::TakesSplit(variant.info.workspace)) return {1};
  if (problem.Products() > std::int64_t{1} << 28) return {1, 4};
  // All that a cluster may share; three share a tile's columns unevenly.
  if (variant.info.workspace == kernels::WorkspaceRule::kCluster) return {1, 2, 3, 4, 8};
  return {1, 2, 3, 7};
}

bool MoreSlicesThanTiles(const GemmVariant& variant, const GpuCase& problem, int split) {
  return split > 1 && split > (problem.k + variant.tile.k - 1) / variant.tile.k;
}

class Conformance {
 public:
  Conformance(const Options& options, Gpu& gpu, Report& report)
      : options_(options), gpu_(gpu), report_(report), begin_(Clock::now()) {}

  void Run() {
    ProveNaiveOracle();
    RunFarStrides();
    std::vector<Job> jobs = MakeJobs();
    // The longest first, so that no thread is left with one at the end.
    std::stable_sort(jobs.begin(), jobs.end(), [](const Job& x, const Job& y) { return x.Cost() > y.Cost(); });
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      for (std::size_t i = next++; i < jobs.size() && !Stopped(); i = next++) {
        RunJob(jobs[i]);
        jobs[i].shared.reset();  // the truths of large cases are large
      }
    };
    {
      std::vector<std::jthread> helpers;
      for (int i = 1; i < Threads(); ++i) helpers.emplace_back(work);
      work();
    }
    if (gpu_.lost) report_.Fail("the device was lost; what came after did not run");
    if (Expired()) report_.Fail("out of time after " + std::to_string(options_.budget_s) + " s");
  }

  double Seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Pair = std::pair<DType, DType>;

  int Threads() const {
    if (options_.threads > 0) return options_.threads;
    return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 32U));
  }

  bool Expired() const { return options_.budget_s > 0 && Seconds() > options_.budget_s; }
  bool Stopped() const { return gpu_.lost || Expired(); }

  // Pair -> layout -> positions of its variants in the report.
  std::map<Pair, std::map<GemmLayout, std::vector<std::size_t>>> Groups() const {
    std::map<Pair, std::map<GemmLayout, std::vector<std::size_t>>> groups;
    for (std::size_t position = 0; position < report_.variants().size(); ++position) {
      const kernels::GemmClass& c = report_.variants()[position].variant().gemm_class;
      groups[{c.a, c.b}][c.layout].push_back(position);
    }
    return groups;
  }

  std::vector<Job> MakeJobs() const {
    std::vector<GpuCase> cases = ConformanceCases();
    if (options_.reduced) std::erase_if(cases, [](const GpuCase& problem) { return !problem.reduced; });
    const std::size_t plain = cases.size();
    if (!options_.reduced) {
      cases.push_back(ControlCase(Fill::kUniform));
      cases.push_back(ControlCase(Fill::kOneHot));
    }
    std::vector<Job> jobs;
    for (const auto& [pair, layouts] : Groups()) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const auto shared = std::make_shared<SharedCase>(cases[i], pair.first, pair.second, options_.seed + i);
        for (const auto& [layout, positions] : layouts) {
          jobs.push_back({.shared = shared, .layout = layout, .positions = positions, .controls = i >= plain});
        }
      }
    }
    return jobs;
  }

  void RunJob(const Job& job) {
    GemmProblem problem(gpu_, *job.shared, job.layout, options_.reduced);
    for (const std::size_t position : job.positions) {
      if (Stopped()) return;
      if (job.controls) {
        RunControls(problem, report_, position);
        continue;
      }
      const GemmVariant& variant = report_.variants()[position].variant();
      for (const int split : SplitsFor(variant, problem.problem())) RunCase(problem, position, split);
    }
    if (!problem.InputsIntact()) report_.Fail("an input was changed in case '" + problem.problem().name + "'");
    report_.CountJob();
  }

  void RunCase(GemmProblem& problem, std::size_t position, int split) {
    const auto fail = [&](const std::string& what) {
      report_.Fail(position,
                   problem.problem().name + (split > 1 ? ", split " + std::to_string(split) : "") + ": " + what);
    };
    const std::size_t index = report_.variants()[position].index;
    const GemmVariant& variant = kernels::GemmVariants()[index];
    const DType out = variant.gemm_class.out;
    const kernels::GemmParams params = problem.Params(out);
    gpu_test::Run first = problem.Launch(index, params, {.split = split}, kNanPoison);
    if (Refused(variant, first)) {
      if (!GemmProblem::Untouched(first)) fail("refused, yet D was written");
      if (MustTake(variant, params) && !MoreSlicesThanTiles(variant, problem.problem(), split)) {
        fail("refused what it has to take");
      }
      return report_.CountRefusal(position);
    }
    double worst = 0;
    const std::string wrong = problem.Check(first, variant.gemm_class, &worst);
    report_.CountCase(position, worst);
    if (!wrong.empty()) return fail(wrong);
    Repeat(problem, index, first, {.split = split}, out, fail);
    if (!problem.problem().raster) return;
    for (const int raster : {1, 3}) Repeat(problem, index, first, {.split = split, .raster = raster}, out, fail);
  }

  // Once more on a D that holds something else: the same bits and nothing outside.
  static void Repeat(GemmProblem& problem, std::size_t index, const gpu_test::Run& first, const LaunchShape& shape,
                     DType out, const std::function<void(const std::string&)>& fail) {
    gpu_test::Run again = problem.Launch(index, problem.Params(out), shape, kFinitePoison);
    const std::string launch = "second launch, raster " + std::to_string(shape.raster) + ": ";
    if (!again.fault.empty() || again.launch != kernels::kLaunchOk) {
      return fail(launch + "error " + std::to_string(again.launch) + " " + again.fault);
    }
    if (!problem.OutsideIntact(again, out)) return fail(launch + "bytes outside D were written");
    if (!problem.SameBits(first, again, out)) fail(launch + "other bits than the first");
  }

  // While no other thread uses the GPU, and with memory that goes before they do.
  void RunFarStrides() {
    if (options_.reduced) return;
    if (!FarStrides::Fits()) {
      report_.Fail("no room for strides past 2^31 elements, which take 95 GB");
      return;
    }
    FarStrides far(gpu_);
    for (std::size_t position = 0; position < report_.variants().size() && !Stopped(); ++position) {
      if (report_.variants()[position].variant().info.arch == Arch::kVendor) continue;
      int ran = 0;
      const std::string wrong = far.Check(report_.variants()[position].index, &ran);
      if (!wrong.empty()) report_.Fail(position, wrong);
      for (int i = 0; i < ran; ++i) report_.CountCase(position, 0);
    }
  }

  // The naive kernel against the host's oracle on small cases of every kind, in every layout of every pair.
  void ProveNaiveOracle() {
    if (options_.reduced) return;
    static const std::set<std::string> kProving = {"K = 0 with bias",
                                                   "packed, primes",
                                                   "packed, larger primes",
                                                   "odd strides and offsets",
                                                   "B with every second element",
                                                   "packed batch, all broadcast somewhere",
                                                   "bias bf16, stride 2, odd offset",
                                                   "one-hot B, batch",
                                                   "NaN and infinity, packed, offset"};
    for (const auto& [pair, layouts] : Groups()) {
      for (const GpuCase& problem_case : ConformanceCases()) {
        if (!kProving.contains(problem_case.name)) continue;
        SharedCase shared(problem_case, pair.first, pair.second, options_.seed);
        for (const auto& [layout, positions] : layouts) {
          GemmProblem problem(gpu_, shared, layout, false);
          CompareTruths(problem_case.name, problem.HostTruth(), problem.NaiveTruthOf());
        }
      }
    }
  }

  // A sum that is no number has no loss.
  static bool SameLoss(double host, double naive, const oracle::GemmTruth& truth, std::size_t index) {
    return !std::isfinite(truth.sum_magnitude[index]) ||
           std::fabs(host - naive) <= kNaiveTolerance * (host + truth.magnitude[index]);
  }

  void CompareTruths(const std::string& name, const oracle::GemmTruth& host, const oracle::GemmTruth& naive) {
    const auto same = [](double x, double y, double magnitude) {
      if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
      return x == y || std::fabs(x - y) <= kNaiveTolerance * magnitude;
    };
    report_.CountOracleCheck();
    bool all = host.value.size() == naive.value.size();
    for (std::size_t i = 0; all && i < host.value.size(); ++i) {
      all = same(host.value[i], naive.value[i], host.magnitude[i]) &&
            same(host.sum_magnitude[i], naive.sum_magnitude[i], host.magnitude[i]) &&
            same(host.magnitude[i], naive.magnitude[i], host.magnitude[i]);
    }
    if (!all) report_.Fail("the naive kernel and the host's oracle differ in case '" + name + "'");
  }

  const Options& options_;
  Gpu& gpu_;
  Report& report_;
  Clock::time_point begin_;
};

int Main(const Options& options) {
  Gpu gpu;
  std::printf("%s, compute capability %d.%d, driver %s, CUDA %s, seed %llu\n", gpu.facts().name.c_str(),
              gpu.facts().capability / 10, gpu.facts().capability % 10, gpu.facts().driver.c_str(),
              gpu.facts().cuda.c_str(), static_cast<unsigned long long>(options.seed));
  Report report;
  Conformance conformance(options, gpu, report);
  SelectVariants(options, gpu, report);
  conformance.Run();
  report.Conclude(/*controls_expected=*/!options.reduced);
  report.PrintTable(gpu.facts());
  if (!options.json.empty() &&
      !report.WriteJson(options.json, gpu.facts(), options.git, options.seed, conformance.Seconds())) {
    std::fprintf(stderr, "tessera-gpu-conformance: cannot write %s\n", options.json.c_str());
    return 1;
  }
  return report.ok() ? 0 : 1;
}

}  // namespace
}  // namespace tessera::gpu_test

int main(int argc, char** argv) {
  tessera::gpu_test::Options options;
  CLI::App app("GEMM variants of this build against the float64 oracle on device 0");
  app.add_option("--filter", options.filter, "only variants whose id contains this");
  app.add_flag("--reduced", options.reduced,
               "a few small cases, tight allocations, no controls: for compute-sanitizer");
  app.add_flag("--no-vendor", options.no_vendor, "leave out the vendor's library");
  app.add_option("--json", options.json, "write a report to this file");
  app.add_option("--budget-s", options.budget_s, "fail if it takes longer, in seconds; 0 = no limit");
  app.add_option("--threads", options.threads, "host threads; 0 = one a processor");
  app.add_option("--seed", options.seed, "of all random data");
  app.add_option("--git", options.git, "revision to name in the report")->envname("TESSERA_GIT");
  CLI11_PARSE(app, argc, argv);
  return tessera::gpu_test::Main(options);
}
