// `tessera log-level`, `config` and `drain`.

#include <cstdio>

#include <nlohmann/json.hpp>

#include "client/cli/commands.h"

namespace tessera::client::cli {
namespace {

int RunLogLevel(const GlobalOptions& options, const std::string& level) {
  auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  if (level.empty()) {
    auto info = client->ServerInfo();
    if (!info.ok()) return Fail(options, info.status());
    if (options.json) {
      std::printf("%s\n", nlohmann::json({{"level", info->log_level()}}).dump(2).c_str());
    } else {
      std::printf("%s\n", info->log_level().c_str());
    }
    return kExitOk;
  }
  auto previous = client->SetLogLevel(level);
  if (!previous.ok()) return Fail(options, previous.status());
  if (options.json) {
    std::printf("%s\n", nlohmann::json({{"previous", *previous}, {"level", level}}).dump(2).c_str());
  } else {
    std::printf("%s -> %s\n", previous->c_str(), level.c_str());
  }
  return kExitOk;
}

int RunConfig(const GlobalOptions& options) {
  auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  auto config = client->GetConfig();
  if (!config.ok()) return Fail(options, config.status());
  if (options.json) {
    nlohmann::json rows = nlohmann::json::array();
    for (const v1::Setting& setting : config->settings()) {
      rows.push_back({{"name", setting.name()},
                      {"value", setting.value()},
                      {"default", setting.default_value()},
                      {"unit", setting.unit()},
                      {"source", setting.source()}});
    }
    std::printf("%s\n", rows.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    return kExitOk;
  }
  Table table({"setting", "value", "unit", "from"});
  for (const v1::Setting& setting : config->settings()) {
    table.Add({setting.name(), setting.value(), setting.unit(), setting.source()});
  }
  std::fputs(table.ToString().c_str(), stdout);
  return kExitOk;
}

int RunDrain(const GlobalOptions& options) {
  auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  auto reply = client->Drain();
  if (!reply.ok()) return Fail(options, reply.status());
  if (options.json) {
    std::printf("%s\n",
                nlohmann::json({{"in_flight", reply->in_flight()}, {"grace_s", reply->grace_s()}}).dump(2).c_str());
  } else {
    std::printf("draining: %u operations in flight, exit within %u s\n", reply->in_flight(), reply->grace_s());
  }
  return kExitOk;
}

}  // namespace

Command AddLogLevel(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("log-level", "Shows the daemon's log level, or sets it (administrators)");
  auto level = std::make_shared<std::string>();
  command->add_option("level", *level, "trace, debug, info, warn, error or off");
  return {command, [&options, level] { return RunLogLevel(options, *level); }};
}

Command AddConfig(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("config", "Every setting, its value and where it came from (administrators)");
  return {command, [&options] { return RunConfig(options); }};
}

Command AddDrain(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command =
      app.add_subcommand("drain", "Lets running work finish, refuses new work, and ends the daemon (administrators)");
  return {command, [&options] { return RunDrain(options); }};
}

}  // namespace tessera::client::cli
