// What `--watch` means to the commands that have it: the same again and again.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>

#include "client/cli/output.h"

namespace tessera::client::cli {

struct WatchOptions {
  bool watch = false;
  int interval_ms = 1000;
  int count = 0;  // times; 0 = until interrupted
};

void AddWatchOptions(CLI::App& command, WatchOptions& options);

// Runs `show`, which prints and returns an exit code, once, or again and again until it fails. On a terminal each time
// takes the place of the one before; elsewhere they follow each other.
int Watch(const WatchOptions& watch, const GlobalOptions& options, const std::function<int()>& show);

}  // namespace tessera::client::cli
