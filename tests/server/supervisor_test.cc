// The supervisor with daemons that are a few lines long: what it does about each end, and what it passes on.

#include "server/supervisor.h"

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace tessera::server {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using ::testing::ElementsAre;

constexpr RestartPacing kFast = {.healthy = 10s, .first_delay = 1ms, .longest_delay = 4ms, .short_lives_max = 5};

DaemonEnd Exited(int code, milliseconds served = 1s) {
  return {.exit_code = code, .signal = 0, .served = served};
}
DaemonEnd Killed(int signal, milliseconds served = 1s) {
  return {.exit_code = kExitBySignalBase + signal, .signal = signal, .served = served};
}

TEST(RestartPolicyTest, OnlyAbnormalEndsAreFollowedByAStart) {
  const auto restarts = [](const DaemonEnd& end) { return RestartPolicy(true, {}).After(end).restart; };
  for (const DaemonEnd& end : {Killed(SIGKILL), Killed(SIGSEGV), Killed(SIGABRT), Exited(kExitGpuLost)}) {
    EXPECT_TRUE(restarts(end)) << end.exit_code;
  }
  for (const int code : {kExitDrained, kExitCannotStart, 2, kExitUnfinished, kExitBySignalBase + SIGTERM}) {
    EXPECT_FALSE(restarts(Exited(code))) << code;
  }
  EXPECT_FALSE(RestartPolicy(false, {}).After(Killed(SIGKILL)).restart);
  EXPECT_FALSE(RestartPolicy(false, {}).After(Exited(kExitGpuLost)).restart);
}

TEST(RestartPolicyTest, AFailedStartIsTriedAgainUnlessItWasTheFirst) {
  RestartPolicy policy(true, {});
  EXPECT_TRUE(policy.After(Exited(kExitGpuLost, 1h)).restart);
  EXPECT_TRUE(policy.After(Exited(kExitCannotStart, 0s)).restart);
  EXPECT_FALSE(policy.After(Exited(kExitDrained)).restart);
}

TEST(RestartPolicyTest, DelaysDoubleUntilADaemonWasHealthy) {
  RestartPolicy policy(true, {});
  const auto delay_after = [&](milliseconds served) {
    const RestartPolicy::Decision decision = policy.After(Killed(SIGKILL, served));
    EXPECT_TRUE(decision.restart);
    return decision.delay;
  };
  EXPECT_EQ(delay_after(10s), 0ms);
  std::vector<milliseconds> delays;
  for (int i = 0; i < 7; ++i) delays.push_back(delay_after(9999ms));
  EXPECT_THAT(delays, ElementsAre(100ms, 200ms, 400ms, 800ms, 1600ms, 2000ms, 2000ms));
  EXPECT_EQ(delay_after(1h), 0ms);
  EXPECT_EQ(delay_after(0ms), 100ms);
}

TEST(RestartPolicyTest, GivesUpAfterShortLivesInARow) {
  const int most = RestartPacing{}.short_lives_max;
  RestartPolicy policy(true, {});
  for (int i = 0; i < most - 1; ++i) ASSERT_TRUE(policy.After(Killed(SIGKILL)).restart) << i;
  ASSERT_TRUE(policy.After(Killed(SIGKILL, 1h)).restart) << "a long life ends the row";
  for (int i = 0; i < most - 1; ++i) ASSERT_TRUE(policy.After(Killed(SIGKILL)).restart) << i;
  const RestartPolicy::Decision last = policy.After(Killed(SIGKILL));
  EXPECT_FALSE(last.restart);
  EXPECT_TRUE(last.gave_up);
}

TEST(StopSignalsTest, OneWishMayArriveTwice) {
  using Meaning = StopSignals::Meaning;
  siginfo_t direct{};
  direct.si_code = SI_USER;
  siginfo_t forwarded{};
  forwarded.si_code = SI_QUEUE;
  forwarded.si_pid = ::getppid();
  forwarded.si_value.sival_int = 1;
  siginfo_t again = forwarded;
  again.si_value.sival_int = 2;
  siginfo_t queued_by_another = forwarded;
  queued_by_another.si_pid = ::getpid();
  const auto meanings = [](const std::vector<siginfo_t>& signals) {
    StopSignals stop;
    std::vector<Meaning> result;
    for (const siginfo_t& signal : signals) result.push_back(stop.Of(signal));
    return result;
  };
  EXPECT_THAT(meanings({direct, direct}), ElementsAre(Meaning::kDrain, Meaning::kEndAtOnce));
  EXPECT_THAT(meanings({forwarded, again}), ElementsAre(Meaning::kDrain, Meaning::kEndAtOnce));
  EXPECT_THAT(meanings({direct, queued_by_another}), ElementsAre(Meaning::kDrain, Meaning::kEndAtOnce));
  EXPECT_THAT(meanings({direct, forwarded, again}),
              ElementsAre(Meaning::kDrain, Meaning::kNothingNew, Meaning::kEndAtOnce));
  EXPECT_THAT(meanings({forwarded, direct, direct}),
              ElementsAre(Meaning::kDrain, Meaning::kNothingNew, Meaning::kEndAtOnce));
  EXPECT_THAT(meanings({direct, again}), ElementsAre(Meaning::kDrain, Meaning::kEndAtOnce))
      << "the first forwarded one was lost while the direct one was pending";
}

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// Whether a process of that number exists and has not ended: one that nobody has reaped has.
bool Runs(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const std::size_t name_end = line.rfind(')');
  return name_end != std::string::npos && line.at(name_end + 2) != 'Z' && line.at(name_end + 2) != 'X';
}

// What the processes of a test see of one another: in memory that all of them share.
struct Stage {
  std::atomic<int> starts{0};
  std::atomic<pid_t> daemon{0};  // of the latest start
  std::atomic<int> ready{0};     // daemons that wait for a signal
  std::atomic<int> got_signal{0};
  std::atomic<int> got_value{0};
  std::atomic<int> checks_failed{0};
};

class SupervisorTest : public ::testing::Test {
 public:
  SupervisorTest() {
    void* page = ::mmap(nullptr, sizeof(Stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(page, MAP_FAILED);
    stage_ = new (page) Stage;
  }

  ~SupervisorTest() override {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    if (stage_->daemon > 0 && Runs(stage_->daemon)) ::kill(stage_->daemon, SIGKILL);  // a test has failed
    ::munmap(stage_, sizeof(Stage));
  }

 protected:
  using DaemonMain = std::function<int(const Succession&)>;

  // Runs a supervisor, in a process of its own, over daemons that number themselves from 0.
  void Run(
      const SupervisorOptions& options, const std::function<int(int number, const Succession&)>& daemon,
      const std::function<void()>& before = [] {}) {
    pid_ = ::fork();
    ASSERT_GE(pid_, 0);
    if (pid_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    before();
    ::_exit(Supervise(options, [&](const Succession& succession) {
      stage_->daemon = ::getpid();
      return daemon(stage_->starts++, succession);
    }));
  }

  // The supervisor's exit code; minus the signal if one killed it.
  std::optional<int> Wait(milliseconds timeout = 20s) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (int status = 0;; std::this_thread::sleep_for(1ms)) {
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
      }
      if (std::chrono::steady_clock::now() > deadline) return std::nullopt;
    }
  }

  // In a daemon: returns the signal that stops it.
  int AwaitStop() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    ++stage_->ready;
    siginfo_t info{};
    const int number = sigwaitinfo(&signals, &info);
    stage_->got_signal = number;
    stage_->got_value = info.si_code == SI_QUEUE ? info.si_value.sival_int : 0;
    return number;
  }

  // In a daemon: remembered across its exit.
  void Check(bool holds) { stage_->checks_failed += holds ? 0 : 1; }

  void AwaitReady(int daemons = 1) {
    ASSERT_TRUE(Eventually([&] { return stage_->ready == daemons; }));
  }

  static int DieOf(int signal) {
    ::signal(signal, SIG_DFL);  // sanitizers handle some
    ::raise(signal);
    return 99;
  }

  Stage* stage_ = nullptr;
  pid_t pid_ = -1;
};

TEST_F(SupervisorTest, ACrashedDaemonIsFollowedByTheNext) {
  Run({.restart = true, .pacing = kFast}, [&](int number, const Succession& succession) {
    Check(succession.restarts == static_cast<std::uint32_t>(number));
    if (number == 0) return DieOf(SIGKILL);
    if (number == 1) return DieOf(SIGSEGV);
    return number == 2 ? kExitGpuLost : kExitDrained;
  });
  EXPECT_EQ(Wait(), kExitDrained);
  EXPECT_EQ(stage_->starts, 4);
  EXPECT_EQ(stage_->checks_failed, 0);
}

TEST_F(SupervisorTest, WithoutRestartItPassesTheEndOn) {
  Run({.restart = false}, [&](int, const Succession&) { return kExitGpuLost; });
  EXPECT_EQ(Wait(), kExitGpuLost);
  Run({.restart = false}, [&](int, const Succession&) { return DieOf(SIGKILL); });
  EXPECT_EQ(Wait(), 128 + SIGKILL);
  EXPECT_EQ(stage_->starts, 2);
}

TEST_F(SupervisorTest, AFailedFirstStartIsFinal) {
  Run({.restart = true, .pacing = kFast}, [&](int, const Succession&) { return kExitCannotStart; });
  EXPECT_EQ(Wait(), kExitCannotStart);
  EXPECT_EQ(stage_->starts, 1);
}

TEST_F(SupervisorTest, GivesUpWithTheLastExitCode) {
  Run({.restart = true, .pacing = kFast},
      [&](int number, const Succession&) { return number == 0 ? kExitGpuLost : kExitCannotStart; });
  EXPECT_EQ(Wait(), kExitCannotStart);
  EXPECT_EQ(stage_->starts, kFast.short_lives_max);
}

TEST_F(SupervisorTest, DaemonsThatServedLongEnoughAreFollowedForEver) {
  RestartPacing pacing = kFast;
  pacing.healthy = 5ms;
  pacing.first_delay = 1h;  // nobody is to wait for this
  const int lives = 3 * pacing.short_lives_max;
  Run({.restart = true, .pacing = pacing}, [&](int number, const Succession& succession) {
    succession.serving("");
    std::this_thread::sleep_for(6ms);
    return number < lives ? kExitGpuLost : kExitDrained;
  });
  EXPECT_EQ(Wait(), kExitDrained);
  EXPECT_EQ(stage_->starts, lives + 1);
}

TEST_F(SupervisorTest, TimeBeforeServingIsNoSignOfHealth) {
  RestartPacing pacing = kFast;
  pacing.healthy = 5ms;
  Run({.restart = true, .pacing = pacing}, [&](int, const Succession&) {
    std::this_thread::sleep_for(20ms);
    return kExitGpuLost;
  });
  EXPECT_EQ(Wait(), kExitGpuLost);
  EXPECT_EQ(stage_->starts, pacing.short_lives_max);
}

TEST_F(SupervisorTest, TheHealthOfAFormerDaemonIsNotThatOfTheNext) {
  RestartPacing pacing = kFast;
  pacing.healthy = 5ms;
  Run({.restart = true, .pacing = pacing}, [&](int number, const Succession& succession) {
    if (number == 0) succession.serving("");
    if (number == 0) std::this_thread::sleep_for(6ms);
    return kExitGpuLost;
  });
  EXPECT_EQ(Wait(), kExitGpuLost);
  EXPECT_EQ(stage_->starts, 1 + pacing.short_lives_max);
}

TEST_F(SupervisorTest, LaterDaemonsKnowTheGpuThatWasServed) {
  Run({.restart = true, .pacing = kFast}, [&](int number, const Succession& succession) {
    Check(succession.gpu_uuid == (number == 0 ? "" : "GPU-42"));
    if (number == 0) succession.serving("GPU-42");
    if (number == 2) succession.serving("");  // cannot be; the GPU is not forgotten all the same
    return number < 3 ? kExitGpuLost : kExitDrained;
  });
  EXPECT_EQ(Wait(), kExitDrained);
  EXPECT_EQ(stage_->starts, 4);
  EXPECT_EQ(stage_->checks_failed, 0);
}

TEST_F(SupervisorTest, AStopSignalReachesTheDaemonAndEndsTheRestarts) {
  for (const int signal : {SIGTERM, SIGINT}) {
    stage_ = new (stage_) Stage;
    Run({.restart = true, .pacing = kFast}, [&](int, const Succession&) {
      AwaitStop();
      return kExitGpuLost;  // which would be followed by a restart
    });
    AwaitReady();
    ::kill(pid_, signal);
    EXPECT_EQ(Wait(), kExitGpuLost);
    EXPECT_EQ(stage_->got_signal, signal);
    EXPECT_EQ(stage_->starts, 1);
  }
}

TEST_F(SupervisorTest, ASecondSignalIsForwardedToo) {
  Run({.restart = true, .pacing = kFast}, [&](int, const Succession&) {
    AwaitStop();
    return kExitBySignalBase + AwaitStop();
  });
  AwaitReady(1);
  ::kill(pid_, SIGTERM);
  AwaitReady(2);
  ::kill(pid_, SIGINT);
  EXPECT_EQ(Wait(), 128 + SIGINT);
  EXPECT_EQ(stage_->got_value, 2) << "it says which wish it is";
  EXPECT_EQ(stage_->starts, 1);
}

TEST_F(SupervisorTest, ADaemonKilledAfterTheStopSignalIsNotFollowed) {
  Run({.restart = true, .pacing = kFast}, [&](int, const Succession&) {
    AwaitStop();
    return DieOf(SIGKILL);
  });
  AwaitReady();
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(Wait(), 128 + SIGKILL);
  EXPECT_EQ(stage_->starts, 1);
}

TEST_F(SupervisorTest, AStopSignalEndsThePauseBeforeARestart) {
  RestartPacing pacing = kFast;
  pacing.first_delay = pacing.longest_delay = 1h;
  Run({.restart = true, .pacing = pacing}, [&](int, const Succession&) { return kExitGpuLost; });
  ASSERT_TRUE(Eventually([&] { return stage_->starts == 1 && !Runs(stage_->daemon); }));
  EXPECT_EQ(Wait(50ms), std::nullopt) << "it is to wait for an hour";
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(Wait(10s), kExitDrained);
  EXPECT_EQ(stage_->starts, 1);
}

TEST_F(SupervisorTest, AHangupIsForwardedUnlessItIsIgnored) {
  const auto daemon = [&](int, const Succession&) {
    AwaitStop();
    return kExitDrained;
  };
  Run({.restart = true, .pacing = kFast}, daemon, [] { ::signal(SIGHUP, SIG_DFL); });
  AwaitReady(1);
  ::kill(pid_, SIGHUP);
  EXPECT_EQ(Wait(), 128 + SIGHUP) << "what it does to a daemon without supervisor";
  Run({.restart = true, .pacing = kFast}, daemon, [] { ::signal(SIGHUP, SIG_IGN); });
  AwaitReady(2);
  ::kill(pid_, SIGHUP);
  EXPECT_EQ(Wait(100ms), std::nullopt);
  ::kill(stage_->daemon, SIGKILL);
  AwaitReady(3);  // nobody has asked for the end
  ::kill(pid_, SIGTERM);
  EXPECT_EQ(Wait(), kExitDrained);
  EXPECT_EQ(stage_->starts, 3);
}

TEST_F(SupervisorTest, TheDaemonLearnsOfTheSupervisorsDeath) {
  Run({.restart = true, .pacing = kFast}, [&](int, const Succession&) {
    AwaitStop();
    return kExitDrained;
  });
  AwaitReady();
  ::kill(pid_, SIGKILL);
  EXPECT_EQ(Wait(), -SIGKILL);
  EXPECT_TRUE(Eventually([&] { return stage_->got_signal == SIGTERM && !Runs(stage_->daemon); }));
  EXPECT_EQ(stage_->starts, 1);
}

TEST_F(SupervisorTest, TheDaemonIsOutOfReachOfTheTerminal) {
  Run({.restart = true, .pacing = kFast}, [&](int, const Succession&) {
    Check(::getpgrp() == ::getpid());
    return kExitDrained;
  });
  EXPECT_EQ(Wait(), kExitDrained);
  EXPECT_EQ(stage_->checks_failed, 0);
}

TEST_F(SupervisorTest, OrphansAreReaped) {
  // As PID 1, it inherits every process whose parent has died.
  const auto become_heir = [] { ::prctl(PR_SET_CHILD_SUBREAPER, 1); };
  Run(
      {.restart = true, .pacing = kFast},
      [&](int, const Succession&) {
        const pid_t supervisor = ::getppid();
        std::array<int, 2> orphan_pipe{};
        Check(::pipe(orphan_pipe.data()) == 0);
        const pid_t parent = ::fork();
        if (parent == 0) {
          const pid_t orphan = ::fork();
          if (orphan == 0) {
            // Ends when it is the supervisor's, so that nobody else can reap it.
            while (::getppid() != supervisor) std::this_thread::sleep_for(1ms);
            ::_exit(0);
          }
          Check(::write(orphan_pipe[1], &orphan, sizeof(orphan)) == sizeof(orphan));
          ::_exit(0);
        }
        pid_t orphan = 0;
        Check(::read(orphan_pipe[0], &orphan, sizeof(orphan)) == sizeof(orphan));
        ::waitpid(parent, nullptr, 0);
        // A zombie still has its number.
        Check(Eventually([&] { return ::kill(orphan, 0) != 0 && errno == ESRCH; }));
        return kExitDrained;
      },
      become_heir);
  EXPECT_EQ(Wait(60s), kExitDrained);
  EXPECT_EQ(stage_->checks_failed, 0);
}

}  // namespace
}  // namespace tessera::server
