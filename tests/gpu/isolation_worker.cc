#include "tests/gpu/isolation_worker.h"

#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_problem.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/isolation_client.h"
#include "tests/gpu/isolation_kernels.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

// Longer than any job may take: a worker that hangs ends by itself, even if nobody looks.
constexpr unsigned kWatchdogS = 60;

absl::StatusOr<Json> RunProbe() {
  int devices = 0;
  // Before all else: its words tell a missing driver from a missing device.
  RETURN_IF_ERROR(ToStatus(cudaGetDeviceCount(&devices), "no usable GPU"));
  if (devices == 0) return absl::UnavailableError("no usable GPU: the driver shows none");
  const Gpu gpu;
  return Json{{"gpu", gpu.facts().name}, {"driver", gpu.facts().driver}, {"cuda", gpu.facts().cuda}};
}

absl::Status BecomeUser(int uid) {
  const auto id = static_cast<uid_t>(uid);
  if (::setgroups(0, nullptr) != 0 || ::setgid(id) != 0 || ::setuid(id) != 0) {
    return ErrnoStatus(absl::StatusCode::kPermissionDenied, absl::StrCat("becoming user ", uid));
  }
  // A change of user undoes both: /proc/self would be root's, and nobody would end this process with its parent.
  if (::prctl(PR_SET_DUMPABLE, 1) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
    return ErrnoStatus(absl::StatusCode::kInternal, "prctl");
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> RunJob(const WorkerSpec& spec, const Marks& marks) {
  if (spec.job == "probe") return RunProbe();
  if (spec.job == "check") return RunCheck(spec);
  if (spec.job == "handover") return RunHandover(spec);
  if (spec.job == "busy") return RunBusy(spec, marks);
  if (spec.job == "latency") return RunLatency(spec, marks);
  if (spec.job == "stuck") return RunStuck(marks);
  if (spec.job == "hold") return RunHold(marks);
  if (spec.job == "context") return RunContext(spec, marks);
  if (spec.job == "fault") return RunFault(spec, marks);
  if (spec.job == "inflight") return RunInFlight(spec, marks);
  if (spec.job == "victim") return RunVictim(spec, marks);
  if (spec.job == "memory") return RunMemory(marks);
  return absl::InvalidArgumentError("unknown job " + spec.job);
}

}  // namespace

absl::StatusOr<Json> RunCheck(const WorkerSpec& spec) {
  Problem problem("NT 128x128x256", 128, 128, 256, /*b_by_columns=*/false, /*offset=*/512);
  ASSIGN_OR_RETURN(client::Client client,
                   client::Client::Connect({.socket = spec.socket, .side_channel = {}, .timeout = 10s}));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession("check"));
  const std::string wrong = problem.Run(session, Homes{}, v1::BACKEND_CUDA, "cuda");
  return Json{{"wrong", wrong}, {"done_ns", NowNs()}};
}

absl::StatusOr<Json> RunHold(const Marks& marks) {
  ASSIGN_OR_RETURN(const OwnWork own, OwnWork::Make());
  RETURN_IF_ERROR(marks.Set("ready"));
  marks.Await("stop");
  return Json::object();
}

absl::StatusOr<Json> RunContext(const WorkerSpec& spec, const Marks& marks) {
  if (spec.uid >= 0) RETURN_IF_ERROR(BecomeUser(spec.uid));
  RETURN_IF_ERROR(marks.Set("trying"));
  const std::int64_t begin_ns = NowNs();
  RETURN_IF_ERROR(ToStatus(cudaFree(nullptr), "making a context"));
  ASSIGN_OR_RETURN(const OwnWork own, OwnWork::Make());
  const std::int64_t done_ns = NowNs();
  return Json{{"ms", static_cast<double>(done_ns - begin_ns) / 1e6}, {"done_ns", done_ns}};
}

absl::StatusOr<Json> RunFault(const WorkerSpec& spec, const Marks& marks) {
  ASSIGN_OR_RETURN(const OwnWork own, OwnWork::Make());
  RETURN_IF_ERROR(marks.Set("ready"));
  marks.Await("go");
  const std::int64_t fault_ns = NowNs();
  RETURN_IF_ERROR(ToStatus(LaunchIllegalRead(own.memory(), own.stream()), "launching the faulty kernel"));
  const cudaError_t error = cudaStreamSynchronize(own.stream());
  AnswerAndExit(spec, {{"fault_ns", fault_ns}, {"error", error == cudaSuccess ? "" : cudaGetErrorName(error)}});
}

void AnswerAndExit(const WorkerSpec& spec, const Json& answer) {
  const absl::Status status = WriteJson(spec.result, answer);
  if (!status.ok()) std::fprintf(stderr, "%s\n", MessageOf(status).c_str());
  std::fflush(nullptr);
  std::_Exit(status.ok() ? EXIT_SUCCESS : EXIT_FAILURE);
}

int RunWorker(const WorkerSpec& spec) {
  ::alarm(kWatchdogS);
  const absl::StatusOr<Json> answer = RunJob(spec, Marks(spec.result));
  if (answer.ok()) AnswerAndExit(spec, *answer);
  std::fprintf(stderr, "%s\n", MessageOf(answer.status()).c_str());
  return EXIT_FAILURE;
}

}  // namespace tessera::gpu_test
