// The client's side of the end-to-end program: a process of its own that does one job against a daemon and writes what
// it found as JSON.
#pragma once

#include <string>

namespace tessera::gpu_test {

// Jobs:
//   probe      needs no daemon: the GPU, and how much of its memory is free
//   routes     products over every route of memory
//   quick      a few of them
//   collision  the handle route is refused for the PID number, the others compute
//   refusals   calls and imports that must be refused, in words
//   cycles     200 times allocate, import, release, free: nothing stays
//   victim     keeps products under way on large buffers until it is killed; makes `result` when they are
struct ClientJob {
  std::string job;
  std::string socket;
  std::string result;  // file for the answer
};

// Exit code 0 if the job ran and its answer was written, whatever it says.
int RunClient(const ClientJob& job);

}  // namespace tessera::gpu_test
