// The client's side of the end-to-end program: a process of its own that does one job against a daemon and writes what
// it found as JSON.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/gpu/e2e_report.h"

namespace tessera::gpu_test {

// Jobs:
//   probe      needs no daemon: the GPU, and how much of its memory is free
//   routes     products over every route of memory
//   quick      a few of them
//   collision  the handle route is refused for the PID number, the others compute
//   refusals   calls and imports that must be refused, in words
//   cycles     200 times allocate, import, release, free: nothing stays
// and those of e2e_lifetime_jobs.h.
struct ClientJob {
  std::string job;
  std::string socket;
  std::string result;  // file for the answer
  std::string board;   // file of a board (e2e_board.h), for jobs that have one
  int cycles = 0;      // for jobs that have a number of them
};

// Exit code 0 if the job ran and its answer was written, whatever it says.
int RunClient(const ClientJob& job);

// A connection with a session, whose label is the job's name.
struct Connected {
  client::Client client;
  client::Session session;
};
absl::StatusOr<Connected> Connect(const ClientJob& job);

std::string Text(const absl::Status& status);

// Checks that `status` is an error of `code` whose message has every one of `words`.
void CheckRefused(Row& row, const std::string& what, const absl::Status& status, absl::StatusCode code,
                  const std::vector<std::string>& words);

}  // namespace tessera::gpu_test
