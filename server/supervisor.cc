#include "server/supervisor.h"

#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

namespace tessera::server {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: one for all processes

// A GPU's UUID has 40 characters, a MIG slice's in the old notation some 60.
constexpr std::size_t kUuidBytesMax = 128;

// Shared by the supervisor and the daemon of the moment. The daemon writes; the supervisor reads once that one is dead.
struct SharedReport {
  std::atomic<Clock::rep> serving_since{0};    // of Clock; 0 = it does not serve yet. Written last
  std::array<char, kUuidBytesMax> gpu_uuid{};  // NUL-terminated
};
static_assert(std::atomic<Clock::rep>::is_always_lock_free, "a lock would not work between processes");

std::string DescribeEnd(const DaemonEnd& end) {
  const auto served = fmt::format("{:.1f} s", std::chrono::duration<double>(end.served).count());
  if (end.signal != 0)
    return fmt::format("was killed by signal {} ({}), served {}", end.signal, strsignal(end.signal), served);
  return fmt::format("exited with {}, served {}", end.exit_code, served);
}

class Supervisor {
 public:
  Supervisor(const SupervisorOptions& options, const std::function<int(const Succession&)>& daemon)
      : pacing_(options.pacing), policy_(options.restart, options.pacing), daemon_(daemon) {}
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  int Run();

 private:
  bool Prepare();
  bool StartDaemon();
  [[noreturn]] void BeDaemon(pid_t supervisor);
  DaemonEnd AwaitEnd();
  std::optional<int> Reap();
  bool Pause(milliseconds delay);
  int NextSignal(std::optional<Clock::time_point> deadline);
  void Forward(int number);

  const RestartPacing pacing_;
  RestartPolicy policy_;
  const std::function<int(const Succession&)>& daemon_;
  SharedReport* report_ = nullptr;
  sigset_t waited_for_{};  // blocked here, so that none is lost between two waits
  sigset_t original_mask_{};
  pid_t pid_ = -1;  // of the daemon, while it is not reaped
  int wishes_ = 0;  // signals that asked for the end
  std::uint32_t restarts_ = 0;
  std::string gpu_uuid_;
};

Supervisor::~Supervisor() {
  if (report_ != nullptr) ::munmap(report_, sizeof(SharedReport));
}

int Supervisor::Run() {
  if (!Prepare()) return kExitCannotStart;
  for (;; ++restarts_) {
    // A fork that fails is a start that fails.
    const DaemonEnd end = StartDaemon() ? AwaitEnd() : DaemonEnd{.exit_code = kExitCannotStart};
    if (wishes_ > 0) {
      spdlog::info("supervisor: the daemon {}, as it was told to end", DescribeEnd(end));
      return end.exit_code;
    }
    const RestartPolicy::Decision decision = policy_.After(end);
    if (decision.gave_up) {
      spdlog::critical("supervisor: the daemon {}; gives up after {} starts in a row that served less than {} ms each",
                       DescribeEnd(end), pacing_.short_lives_max, pacing_.healthy.count());
    } else if (!decision.restart) {
      spdlog::info("supervisor: the daemon {}; no restart", DescribeEnd(end));
    }
    if (!decision.restart) return end.exit_code;
    spdlog::warn("supervisor: the daemon {}; restart in {} ms", DescribeEnd(end), decision.delay.count());
    if (!Pause(decision.delay)) {
      spdlog::info("supervisor: told to end before the restart");
      return kExitDrained;
    }
  }
}

bool Supervisor::Prepare() {
  void* page = ::mmap(nullptr, sizeof(SharedReport), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    spdlog::error("supervisor: no memory to share with the daemon: {}", std::strerror(errno));
    return false;
  }
  report_ = new (page) SharedReport;

  struct sigaction hangup {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  sigemptyset(&waited_for_);
  for (const int number : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&waited_for_, number);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&waited_for_, SIGHUP);  // ignored: someone wants us to outlive a terminal
  ::sigprocmask(SIG_BLOCK, &waited_for_, &original_mask_);
  ::signal(SIGCHLD, SIG_DFL);  // if it was ignored, children would vanish without their exit codes
  return true;
}

bool Supervisor::StartDaemon() {
  report_->serving_since.store(0);
  std::fflush(nullptr);  // what is still in buffers would be written by both
  const pid_t supervisor = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) BeDaemon(supervisor);
  if (pid_ < 0) {
    spdlog::error("supervisor: cannot fork: {}", std::strerror(errno));
    return false;
  }
  spdlog::info("supervisor: daemon process {} started, restarts: {}", pid_, restarts_);
  return true;
}

void Supervisor::BeDaemon(pid_t supervisor) {
  // SIGTERM and SIGINT stay blocked: one that comes before the daemon waits for it must not kill it.
  sigset_t mask = original_mask_;
  sigaddset(&mask, SIGTERM);
  sigaddset(&mask, SIGINT);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  // A supervisor that died before this line sends no signal any more, but it is not the parent any more either.
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != supervisor) ::_exit(kExitCannotStart);
  // A terminal sends ^C to a whole group of processes: the daemon would get it twice.
  ::setpgid(0, 0);

  Succession succession{.restarts = restarts_, .gpu_uuid = gpu_uuid_};
  succession.serving = [report = report_](std::string_view uuid) {
    const std::size_t bytes = uuid.copy(report->gpu_uuid.data(), kUuidBytesMax - 1);
    report->gpu_uuid[bytes] = '\0';
    report->serving_since.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
  };
  std::exit(daemon_(succession));
}

DaemonEnd Supervisor::AwaitEnd() {
  std::optional<int> status;
  while (!(status = Reap()).has_value()) {
    const int number = NextSignal(std::nullopt);
    if (number != SIGCHLD) Forward(number);
  }
  pid_ = -1;
  DaemonEnd end;
  end.signal = WIFSIGNALED(*status) ? WTERMSIG(*status) : 0;
  end.exit_code = WIFEXITED(*status) ? WEXITSTATUS(*status) : kExitBySignalBase + end.signal;
  const Clock::duration since(report_->serving_since.load(std::memory_order_acquire));
  if (since == Clock::duration::zero()) return end;
  end.served = std::chrono::duration_cast<milliseconds>(Clock::now().time_since_epoch() - since);
  const std::string_view uuid(report_->gpu_uuid.data(), ::strnlen(report_->gpu_uuid.data(), kUuidBytesMax));
  if (!uuid.empty()) gpu_uuid_ = uuid;
  return end;
}

// Collects every child that has ended, since PID 1 inherits those of others. The daemon's status if it is among them.
std::optional<int> Supervisor::Reap() {
  std::optional<int> daemon_status;
  int status = 0;
  for (pid_t ended; (ended = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    if (ended == pid_) daemon_status = status;
  }
  return daemon_status;
}

// False: somebody has asked for the end meanwhile, or before.
bool Supervisor::Pause(milliseconds delay) {
  const Clock::time_point deadline = Clock::now() + delay;
  while (const int number = NextSignal(deadline)) {
    if (number == SIGCHLD) {
      Reap();
      continue;
    }
    Forward(number);
    return false;
  }
  return true;
}

// The next of the signals that it waits for; 0 if none has come until `deadline`.
int Supervisor::NextSignal(std::optional<Clock::time_point> deadline) {
  for (;;) {
    int number = 0;
    if (deadline.has_value()) {
      const auto left = std::max(std::chrono::nanoseconds(*deadline - Clock::now()), std::chrono::nanoseconds(0));
      const auto seconds = std::chrono::floor<std::chrono::seconds>(left);
      const timespec timeout = {.tv_sec = seconds.count(), .tv_nsec = (left - seconds).count()};
      number = ::sigtimedwait(&waited_for_, nullptr, &timeout);
    } else {
      number = ::sigwaitinfo(&waited_for_, nullptr);
    }
    if (number > 0) return number;
    if (errno == EAGAIN) return 0;
  }
}

void Supervisor::Forward(int number) {
  ++wishes_;
  spdlog::info("supervisor: signal {}{}", strsignal(number), pid_ > 0 ? ", forwarded" : "");
  // By sigqueue, so that the daemon can tell it from one that was sent to itself. Numbered, since one that comes while
  // another is pending is lost (StopSignals).
  if (pid_ > 0 && ::sigqueue(pid_, number, {.sival_int = wishes_}) != 0) {
    spdlog::error("supervisor: cannot signal process {}: {}", pid_, std::strerror(errno));
  }
}

}  // namespace

RestartPolicy::Decision RestartPolicy::After(const DaemonEnd& end) {
  const bool was_first = std::exchange(is_first_, false);
  // A first start that fails does so because of its settings, or of what is on this machine; a later one worked before.
  const bool restart_failed = end.signal == 0 && end.exit_code == kExitCannotStart && !was_first;
  const bool abnormal = end.signal != 0 || end.exit_code == kExitGpuLost || restart_failed;
  if (!enabled_ || !abnormal) return {};
  if (end.served >= pacing_.healthy) {
    short_lives_ = 0;
    return {.restart = true};
  }
  if (++short_lives_ >= pacing_.short_lives_max) return {.gave_up = true};
  milliseconds delay = pacing_.first_delay;
  for (int i = 1; i < short_lives_ && delay < pacing_.longest_delay; ++i) delay *= 2;
  return {.restart = true, .delay = std::min(delay, pacing_.longest_delay)};
}

int Supervise(const SupervisorOptions& options, const std::function<int(const Succession&)>& daemon) {
  return Supervisor(options, daemon).Run();
}

StopSignals::Meaning StopSignals::Of(const siginfo_t& signal) {
  const bool was_forwarded = signal.si_code == SI_QUEUE && signal.si_pid == ::getppid();
  const int wishes = was_forwarded ? signal.si_value.sival_int : ++direct_;
  if (wishes > 1) return Meaning::kEndAtOnce;
  return std::exchange(is_first_, false) ? Meaning::kDrain : Meaning::kNothingNew;
}

}  // namespace tessera::server
