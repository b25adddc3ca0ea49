// What sharing a GPU costs and risks, with MPS and without: handovers between processes, two busy clients, somebody
// else's fault, another user, a wait that never ends, a client that is killed. Measures in processes that it starts;
// this one never has a CUDA context. Exit code 0 only if every case was carried through and found right.
#include "tests/gpu/isolation_cases.h"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/isolation_stage.h"
#include "tests/gpu/isolation_worker.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr auto kProbeLimit = 60s;
constexpr auto kStopLimit = 10s;

struct DaemonCase {
  const char* name;
  absl::Status (*measure)(Stage&, TestDaemon&);
};

constexpr DaemonCase kDaemonCases[] = {{"handover", MeasureHandover},
                                       {"two_clients", MeasureTwoClients},
                                       {"stuck_wait", MeasureStuckWait},
                                       {"client_killed_while_sharing", MeasureKilledClient}};

struct BareCase {
  const char* name;
  absl::Status (*measure)(Stage&);
};

constexpr BareCase kBareCases[] = {{"fault", MeasureFault}, {"second_uid", MeasureSecondUser}};

class ModeRun {
 public:
  ModeRun(const IsolationOptions& options, Stage& stage) : options_(options), stage_(stage) {}

  // All cases that can be carried through are, whatever fails.
  void Run() {
    for (const DaemonCase& one : kDaemonCases) {
      if (Wanted(one.name)) Judge(one.name, WithDaemon(one));
    }
    if (daemon_ != nullptr) Judge("daemon", daemon_->Stop(stage_.Within(kStopLimit)));
    daemon_.reset();
    for (const BareCase& one : kBareCases) {
      if (Wanted(one.name)) Judge(one.name, Bare(one));
    }
  }

 private:
  bool Wanted(const char* name) const { return absl::StrContains(name, options_.filter); }

  // On one daemon for all, or a new one where a case has ended it.
  absl::Status WithDaemon(const DaemonCase& one) {
    if (daemon_ != nullptr && !daemon_->client().ServerInfo().ok()) daemon_.reset();
    if (daemon_ == nullptr) {
      ASSIGN_OR_RETURN(daemon_, stage_.StartDaemon("daemon"));
    }
    RETURN_IF_ERROR(one.measure(stage_, *daemon_));
    return daemon_->alive() ? absl::OkStatus() : absl::InternalError("the daemon is gone: " + daemon_->LogTail());
  }

  // With an MPS of its own, since what the case before did to it may last.
  absl::Status Bare(const BareCase& one) {
    RETURN_IF_ERROR(stage_.Open());
    return one.measure(stage_);
  }

  void Judge(const char* name, const absl::Status& status) {
    if (!status.ok()) stage_.Add({.name = name, .value = -1, .unit = "", .detail = MessageOf(status), .ok = false});
  }

  const IsolationOptions& options_;
  Stage& stage_;
  std::unique_ptr<TestDaemon> daemon_;
};

void RunMode(const IsolationOptions& options, const ScratchDirectory& scratch, IsolationReport& report, bool mps) {
  Stage stage(options, scratch, report, mps);
  const absl::Status open = stage.Open();
  if (open.ok()) return ModeRun(options, stage).Run();
  if (options.allow_skip) {
    std::printf("skipped: %s\n", MessageOf(open).c_str());
  } else {
    stage.Add({.name = "environment", .value = -1, .unit = "", .detail = MessageOf(open), .ok = false});
  }
}

absl::StatusOr<Json> Probe(const IsolationOptions& options, const ScratchDirectory& scratch) {
  IsolationReport nowhere("", {});
  Stage stage(options, scratch, nowhere, /*mps=*/false);
  ASSIGN_OR_RETURN(Worker probe, stage.Start("probe"));
  return probe.Answer(kProbeLimit);
}

absl::StatusOr<bool> RunModes(const IsolationOptions& options) {
  if (options.dist.empty()) return absl::InvalidArgumentError("--dist: missing; the installed tree");
  if (!std::filesystem::exists(options.dist + "/bin/tesserad")) {
    return absl::NotFoundError(options.dist + "/bin/tesserad is not there; install the component tessera, too");
  }
  ASSIGN_OR_RETURN(const ScratchDirectory scratch, ScratchDirectory::Make());
  ASSIGN_OR_RETURN(Json machine, Probe(options, scratch));
  machine["git"] = options.git;
  if (!options.json.empty()) {
    std::ofstream file(options.json, std::ios::trunc);
    if (!file) return absl::InvalidArgumentError("cannot write " + options.json);
  }
  IsolationReport report(options.json, machine);
  for (const bool mps : {false, true}) RunMode(options, scratch, report, mps);
  std::printf("%d lines, %d failed\n", report.lines(), report.failed());
  if (report.lines() == 0) return absl::InvalidArgumentError("--case matches none");
  return report.ok();
}

int Main(const IsolationOptions& options) {
  const absl::StatusOr<bool> ok = RunModes(options);
  if (ok.ok()) return *ok ? EXIT_SUCCESS : EXIT_FAILURE;
  std::fprintf(stderr, "tessera-gpu-isolation: %s\n", MessageOf(ok.status()).c_str());
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace tessera::gpu_test

int main(int argc, char** argv) {
  using namespace tessera::gpu_test;
  IsolationOptions options;
  WorkerSpec worker;
  CLI::App app("What sharing device 0 costs and risks, with MPS and without");
  app.add_option("--dist", options.dist, "the installed tree: bin/tesserad");
  app.add_option("--json", options.json, "write a line of JSON for each finding to this file");
  app.add_option("--git", options.git, "revision to name in the lines")->envname("TESSERA_GIT");
  app.add_option("--case", options.filter, "only cases whose name contains this");
  app.add_flag("--allow-skip", options.allow_skip, "a machine without MPS is no failure");
  app.add_option("--budget-s", options.budget_s, "give up after that many seconds; 0 = no limit");
  // How this program starts its workers; an empty group is not shown.
  app.add_option("--worker", worker.job)->group("");
  app.add_option("--socket", worker.socket)->group("");
  app.add_option("--result", worker.result)->group("");
  app.add_option("--uid", worker.uid)->group("");
  CLI11_PARSE(app, argc, argv);
  return worker.job.empty() ? Main(options) : RunWorker(worker);
}
