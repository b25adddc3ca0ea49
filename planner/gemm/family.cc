#include "planner/gemm/family.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "kernels/catalog/gemm_geometry.h"
#include "planner/gemm/bands.h"
#include "planner/gemm/model.h"

namespace tessera::planner {
namespace {

using kernels::GemmVariant;

enum Knob : std::size_t { kRaster, kSplit };

// Slices that the launch takes, none of them shorter than one K block of the tile.
bool LegalSplit(const GemmVariant& variant, const GemmProblem& problem, int split) {
  if (split == 1) return true;
  if (!kernels::TakesSplit(variant.info.workspace)) return false;
  if (variant.info.workspace == kernels::WorkspaceRule::kCluster && !kernels::LegalClusterSplit(split)) return false;
  return problem.k > 0 && split <= (problem.k - 1) / variant.tile.k + 1;
}

}  // namespace

GemmFamily::GemmFamily(std::span<const GemmVariant> catalogue) : catalogue_(catalogue) {
  for (std::size_t i = 0; i < catalogue_.size(); ++i) {
    const GemmVariant& variant = catalogue_[i];
    by_class_[ClassKey({.gemm_class = variant.gemm_class}, {.backend = variant.info.backend})].push_back(i);
  }
}

std::array<std::uint64_t, GemmFamily::kKeyWords> GemmFamily::Key(const GemmProblem& problem) {
  return {problem.gemm_class.Key() | std::uint64_t{problem.addressable.bits()} << 32U,
          static_cast<std::uint64_t>(problem.batch), static_cast<std::uint64_t>(problem.m),
          static_cast<std::uint64_t>(problem.n), static_cast<std::uint64_t>(problem.k)};
}

std::string GemmFamily::ToText(const GemmProblem& problem) {
  std::string text =
      absl::StrCat("gemm ", problem.gemm_class.ToString(), " m=", problem.m, " n=", problem.n, " k=", problem.k);
  if (problem.batch != 1) absl::StrAppend(&text, " batch=", problem.batch);
  return text;
}

DeviceFacts GemmFamily::Staged(const DeviceFacts& facts, const Staging& staging) {
  DeviceFacts staged = facts;
  if (!staging.tma) staged.archs.Remove(kernels::Arch::kSm90a);
  return staged;
}

std::span<const std::size_t> GemmFamily::Variants(const GemmProblem& problem, const DeviceFacts& facts) const {
  const auto found = by_class_.find(ClassKey(problem, facts));
  if (found == by_class_.end()) return {};
  return found->second;
}

std::optional<Reason> GemmFamily::WhyNot(std::size_t variant, const GemmProblem& problem, const DeviceFacts& facts,
                                         const DeviceFacts& staged) const {
  const GemmVariant& of = catalogue_[variant];
  if (!facts.archs.Has(of.info.arch)) return Reason::kNotOnDevice;
  if (!staged.archs.Has(of.info.arch)) return Reason::kStagingOff;
  if (!CanAddress(of, problem)) return Reason::kAlignment;
  if (facts.shared_bytes_per_block > 0 && kernels::GemmSharedBytes(of) > facts.shared_bytes_per_block) {
    return Reason::kSharedMemory;
  }
  return std::nullopt;
}

std::int64_t GemmFamily::Tiles(std::size_t variant, const GemmProblem& problem) const {
  return CountTiles(problem, catalogue_[variant].tile.m, catalogue_[variant].tile.n);
}

std::int64_t GemmFamily::Resident(std::size_t variant, const DeviceFacts& facts) const {
  return ResidentBlocks(catalogue_[variant], facts);
}

std::variant<Plan, Reason> GemmFamily::PlanOf(std::size_t variant, const Row& row, const GemmProblem& problem,
                                              const DeviceFacts& facts, const DeviceFacts& staged) const {
  const GemmVariant& of = catalogue_[variant];
  Plan plan{.variant = variant, .split = row.knobs[kSplit], .raster = row.knobs[kRaster]};
  if (plan.split == 0) plan.split = SplitFor(of, problem, staged);
  if (!LegalSplit(of, problem, plan.split)) return Reason::kSplit;
  if (plan.raster != 0 && !kernels::GemmTakesRaster(of)) return Reason::kRaster;
  if (plan.raster == 0) plan.raster = RasterFor(of, problem, facts);
  const auto workspace = kernels::GemmWorkspaceBytes(of, problem.batch, problem.m, problem.n, problem.k, plan.split);
  if (!workspace.has_value() || *workspace > staged.workspace_bytes_max) return Reason::kWorkspace;
  plan.workspace_bytes = *workspace;
  return plan;
}

std::vector<std::size_t> GemmFamily::Candidates(const GemmProblem& problem, const DeviceFacts& facts,
                                                const DeviceFacts& staged) const {
  const auto variants = Variants(problem, facts);
  std::vector<std::size_t> candidates;
  candidates.reserve(variants.size());
  std::copy_if(variants.begin(), variants.end(), std::back_inserter(candidates),
               [&](std::size_t variant) { return !WhyNot(variant, problem, facts, staged).has_value(); });
  return candidates;
}

ModelAnswer GemmFamily::Model(const GemmProblem& problem, const DeviceFacts& facts, const DeviceFacts& staged) const {
  return PlanByResidency(catalogue_, Candidates(problem, facts, staged), problem, facts, staged);
}

std::optional<Plan> GemmFamily::Degraded(const GemmProblem& problem, const DeviceFacts& facts,
                                         const DeviceFacts& staged) const {
  std::optional<Plan> plan = PlanByBands(catalogue_, Candidates(problem, facts, staged), problem, staged);
  if (plan.has_value()) plan->raster = RasterFor(catalogue_[plan->variant], problem, facts);
  return plan;
}

absl::Status GemmFamily::NoPlan(const GemmProblem& problem, const DeviceFacts& facts, const DeviceFacts& staged) const {
  const std::string of_class = problem.gemm_class.ToString();
  const std::string_view backend = kernels::BackendName(facts.backend);
  const auto variants = Variants(problem, facts);
  if (variants.empty()) {
    return absl::UnimplementedError(absl::StrCat("no kernel of class ", of_class, " on backend ", Av(backend)));
  }
  kernels::ArchSet built;  // trees that have the class
  std::string names;
  for (const std::size_t variant : variants) {
    const kernels::Arch arch = Info(variant).arch;
    if (built.Has(arch)) continue;
    built.Add(arch);
    absl::StrAppend(&names, names.empty() ? "" : ", ", Av(kernels::ArchName(arch)));
  }
  if ((built.bits() & facts.archs.bits()) == 0) {
    return absl::UnimplementedError(absl::StrCat("no kernel of class ", of_class,
                                                 " runs on this device; this build has them for ", names, " alone"));
  }
  if ((built.bits() & staged.archs.bits()) == 0) {
    return absl::UnimplementedError(absl::StrCat("the kernels of class ", of_class, ", for ", names,
                                                 " alone, are switched off; see `tessera plan staging`"));
  }
  return absl::UnimplementedError(absl::StrCat("no kernel of backend ", Av(backend), " takes class ", of_class,
                                               " with M=", problem.m, " N=", problem.n, " K=", problem.k,
                                               " and these strides on this device"));
}

std::vector<Recipe> GemmFamily::Recipes() const {
  std::vector<Recipe> recipes;
  for (std::size_t i = 0; i < catalogue_.size(); ++i) {
    const GemmVariant& variant = catalogue_[i];
    recipes.push_back({.variant = i,
                       .family = Schema().family(),
                       .info = variant.info,
                       .tile = {variant.tile.m, variant.tile.n, variant.tile.k},
                       .stages = variant.stages,
                       .shared_bytes = kernels::GemmSharedBytes(variant),
                       .threads = kernels::GemmBlockThreads(variant),
                       .takes_split = kernels::TakesSplit(variant.info.workspace),
                       .takes_raster = kernels::GemmTakesRaster(variant)});
  }
  return recipes;
}

}  // namespace tessera::planner
