// What a row means, read slowly and without the planner's chain: for tests that hold the two against each other.
#pragma once

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/catalog/gemm_geometry.h"
#include "planner/gemm/bands.h"
#include "planner/row.h"
#include "tests/planner/plan_checks.h"

namespace tessera::planner {

// The plan of a row, its raster left open where the row names none; nullopt where the row does not decide.
inline std::optional<Plan> ReadRow(const Row& row, const GemmProblem& problem, const DeviceFacts& facts) {
  const std::int64_t extents[] = {problem.m, problem.n, problem.k};
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (extents[axis] <= row.bands[axis].min || extents[axis] > row.bands[axis].max) return std::nullopt;
  }
  const auto variants = kernels::GemmVariants();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const kernels::GemmVariant& variant = variants[i];
    if (variant.info.id != absl::StrCat(row.class_name, "/", row.recipe)) continue;
    Plan plan{.variant = i, .split = row.knobs[1], .raster = row.knobs[0]};
    if (variant.info.backend != facts.backend || !(variant.gemm_class == problem.gemm_class)) return std::nullopt;
    const std::int64_t shared = kernels::GemmSharedBytes(variant);
    std::int64_t resident = 1;
    if (shared > 0 && facts.shared_bytes_per_processor > 0) {
      resident = std::max<std::int64_t>(
          1, std::min<std::int64_t>(facts.shared_bytes_per_processor / (shared + 1024),
                                    facts.threads_per_processor / kernels::GemmBlockThreads(variant)));
    }
    if (TilesOf(variant, problem) < static_cast<__int128>(row.waves) * facts.processors * resident) return std::nullopt;
    if (TilesOf(variant, problem) < static_cast<__int128>(row.blocks) * facts.processors) return std::nullopt;
    // What the bands would cut is theirs to know.
    if (plan.split == 0) plan.split = SplitFor(variant, problem, facts);
    const auto workspace =
        kernels::GemmWorkspaceBytes(variant, problem.batch, problem.m, problem.n, problem.k, plan.split);
    if (!workspace.has_value()) return std::nullopt;
    plan.workspace_bytes = *workspace;
    if (!WhyIllegalPlan(plan, problem, facts).empty()) return std::nullopt;
    return plan;
  }
  return std::nullopt;
}

}  // namespace tessera::planner
