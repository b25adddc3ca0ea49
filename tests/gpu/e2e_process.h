// Child processes of the GPU programs: each ends with the thread that started it at the latest, writes to a log, and
// may have a PID namespace of its own.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera::gpu_test {

// A new directory of mode 0750 under $TMPDIR that goes, with all in it, when the object does.
class ScratchDirectory {
 public:
  static absl::StatusOr<ScratchDirectory> Make();
  ScratchDirectory(ScratchDirectory&& other) noexcept;
  ScratchDirectory& operator=(ScratchDirectory&&) = delete;
  ~ScratchDirectory();

  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  explicit ScratchDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

struct ProcessSpec {
  std::vector<std::string> command;      // the first is a path
  std::vector<std::string> environment;  // NAME=value, over this process's own less all TESSERA_ ones
  std::string log;                       // receives stdout and stderr
  // 0: this process's PID namespace. Else a new one with a /proc of its own, in which the program has this number.
  int pid_number = 0;
};

class Process {
 public:
  // PERMISSION_DENIED, saying what is missing, where namespaces may not be made. A command that cannot be executed
  // shows as exit code 127. The program gets SIGKILL when the calling thread ends.
  static absl::StatusOr<Process> Start(const ProcessSpec& spec);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();  // kills

  // Exit code, or 128 + the signal that ended it; nullopt if it runs still after `limit`.
  std::optional<int> Wait(std::chrono::milliseconds limit);
  bool running() { return !Wait(std::chrono::milliseconds(0)).has_value(); }
  void Kill();  // SIGKILL, to all of its namespace; returns when the process is gone

  // The end of the log, for messages.
  std::string LogTail() const;

 private:
  Process(pid_t pid, std::string log) : pid_(pid), log_(std::move(log)) {}

  pid_t pid_ = -1;  // -1: moved from
  std::optional<int> exit_code_;
  std::string log_;
};

// Path of this program.
std::string SelfPath();

// What Start runs as the first process of a namespace in which the program shall not be the first: forks until the
// numbers have reached `pid_number`, runs `command` under that one, and returns its exit code.
int RunAsInit(int pid_number, char** command);

// Whether a process can have a PID namespace here; the error says why not.
absl::Status CheckNamespaces(const std::string& log);

}  // namespace tessera::gpu_test
