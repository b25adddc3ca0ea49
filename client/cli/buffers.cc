// `tessera buffers`: who holds which memory.

#include <cstdio>

#include <nlohmann/json.hpp>

#include "client/cli/commands.h"
#include "client/cli/watch.h"

namespace tessera::client::cli {
namespace {

const char* OriginName(v1::BufferOrigin origin) {
  return origin == v1::BUFFER_ORIGIN_IMPORTED ? "imported" : "allocated";
}

struct Options {
  bool all = false;
  WatchOptions watch;
};

// "uid:7 (read), uid:8"
std::string SharesText(const v1::BufferInfo& buffer) {
  std::string text;
  for (const v1::BufferShare& share : buffer.shares()) {
    text += text.empty() ? "" : ", ";
    text += share.principal();
    text += share.access() == v1::BUFFER_ACCESS_READ ? " (read)" : "";
  }
  return text;
}

nlohmann::json SharesJson(const v1::BufferInfo& buffer) {
  nlohmann::json shares = nlohmann::json::array();
  for (const v1::BufferShare& share : buffer.shares()) {
    const bool reads = share.access() == v1::BUFFER_ACCESS_READ;
    shares.push_back({{"principal", share.principal()}, {"access", reads ? "read" : "read_write"}});
  }
  return shares;
}

void PrintJson(const v1::ListBuffersReply& list, bool one_line) {
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
                    {"session", buffer.session()},
                    {"session_label", buffer.session_label()},
                    {"shares", SharesJson(buffer)}});
  }
  std::printf("%s\n", rows.dump(one_line ? -1 : 2).c_str());
}

void PrintTable(const v1::ListBuffersReply& list) {
  Table table(
      {"buffer", "origin", "space", "size", "in use", "age", "owner", "pid", "session", "label", "shared with"});
  std::uint64_t bytes = 0;
  for (const v1::BufferInfo& buffer : list.buffers()) {
    bytes += buffer.bytes();
    table.Add({Hex(buffer.buffer_id()).substr(8, 16), OriginName(buffer.origin()), buffer.space(),
               HumanBytes(buffer.bytes()), std::to_string(buffer.references()), HumanDuration(buffer.age_ms()),
               buffer.principal(), std::to_string(buffer.owner_pid()), buffer.session(), buffer.session_label(),
               SharesText(buffer)});
  }
  std::fputs(table.ToString().c_str(), stdout);
  std::printf("%s, %s\n", Counted(static_cast<std::uint64_t>(list.buffers_size()), "buffer").c_str(),
              HumanBytes(bytes).c_str());
}

int Run(const GlobalOptions& global, const Options& options) {
  auto client = Connect(global);
  if (!client.ok()) return Fail(global, client.status());
  return Watch(options.watch, global, [&] {
    const auto list = client->ListBuffers(options.all);
    if (!list.ok()) return Fail(global, list.status());
    global.json ? PrintJson(*list, options.watch.watch) : PrintTable(*list);
    return kExitOk;
  });
}

}  // namespace

Command AddBuffers(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command =
      app.add_subcommand("buffers", "Buffers of your sessions, and those shared with you: owner, size, users, age");
  auto own = std::make_shared<Options>();
  command->add_flag("--all", own->all, "Of every principal (administrators)");
  AddWatchOptions(*command, own->watch);
  return {command, [&options, own] { return Run(options, *own); }};
}

}  // namespace tessera::client::cli
