#include "tests/gpu/e2e_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/unique_fd.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kExitNotExecuted = 127;
constexpr int kExitNoNamespace = 126;
constexpr std::size_t kTailBytes = 1500;

int ExitCodeOf(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string_view NameOf(std::string_view assignment) {
  return assignment.substr(0, assignment.find('='));
}

std::vector<std::string> EnvironmentWith(const std::vector<std::string>& changes) {
  std::vector<std::string> result = changes;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name = NameOf(*entry);
    bool changed = name.substr(0, 8) == "TESSERA_";
    for (const std::string& change : changes) changed = changed || NameOf(change) == name;
    if (!changed) result.emplace_back(*entry);
  }
  return result;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// In the child, where other threads of the parent may have held any lock: system calls only.
[[noreturn]] void Die(const char* what, int exit_code) {
  const char* const reason = strerrordesc_np(errno);
  for (const char* text : {what, ": ", reason, "\n"}) {
    if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  }
  ::_exit(exit_code);
}

[[noreturn]] void BecomeProgram(pid_t parent, bool own_namespace, int log, char** command, char** environment) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) Die("PR_SET_PDEATHSIG", kExitNotExecuted);
  // The parent may have died before; in a new namespace it has no number.
  if (!own_namespace && ::getppid() != parent) ::_exit(kExitNotExecuted);
  const int null = ::open("/dev/null", O_RDONLY);
  if (null < 0 || ::dup2(null, STDIN_FILENO) < 0 || ::dup2(log, STDOUT_FILENO) < 0 || ::dup2(log, STDERR_FILENO) < 0) {
    Die("standard streams", kExitNotExecuted);
  }
  static_cast<void>(::close_range(3, ~0U, 0));  // where the kernel has no such call, they stay open
  if (own_namespace) {
    // The driver reads /proc: that of the namespace it is in.
    if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      Die("making mounts private", kExitNoNamespace);
    if (::mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0) {
      Die("mounting /proc", kExitNoNamespace);
    }
  }
  ::execve(command[0], command, environment);
  Die(command[0], kExitNotExecuted);
}

}  // namespace

absl::StatusOr<ScratchDirectory> ScratchDirectory::Make() {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  if (error) return absl::FailedPreconditionError(absl::StrCat("no temporary directory: ", error.message()));
  std::string path = (parent / "tessera-gpu-XXXXXX").string();
  if (::mkdtemp(path.data()) == nullptr || ::chmod(path.c_str(), 0750) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  return ScratchDirectory(std::move(path));
}

ScratchDirectory::ScratchDirectory(ScratchDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}

ScratchDirectory::~ScratchDirectory() {
  if (path_.empty()) return;
  std::error_code error;
  std::filesystem::remove_all(path_, error);
  if (error) std::fprintf(stderr, "%s stays: %s\n", path_.c_str(), error.message().c_str());
}

absl::StatusOr<Process> Process::Start(const ProcessSpec& spec) {
  const UniqueFd log(::open(spec.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640));
  if (!log) return absl::FailedPreconditionError(absl::StrCat(spec.log, ": ", std::strerror(errno)));
  std::vector<std::string> command = spec.command;
  if (spec.pid_number > 1) {
    command.insert(command.begin(), {SelfPath(), "--init", std::to_string(spec.pid_number)});
  }
  std::vector<std::string> environment = EnvironmentWith(spec.environment);
  const std::vector<char*> command_pointers = Pointers(command);
  const std::vector<char*> environment_pointers = Pointers(environment);

  const bool own_namespace = spec.pid_number > 0;
  const pid_t parent = ::getpid();
  const unsigned long flags = static_cast<unsigned long>(SIGCHLD) | (own_namespace ? CLONE_NEWPID | CLONE_NEWNS : 0);
  // As fork, without its handlers: this process has threads of gRPC, and the child only makes system calls.
  const auto pid = static_cast<pid_t>(::syscall(SYS_clone, flags, nullptr, nullptr, nullptr, nullptr));
  if (pid == 0) {
    BecomeProgram(parent, own_namespace, log.get(), const_cast<char**>(command_pointers.data()),
                  const_cast<char**>(environment_pointers.data()));
  }
  if (pid > 0) return Process(pid, spec.log);
  if (own_namespace) {
    return absl::PermissionDeniedError(absl::StrCat("no PID namespace: ", std::strerror(errno),
                                                    "; it takes root with CAP_SYS_ADMIN (a privileged container)"));
  }
  return absl::ResourceExhaustedError(absl::StrCat("no process: ", std::strerror(errno)));
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), exit_code_(other.exit_code_), log_(std::move(other.log_)) {}

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(exit_code_, other.exit_code_);
  std::swap(log_, other.log_);
  return *this;
}

Process::~Process() {
  if (pid_ > 0) Kill();
}

std::optional<int> Process::Wait(std::chrono::milliseconds limit) {
  const Clock::time_point deadline = Clock::now() + limit;
  while (!exit_code_.has_value()) {
    int status = 0;
    const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
    if (ended == pid_) {
      exit_code_ = ExitCodeOf(status);
    } else if (ended < 0 && errno != EINTR) {
      exit_code_ = kExitNotExecuted;  // somebody else has reaped it
    } else if (Clock::now() >= deadline) {
      break;
    } else {
      std::this_thread::sleep_for(2ms);
    }
  }
  return exit_code_;
}

void Process::Kill() {
  if (exit_code_.has_value()) return;
  static_cast<void>(::kill(pid_, SIGKILL));  // fails only if it is gone
  // A process in the middle of a call into the driver takes its time.
  if (!Wait(30s).has_value()) std::fprintf(stderr, "process %d does not go\n", static_cast<int>(pid_));
}

std::string Process::LogTail() const {
  std::ifstream file(log_);
  std::ostringstream text;
  text << file.rdbuf();
  std::string all = text.str();
  while (!all.empty() && all.back() == '\n') all.pop_back();
  return all.size() <= kTailBytes ? all : "..." + all.substr(all.size() - kTailBytes);
}

std::string SelfPath() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

int RunAsInit(int pid_number, char** command) {
  pid_t pid = 0;
  while (pid < pid_number) {
    pid = ::fork();
    if (pid < 0) Die("fork", kExitNotExecuted);
    if (pid == 0) {
      if (::getpid() != pid_number) ::_exit(0);
      if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) Die("PR_SET_PDEATHSIG", kExitNotExecuted);
      ::execv(command[0], command);
      Die(command[0], kExitNotExecuted);
    }
    if (pid < pid_number) static_cast<void>(::waitpid(pid, nullptr, 0));
  }
  while (true) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, 0);
    if (ended == pid) return ExitCodeOf(status);
    if (ended < 0 && errno != EINTR) return kExitNotExecuted;
  }
}

absl::Status CheckNamespaces(const std::string& log) {
  absl::StatusOr<Process> process =
      Process::Start({.command = {SelfPath(), "--help"}, .environment = {}, .log = log, .pid_number = 2});
  if (!process.ok()) return process.status();
  const std::optional<int> code = process->Wait(10s);
  if (code == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("no PID namespace with a /proc of its own: exit code ",
                                                  code.value_or(-1), ": ", process->LogTail()));
}

}  // namespace tessera::gpu_test
