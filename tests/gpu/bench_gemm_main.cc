// Our GEMM beside cuBLASLt's over a grid of sizes: what the planner chooses by itself for backend cuda, launched as the
// daemon launches it, and the best of eight that the library proposes. Exit code 0 if every cell that was asked for has
// its row or is refused by the planner.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/gemm/vendor/cublaslt.h"
#include "server/config/settings.h"
#include "server/exec/devices.h"
#include "server/telemetry/log.h"
#include "tests/gpu/bench_gemm_cell.h"
#include "tests/gpu/bench_gemm_grid.h"
#include "tests/gpu/bench_gemm_rows.h"
#include "tests/gpu/gpu.h"

namespace tessera::gpu_test {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr const char* kProgram = "tessera-gpu-bench-gemm";

struct Options {
  std::string json;
  std::vector<std::string> families;
  std::string shapes = "full";
  std::string git = "unknown";
  bool merge = false;
  int budget_s = 0;  // 0 = none
};

std::vector<BenchCell> CellsAskedFor(const Options& options) {
  std::vector<BenchCell> cells;
  for (const std::string_view name : kBenchFamilyNames) {
    const bool wanted = options.families.empty() || std::count(options.families.begin(), options.families.end(), name);
    if (!wanted) continue;
    const std::vector<BenchCell> family = CellsOf(*BenchFamilyFrom(name), options.shapes == "small");
    cells.insert(cells.end(), family.begin(), family.end());
  }
  return cells;
}

absl::StatusOr<planner::DeviceFacts> CudaFacts(const server::OpenedDevices& opened) {
  for (const auto& device : opened.devices) {
    for (const planner::DeviceFacts& facts : device->facts()) {
      if (facts.backend == kernels::Backend::kCuda) return facts;
    }
  }
  return absl::UnavailableError("no device serves backend cuda");
}

class Bench {
 public:
  Bench(const Options& options, const planner::DeviceFacts& facts, Json machine, RowFile file)
      : options_(options), facts_(facts), machine_(std::move(machine)), file_(std::move(file)) {}

  // Whether every cell has a row or is refused; an error where nothing more can be measured.
  absl::StatusOr<bool> Run(const std::vector<BenchCell>& cells) {
    for (const BenchCell& cell : cells) RETURN_IF_ERROR(RunCell(cell));
    return ok_;
  }

  void PrintSummary() const {
    std::printf("\n%s%d rows; time: %s\n", summary_.Text().c_str(), rows_, watch_.Text().c_str());
  }

 private:
  absl::Status RunCell(const BenchCell& cell) {
    if (options_.budget_s > 0 && Clock::now() > begin_ + std::chrono::seconds(options_.budget_s)) {
      // Nothing is known against the row that the file may have.
      ok_ = false;
      Skip(cell, "out of time; a row of an earlier run stays");
      return absl::OkStatus();
    }
    const absl::StatusOr<BenchResult> result = MeasureCell(cell, facts_, watch_);
    watch_.Lap("preparing");
    if (result.ok()) return AddRow(cell, *result);
    const std::string reason = MessageOf(result.status());
    const bool refused = absl::IsUnimplemented(result.status());
    ok_ = ok_ && refused;
    Skip(cell, absl::StrCat(refused ? "refused: " : "FAILED: ", reason));
    RETURN_IF_ERROR(file_.Drop(KeyOf(cell)));
    const cudaError_t lost = cudaDeviceSynchronize();
    if (lost == cudaSuccess) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("the GPU is lost: ", cudaGetErrorString(lost)));
  }

  absl::Status AddRow(const BenchCell& cell, const BenchResult& result) {
    Json row = RowOf(cell, result);
    std::printf("%-58s %9.2f us, peer %9.2f us, ratio %.3f, %5.0f TFLOP/s, %s\n", cell.Describe().c_str(), result.us,
                result.peer_us, result.peer_us / result.us, row.value("tflops", 0.0), result.variant.c_str());
    std::fflush(stdout);
    row.update(machine_);
    summary_.Add(cell, result);
    ++rows_;
    return file_.Put(std::move(row));
  }

  // Each reason is told once a family; the summary counts.
  void Skip(const BenchCell& cell, const std::string& reason) {
    summary_.Skip(cell, reason);
    if (told_.insert({cell.family, reason}).second) {
      std::fprintf(stderr, "%s: %s: %s\n", kProgram, cell.Describe().c_str(), reason.c_str());
    }
  }

  const Options& options_;
  const planner::DeviceFacts facts_;
  const Json machine_;
  const Clock::time_point begin_ = Clock::now();
  RowFile file_;
  BenchSummary summary_;
  Stopwatch watch_;
  std::set<std::pair<BenchFamily, std::string>> told_;
  int rows_ = 0;
  bool ok_ = true;
};

absl::StatusOr<bool> RunBench(const Options& options) {
  RETURN_IF_ERROR(server::InitLogging("warn", "text"));
  ASSIGN_OR_RETURN(const server::OpenedDevices opened,
                   server::OpenDevices({.cpu_threads = 1,
                                        .cuda_device = "0",
                                        .workspace_bytes_max = server::Settings().workspace_bytes_max,
                                        .lost = {}}));
  ASSIGN_OR_RETURN(const planner::DeviceFacts facts, CudaFacts(opened));
  if (!kernels::VendorUnavailable().empty()) return absl::UnavailableError(kernels::VendorUnavailable());
  const Gpu gpu;
  const Json machine = {
      {"gpu", gpu.facts().name}, {"driver", gpu.facts().driver}, {"cuda", gpu.facts().cuda}, {"git", options.git}};
  std::printf("%s, driver %s, CUDA %s\n", gpu.facts().name.c_str(), gpu.facts().driver.c_str(),
              gpu.facts().cuda.c_str());
  ASSIGN_OR_RETURN(RowFile file, RowFile::Open(options.json, options.merge));
  Bench bench(options, facts, machine, std::move(file));
  absl::StatusOr<bool> ok = bench.Run(CellsAskedFor(options));
  bench.PrintSummary();
  return ok;
}

int Main(const Options& options) {
  const absl::StatusOr<bool> ok = RunBench(options);
  if (ok.ok()) return *ok ? EXIT_SUCCESS : EXIT_FAILURE;
  std::fprintf(stderr, "%s: %s\n", kProgram, MessageOf(ok.status()).c_str());
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace tessera::gpu_test

int main(int argc, char** argv) {
  using namespace tessera::gpu_test;
  Options options;
  CLI::App app("Our GEMM, as the planner chooses it, beside the best of cuBLASLt's proposals, on device 0");
  const std::vector<std::string> families(kBenchFamilyNames.begin(), kBenchFamilyNames.end());
  app.add_option("--json", options.json, "write a line of JSON for each cell to this file");
  app.add_flag("--merge", options.merge,
               "keep the rows of --json that this run does not measure; without it the file begins empty");
  app.add_option("--family", options.families, "measure these only; all without it")
      ->check(CLI::IsMember(families))
      ->delimiter(',');
  app.add_option("--shapes", options.shapes, "small: a few cells of each family, for a look")
      ->check(CLI::IsMember({"full", "small"}))
      ->capture_default_str();
  app.add_option("--budget-s", options.budget_s, "begin no cell after that many seconds; 0 = no limit")
      ->check(CLI::Range(0, 86400));
  app.add_option("--git", options.git, "revision to name in the lines")->envname("TESSERA_GIT");
  CLI11_PARSE(app, argc, argv);
  if (options.merge && options.json.empty()) {
    std::fprintf(stderr, "%s: --merge: needs --json\n", kProgram);
    return EXIT_FAILURE;
  }
  return Main(options);
}
