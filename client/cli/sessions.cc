// `tessera sessions`: who is here, what they hold, and what has not gone away.

#include <cstdio>

#include <nlohmann/json.hpp>

#include "client/cli/commands.h"
#include "client/cli/watch.h"

namespace tessera::client::cli {
namespace {

struct Options {
  bool all = false;
  std::string end;
  WatchOptions watch;
};

std::string LeaseText(const v1::SessionInfo& session) {
  switch (session.lease()) {
    case v1::LEASE_KIND_SIDE_CHANNEL:
      return "side channel";
    case v1::LEASE_KIND_ATTACH:
      return "attach";
    case v1::LEASE_KIND_TTL:
      return "ttl";
    default:
      return "unknown";
  }
}

std::string StateText(const v1::SessionInfo& session) {
  switch (session.state()) {
    case v1::SESSION_STATE_OPEN:
      return "open";
    case v1::SESSION_STATE_ENDING:
      return "ending";
    case v1::SESSION_STATE_QUARANTINED:
      return "quarantined";
    default:
      return "unknown";
  }
}

void PrintJson(const v1::ListSessionsReply& list, bool one_line) {
  nlohmann::json rows = nlohmann::json::array();
  for (const v1::SessionInfo& session : list.sessions()) {
    rows.push_back({{"name", session.name()},
                    {"label", session.label()},
                    {"principal", session.principal()},
                    {"owner_pid", session.owner_pid()},
                    {"lease", LeaseText(session)},
                    {"ttl_ms", session.ttl_ms()},
                    {"state", StateText(session)},
                    {"end_reason", session.end_reason()},
                    {"age_ms", session.age_ms()},
                    {"idle_ms", session.idle_ms()},
                    {"buffers", session.buffers()},
                    {"bytes", session.bytes()},
                    {"in_flight", session.in_flight()},
                    {"gated", session.gated()},
                    {"streams", session.streams()},
                    {"timelines", session.timelines()}});
  }
  std::printf("%s\n", rows.dump(one_line ? -1 : 2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void PrintTable(const v1::ListSessionsReply& list) {
  Table table({"session", "state", "lease", "buffers", "memory", "in flight", "gated", "streams", "timelines", "age",
               "idle", "owner", "pid", "label"});
  std::uint64_t bytes = 0;
  for (const v1::SessionInfo& session : list.sessions()) {
    bytes += session.bytes();
    const std::string reason = session.end_reason().empty() ? "" : " (" + session.end_reason() + ")";
    const std::string left = session.lease() == v1::LEASE_KIND_TTL ? " " + HumanDuration(session.ttl_ms()) : "";
    table.Add({session.name(), StateText(session) + reason, LeaseText(session) + left,
               std::to_string(session.buffers()), HumanBytes(session.bytes()), std::to_string(session.in_flight()),
               std::to_string(session.gated()), std::to_string(session.streams()), std::to_string(session.timelines()),
               HumanDuration(session.age_ms()), HumanDuration(session.idle_ms()), session.principal(),
               std::to_string(session.owner_pid()), session.label()});
  }
  std::fputs(table.ToString().c_str(), stdout);
  std::printf("%s, %s\n", Counted(static_cast<std::uint64_t>(list.sessions_size()), "session").c_str(),
              HumanBytes(bytes).c_str());
}

int End(const GlobalOptions& options, const Client& client, const std::string& name) {
  const auto reply = client.EndSession(name);
  if (!reply.ok()) return Fail(options, reply.status());
  if (options.json) {
    std::printf("%s\n", nlohmann::json({{"buffers_released", reply->buffers_released()}}).dump(2).c_str());
  } else {
    std::printf("session %s ended, %s released\n", name.c_str(), Counted(reply->buffers_released(), "buffer").c_str());
  }
  return kExitOk;
}

int Run(const GlobalOptions& global, const Options& options) {
  auto client = Connect(global);
  if (!client.ok()) return Fail(global, client.status());
  if (!options.end.empty()) return End(global, *client, options.end);
  return Watch(options.watch, global, [&] {
    const auto list = client->ListSessions(options.all);
    if (!list.ok()) return Fail(global, list.status());
    global.json ? PrintJson(*list, options.watch.watch) : PrintTable(*list);
    return kExitOk;
  });
}

}  // namespace

Command AddSessions(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand(
      "sessions", "Your sessions, with lease, memory and load; those that end, too, until all is gone");
  auto own = std::make_shared<Options>();
  command->add_flag("--all", own->all, "Of every principal (administrators)");
  command->add_option("--end", own->end, "End the session of this name, such as 3.1 (administrators)");
  AddWatchOptions(*command, own->watch);
  return {command, [&options, own] { return Run(options, *own); }};
}

}  // namespace tessera::client::cli
