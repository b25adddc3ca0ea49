// What every plan must be, whoever made it; and the devices that tests plan for.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/catalog/gemm_catalog.h"
#include "kernels/catalog/gemm_geometry.h"
#include "planner/gemm/problem.h"
#include "planner/known_devices.h"
#include "planner/plan.h"

namespace tessera::planner {

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

inline DeviceFacts CpuFacts(int threads) {
  return {.backend = kernels::Backend::kCpu, .processors = threads, .workspace_bytes_max = 64 * kMiB};
}

inline __int128 TilesOf(const kernels::GemmVariant& variant, const GemmProblem& problem) {
  const auto up = [](std::int64_t extent, int tile) { return (static_cast<__int128>(extent) + tile - 1) / tile; };
  const __int128 of_matrix = up(problem.m, variant.tile.m) * up(problem.n, variant.tile.n);
  constexpr __int128 kMany = __int128{1} << 60;  // more than any gate asks for
  return std::min(of_matrix, kMany) * std::min<__int128>(problem.batch, kMany);
}

// Why the plan cannot be launched on that problem; empty if it can.
inline std::string WhyIllegalPlan(const Plan& plan, const GemmProblem& problem, const DeviceFacts& facts) {
  if (plan.variant >= kernels::GemmVariants().size()) return "variant beyond the catalogue";
  const kernels::GemmVariant& variant = kernels::GemmVariants()[plan.variant];
  if (variant.info.backend != facts.backend) return "another backend";
  if (!(variant.gemm_class == problem.gemm_class)) return "another class";
  if (!facts.archs.Has(variant.info.arch)) return "not on the device";
  const bool packs = variant.info.workspace == kernels::WorkspaceRule::kPacked;
  if (packs && !kernels::PackedTakes(problem.gemm_class, problem.m, problem.n, problem.k)) return "too large to pack";
  // Tiles are counted in 31 bits there; of others, what cannot is out of the reach of their loaders, too.
  if (packs && TilesOf(variant, problem) >= __int128{1} << 31) return "more tiles than a launch has";
  if (!packs && !problem.addressable.Has(variant.info.arch)) return "operands out of its reach";
  if (facts.shared_bytes_per_block > 0 && kernels::GemmSharedBytes(variant) > facts.shared_bytes_per_block) {
    return "more shared memory than a block can have";
  }
  if (plan.raster < 0) return "a negative raster";
  if (plan.raster > 0 && variant.info.backend != kernels::Backend::kCuda) return "a raster for what takes none";
  if (plan.workspace_bytes < 0 || plan.workspace_bytes > facts.workspace_bytes_max) return "workspace out of bounds";
  const auto needed = kernels::GemmWorkspaceBytes(variant, problem.batch, problem.m, problem.n, problem.k, plan.split);
  if (needed != plan.workspace_bytes) return "workspace is not what the variant needs";
  if (plan.split < 1) return "split below 1";
  if (plan.split == 1) return "";
  if (!kernels::TakesSplit(variant.info.workspace)) return "splits a variant that does not";
  if (variant.info.workspace == kernels::WorkspaceRule::kCluster && !kernels::LegalClusterSplit(plan.split)) {
    return "no split of a cluster";
  }
  if (problem.k == 0 || plan.split > (problem.k - 1) / variant.tile.k + 1) return "slices shorter than a K block";
  return "";
}

}  // namespace tessera::planner
