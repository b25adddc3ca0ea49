#include "planner/gemm/model.h"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "kernels/catalog/gemm_geometry.h"
#include "planner/gemm/bands.h"

namespace tessera::planner {
namespace {

using kernels::Arch;
using kernels::GemmVariant;

// What the runtime keeps of a processor's shared memory for each block.
constexpr std::int64_t kReservedBytes = 1024;

using Rank = std::pair<std::int64_t, int>;  // resident blocks, stages

Rank RankOf(const GemmVariant& variant, const DeviceFacts& facts) {
  return {ResidentBlocks(variant, facts), variant.stages};
}

bool IsPortable(const GemmVariant& variant) {
  return variant.info.arch == Arch::kSm80 || variant.info.arch == Arch::kSm89;
}

ModelAnswer Abstains(std::string_view why) {
  return {.plan = std::nullopt, .detail = absl::StrCat("the model abstains: ", Av(why))};
}

}  // namespace

bool IsPortableDevice(const DeviceFacts& facts) {
  return facts.backend == kernels::Backend::kCuda && !facts.archs.Has(Arch::kSm90a);
}

std::int64_t ResidentBlocks(const GemmVariant& variant, const DeviceFacts& facts) {
  const std::int64_t shared = kernels::GemmSharedBytes(variant);
  if (shared == 0 || facts.shared_bytes_per_processor == 0) return 1;
  std::int64_t blocks = facts.shared_bytes_per_processor / (shared + kReservedBytes);
  if (facts.threads_per_processor > 0) {
    blocks = std::min<std::int64_t>(blocks, facts.threads_per_processor / kernels::GemmBlockThreads(variant));
  }
  return std::max<std::int64_t>(1, blocks);
}

ModelAnswer PlanByResidency(std::span<const GemmVariant> catalogue, std::span<const std::size_t> candidates,
                            const GemmProblem& problem, const DeviceFacts& facts, const DeviceFacts& staged) {
  if (facts.backend != kernels::Backend::kCuda) return Abstains("it knows GPU kernels of this build alone");
  if (!IsPortableDevice(facts)) return Abstains("the bands of this device were measured on it");
  if (facts.shared_bytes_per_processor == 0) return Abstains("the device's shared memory is not known");
  const GemmVariant* best = nullptr;
  std::size_t best_index = 0;
  std::size_t lesser = 0;
  std::size_t portable = 0;
  for (const std::size_t index : candidates) {
    const GemmVariant& variant = catalogue[index];
    if (!IsPortable(variant)) continue;
    ++portable;
    if (best == nullptr || RankOf(variant, facts) > RankOf(*best, facts)) {
      lesser = portable - 1;
      best = &variant;
      best_index = index;
    } else if (RankOf(variant, facts) < RankOf(*best, facts)) {
      ++lesser;
    }
  }
  if (best == nullptr) return Abstains("no portable kernel can run this");
  const auto [resident, stages] = RankOf(*best, facts);
  std::string of = absl::StrCat(resident, " resident blocks a processor, ", stages, " stages");
  if (portable > 1 && lesser == 0) return Abstains(absl::StrCat("all candidates have ", of));
  const int split = SplitFor(*best, problem, staged);
  const auto workspace = kernels::GemmWorkspaceBytes(*best, problem.batch, problem.m, problem.n, problem.k, split);
  if (!workspace.has_value() || *workspace > staged.workspace_bytes_max) return Abstains("its choice lacks scratch");
  return {.plan = Plan{.variant = best_index,
                       .split = split,
                       .raster = RasterFor(*best, problem, facts),
                       .workspace_bytes = *workspace,
                       .source = Source::kModel},
          .detail = absl::StrCat(Av(best->info.recipe), " leads with ", of)};
}

}  // namespace tessera::planner
