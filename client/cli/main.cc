// `tessera`: the command line of a node's tesserad.

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "client/cli/commands.h"

namespace tessera::client::cli {
namespace {

// Says so where the command that was reached wants a subcommand and got a word that is none: the parser would only ask
// for one.
bool SaidUnknownCommand(const CLI::App& app) {
  const CLI::App* reached = &app;
  std::string path = app.get_name();
  while (!reached->get_subcommands().empty()) {
    reached = reached->get_subcommands().front();
    path += " " + reached->get_name();
  }
  if (reached->get_require_subcommand_min() == 0) return false;
  // Words that no option took; they are kept where fallthrough has left them.
  const std::vector<std::string> words = app.remaining(/*recurse=*/true);
  if (words.empty() || words.front().starts_with('-')) return false;
  std::fprintf(stderr, "tessera: unknown command '%s'; `%s --help` lists them\n", words.front().c_str(), path.c_str());
  return true;
}

}  // namespace
}  // namespace tessera::client::cli

int main(int argc, char** argv) {
  using namespace tessera::client::cli;
  GlobalOptions options;
  CLI::App app("Talks to the Tessera daemon of this node.", "tessera");
  app.require_subcommand(1);
  app.fallthrough();  // global options may follow the command
  app.add_option(
      "--socket", options.socket,
      "The daemon's Unix socket [env TESSERA_SOCKET; default: /run/tessera/tessera.sock for root, else under "
      "$XDG_RUNTIME_DIR or /tmp/tessera-UID]");
  CLI::Option* address =
      app.add_option("--address", options.address, "Talk to HOST:PORT over TCP instead (the daemon's --tcp-address)");
  const std::pair<const char*, std::pair<std::string*, const char*>> tls[] = {
      {"--ca", {&options.tls.ca, "PEM file of the authority behind the daemon's certificate"}},
      {"--cert", {&options.tls.certificate, "PEM file of this client's certificate"}},
      {"--key", {&options.tls.key, "PEM file of its private key"}},
      {"--server-name", {&options.tls.server_name, "Name in the daemon's certificate, if it is not the host"}}};
  for (const auto& [flag, option] : tls) {
    app.add_option(flag, *option.first, std::string("With --address: ") + option.second)->needs(address);
  }
  app.add_flag("--plaintext", options.plaintext, "With --address: no TLS, for a daemon with --tcp-plaintext")
      ->needs(address);
  app.add_flag("--json", options.json, "One JSON document instead of tables");
  app.add_option("--timeout-ms", options.timeout_ms, "For connecting and for calls that do not compute")
      ->capture_default_str()
      ->check(CLI::Range(1, 600000));
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.footer(
      "Exit codes: 0 done, 1 refused or a check failed, 2 wrong command line, 3 no daemon answers.\n"
      "`tessera COMMAND --help` explains a command.");

  const std::vector<Command> commands = {AddStatus(app, options),  AddGemm(app, options),    AddSessions(app, options),
                                         AddBuffers(app, options), AddMetrics(app, options), AddLogLevel(app, options),
                                         AddConfig(app, options),  AddDrain(app, options),   AddPlan(app, options),
                                         AddBench(app, options)};
  const auto is_named = [&](const Command& command) { return command.app->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && std::none_of(commands.begin(), commands.end(), is_named)) {
    std::fprintf(stderr, "tessera: unknown command '%s'; `tessera --help` lists them\n", argv[1]);
    return kExitUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (SaidUnknownCommand(app)) return kExitUsage;
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return kExitUsage;
}
