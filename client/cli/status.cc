// `tessera status`: what runs here, on what, how busy it is.

#include <google/protobuf/util/json_util.h>

#include <cstdio>

#include "client/cli/commands.h"

namespace tessera::client::cli {
namespace {

void PrintTable(const v1::ServerInfoReply& info) {
  Table facts({"tesserad " + info.version(), info.state()});
  facts.Add({"pid", std::to_string(info.pid())});
  facts.Add({"up", HumanDuration(info.uptime_ms())});
  facts.Add({"socket", info.socket()});
  facts.Add({"http", info.http_address().empty() ? "off" : info.http_address()});
  facts.Add({"isolation", info.isolation_mode()});
  facts.Add({"log level", info.log_level()});
  facts.Add({"sessions", std::to_string(info.sessions())});
  facts.Add({"buffers", std::to_string(info.buffers()) + " (" + HumanBytes(info.buffer_bytes()) + ")"});
  facts.Add({"in flight", std::to_string(info.in_flight())});
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

int Run(const GlobalOptions& options) {
  auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  auto info = client->ServerInfo();
  if (!info.ok()) return Fail(options, info.status());
  if (!options.json) {
    PrintTable(*info);
    return kExitOk;
  }
  google::protobuf::util::JsonPrintOptions json;
  json.add_whitespace = true;
  json.always_print_primitive_fields = true;
  json.preserve_proto_field_names = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(*info, &text, json).ok()) return kExitFailed;
  std::fputs(text.c_str(), stdout);
  return kExitOk;
}

}  // namespace

Command AddStatus(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("status", "The daemon: version, backends, load, and who you are to it");
  return {command, [&options] { return Run(options); }};
}

}  // namespace tessera::client::cli
