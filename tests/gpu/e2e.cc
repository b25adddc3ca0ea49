// A daemon and its clients as processes of their own on a machine with a GPU: products over every route of memory, with
// and without MPS, in one PID namespace and in two, and what has to be refused, survived and given back. Exit code 0
// only if every case of every environment ran and was right.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/e2e_client.h"
#include "tests/gpu/e2e_daemon.h"
#include "tests/gpu/e2e_handover.h"
#include "tests/gpu/e2e_lifetimes.h"
#include "tests/gpu/e2e_order_random.h"
#include "tests/gpu/e2e_process.h"
#include "tests/gpu/e2e_report.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr auto kJobLimit = 120s;
// Lifetimes are long in two environments, and only looked at in the others, which differ in how memory is opened.
constexpr int kKills = 25;
constexpr int kKillsElsewhere = 3;
constexpr int kCycles = 10'000;
constexpr int kCyclesWithMps = 1'000;

struct Options {
  std::string dist;
  std::string json;
  std::string git = "unknown";
  std::string filter;
  bool allow_skip = false;
  int budget_s = 0;        // 0 = none
  std::uint64_t seed = 0;  // of the points at which clients are killed
  Clock::time_point begin = Clock::now();

  // What is left of the budget, at most `limit`: every wait is for no longer, so that what was started is ended in
  // order.
  std::chrono::milliseconds Within(std::chrono::milliseconds limit) const {
    if (budget_s == 0) return limit;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(begin + budget_s * 1s - Clock::now());
    return std::clamp(left, std::chrono::milliseconds(0), limit);
  }
  bool Expired() const { return Within(1s) == 0s; }
};

struct Environment {
  std::string name;
  bool mps = false;
  int daemon_pid = 0;  // 0: the PID namespace of this program; else in namespaces of their own
  int client_pid = 0;
  bool collision() const { return daemon_pid > 1 && daemon_pid == client_pid; }
  bool containers() const { return daemon_pid == 1; }
  bool own_pids() const { return daemon_pid == 0 && client_pid == 0; }
};

// 1 and 1 is what two containers have; there the daemon is a child of its PID 1, and so has another number.
const std::vector<Environment>& Environments() {
  static const std::vector<Environment> environments = {
      {.name = "plain"},
      {.name = "two PID namespaces", .daemon_pid = 5, .client_pid = 9},
      {.name = "two PID 1", .daemon_pid = 1, .client_pid = 1},
      {.name = "equal PID numbers", .daemon_pid = 5, .client_pid = 5},
      {.name = "MPS", .mps = true},
      {.name = "MPS, two PID namespaces", .mps = true, .daemon_pid = 5, .client_pid = 9},
      {.name = "MPS, two PID 1", .mps = true, .daemon_pid = 1, .client_pid = 1},
      {.name = "MPS, equal PID numbers", .mps = true, .daemon_pid = 5, .client_pid = 5},
  };
  return environments;
}

// Everything that is done in one environment, in order; rows even where it cannot be done.
class EnvironmentRun {
 public:
  EnvironmentRun(const Options& options, const ScratchDirectory& scratch, const Environment& environment, int number)
      : options_(options),
        scratch_(scratch),
        environment_(environment),
        prefix_("e" + std::to_string(number)),
        variables_(WithoutMps(scratch)) {}

  std::vector<Row> Run() {
    const absl::Status status = RunAll();
    if (!status.ok()) Add("environment").Check(false, MessageOf(status));
    for (Row& row : rows_) row.environment = environment_.name;
    return std::move(rows_);
  }

 private:
  absl::Status RunAll() {
    if (options_.Expired()) return OutOfTime();
    if (environment_.daemon_pid != 0) {
      const absl::Status namespaces = CheckNamespaces(scratch_.File(prefix_ + "-namespace.log"));
      if (!namespaces.ok()) return Skip(namespaces);
    }
    if (environment_.mps) {
      absl::StatusOr<std::unique_ptr<Mps>> mps = Mps::Start(scratch_, prefix_ + "-mps");
      if (!mps.ok()) return Skip(mps.status());
      mps_ = *std::move(mps);
      variables_ = mps_->environment();
    }
    ASSIGN_OR_RETURN(daemon_, TestDaemon::Start(scratch_, {.dist = options_.dist,
                                                           .name = prefix_,
                                                           .environment = variables_,
                                                           .pid_number = environment_.daemon_pid}));
    CheckIsolation();
    if (environment_.collision()) {
      RunJob("collision");
    } else if (environment_.containers()) {
      for (const char* const job : {"routes", "refusals"}) RunJob(job);
    } else {
      for (const char* const job : {"routes", "refusals", "hostile", "cycles"}) RunJob(job);
      if (environment_.own_pids()) RunLifetimes();
      KillClients();
      if (environment_.own_pids()) RunHandovers();
    }
    Row& end = Add("daemon's end");
    end.Check(daemon_->alive(), "the daemon is gone: " + daemon_->LogTail());
    const absl::Status stopped = daemon_->Stop();
    end.Check(stopped.ok(), MessageOf(stopped));
    return absl::OkStatus();
  }

  absl::Status OutOfTime() const {
    return absl::DeadlineExceededError(absl::StrCat("out of time after ", options_.budget_s, " s"));
  }

  // What cannot be had here is a failure unless it was allowed.
  absl::Status Skip(const absl::Status& why) {
    if (!options_.allow_skip) return why;
    Add("environment").Remark("skipped: " + MessageOf(why));
    return absl::OkStatus();
  }

  Row& Add(const std::string& route) { return rows_.emplace_back(Row{.environment = {}, .route = route}); }

  std::string ResultPath(const std::string& job) {
    return scratch_.File(absl::StrCat(prefix_, "-", job, "-", ++results_, ".json"));
  }

  absl::StatusOr<Process> StartClient(const std::string& job, const std::string& result, const std::string& board = {},
                                      int cycles = 0) {
    std::vector<std::string> environment = variables_;
    environment.push_back("TESSERA_TEST_SEED=" + std::to_string(options_.seed));
    return Process::Start({.command = {SelfPath(), "--client", job, "--socket", daemon_->socket(), "--result", result,
                                       "--board", board, "--cycles", std::to_string(cycles)},
                           .environment = std::move(environment),
                           .log = scratch_.File(absl::StrCat(prefix_, "-", job, ".log")),
                           .pid_number = environment_.client_pid});
  }

  absl::StatusOr<Json> AnswerOf(const std::string& job, int cycles) {
    if (options_.Expired()) return OutOfTime();
    const std::string result = ResultPath(job);
    ASSIGN_OR_RETURN(Process client, StartClient(job, result, {}, cycles));
    const std::optional<int> code = client.Wait(options_.Within(kJobLimit));
    if (!code.has_value()) {
      return absl::DeadlineExceededError(absl::StrCat("client job ", job, ": no end: ", client.LogTail()));
    }
    std::ifstream file(result);
    Json answer = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (*code == 0 && !answer.is_discarded()) return answer;
    return absl::InternalError(absl::StrCat("client job ", job, ": exit code ", *code, ": ", client.LogTail()));
  }

  void RunJob(const std::string& job, const std::string& route = {}, int cycles = 0) {
    const absl::StatusOr<Json> answer = AnswerOf(job, cycles);
    if (!answer.ok()) return Add(route.empty() ? job : route).Check(false, MessageOf(answer.status()));
    for (Row row : answer->get<std::vector<Row>>()) {
      if (!route.empty()) row.route = route;
      rows_.push_back(std::move(row));
    }
  }

  void CheckIsolation() {
    Row& row = Add("isolation");
    const std::string want = environment_.mps ? "shared" : "strict";
    const absl::StatusOr<v1::ServerInfoReply> info = daemon_->client().ServerInfo();
    row.Check(info.ok() && info->isolation_mode() == want,
              info.ok() ? absl::StrCat("ServerInfo.isolation_mode is ", info->isolation_mode(), " and not ", want)
                        : MessageOf(info.status()));
    row.Check(absl::StrContains(daemon_->Metrics(), absl::StrCat("tessera_isolation_mode{mode=\"", want, "\"} 1")),
              absl::StrCat("the metric tessera_isolation_mode does not say ", want));
  }

  LifetimeStage Stage() {
    return {.daemon = &daemon_->client(),
            .same_pids = environment_.own_pids(),
            .own_kernels = !environment_.mps,
            .seed = options_.seed + static_cast<std::uint64_t>(results_),
            .start = [this](const std::string& job, const std::string& board) { return StartClient(job, "", board); },
            .new_path = [this](const std::string& name) { return ResultPath(name); },
            .within = [this](std::chrono::milliseconds limit) { return options_.Within(limit); }};
  }

  // Fewer where only the process numbers differ.
  void KillClients() {
    const LifetimeStage stage = Stage();
    rows_.push_back(RunKilled(stage, environment_.own_pids() ? kKills : kKillsElsewhere));
    Row& alive = Add("after the kills");
    alive.Check(daemon_->alive(), "the daemon is gone: " + daemon_->LogTail());
    RunJob("quick", "after the kills");
  }

  // How long memory lives, where process numbers are everybody's.
  void RunLifetimes() {
    for (const char* const job : {"sub-buffers", "reused-address", "released-running", "shared", "order", "producer"}) {
      RunJob(job);
    }
    RunJob(std::string(kOrderRandomJob));
    RunJob("import-cycles", {}, environment_.mps ? kCyclesWithMps : kCycles);
  }

  void RunHandovers() {
    for (const std::string_view job : kHandoverJobs) RunJob(std::string(job));
    const LifetimeStage stage = Stage();
    rows_.push_back(RunKilledInWait(stage));
    if (stage.own_kernels) rows_.push_back(RunEventOfTheDead(stage));
  }

  const Options& options_;
  const ScratchDirectory& scratch_;
  const Environment& environment_;
  const std::string prefix_;
  std::vector<std::string> variables_;
  int results_ = 0;
  std::unique_ptr<Mps> mps_;            // outlives the daemon
  std::unique_ptr<TestDaemon> daemon_;  // outlives no client: each ends with its job
  std::vector<Row> rows_;
};

// What the GPU is, from a process of its own: this one never has a CUDA context, so that environments do not mix.
absl::StatusOr<Json> ProbeGpu(const ScratchDirectory& scratch) {
  const std::string result = scratch.File("probe.json");
  ASSIGN_OR_RETURN(Process probe, Process::Start({.command = {SelfPath(), "--client", "probe", "--result", result},
                                                  .environment = WithoutMps(scratch),
                                                  .log = scratch.File("probe.log")}));
  const std::optional<int> code = probe.Wait(kJobLimit);
  std::ifstream file(result);
  Json answer = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (code == 0 && !answer.is_discarded()) return answer;
  return absl::UnavailableError(probe.LogTail());
}

std::int64_t FailedOf(const std::vector<Row>& rows) {
  std::int64_t failed = 0;
  for (const Row& row : rows) failed += row.failed;
  return failed;
}

void Print(const Row& row) {
  std::printf("%-26s %-16s %4lld cases, %lld failed%s%s\n", row.environment.c_str(), row.route.c_str(),
              static_cast<long long>(row.cases), static_cast<long long>(row.failed), row.detail.empty() ? "" : ": ",
              row.detail.c_str());
  std::fflush(stdout);
}

bool WriteReport(const Options& options, const Json& gpu, const std::vector<Row>& rows, double seconds) {
  if (options.json.empty()) return true;
  const Json report = {{"gpu", gpu.value("gpu", "")},   {"driver", gpu.value("driver", "")},
                       {"cuda", gpu.value("cuda", "")}, {"git", options.git},
                       {"seed", options.seed},          {"rows", rows},
                       {"failed", FailedOf(rows)},      {"seconds", seconds}};
  std::ofstream file(options.json);
  file << report.dump(1) << "\n";
  file.close();
  if (file.fail()) std::fprintf(stderr, "tessera-gpu-e2e: cannot write %s\n", options.json.c_str());
  return !file.fail();
}

absl::StatusOr<int> RunEnvironments(const Options& options) {
  if (options.dist.empty()) return absl::InvalidArgumentError("--dist: missing; the installed tree");
  if (!std::filesystem::exists(options.dist + "/bin/tesserad")) {
    return absl::NotFoundError(options.dist + "/bin/tesserad is not there; install the component tessera, too");
  }
  ASSIGN_OR_RETURN(const ScratchDirectory scratch, ScratchDirectory::Make());
  ASSIGN_OR_RETURN(const Json gpu, ProbeGpu(scratch));
  std::printf("%s, driver %s, CUDA %s\n", gpu.value("gpu", "").c_str(), gpu.value("driver", "").c_str(),
              gpu.value("cuda", "").c_str());
  std::printf("TESSERA_TEST_SEED=%llu\n", static_cast<unsigned long long>(options.seed));
  std::vector<Row> rows;
  int number = 0;
  bool written = true;
  for (const Environment& environment : Environments()) {
    ++number;
    if (!absl::StrContains(environment.name, options.filter)) continue;
    for (Row& row : EnvironmentRun(options, scratch, environment, number).Run()) {
      Print(row);
      rows.push_back(std::move(row));
    }
    // After each, so that a run that is cut short leaves what it found.
    written = WriteReport(options, gpu, rows, std::chrono::duration<double>(Clock::now() - options.begin).count());
  }
  if (rows.empty()) return absl::InvalidArgumentError("--environment matches none");
  const std::int64_t failed = FailedOf(rows);
  std::printf("%zu rows, %lld failed\n", rows.size(), static_cast<long long>(failed));
  return failed == 0 && written ? EXIT_SUCCESS : EXIT_FAILURE;
}

int Main(const Options& options) {
  const absl::StatusOr<int> code = RunEnvironments(options);
  if (code.ok()) return *code;
  std::fprintf(stderr, "tessera-gpu-e2e: %s\n", MessageOf(code.status()).c_str());
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace tessera::gpu_test

int main(int argc, char** argv) {
  using namespace tessera::gpu_test;
  if (argc > 3 && std::strcmp(argv[1], "--init") == 0) return RunAsInit(std::atoi(argv[2]), argv + 3);
  Options options;
  options.seed = std::random_device()();
  ClientJob client;
  CLI::App app("A daemon and its clients over shared memory of device 0, with and without MPS and PID namespaces");
  app.add_option("--dist", options.dist, "the installed tree: bin/tesserad");
  app.add_option("--json", options.json, "write a report to this file");
  app.add_option("--git", options.git, "revision to name in the report")->envname("TESSERA_GIT");
  app.add_option("--environment", options.filter, "only environments whose name contains this");
  app.add_flag("--allow-skip", options.allow_skip, "environments that this machine cannot make are no failures");
  app.add_option("--budget-s", options.budget_s, "fail if it takes longer, in seconds; 0 = no limit");
  app.add_option("--seed", options.seed, "of the points at which clients are killed; printed if it is left to chance")
      ->envname("TESSERA_TEST_SEED");
  // How this program starts itself as a client; an empty group is not shown.
  app.add_option("--client", client.job)->group("");
  app.add_option("--socket", client.socket)->group("");
  app.add_option("--result", client.result)->group("");
  app.add_option("--board", client.board)->group("");
  app.add_option("--cycles", client.cycles)->group("");
  CLI11_PARSE(app, argc, argv);
  if (IsHandoverJob(client.job)) return RunHandoverJob(client);
  if (client.job == kOrderRandomJob) return RunOrderRandomJob(client);
  return client.job.empty() ? Main(options) : RunClient(client);
}
