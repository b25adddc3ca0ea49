#include "client/cli/watch.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

namespace tessera::client::cli {

void AddWatchOptions(CLI::App& command, WatchOptions& options) {
  CLI::Option* const watch = command.add_flag("--watch", options.watch, "Again and again, until interrupted");
  command.add_option("--interval-ms", options.interval_ms, "With --watch: time between two looks")
      ->capture_default_str()
      ->check(CLI::Range(10, 3'600'000))
      ->needs(watch);
  command.add_option("--count", options.count, "With --watch: stop after so many looks; 0 = never")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber)
      ->needs(watch);
}

int Watch(const WatchOptions& watch, const GlobalOptions& options, const std::function<int()>& show) {
  if (!watch.watch) return show();
  const bool redraw = ::isatty(STDOUT_FILENO) == 1 && !options.json;
  for (int look = 1;; ++look) {
    if (redraw) std::fputs("\033[H\033[2J", stdout);
    const int code = show();
    std::fflush(stdout);
    if (code != kExitOk || look == watch.count) return code;
    std::this_thread::sleep_for(std::chrono::milliseconds(watch.interval_ms));
    if (!redraw && !options.json) std::fputs("\n", stdout);
  }
}

}  // namespace tessera::client::cli
