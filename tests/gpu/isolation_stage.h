// Where the cases of the isolation program run: with MPS or without, on a time budget, with workers of their own. Also
// the report.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/gpu/e2e_daemon.h"
#include "tests/gpu/e2e_process.h"
#include "tests/gpu/isolation_files.h"

namespace tessera::gpu_test {

struct IsolationOptions {
  std::string dist;
  std::string json;
  std::string git = "unknown";
  std::string filter;  // cases whose name contains it
  bool allow_skip = false;
  int budget_s = 0;  // 0 = none
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

  // What is left of the budget, at most `limit`: every wait is for no longer, so that what was started is ended in
  // order.
  std::chrono::milliseconds Within(std::chrono::milliseconds limit) const;
};

struct Finding {
  std::string name;
  double value = 0;
  std::string unit;
  std::string detail = {};
  bool ok = true;
};

// A line of JSON for each finding, written at once, so that a run that is cut short leaves what it found.
class IsolationReport {
 public:
  IsolationReport(std::string path, Json machine) : path_(std::move(path)), machine_(std::move(machine)) {}
  void Add(bool mps, const Finding& finding);
  bool ok() const { return failed_ == 0; }
  int lines() const { return lines_; }
  int failed() const { return failed_; }

 private:
  const std::string path_;
  const Json machine_;  // gpu, driver, cuda, git
  int lines_ = 0;
  int failed_ = 0;
};

class Stage;

// A worker process (isolation_worker.h). Killed with the object.
class Worker {
 public:
  // What the mark says; an error if the process ends without setting it, or does not set it within `limit`.
  absl::StatusOr<Json> Await(const std::string& mark, std::chrono::milliseconds limit);
  absl::Status Tell(const std::string& mark) { return marks_.Set(mark); }
  // The answer of the process, which ends; DEADLINE_EXCEEDED, and it goes on, if it does not within `limit`.
  absl::StatusOr<Json> Answer(std::chrono::milliseconds limit);
  void Kill() { process_.Kill(); }

 private:
  friend class Stage;
  Worker(const Stage& stage, std::string job, std::string result, Process process)
      : stage_(&stage),
        job_(std::move(job)),
        result_(std::move(result)),
        marks_(result_),
        process_(std::move(process)) {}

  const Stage* stage_;
  std::string job_;
  std::string result_;
  Marks marks_;
  Process process_;
};

class Stage {
 public:
  Stage(const IsolationOptions& options, const ScratchDirectory& scratch, IsolationReport& report, bool mps)
      : options_(options),
        scratch_(scratch),
        report_(report),
        mps_(mps),
        prefix_(mps ? "mps" : "plain"),
        environment_(WithoutMps(scratch)) {}

  // A new MPS, if it is to be used, in place of the one before: no process may be left that uses that.
  absl::Status Open();

  bool mps() const { return mps_; }
  std::chrono::milliseconds Within(std::chrono::milliseconds limit) const { return options_.Within(limit); }
  void Add(const Finding& finding) { report_.Add(mps_, finding); }

  absl::StatusOr<Worker> Start(const std::string& job, const std::string& socket = {}, int uid = -1);
  // A daemon in the stage's isolation mode; the error says so if it is in another.
  absl::StatusOr<std::unique_ptr<TestDaemon>> StartDaemon(const std::string& name,
                                                          const std::vector<std::string>& arguments = {});
  // That a fresh client gets a right product from the daemon: when it had it, in ns of NowNs.
  absl::StatusOr<std::int64_t> CheckProduct(const std::string& socket, std::chrono::milliseconds limit);

 private:
  // A directory in which that user may write.
  absl::StatusOr<std::string> DirectoryFor(int uid) const;

  const IsolationOptions& options_;
  const ScratchDirectory& scratch_;
  IsolationReport& report_;
  const bool mps_;
  const std::string prefix_;
  std::vector<std::string> environment_;
  std::unique_ptr<Mps> mps_control_;
  int opened_ = 0;
  int workers_ = 0;
};

}  // namespace tessera::gpu_test
