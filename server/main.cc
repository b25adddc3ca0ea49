// tesserad: reads its settings, serves until SIGTERM, SIGINT or Admin.Drain, drains, exits 0.

#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/text.h"
#include "server/config/settings.h"
#include "server/daemon.h"
#include "server/telemetry/log.h"

namespace tessera::server {
namespace {

constexpr int kExitUnfinished = 3;  // grace was over before all work had finished
constexpr int kExitGpuLost = 4;     // the GPU's context was lost
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

int Serve(const LoadedSettings& settings) {
  if (absl::Status status = InitLogging(settings.values.log_level, settings.values.log_format); !status.ok()) {
    std::fprintf(stderr, "tesserad: %s\n", MessageOf(status).c_str());
    return EXIT_FAILURE;
  }
  for (const std::string& warning : settings.warnings) spdlog::warn("{}", warning);
  const sigset_t signals = BlockTerminationSignals();
  ::signal(SIGPIPE, SIG_IGN);

  auto daemon = Daemon::Start(settings);
  if (!daemon.ok()) {
    spdlog::error("cannot start: {}", MessageOf(daemon.status()));
    return EXIT_FAILURE;
  }
  // The first signal drains; a second one ends the process at once.
  std::thread([&signals, drain = daemon->get()] {
    int number = 0;
    sigwait(&signals, &number);
    spdlog::info("signal {}", strsignal(number));
    drain->RequestDrain();
    sigwait(&signals, &number);
    _exit(128 + number);
  }).detach();

  if (!(*daemon)->AwaitDrained()) {
    // A running kernel cannot be interrupted, and destructors would wait for it past the grace.
    (*daemon)->RemoveSockets();
    spdlog::warn("stopped with work unfinished");
    spdlog::shutdown();
    _exit(kExitUnfinished);
  }
  (*daemon)->RemoveSockets();
  if ((*daemon)->gpu_lost()) {
    // Nothing of CUDA can be torn down any more.
    spdlog::shutdown();
    _exit(kExitGpuLost);
  }
  const bool stopped = StopWithin(*std::move(daemon), kStopPatience);
  spdlog::info("drained");
  if (stopped) return EXIT_SUCCESS;
  spdlog::shutdown();
  _exit(EXIT_SUCCESS);
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
  return server::Serve(command_line->settings);
}
