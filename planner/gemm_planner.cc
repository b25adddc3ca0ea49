#include "planner/gemm_planner.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::planner {
namespace {

using kernels::Backend;
using kernels::GemmVariant;

constexpr std::int64_t kOpen = std::numeric_limits<std::int64_t>::max();

// A band of problems and the recipe that takes it: m <= m_max, n <= n_max, k_min < k <= k_max, and tiles for every
// processor where `fills` says so. First match wins.
struct DegradedBand {
  Backend backend;
  std::int64_t m_max;
  std::int64_t n_max;
  std::int64_t k_min;
  std::int64_t k_max;
  std::string_view recipe;
  bool fills = false;
};

// CPU bands. Packing a panel costs more than 16 x 16 x 64 products; one or two tiles of a long K leave threads idle
// unless K is split; everything else is whole tiles.
// CUDA bands. The Hopper tree first, where it can address the operands: its large tile if there is one for every SM,
// else one of half the size (docs/perf/log.md). Of the portable tiles, the small one where a tall one would be mostly
// empty.
constexpr DegradedBand kDegradedBands[] = {
    {Backend::kCpu, 16, 16, -1, 64, "reference"},
    {Backend::kCpu, 96, 96, 1024, kOpen, "splitk_48x48x512"},
    {Backend::kCpu, kOpen, kOpen, -1, kOpen, "blocked_96x96x256"},
    {Backend::kCpu, kOpen, kOpen, -1, kOpen, "reference"},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x256x64_s4", /*fills=*/true},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x128x64_s6"},
    {Backend::kCuda, 64, kOpen, -1, kOpen, "64x64x64_s4"},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x128x32_s4"},
    {Backend::kVendor, kOpen, kOpen, -1, kOpen, "cublaslt"},
    {Backend::kVendor, kOpen, kOpen, -1, kOpen, "cublaslt_fp8"},
};

std::uint32_t ClassKey(const kernels::GemmClass& gemm_class, Backend backend) {
  return gemm_class.Key() | static_cast<std::uint32_t>(backend) << 24U;
}

bool Matches(const DegradedBand& band, const GemmProblem& problem, Backend backend) {
  return band.backend == backend && problem.m <= band.m_max && problem.n <= band.n_max && problem.k > band.k_min &&
         problem.k <= band.k_max;
}

std::int64_t CeilDiv(std::int64_t value, std::int64_t by) {
  return value / by + (value % by != 0 ? 1 : 0);
}

// Whether there is a tile for every processor. Counts no further than it must: the product of all may be too large.
bool Fills(const GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts) {
  std::int64_t tiles = 1;
  for (const std::int64_t factor :
       {CeilDiv(problem.m, variant.tile.m), CeilDiv(problem.n, variant.tile.n), problem.batch}) {
    if (factor == 0) return false;
    if (tiles >= facts.processors || factor >= facts.processors) {
      tiles = facts.processors;
    } else {
      tiles *= factor;
    }
  }
  return tiles >= facts.processors;
}

bool CanRun(const GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts) {
  return facts.archs.Has(variant.info.arch) && problem.addressable.Has(variant.info.arch);
}

// Enough slices to give each processor two, none shorter than one K block of the tile.
int SplitFor(const GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts) {
  if (variant.info.workspace != kernels::WorkspaceRule::kSplitPartials) return 1;
  const std::int64_t blocks = CeilDiv(problem.k, variant.tile.k);
  return static_cast<int>(std::clamp<std::int64_t>(blocks, 1, 2 * std::max(1, facts.processors)));
}

}  // namespace

GemmPlanner::GemmPlanner(std::span<const GemmVariant> catalogue) : catalogue_(catalogue) {
  for (std::size_t i = 0; i < catalogue_.size(); ++i) {
    by_class_[ClassKey(catalogue_[i].gemm_class, catalogue_[i].info.backend)].push_back(i);
  }
}

const std::vector<std::size_t>* GemmPlanner::VariantsOf(const GemmProblem& problem, const DeviceFacts& facts) const {
  const auto found = by_class_.find(ClassKey(problem.gemm_class, facts.backend));
  return found == by_class_.end() ? nullptr : &found->second;
}

absl::StatusOr<Plan> GemmPlanner::Decide(const GemmProblem& problem, const DeviceFacts& facts) const {
  const std::vector<std::size_t>* variants = VariantsOf(problem, facts);
  if (variants == nullptr) {
    return absl::UnimplementedError(absl::StrCat("no kernel of class ", problem.gemm_class.ToString(), " on backend ",
                                                 Av(kernels::BackendName(facts.backend))));
  }
  for (const DegradedBand& band : kDegradedBands) {
    if (!Matches(band, problem, facts.backend)) continue;
    for (const std::size_t index : *variants) {
      const GemmVariant& variant = catalogue_[index];
      if (variant.info.recipe != band.recipe || !CanRun(variant, problem, facts)) continue;
      if (band.fills && !Fills(variant, problem, facts)) continue;
      const int split = SplitFor(variant, problem, facts);
      const auto workspace = kernels::GemmWorkspaceBytes(variant, problem.batch, problem.m, problem.n, split);
      if (!workspace.has_value() || *workspace > facts.workspace_bytes_max) continue;
      return Plan{.variant = index, .split = split, .workspace_bytes = *workspace, .source = Source::kDegraded};
    }
  }
  return absl::UnimplementedError(absl::StrCat(
      "no kernel of backend ", Av(kernels::BackendName(facts.backend)), " takes class ", problem.gemm_class.ToString(),
      " with M=", problem.m, " N=", problem.n, " K=", problem.k, " and these strides on this device"));
}

}  // namespace tessera::planner
