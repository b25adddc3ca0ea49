// The processes that use the GPU for the isolation program, which never has a CUDA context itself. Each does one job,
// tells by marks (isolation_files.h) where it is, and writes its answer to `result`.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/gpu/isolation_files.h"

namespace tessera::gpu_test {

struct WorkerSpec {
  std::string job;
  std::string socket;  // of the daemon, for jobs that use it
  std::string result;
  int uid = -1;  // user to become before CUDA is touched; -1: stays
};

// Exit code 0 if the job was done and its answer written. The process ends by SIGALRM if that takes too long.
int RunWorker(const WorkerSpec& spec);

// Writes the answer and ends the process, without destructors: what they end may never end. Under MPS a process that
// has lost its context keeps all others from a new one for as long as it lives.
[[noreturn]] void AnswerAndExit(const WorkerSpec& spec, const Json& answer);

// Jobs answer in JSON.
//
//   probe     needs no daemon: what the GPU is
//   check     a product through the daemon, compared with the truth: {wrong, done_ns}
//   handover  own kernels and the daemon's products in turns: {stream: {..}, unary: {..}}, in us
//   busy      own kernels and products without pause, for a second after each of the marks go1 and go2, says
//             {products_per_s} with done1 and done2
//   latency   says ready {us}, a product's time; after go the same again: {us}, -1 if one did not finish
//   stuck     says ready; after go one stream waits for what never comes, says stuck {moved, streams} about the others;
//             after release all must end
//   hold      has a context, says ready, ends after stop
//   context   says trying, makes a context: {ms, done_ns}
//   fault     says ready; after go a kernel reads what is not mapped: {fault_ns, error}
//   inflight  keeps products under way, says ready {token}, ends after stop or after a failure: {ok, unavailable,
//   other,
//             unanswered, what, first_failure_ns}
//   victim    the same and kernels of its own on much memory, says ready {pid}, until it is killed
//   memory    says ready; after go says armed {used} and looks for the memory that has gone since: {back_ns, missing}
absl::StatusOr<Json> RunCheck(const WorkerSpec& spec);
absl::StatusOr<Json> RunHandover(const WorkerSpec& spec);
absl::StatusOr<Json> RunBusy(const WorkerSpec& spec, const Marks& marks);
absl::StatusOr<Json> RunLatency(const WorkerSpec& spec, const Marks& marks);
absl::StatusOr<Json> RunStuck(const Marks& marks);
absl::StatusOr<Json> RunHold(const Marks& marks);
absl::StatusOr<Json> RunContext(const WorkerSpec& spec, const Marks& marks);
absl::StatusOr<Json> RunFault(const WorkerSpec& spec, const Marks& marks);
absl::StatusOr<Json> RunInFlight(const WorkerSpec& spec, const Marks& marks);
absl::StatusOr<Json> RunVictim(const WorkerSpec& spec, const Marks& marks);
absl::StatusOr<Json> RunMemory(const Marks& marks);

}  // namespace tessera::gpu_test
