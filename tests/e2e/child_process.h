// A program run by a test: started, watched, killed, its output kept. It never outlives its object.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {

class ChildProcess {
 public:
  // Starts `argv[0]`, a path. The child sees this process's environment without variables named TESSERA_*, so that the
  // caller's settings do not leak into the test, and has no cache directory.
  explicit ChildProcess(const std::vector<std::string>& argv);
  ~ChildProcess();  // SIGKILL if it still runs
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void Signal(int number) const;

  // The exit code, or minus the signal that ended it; nullopt if it still runs after `timeout`.
  std::optional<int> Wait(std::chrono::milliseconds timeout = std::chrono::seconds(30));

  // What it has written so far.
  std::string Out() const { return ReadAll("out"); }
  std::string Err() const { return ReadAll("err"); }

 private:
  std::string ReadAll(const char* name) const;

  TemporaryDirectory directory_;
  pid_t pid_ = -1;
  std::optional<int> result_;
};

struct Finished {
  std::optional<int> code;  // as ChildProcess::Wait
  std::string out;
  std::string err;
};

// Runs a program to its end.
Finished RunProgram(const std::vector<std::string>& argv);

}  // namespace tessera::e2e
