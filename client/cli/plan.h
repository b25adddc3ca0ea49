// The parts of `tessera plan`: each function adds subcommands to it.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "client/cli/commands.h"
#include "client/planner.h"

namespace tessera::client::cli {

void AddPlanShow(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands);    // state, facts, ..
void AddPlanProbe(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands);   // probe
void AddPlanChange(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands);  // set, table, ..
void AddPlanWatch(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands);   // watch

// Connects and runs `show` on the daemon's planner.
int WithPlanner(const GlobalOptions& options, const std::function<int(const Planner&)>& show);

// A product as options of a command name it.
struct ShapeArguments {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t batch = 1;
  std::string pair = "bf16_bf16";
  std::string layout = "NT";
  std::string out = "bf16";
  std::string accumulation = "fast";
  std::string backend = "default";
  std::string device;
  std::int64_t a_stride = 0;
  std::int64_t b_stride = 0;
  std::uint32_t alignment = 0;
};

// INVALID_ARGUMENT names the option.
absl::StatusOr<v1::Problem> ToProblem(const ShapeArguments& arguments);

// "512x1024x4096", "512x1024x4096:e4m3_e5m2", "..:NN", "..:f32", parts behind the extents in any order.
absl::StatusOr<v1::Problem> ParseShape(const std::string& text);

nlohmann::json ToJson(const v1::PlanInfo& plan);
void PrintDocument(const nlohmann::json& document, int indent = 2);
std::string RasterText(const v1::PlanInfo& plan);  // "-" for none
std::string OneLine(const std::string& value);     // the first line of it, and how many follow
std::string TimeText(std::int64_t unix_ms);        // UTC, to the second

}  // namespace tessera::client::cli
