// What a product costs on its way through Tessera, with and without MPS, and our kernels beside the vendor's. Measures
// in processes that it starts; this one never has a CUDA context. Exit code 0 only if everything was measured.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/bench_handover.h"
#include "tests/gpu/bench_samples.h"
#include "tests/gpu/bench_workers.h"
#include "tests/gpu/e2e_daemon.h"
#include "tests/gpu/e2e_process.h"
#include "tests/gpu/gpu.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr auto kWorkerLimit = 180s;

struct Options {
  std::string dist;
  std::string json;
  std::string handover_json;
  std::string vendor_json;
  std::string git = "unknown";
  bool allow_skip = false;
  int budget_s = 0;  // 0 = none
  Clock::time_point begin = Clock::now();

  // What is left of the budget, at most `limit`.
  std::chrono::milliseconds Within(std::chrono::milliseconds limit) const {
    if (budget_s == 0) return limit;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(begin + budget_s * 1s - Clock::now());
    return std::clamp(left, std::chrono::milliseconds(0), limit);
  }
};

struct WorkerOptions {
  std::string name;
  std::string socket;
  std::string lines;
};

// In a process of its own: the GPU, or an error.
absl::Status Probe(const std::string& lines) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    return absl::UnavailableError(
        absl::StrCat("no usable GPU: ", error == cudaSuccess ? "the driver shows none" : cudaGetErrorString(error)));
  }
  const Gpu gpu;
  LineFile(lines).Add({{"gpu", gpu.facts().name}, {"driver", gpu.facts().driver}, {"cuda", gpu.facts().cuda}});
  return absl::OkStatus();
}

int RunWorker(const WorkerOptions& options) {
  absl::Status status = absl::InvalidArgumentError("unknown worker " + options.name);
  if (options.name == "probe") status = Probe(options.lines);
  if (options.name == "launch") status = BenchLaunch(options.lines);
  if (options.name == "daemon") status = BenchDaemon(options.socket, options.lines);
  if (options.name == "handover") status = BenchHandover(options.socket, options.lines);
  if (options.name == "vendor") status = BenchVendor(options.lines);
  if (status.ok()) return EXIT_SUCCESS;
  std::fprintf(stderr, "%s\n", MessageOf(status).c_str());
  return EXIT_FAILURE;
}

// The lines that a worker wrote.
std::vector<Json> ReadLines(const std::string& path) {
  std::vector<Json> lines;
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!line.is_discarded()) lines.push_back(std::move(line));
  }
  return lines;
}

class Bench {
 public:
  Bench(const Options& options, const ScratchDirectory& scratch) : options_(options), scratch_(scratch) {}

  absl::Status Probe() {
    ASSIGN_OR_RETURN(const std::vector<Json> lines, RunWorker("probe", {}, WithoutMps(scratch_)));
    if (lines.empty()) return absl::InternalError("the probe says nothing");
    machine_ = lines.front();
    machine_["git"] = options_.git;
    std::printf("%s, driver %s, CUDA %s\n", machine_.value("gpu", "").c_str(), machine_.value("driver", "").c_str(),
                machine_.value("cuda", "").c_str());
    return absl::OkStatus();
  }

  // All that can be measured is, whatever fails.
  bool Run() {
    bool ok = Report("without MPS", RunLaunch(/*mps=*/false, WithoutMps(scratch_)));
    ok = Report("with MPS", RunWithMps()) && ok;
    return Report("vendor", RunVendor()) && ok;
  }

 private:
  static bool Report(const char* what, const absl::Status& status) {
    if (!status.ok()) std::fprintf(stderr, "tessera-gpu-bench: %s: %s\n", what, MessageOf(status).c_str());
    return status.ok();
  }

  absl::StatusOr<std::vector<Json>> RunWorker(const std::string& name, const std::string& socket,
                                              const std::vector<std::string>& environment) {
    const std::string lines = scratch_.File(absl::StrCat("lines-", ++runs_, ".jsonl"));
    std::vector<std::string> command = {SelfPath(), "--worker", name, "--lines", lines};
    if (!socket.empty()) command.insert(command.end(), {"--socket", socket});
    ASSIGN_OR_RETURN(Process worker, Process::Start({.command = std::move(command),
                                                     .environment = environment,
                                                     .log = scratch_.File(absl::StrCat("worker-", runs_, ".log"))}));
    const std::optional<int> code = worker.Wait(options_.Within(kWorkerLimit));
    if (code == 0) return ReadLines(lines);
    return absl::UnavailableError(code.has_value() ? worker.LogTail()
                                                   : absl::StrCat(name, " does not end: ", worker.LogTail()));
  }

  absl::Status RunLaunch(bool mps, const std::vector<std::string>& environment) {
    ASSIGN_OR_RETURN(const std::vector<Json> in_process, RunWorker("launch", {}, environment));
    AddLaunchLines(in_process, mps);
    ASSIGN_OR_RETURN(const std::unique_ptr<TestDaemon> daemon,
                     TestDaemon::Start(
                         scratch_, {.dist = options_.dist, .name = mps ? "mps" : "plain", .environment = environment}));
    ASSIGN_OR_RETURN(const v1::ServerInfoReply info, daemon->client().ServerInfo());
    const std::string want = mps ? "shared" : "strict";
    if (info.isolation_mode() != want) {
      return absl::FailedPreconditionError(
          absl::StrCat("the daemon's isolation mode is ", info.isolation_mode(), " and not ", want));
    }
    ASSIGN_OR_RETURN(const std::vector<Json> through_daemon, RunWorker("daemon", daemon->socket(), environment));
    AddLaunchLines(through_daemon, mps);
    RETURN_IF_ERROR(RunHandover(daemon->socket(), mps, environment));
    return daemon->Stop();
  }

  absl::Status RunHandover(const std::string& socket, bool mps, const std::vector<std::string>& environment) {
    if (options_.handover_json.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::vector<Json> lines, RunWorker("handover", socket, environment));
    LineFile file(options_.handover_json);
    for (const Json& line : lines) {
      Json whole = {{"case", line.at("case")}, {"mps", mps}};
      whole.update(line);
      whole.update(machine_);
      file.Add(whole);
      std::printf("%-18s %-8s %9.3f us, in one process %9.3f us, extra %9.3f us\n", line.value("case", "").c_str(),
                  mps ? "MPS" : "no MPS", line.value("daemon_us", 0.0), line.value("in_process_us", 0.0),
                  line.value("extra_us", 0.0));
      std::fflush(stdout);
    }
    return file.ok() ? absl::OkStatus() : absl::InternalError("cannot write " + options_.handover_json);
  }

  absl::Status RunWithMps() {
    const absl::StatusOr<std::unique_ptr<Mps>> mps = Mps::Start(scratch_, "mps-control");
    if (mps.ok()) return RunLaunch(/*mps=*/true, (*mps)->environment());
    if (!options_.allow_skip) return mps.status();
    std::printf("skipped: %s\n", MessageOf(mps.status()).c_str());
    return absl::OkStatus();
  }

  absl::Status RunVendor() {
    if (options_.vendor_json.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::vector<Json> lines, RunWorker("vendor", {}, WithoutMps(scratch_)));
    LineFile file(options_.vendor_json);
    for (Json line : lines) {
      std::printf("%5lld x %5lld x %5lld %-9s %9.2f us, vendor %9.2f us, ratio %.3f, %.0f TFLOP/s\n",
                  line.value("m", 0LL), line.value("n", 0LL), line.value("k", 0LL), line.value("regime", "").c_str(),
                  line.value("us", 0.0), line.value("peer_us", 0.0), line.value("ratio", 0.0),
                  line.value("tflops", 0.0));
      line.update(machine_);
      file.Add(line);
    }
    return file.ok() ? absl::OkStatus() : absl::InternalError("cannot write " + options_.vendor_json);
  }

  void AddLaunchLines(const std::vector<Json>& lines, bool mps) {
    std::optional<LineFile> file;
    if (!options_.json.empty()) file.emplace(options_.json);
    for (const Json& line : lines) {
      Json whole = {{"case", line.at("case")}, {"mps", mps}, {"us", line.at("us")}, {"p99_us", line.at("p99_us")}};
      whole.update(machine_);
      if (file.has_value()) file->Add(whole);
      std::printf("%-18s %-8s %9.3f us, p99 %9.3f us\n", whole.value("case", "").c_str(), mps ? "MPS" : "no MPS",
                  whole.value("us", 0.0), whole.value("p99_us", 0.0));
      std::fflush(stdout);
    }
  }

  const Options& options_;
  const ScratchDirectory& scratch_;
  Json machine_;
  int runs_ = 0;
};

absl::StatusOr<bool> RunBench(const Options& options) {
  if (options.dist.empty()) return absl::InvalidArgumentError("--dist: missing; the installed tree");
  if (!std::filesystem::exists(options.dist + "/bin/tesserad")) {
    return absl::NotFoundError(options.dist + "/bin/tesserad is not there; install the component tessera, too");
  }
  ASSIGN_OR_RETURN(const ScratchDirectory scratch, ScratchDirectory::Make());
  Bench bench(options, scratch);
  RETURN_IF_ERROR(bench.Probe());
  for (const std::string& path : {options.json, options.handover_json, options.vendor_json}) {
    if (path.empty()) continue;
    std::ofstream file(path, std::ios::trunc);
    if (!file) return absl::InvalidArgumentError("cannot write " + path);
  }
  return bench.Run();
}

int Main(const Options& options) {
  const absl::StatusOr<bool> ok = RunBench(options);
  if (ok.ok()) return *ok ? EXIT_SUCCESS : EXIT_FAILURE;
  std::fprintf(stderr, "tessera-gpu-bench: %s\n", MessageOf(ok.status()).c_str());
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace tessera::gpu_test

int main(int argc, char** argv) {
  using namespace tessera::gpu_test;
  Options options;
  WorkerOptions worker;
  CLI::App app("What a product costs on its way, with and without MPS, and our kernels beside cuBLASLt, on device 0");
  app.add_option("--dist", options.dist, "the installed tree: bin/tesserad");
  app.add_option("--json", options.json, "write a line of JSON for each case to this file");
  app.add_option("--handover-json", options.handover_json,
                 "measure handing work over between a client and the daemon, too: a line for each case");
  app.add_option("--vendor-json", options.vendor_json,
                 "compare kernels with cuBLASLt, too: a line for each shape and regime");
  app.add_option("--git", options.git, "revision to name in the lines")->envname("TESSERA_GIT");
  app.add_flag("--allow-skip", options.allow_skip, "a machine without MPS is no failure");
  app.add_option("--budget-s", options.budget_s, "give up after that many seconds; 0 = no limit");
  // How this program starts its measuring processes; an empty group is not shown.
  app.add_option("--worker", worker.name)->group("");
  app.add_option("--socket", worker.socket)->group("");
  app.add_option("--lines", worker.lines)->group("");
  CLI11_PARSE(app, argc, argv);
  return worker.name.empty() ? Main(options) : RunWorker(worker);
}
