// The commands of `tessera`, one function each: adds its subcommand to the application; the returned function runs it
// after parsing and gives the exit code.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>

#include "client/cli/output.h"

namespace tessera::client::cli {

struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

Command AddStatus(CLI::App& app, const GlobalOptions& options);
Command AddGemm(CLI::App& app, const GlobalOptions& options);
Command AddSessions(CLI::App& app, const GlobalOptions& options);
Command AddBuffers(CLI::App& app, const GlobalOptions& options);
Command AddLogLevel(CLI::App& app, const GlobalOptions& options);
Command AddConfig(CLI::App& app, const GlobalOptions& options);
Command AddDrain(CLI::App& app, const GlobalOptions& options);
Command AddMetrics(CLI::App& app, const GlobalOptions& options);
Command AddPlan(CLI::App& app, const GlobalOptions& options);
Command AddBench(CLI::App& app, const GlobalOptions& options);

}  // namespace tessera::client::cli
