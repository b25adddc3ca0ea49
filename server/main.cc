// tesserad: reads its settings, serves until SIGTERM, SIGINT or Admin.Drain, drains, exits 0. Under its own supervisor
// (setting `supervise`), and where it is PID 1, the daemon is a child of this process.

#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/text.h"
#include "server/config/settings.h"
#include "server/daemon.h"
#include "server/supervisor.h"
#include "server/telemetry/log.h"

namespace tessera::server {
namespace {

constexpr std::chrono::seconds kStopPatience{3};

sigset_t BlockTerminationSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // inherited by every thread that starts later
  return signals;
}

// Ends the daemon's parts, which then have nothing left to do. False if that takes longer than `patience`: gRPC may
// wait for clients that do not read their answers, and for seconds after those that read slowly. Exit at once then.
bool StopWithin(std::unique_ptr<Daemon> daemon, std::chrono::seconds patience) {
  std::promise<void> stopped;
  const std::future<void> is_stopped = stopped.get_future();
  std::thread([parts = std::move(daemon), done = std::move(stopped)]() mutable {
    parts.reset();
    done.set_value();
  }).detach();
  return is_stopped.wait_for(patience) == std::future_status::ready;
}

// What a signal may drain, until it has been.
class DrainTarget {
 public:
  explicit DrainTarget(Daemon& daemon) : daemon_(&daemon) {}

  void RequestDrain() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (daemon_ != nullptr) daemon_->RequestDrain();
  }
  void Forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    daemon_ = nullptr;
  }

 private:
  std::mutex mutex_;
  Daemon* daemon_;
};

// The first signal drains; a second one ends the process at once.
void ObeySignals(const sigset_t& signals, DrainTarget& target) {
  StopSignals stop;
  for (;;) {
    siginfo_t info{};
    const int number = sigwaitinfo(&signals, &info);
    if (number < 0) continue;
    const StopSignals::Meaning meaning = stop.Of(info);
    if (meaning == StopSignals::Meaning::kEndAtOnce) _exit(kExitBySignalBase + number);
    if (meaning == StopSignals::Meaning::kNothingNew) continue;
    spdlog::info("signal {}", strsignal(number));
    target.RequestDrain();
  }
}

int Serve(LoadedSettings settings, const Succession& succession) {
  const sigset_t signals = BlockTerminationSignals();
  ::signal(SIGPIPE, SIG_IGN);
  std::string& gpu = settings.values.cuda_device;
  if (gpu == "auto" && !succession.gpu_uuid.empty()) gpu = succession.gpu_uuid;

  auto daemon = Daemon::Start(settings, succession.restarts);
  if (!daemon.ok()) {
    spdlog::error("cannot start: {}", MessageOf(daemon.status()));
    return kExitCannotStart;
  }
  succession.serving((*daemon)->gpu_uuid());
  const auto target = std::make_shared<DrainTarget>(**daemon);
  std::thread([signals, target] { ObeySignals(signals, *target); }).detach();

  const bool finished = (*daemon)->AwaitDrained();
  target->Forget();
  (*daemon)->RemoveSockets();
  if (!finished) spdlog::warn("stopped with work unfinished");
  if (!finished || (*daemon)->gpu_lost()) {
    // A running kernel cannot be interrupted, and destructors would wait for it past the grace; of CUDA without its
    // context nothing can be torn down.
    const int code = (*daemon)->gpu_lost() ? kExitGpuLost : kExitUnfinished;
    spdlog::shutdown();
    _exit(code);
  }
  const bool stopped = StopWithin(*std::move(daemon), kStopPatience);
  spdlog::info("drained");
  if (stopped) return kExitDrained;
  spdlog::shutdown();
  _exit(kExitDrained);
}

int Run(const LoadedSettings& settings) {
  if (absl::Status status = InitLogging(settings.values.log_level, settings.values.log_format); !status.ok()) {
    std::fprintf(stderr, "tesserad: %s\n", MessageOf(status).c_str());
    return kExitCannotStart;
  }
  for (const std::string& warning : settings.warnings) spdlog::warn("{}", warning);
  // The daemon is never PID 1, which all containers have: supervisor.h says what CUDA has against it.
  const bool is_init = ::getpid() == 1;
  if (!settings.values.supervise && !is_init) return Serve(settings, {});
  return Supervise({.restart = settings.values.supervise},
                   [&settings](const Succession& succession) { return Serve(settings, succession); });
}

}  // namespace
}  // namespace tessera::server

int main(int argc, char** argv) {
  using namespace tessera;
  const std::vector<std::string> args(argv + 1, argv + argc);
  const std::vector<std::string> environment = server::ProcessEnvironmentNames();
  auto command_line = server::ParseCommandLine(args, server::ProcessEnvironment, environment);
  if (!command_line.ok()) {
    std::fprintf(stderr, "tesserad: %s\n", MessageOf(command_line.status()).c_str());
    return EXIT_FAILURE;
  }
  if (command_line->action == server::CommandLine::Action::kExit) {
    std::fputs(command_line->output.c_str(), command_line->exit_code == 0 ? stdout : stderr);
    return command_line->exit_code;
  }
  return server::Run(command_line->settings);
}
