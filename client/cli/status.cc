// `tessera status`: what runs here, on what, how busy it is.

#include <cstdio>

#include <nlohmann/json.hpp>

#include "client/cli/commands.h"

namespace tessera::client::cli {
namespace {

void PrintTable(const v1::ServerInfoReply& info) {
  Table facts({"tesserad " + info.version(), info.state()});
  facts.Add({"pid", std::to_string(info.pid())});
  facts.Add({"up", HumanDuration(info.uptime_ms())});
  facts.Add({"socket", info.socket()});
  facts.Add({"tcp", info.tcp_address().empty() ? "off" : info.tcp_address()});
  facts.Add({"http", info.http_address().empty() ? "off" : info.http_address()});
  facts.Add({"isolation", info.isolation_mode()});
  facts.Add({"log level", info.log_level()});
  const std::string ending = ", " + std::to_string(info.sessions_ending()) + " ending";
  facts.Add({"sessions", std::to_string(info.sessions()) + (info.sessions_ending() == 0 ? "" : ending)});
  facts.Add({"buffers", std::to_string(info.buffers()) + " (" + HumanBytes(info.buffer_bytes()) + ")"});
  facts.Add({"in flight", std::to_string(info.in_flight())});
  if (info.quarantined() > 0) {
    facts.Add({"quarantined", std::to_string(info.quarantined()) + "; `tessera sessions --all` and the log tell what"});
  }
  if (info.restarts() > 0) facts.Add({"restarts", std::to_string(info.restarts())});
  facts.Add({"you are", info.principal() + (info.administrator() ? ", administrator" : "")});
  std::fputs(facts.ToString().c_str(), stdout);

  Table backends({"\nbackend", "available", "variants", "detail"});
  for (const v1::BackendInfo& backend : info.backends()) {
    const bool is_default = backend.name() == info.default_backend();
    backends.Add({backend.name() + (is_default ? " (default)" : ""), backend.available() ? "yes" : "no",
                  std::to_string(backend.variants()), backend.reason()});
  }
  std::fputs(backends.ToString().c_str(), stdout);
}

// Keys are the field names of ServerInfoReply. Written out rather than converted: protobuf's JSON makes strings of
// 64-bit numbers.
void PrintJson(const v1::ServerInfoReply& info) {
  nlohmann::json backends = nlohmann::json::array();
  for (const v1::BackendInfo& backend : info.backends()) {
    backends.push_back({{"name", backend.name()},
                        {"available", backend.available()},
                        {"reason", backend.reason()},
                        {"variants", backend.variants()}});
  }
  const nlohmann::json document = {{"version", info.version()},
                                   {"epoch", info.epoch()},
                                   {"pid", info.pid()},
                                   {"uptime_ms", info.uptime_ms()},
                                   {"state", info.state()},
                                   {"default_backend", info.default_backend()},
                                   {"backends", backends},
                                   {"isolation_mode", info.isolation_mode()},
                                   {"socket", info.socket()},
                                   {"side_channel", info.side_channel()},
                                   {"http_address", info.http_address()},
                                   {"tcp_address", info.tcp_address()},
                                   {"inline_bytes_max", info.inline_bytes_max()},
                                   {"message_bytes_max", info.message_bytes_max()},
                                   {"restarts", info.restarts()},
                                   {"sessions", info.sessions()},
                                   {"sessions_ending", info.sessions_ending()},
                                   {"quarantined", info.quarantined()},
                                   {"buffers", info.buffers()},
                                   {"buffer_bytes", info.buffer_bytes()},
                                   {"in_flight", info.in_flight()},
                                   {"principal", info.principal()},
                                   {"administrator", info.administrator()},
                                   {"log_level", info.log_level()}};
  std::printf("%s\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

int Run(const GlobalOptions& options) {
  auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  auto info = client->ServerInfo();
  if (!info.ok()) return Fail(options, info.status());
  if (!options.json) {
    PrintTable(*info);
    return kExitOk;
  }
  PrintJson(*info);
  return kExitOk;
}

}  // namespace

Command AddStatus(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("status", "The daemon: version, backends, load, and who you are to it");
  return {command, [&options] { return Run(options); }};
}

}  // namespace tessera::client::cli
