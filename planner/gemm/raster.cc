// The order of tiles by the budget of L2. Bands of `raster` tiles of M are walked along N: the rows of A that a band
// has are read once from memory if they stay in L2 while all of B passes by, so a band is as high as what L2 has left
// beside the stream of B, but no lower than keeps every processor busy in one sweep.

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "planner/gemm/bands.h"
#include "planner/gemm/model.h"

namespace tessera::planner {
namespace {

using kernels::GemmVariant;

// Extents are 63-bit numbers: what is too large to reckon with is as good as endless.
constexpr std::int64_t kMany = std::int64_t{1} << 60;

std::int64_t Times(std::int64_t left, std::int64_t right) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(left, right, &product) ? kMany : std::min(product, kMany);
}

std::int64_t CeilDiv(std::int64_t value, std::int64_t by) {
  return value / by + (value % by != 0 ? 1 : 0);
}

}  // namespace

int RasterFor(const GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts) {
  const kernels::Arch arch = variant.info.arch;
  const bool portable = arch == kernels::Arch::kSm80 || arch == kernels::Arch::kSm89;
  if (!portable || !IsPortableDevice(facts) || facts.l2_bytes <= 0) return 0;
  if (problem.m <= 0 || problem.n <= 0 || problem.k <= 0) return 0;
  const auto a_row = Times(problem.k, static_cast<std::int64_t>(DTypeBytes(problem.gemm_class.a)));
  const auto b_row = Times(problem.k, static_cast<std::int64_t>(DTypeBytes(problem.gemm_class.b)));
  const std::int64_t a_bytes = Times(problem.m, a_row);
  const std::int64_t b_bytes = Times(problem.n, b_row);
  // B stays in L2 whatever the order, with half left for A and D.
  if (b_bytes <= facts.l2_bytes / 2) return 1;

  // A quarter of L2 for the stream of B, and half where B is the fatter operand.
  const std::int64_t budget = b_bytes > a_bytes ? facts.l2_bytes / 2 : facts.l2_bytes - facts.l2_bytes / 4;
  const std::int64_t fits = budget / Times(variant.tile.m, a_row);
  const std::int64_t tiles_n = CeilDiv(problem.n, variant.tile.n);
  const std::int64_t at_once = std::max(1, facts.processors) * ResidentBlocks(variant, facts);
  const std::int64_t busy = CeilDiv(at_once, tiles_n);
  const std::int64_t tiles_m = CeilDiv(problem.m, variant.tile.m);
  constexpr std::int64_t kMax = std::int64_t{1} << 20;
  return static_cast<int>(std::clamp<std::int64_t>(std::max(fits, busy), 1, std::min(tiles_m, kMax)));
}

}  // namespace tessera::planner
