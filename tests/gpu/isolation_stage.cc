#include "tests/gpu/isolation_stage.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "tests/gpu/bench_samples.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr auto kServingLimit = 40s;

}  // namespace

std::chrono::milliseconds IsolationOptions::Within(std::chrono::milliseconds limit) const {
  if (budget_s == 0) return limit;
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(begin + budget_s * 1s - std::chrono::steady_clock::now());
  return std::clamp(left, std::chrono::milliseconds(0), limit);
}

void IsolationReport::Add(bool mps, const Finding& finding) {
  const std::string detail = finding.ok ? finding.detail : "FAILED: " + finding.detail;
  std::printf("%-26s %-7s %10.3f %-6s %s\n", finding.name.c_str(), mps ? "MPS" : "no MPS", finding.value,
              finding.unit.c_str(), detail.c_str());
  std::fflush(stdout);
  ++lines_;
  if (!finding.ok) ++failed_;
  if (path_.empty()) return;
  Json line = {
      {"case", finding.name}, {"mps", mps}, {"value", finding.value}, {"unit", finding.unit}, {"detail", detail}};
  line.update(machine_);
  std::ofstream file(path_, std::ios::app);
  file << line.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
  if (file.good()) return;
  std::fprintf(stderr, "tessera-gpu-isolation: cannot write %s\n", path_.c_str());
  ++failed_;
}

absl::StatusOr<Json> Worker::Await(const std::string& mark, std::chrono::milliseconds limit) {
  bool ended = false;
  const bool set = Eventually(stage_->Within(limit), [&] {
    ended = !process_.running();  // before the look: what it set at its end counts
    return marks_.IsSet(mark) || ended;
  });
  if (marks_.IsSet(mark)) return marks_.Says(mark);
  return absl::DeadlineExceededError(absl::StrCat("job ", job_, set && ended ? " ended before " : " does not get to ",
                                                  mark, ": ", process_.LogTail()));
}

absl::StatusOr<Json> Worker::Answer(std::chrono::milliseconds limit) {
  const std::optional<int> code = process_.Wait(stage_->Within(limit));
  if (!code.has_value()) {
    return absl::DeadlineExceededError(absl::StrCat("job ", job_, " does not end: ", process_.LogTail()));
  }
  Json answer = ReadJson(result_);
  if (*code == 0 && !answer.is_discarded()) return answer;
  return absl::InternalError(absl::StrCat("job ", job_, ": exit code ", *code, ": ", process_.LogTail()));
}

absl::Status Stage::Open() {
  if (!mps_) return absl::OkStatus();
  mps_control_.reset();
  ASSIGN_OR_RETURN(mps_control_, Mps::Start(scratch_, absl::StrCat(prefix_, ++opened_)));
  environment_ = mps_control_->environment();
  return mps_control_->AdmitOtherUsers();
}

absl::StatusOr<std::string> Stage::DirectoryFor(int uid) const {
  if (uid < 0) return scratch_.File("");
  using std::filesystem::perms;
  const std::filesystem::path directory = scratch_.File(prefix_ + "-guest");
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (!error) std::filesystem::permissions(directory, perms::all, error);
  if (!error) {
    std::filesystem::permissions(scratch_.File(""), perms::others_exec, std::filesystem::perm_options::add, error);
  }
  if (error) return absl::PermissionDeniedError(absl::StrCat(directory.string(), ": ", error.message()));
  return directory.string() + "/";
}

absl::StatusOr<Worker> Stage::Start(const std::string& job, const std::string& socket, int uid) {
  if (Within(1s) == 0s) return absl::DeadlineExceededError(absl::StrCat("out of time: ", options_.budget_s, " s"));
  const std::string name = absl::StrCat(prefix_, "-", ++workers_, "-", job);
  ASSIGN_OR_RETURN(const std::string directory, DirectoryFor(uid));
  std::string result = absl::StrCat(directory, name, ".json");
  std::vector<std::string> command = {SelfPath(), "--worker", job, "--result", result};
  if (!socket.empty()) command.insert(command.end(), {"--socket", socket});
  if (uid >= 0) command.insert(command.end(), {"--uid", std::to_string(uid)});
  ASSIGN_OR_RETURN(Process process, Process::Start({.command = std::move(command),
                                                    .environment = environment_,
                                                    .log = scratch_.File(name + ".log")}));
  return Worker(*this, job, std::move(result), std::move(process));
}

absl::StatusOr<std::unique_ptr<TestDaemon>> Stage::StartDaemon(const std::string& name,
                                                               const std::vector<std::string>& arguments) {
  if (Within(1s) == 0s) return absl::DeadlineExceededError(absl::StrCat("out of time: ", options_.budget_s, " s"));
  ASSIGN_OR_RETURN(std::unique_ptr<TestDaemon> daemon,
                   TestDaemon::Start(scratch_, {.dist = options_.dist,
                                                .name = prefix_ + "-" + name,
                                                .environment = environment_,
                                                .arguments = arguments,
                                                .serving_limit = Within(kServingLimit)}));
  ASSIGN_OR_RETURN(const v1::ServerInfoReply info, daemon->client().ServerInfo());
  const std::string want = mps_ ? "shared" : "strict";
  if (info.isolation_mode() == want) return daemon;
  return absl::FailedPreconditionError(
      absl::StrCat("the daemon's isolation mode is ", info.isolation_mode(), " and not ", want));
}

absl::StatusOr<std::int64_t> Stage::CheckProduct(const std::string& socket, std::chrono::milliseconds limit) {
  ASSIGN_OR_RETURN(Worker worker, Start("check", socket));
  ASSIGN_OR_RETURN(const Json answer, worker.Answer(limit));
  const std::string wrong = answer.value("wrong", "no answer");
  if (!wrong.empty()) return absl::DataLossError(wrong);
  return answer.value("done_ns", std::int64_t{0});
}

}  // namespace tessera::gpu_test
