// `tessera buffers`: who holds which memory.

#include <cstdio>

#include <nlohmann/json.hpp>

#include "client/cli/commands.h"

namespace tessera::client::cli {
namespace {

const char* OriginName(v1::BufferOrigin origin) {
  return origin == v1::BUFFER_ORIGIN_IMPORTED ? "imported" : "allocated";
}

void PrintJson(const v1::ListBuffersReply& list) {
  nlohmann::json rows = nlohmann::json::array();
  for (const v1::BufferInfo& buffer : list.buffers()) {
    rows.push_back({{"buffer_id", Hex(buffer.buffer_id())},
                    {"origin", OriginName(buffer.origin())},
                    {"space", buffer.space()},
                    {"bytes", buffer.bytes()},
                    {"references", buffer.references()},
                    {"age_ms", buffer.age_ms()},
                    {"principal", buffer.principal()},
                    {"owner_pid", buffer.owner_pid()},
                    {"session_label", buffer.session_label()}});
  }
  std::printf("%s\n", rows.dump(2).c_str());
}

void PrintTable(const v1::ListBuffersReply& list) {
  Table table({"buffer", "origin", "space", "size", "in use", "age", "owner", "pid", "session"});
  std::uint64_t bytes = 0;
  for (const v1::BufferInfo& buffer : list.buffers()) {
    bytes += buffer.bytes();
    table.Add({Hex(buffer.buffer_id()).substr(8, 16), OriginName(buffer.origin()), buffer.space(),
               HumanBytes(buffer.bytes()), std::to_string(buffer.references()), HumanDuration(buffer.age_ms()),
               buffer.principal(), std::to_string(buffer.owner_pid()), buffer.session_label()});
  }
  std::fputs(table.ToString().c_str(), stdout);
  std::printf("%s, %s\n", Counted(static_cast<std::uint64_t>(list.buffers_size()), "buffer").c_str(),
              HumanBytes(bytes).c_str());
}

int Run(const GlobalOptions& options, bool all) {
  auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  auto list = client->ListBuffers(all);
  if (!list.ok()) return Fail(options, list.status());
  options.json ? PrintJson(*list) : PrintTable(*list);
  return kExitOk;
}

}  // namespace

Command AddBuffers(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("buffers", "Buffers of your sessions, with owner, size, users and age");
  auto all = std::make_shared<bool>(false);
  command->add_flag("--all", *all, "Of every principal (administrators)");
  return {command, [&options, all] { return Run(options, *all); }};
}

}  // namespace tessera::client::cli
