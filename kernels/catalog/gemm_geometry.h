// What a block of a GEMM variant takes of a processor, from its row alone, so that whoever plans need not include
// device code. tests/kernels and the planner's tests hold these numbers against what the driver reported of the kernels
// themselves (docs/perf/h200/conformance.json).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "common/dtype.h"
#include "kernels/catalog/gemm_catalog.h"

namespace tessera::kernels {

namespace internal {

// The families of the Hopper tree that are not plain tiles begin their recipes with a word.
constexpr bool RecipeBegins(const GemmVariant& variant, std::string_view word) {
  return variant.info.recipe.substr(0, word.size()) == word;
}

constexpr std::int64_t StageBytes(const GemmVariant& variant) {
  const auto element =
      static_cast<std::int64_t>(std::max(DTypeBytes(variant.gemm_class.a), DTypeBytes(variant.gemm_class.b)));
  return (std::int64_t{variant.tile.m} + variant.tile.n) * variant.tile.k * element;
}

// The area behind the ring of kernels/gemm/sm90a: what the slices of a cluster exchange, or the tiles that are on their
// way to D, of two warpgroups of four warps, in buffers of 16 rows.
constexpr std::int64_t HopperAreaBytes(const GemmVariant& variant) {
  constexpr std::int64_t kWarps = 8;
  constexpr std::int64_t kRows = 16;
  if (RecipeBegins(variant, "narrow_")) return 0;
  if (RecipeBegins(variant, "slices_")) return std::int64_t{variant.tile.m} * variant.tile.n * 4;
  const bool narrow = variant.tile.n % 64 != 0;
  constexpr std::int64_t kBox = 32;  // where a warp's tile goes
  const std::int64_t columns = narrow ? 32 : 64;
  const std::int64_t blocks = variant.tile.n / columns;
  const std::int64_t buffers = narrow && blocks <= 5 ? blocks : 2;
  return kWarps * (buffers * kRows * columns * 2 + kBox);
}

}  // namespace internal

// Bytes of shared memory of a block; 0 for what has no blocks.
constexpr std::int64_t GemmSharedBytes(const GemmVariant& variant) {
  constexpr std::int64_t kSwizzleAtom = 1024;
  constexpr std::int64_t kBarrier = 8;
  const std::int64_t ring = variant.stages * internal::StageBytes(variant);
  switch (variant.info.arch) {
    case Arch::kSm80:
    case Arch::kSm89:
      // The ring's memory is that of the sums on their way to D afterwards.
      return std::max(ring, std::int64_t{variant.tile.m} * variant.tile.n * 4);
    case Arch::kSm90a:
      return kSwizzleAtom + ring + internal::HopperAreaBytes(variant) + (2 * variant.stages + 2) * kBarrier;
    case Arch::kCpu:
    case Arch::kVendor:
      break;
  }
  return 0;
}

// Threads of a block; 0 for what has no blocks.
constexpr int GemmBlockThreads(const GemmVariant& variant) {
  switch (variant.info.arch) {
    case Arch::kSm80:
    case Arch::kSm89:
      return 128;
    case Arch::kSm90a:
      return internal::RecipeBegins(variant, "narrow_") ? 160 : 384;
    case Arch::kCpu:
    case Arch::kVendor:
      break;
  }
  return 0;
}

// Whether a launch heeds LaunchShape::raster.
constexpr bool GemmTakesRaster(const GemmVariant& variant) {
  return variant.info.backend == Backend::kCuda;
}

}  // namespace tessera::kernels
