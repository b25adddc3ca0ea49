// The process above the daemon, for two reasons. A daemon that crashes, or loses its GPU's context, must be followed by
// a new process. And a daemon with a GPU must not be PID 1: legacy IPC handles of CUDA cannot be opened by a process
// with the PID number of their owner, and the first processes of all containers have the same.
//
// The supervisor forks before the process has a thread or has called CUDA, neither of which survives a fork. From then
// on it waits, forwards signals, reaps whatever children fall to it, and decides.
#pragma once

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tessera::server {

// How tesserad ends, for whoever started it; docs/guides/supervision.md says what to do about each.
inline constexpr int kExitDrained = 0;
inline constexpr int kExitCannotStart = 1;
inline constexpr int kExitUnfinished = 3;      // grace was over before all work had finished
inline constexpr int kExitGpuLost = 4;         // the GPU's context was lost
inline constexpr int kExitBySignalBase = 128;  // plus the signal's number, as shells report it

// When a daemon that ended is followed by the next. Tests shorten the times.
struct RestartPacing {
  // A daemon that served this long was in order: what ended it says nothing against the next, which starts at once.
  std::chrono::milliseconds healthy = std::chrono::seconds(10);
  // Whatever ends a daemon early may need a moment to pass (MPS goes down after a fault), and most of it passes soon.
  std::chrono::milliseconds first_delay = std::chrono::milliseconds(100);
  // Doubled from start to start up to this, so that clients wait little longer than what they wait for.
  std::chrono::milliseconds longest_delay = std::chrono::seconds(2);
  // Some half a minute of trying: what has not passed by then needs a person, or the service manager above.
  int short_lives_max = 20;
};

// How one daemon process ended.
struct DaemonEnd {
  int exit_code = 0;                    // 128 + signal if one killed it
  int signal = 0;                       // 0: it exited
  std::chrono::milliseconds served{0};  // from when it served; 0 if it never did
};

// Whether, and when, another daemon follows those that have ended. Not told of any that was asked to end.
class RestartPolicy {
 public:
  struct Decision {
    bool restart = false;
    std::chrono::milliseconds delay{0};
    bool gave_up = false;  // it would have restarted, but for the number of short lives
  };

  RestartPolicy(bool restart, const RestartPacing& pacing) : enabled_(restart), pacing_(pacing) {}

  Decision After(const DaemonEnd& end);

 private:
  const bool enabled_;
  const RestartPacing pacing_;
  bool is_first_ = true;
  int short_lives_ = 0;  // in a row
};

// What a daemon process inherits from those before it, and leaves to those after it.
struct Succession {
  std::uint32_t restarts = 0;
  // UUID of the GPU that an earlier one served; empty if none did. A daemon that was left to choose takes this one or
  // does not start: the first start after a lost GPU may come too early, and would serve without it for good.
  std::string gpu_uuid = {};
  // To be called once it serves.
  std::function<void(std::string_view gpu_uuid)> serving = [](std::string_view) {};
};

struct SupervisorOptions {
  bool restart = false;  // false: one daemon, whose exit code is passed on
  RestartPacing pacing = {};
};

// Runs `daemon` in a child process, again and again as the policy says, and returns the last one's exit code. Called by
// a process of one thread that does nothing afterwards but exit.
//
// In the child, SIGTERM and SIGINT are blocked, for `daemon` to wait for; its return value is the exit code. SIGTERM
// and SIGINT that come here are forwarded, and so is SIGHUP unless it is ignored; after that, no daemon is started any
// more. A child whose supervisor dies gets SIGTERM.
int Supervise(const SupervisorOptions& options, const std::function<int(const Succession&)>& daemon);

// What a stop signal means to a daemon. The same wish may come twice, from its sender and through the supervisor:
// systemd and others signal every process of a service. That is not yet somebody insisting.
class StopSignals {
 public:
  enum class Meaning { kDrain, kNothingNew, kEndAtOnce };
  Meaning Of(const siginfo_t& signal);

 private:
  bool is_first_ = true;
  int direct_ = 0;  // that did not come through the supervisor, which numbers its own
};

}  // namespace tessera::server
