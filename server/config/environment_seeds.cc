#include "server/config/environment_seeds.h"

#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::server {
namespace {

using Takes = EnvironmentSeed::Takes;

constexpr auto kSeeds = std::to_array<EnvironmentSeed>({
    {"TESSERA_GEMM_TABLE", "planner_table", Takes::kText, "Row file, or - for rows of every source off."},
    {"TESSERA_GEMM_MODEL", "planner_mode", Takes::kPlannerRank,
     "0 = table, 1 = hybrid, 2 = model; the names are taken too."},
    {"TESSERA_GEMM_PLAN", "planner_log", Takes::kSwitch, "1 logs decisions."},
    {"TESSERA_GEMM_NO_TMA", "planner_tma", Takes::kInvertedSwitch, "1 is planner_tma = false."},
    {"TESSERA_GEMM_TUNE_DIR", "cache_dir", Takes::kText, "Directory of measured rows."},
    {"TESSERA_GEMM_NO_MX", "", Takes::kNothing, "No effect: there are no block-scaled kernels yet."},
    {"TESSERA_GEMM_AUTOTUNE", "", Takes::kNothing, "No effect: there is no tuner yet."},
    {"TESSERA_GEMM_TUNE_MAX_SHAPES", "", Takes::kNothing, "No effect: there is no tuner yet."},
    {"TESSERA_GEMM_TUNE_TRIGGER", "", Takes::kNothing, "No effect: there is no tuner yet."},
});

constexpr std::array<std::string_view, 3> kModesByRank = {"table", "hybrid", "model"};

absl::StatusOr<bool> ParseSwitch(const std::string& text) {
  const std::string lower = absl::AsciiStrToLower(text);
  if (lower == "1" || lower == "true" || lower == "on" || lower == "yes") return true;
  if (lower == "0" || lower == "false" || lower == "off" || lower == "no") return false;
  return absl::InvalidArgumentError("takes 1 or 0");
}

absl::StatusOr<std::string> ModeOf(const std::string& text) {
  if (std::find(kModesByRank.begin(), kModesByRank.end(), text) != kModesByRank.end()) return text;
  if (text.size() == 1 && text[0] >= '0' && text[0] <= '2') {
    return std::string(kModesByRank[static_cast<std::size_t>(text[0] - '0')]);
  }
  return absl::InvalidArgumentError("takes 0 (table), 1 (hybrid) or 2 (model)");
}

}  // namespace

std::span<const EnvironmentSeed> EnvironmentSeeds() {
  return kSeeds;
}

absl::StatusOr<std::string> SeedText(const EnvironmentSeed& seed, const std::string& text) {
  switch (seed.takes) {
    case Takes::kPlannerRank:
      return ModeOf(text);
    case Takes::kSwitch:
    case Takes::kInvertedSwitch: {
      const absl::StatusOr<bool> parsed = ParseSwitch(text);
      if (!parsed.ok()) return parsed.status();
      return *parsed == (seed.takes == Takes::kSwitch) ? "true" : "false";
    }
    case Takes::kText:
    case Takes::kNothing:
      break;
  }
  return text;
}

std::string EnvironmentSeedsMarkdown() {
  std::string text =
      "\n"
      "## Variables with other names\n"
      "\n"
      "Deprecated, for scripts that set the variables of the kernels' former Python front end: the same names with "
      "the\n"
      "prefix `TESSERA_`. They are read once at start, empty ones as if they were not set, and are weaker than the\n"
      "variable of the setting itself. Calls of the Planner service win over all of them.\n"
      "\n"
      "| Variable | Setting | Meaning |\n"
      "|---|---|---|\n";
  for (const EnvironmentSeed& seed : kSeeds) {
    const std::string setting = seed.setting.empty() ? "" : absl::StrCat("`", Av(seed.setting), "`");
    absl::StrAppend(&text, "| `", Av(seed.variable), "` | ", setting, " | ", Av(seed.help), " |\n");
  }
  return text;
}

}  // namespace tessera::server
