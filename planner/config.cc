#include "planner/config.h"

#include <algorithm>

namespace tessera::planner {
namespace {

bool SameRows(const RowSetPtr& left, const RowSetPtr& right) {
  return left == right ||
         std::equal(left->rows().begin(), left->rows().end(), right->rows().begin(), right->rows().end());
}

}  // namespace

std::optional<Mode> ModeFromName(std::string_view name) {
  for (std::size_t i = 0; i < kModeNames.size(); ++i) {
    if (kModeNames[i] == name) return static_cast<Mode>(i);
  }
  return std::nullopt;
}

bool Alike(const PlannerConfig& left, const PlannerConfig& right) {
  return left.mode == right.mode && left.mode_is_default == right.mode_is_default && left.rows_off == right.rows_off &&
         left.staging == right.staging && left.log == right.log &&
         std::equal(left.rows.begin(), left.rows.end(), right.rows.begin(), SameRows);
}

}  // namespace tessera::planner
