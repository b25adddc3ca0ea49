#include "planner/gemm/bands.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "planner/row.h"

namespace tessera::planner {
namespace {

using kernels::Backend;
using kernels::GemmVariant;

// What a band asks beside extents.
enum class When : std::uint8_t {
  kAlways,
  kPartial,      // fewer tiles than half the processors
  kOneRound,     // no more tiles than processors, and enough to keep memory busy
  kFullRound,    // the same, and for most of them
  kNotWide,      // no more tiles of 96 columns, of which one row of tiles has many, than processors
  kMostOfRound,  // the same, for enough of them to be faster than slices, and sums in one level
  kManyTiles,    // one for each processor, or more
  kLeastTime,    // no other recipe of whole tiles of the same tree takes less time
};

// A band of problems and the recipe that takes it: m <= m_max, n <= n_max, k_min < k <= k_max and `when`. First match
// wins.
struct DegradedBand {
  Backend backend;
  std::int64_t m_max;
  std::int64_t n_max;
  std::int64_t k_min;
  std::int64_t k_max;
  std::string_view recipe;
  When when = When::kAlways;
};

// CPU bands. Packing a panel costs more than 16 x 16 x 64 products; one or two tiles of a long K leave threads idle
// unless K is split; everything else is whole tiles.
// CUDA bands. The Hopper tree first, where it can address the operands. To 64 rows reading B is what takes time: strips
// with all of K for the fewest rows, where there is one for each processor; else the least tile that has all rows, in
// slices of K, but for more than 32 rows whole tiles where these give work to most processors or to all of them several
// times. Above, slices where whole tiles would leave processors idle and K is long enough to pay for their exchange,
// and else the whole tiles of the width that takes the least time. What the copy engine cannot address is packed first,
// if its elements are bytes. Of the portable tiles, the small one where a tall one would be mostly empty.
constexpr DegradedBand kDegradedBands[] = {
    {Backend::kCpu, 16, 16, -1, 64, "reference"},
    {Backend::kCpu, 96, 96, 1024, kOpen, "splitk_48x48x512"},
    {Backend::kCpu, kOpen, kOpen, -1, kOpen, "blocked_96x96x256"},
    {Backend::kCpu, kOpen, kOpen, -1, kOpen, "reference"},
    {Backend::kCuda, 8, kOpen, -1, kOpen, "narrow_16x32x128_s18", When::kOneRound},
    {Backend::kCuda, 8, kOpen, -1, kOpen, "narrow_16x32x256_s18", When::kOneRound},
    {Backend::kCuda, 16, kOpen, -1, kOpen, "slices_16x128x64_s12"},
    {Backend::kCuda, 16, kOpen, -1, kOpen, "slices_16x128x128_s12"},
    {Backend::kCuda, 32, kOpen, -1, kOpen, "slices_32x128x64_s10"},
    {Backend::kCuda, 32, kOpen, -1, kOpen, "slices_32x128x128_s10"},
    {Backend::kCuda, 64, kOpen, -1, kOpen, "128x96x64_s7", When::kFullRound},
    {Backend::kCuda, 64, kOpen, -1, kOpen, "128x96x128_s7", When::kFullRound},
    {Backend::kCuda, 64, kOpen, 6143, kOpen, "128x64x64_s8", When::kMostOfRound},
    {Backend::kCuda, 64, kOpen, 6143, kOpen, "128x64x128_s8", When::kMostOfRound},
    {Backend::kCuda, 64, kOpen, -1, kOpen, "slices_64x128x64_s8", When::kNotWide},
    {Backend::kCuda, 64, kOpen, -1, kOpen, "slices_64x128x128_s8", When::kNotWide},
    {Backend::kCuda, kOpen, kOpen, 6143, kOpen, "128x64x64_s8", When::kMostOfRound},
    {Backend::kCuda, kOpen, kOpen, 6143, kOpen, "128x64x128_s8", When::kMostOfRound},
    {Backend::kCuda, kOpen, kOpen, 6143, kOpen, "slices_128x128x64_s5", When::kPartial},
    {Backend::kCuda, kOpen, kOpen, 6143, kOpen, "slices_128x128x128_s5", When::kPartial},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x256x64_s4", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x256x128_s4", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x224x64_s4", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x224x128_s4", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x192x128_s4", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x160x64_s5", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x160x128_s5", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x128x64_s6", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x128x128_s6", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x96x64_s7", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x96x128_s7", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x64x64_s8", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x64x128_s8", When::kLeastTime},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "packed_128x256x128_s4", When::kManyTiles},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "packed_128x128x128_s6"},
    {Backend::kCuda, 64, kOpen, -1, kOpen, "64x64x64_s4"},
    {Backend::kCuda, kOpen, kOpen, -1, kOpen, "128x128x32_s4"},
    {Backend::kVendor, kOpen, kOpen, -1, kOpen, "cublaslt"},
    {Backend::kVendor, kOpen, kOpen, -1, kOpen, "cublaslt_fp8"},
};

bool Matches(const DegradedBand& band, const GemmProblem& problem, Backend backend) {
  return band.backend == backend && problem.m <= band.m_max && problem.n <= band.n_max && problem.k > band.k_min &&
         problem.k <= band.k_max;
}

std::int64_t CeilDiv(std::int64_t value, std::int64_t by) {
  return value / by + (value % by != 0 ? 1 : 0);
}

// Columns of the tile by the time that its products take (docs/perf/log.md).
std::int64_t ColumnsByTime(const GemmVariant& variant) {
  if (variant.tile.n == 224) return 228;
  // Sums in two levels are added beside products from 128 columns on, and between them below.
  const bool waits = variant.gemm_class.accumulation == kernels::Accumulation::kExact && variant.tile.n < 128;
  return waits ? variant.tile.n * 5 / 4 : variant.tile.n;
}

// In columns of one tile: a round takes as long as its tile is wide, and the reads of A besides, which are worth
// kReadColumns.
std::int64_t WholeTileTime(const GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts) {
  constexpr std::int64_t kReadColumns = 28;
  const std::int64_t tiles = CountTiles(problem, variant.tile.m, variant.tile.n);
  return CeilDiv(tiles, std::max(1, facts.processors)) * (ColumnsByTime(variant) + kReadColumns);
}

// Processors that read as fast as memory gives, deep rings of copies each: one alone reads 91 GB/s (docs/perf/log.md).
std::int64_t Saturating(const DeviceFacts& facts) {
  return CeilDiv(2 * std::int64_t{std::max(1, facts.processors)}, 5);
}

bool IsWholeTiles(const GemmVariant& variant) {
  constexpr int kRows = 128;  // of the recipes that are not for few rows
  return variant.info.arch == kernels::Arch::kSm90a && variant.info.workspace == kernels::WorkspaceRule::kNone &&
         variant.tile.m == kRows;
}

// `others`: the variants of the problem's class.
bool Holds(When when, const GemmVariant& variant, std::span<const GemmVariant> catalogue,
           std::span<const std::size_t> others, const GemmProblem& problem, const DeviceFacts& facts) {
  switch (when) {
    case When::kAlways:
      return true;
    case When::kPartial:
      return 2 * CountTiles(problem, variant.tile.m, variant.tile.n) < std::max(1, facts.processors);
    case When::kOneRound: {
      const std::int64_t tiles = CountTiles(problem, variant.tile.m, variant.tile.n);
      return tiles <= std::max(1, facts.processors) && tiles >= Saturating(facts);
    }
    case When::kManyTiles:
      return CountTiles(problem, variant.tile.m, variant.tile.n) >= std::max(1, facts.processors);
    case When::kFullRound: {
      const std::int64_t tiles = CountTiles(problem, variant.tile.m, variant.tile.n);
      return tiles <= std::max(1, facts.processors) && 4 * tiles > 3 * std::int64_t{std::max(1, facts.processors)};
    }
    case When::kMostOfRound: {
      const std::int64_t processors = std::max(1, facts.processors);
      const std::int64_t tiles = CountTiles(problem, variant.tile.m, variant.tile.n);
      return tiles <= processors && 5 * tiles >= 3 * processors &&
             variant.gemm_class.accumulation != kernels::Accumulation::kExact;
    }
    case When::kNotWide: {
      constexpr std::int64_t kNarrowColumns = 96;
      return CountTiles(problem, variant.tile.m, kNarrowColumns) <= std::max(1, facts.processors);
    }
    case When::kLeastTime: {
      const std::int64_t time = WholeTileTime(variant, problem, facts);
      return std::none_of(others.begin(), others.end(), [&](std::size_t other) {
        return IsWholeTiles(catalogue[other]) && WholeTileTime(catalogue[other], problem, facts) < time;
      });
    }
  }
  return false;
}

// Slices for the blocks of a cluster. Many rounds of tiles need none. Else two: a round is over when its slowest block
// is, and shorter slices end closer together. More for tiles so few that two slices of each do not saturate memory, or
// of so many rows that products take long, too; but no more than three without need, as clusters of four or eight do
// not find room on all processors, whose groups have sizes that these do not divide (measured, docs/perf/log.md). A
// slice is no shorter than what fills the pipeline once.
int ClusterSplitFor(const GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts) {
  constexpr std::int64_t kLeastSteps = 4;
  constexpr int kManyRows = 128;
  const std::int64_t processors = std::max(1, facts.processors);
  const std::int64_t saturating = Saturating(facts);
  const std::int64_t tiles = CountTiles(problem, variant.tile.m, variant.tile.n);
  const std::int64_t steps = CeilDiv(problem.k, variant.tile.k);
  if (tiles == 0 || tiles >= 2 * processors) return 1;
  int split = 1;
  while (split < kernels::kClusterLimit && (split < 2 || tiles * split < saturating) &&
         steps >= 2 * kLeastSteps * split) {
    split *= 2;
  }
  return split == 2 && variant.tile.m >= kManyRows && 4 * tiles <= processors ? 3 : split;
}

}  // namespace

std::int64_t CountTiles(const GemmProblem& problem, std::int64_t m, std::int64_t n) {
  std::int64_t tiles = 1;
  for (const std::int64_t factor : {CeilDiv(problem.m, m), CeilDiv(problem.n, n), problem.batch}) {
    if (factor == 0) return 0;
    if (__builtin_mul_overflow(tiles, factor, &tiles)) tiles = kManyTiles;
    tiles = std::min(tiles, kManyTiles);
  }
  return tiles;
}

bool CanAddress(const GemmVariant& variant, const GemmProblem& problem) {
  if (variant.info.workspace != kernels::WorkspaceRule::kPacked) return problem.addressable.Has(variant.info.arch);
  constexpr std::int64_t kTilesLimit = std::int64_t{1} << 31;
  return kernels::PackedTakes(problem.gemm_class, problem.m, problem.n, problem.k) &&
         CountTiles(problem, variant.tile.m, variant.tile.n) < kTilesLimit;
}

// Enough slices to give each processor two, none shorter than one K block of the tile.
int SplitFor(const GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts) {
  if (variant.info.workspace == kernels::WorkspaceRule::kCluster) return ClusterSplitFor(variant, problem, facts);
  if (variant.info.workspace != kernels::WorkspaceRule::kSplitPartials) return 1;
  const std::int64_t blocks = CeilDiv(problem.k, variant.tile.k);
  return static_cast<int>(std::clamp<std::int64_t>(blocks, 1, 2 * std::max(1, facts.processors)));
}

std::optional<Plan> PlanByBands(std::span<const GemmVariant> catalogue, std::span<const std::size_t> variants,
                                const GemmProblem& problem, const DeviceFacts& facts) {
  for (const DegradedBand& band : kDegradedBands) {
    if (!Matches(band, problem, facts.backend)) continue;
    for (const std::size_t index : variants) {
      const GemmVariant& variant = catalogue[index];
      if (variant.info.recipe != band.recipe || !CanAddress(variant, problem) || !facts.archs.Has(variant.info.arch))
        continue;
      if (!Holds(band.when, variant, catalogue, variants, problem, facts)) continue;
      const int split = SplitFor(variant, problem, facts);
      const auto workspace =
          kernels::GemmWorkspaceBytes(variant, problem.batch, problem.m, problem.n, problem.k, split);
      if (!workspace.has_value() || *workspace > facts.workspace_bytes_max) continue;
      return Plan{.variant = index, .split = split, .workspace_bytes = *workspace, .source = Source::kDegraded};
    }
  }
  return std::nullopt;
}

}  // namespace tessera::planner
