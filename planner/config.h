// One configuration of the planner: a value that is never changed once others see it. Change makes a new one of a
// higher revision, and plans that are being made finish by the one that they began with.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "planner/plan.h"
#include "planner/row_set.h"

namespace tessera::planner {

// Which links of the chain are asked; the degraded bands always are.
enum class Mode : std::uint8_t {
  kTable,   // rows
  kHybrid,  // rows, then the model
  kModel,   // the model
};
inline constexpr std::array<std::string_view, 3> kModeNames = {"table", "hybrid", "model"};
inline constexpr Mode kDefaultMode = Mode::kHybrid;
constexpr std::string_view ModeName(Mode mode) {
  return kModeNames[static_cast<std::size_t>(mode)];
}
std::optional<Mode> ModeFromName(std::string_view name);

// Tiers of rows, in the order in which the chain asks; values are those of Source.
enum class Tier : std::uint8_t { kOverride, kInjected, kBuiltin };
inline constexpr std::size_t kTiers = 3;
inline constexpr std::array<std::string_view, kTiers> kTierNames = {"override", "injected", "builtin"};
constexpr Source SourceOf(Tier tier) {
  return static_cast<Source>(tier);
}
constexpr std::string_view TierName(Tier tier) {
  return SourceName(SourceOf(tier));
}

struct Staging {
  bool tma = true;  // false: the Hopper tree, which loads by the copy engine, is not used
  bool mx = false;  // block-scaled kernels, which this build does not have

  friend bool operator==(const Staging&, const Staging&) = default;
};

struct PlannerConfig {
  std::uint64_t revision = 0;
  Mode mode = kDefaultMode;
  bool mode_is_default = true;                                          // nobody has chosen it
  bool rows_off = false;                                                // no tier of rows is asked
  std::array<RowSetPtr, kTiers> rows = {NoRows(), NoRows(), NoRows()};  // by Tier
  Staging staging;
  bool log = false;

  const RowSet& tier(Tier of) const { return *rows[static_cast<std::size_t>(of)]; }
  RowSetPtr& tier_ptr(Tier of) { return rows[static_cast<std::size_t>(of)]; }
  bool AsksRows() const { return !rows_off && mode != Mode::kModel; }
  bool AsksModel() const { return mode != Mode::kTable; }
};

// Whether two configurations plan and log alike, whatever their revisions.
bool Alike(const PlannerConfig& left, const PlannerConfig& right);

}  // namespace tessera::planner
