#include "kernels/catalog/gemm_catalog.h"

#include <algorithm>
#include <array>

namespace tessera::kernels {
namespace {

constexpr GemmVariant MakeVariant(std::string_view id, std::string_view class_name, std::string_view recipe,
                                  GemmTile tile, int stages, WorkspaceRule workspace, std::string_view source_hash) {
  const NamedGemmClass parsed = ParseGemmClass(class_name).value();
  return {.info = {.id = id,
                   .class_name = class_name,
                   .recipe = recipe,
                   .arch = parsed.arch,
                   .backend = BackendOf(parsed.arch),
                   .workspace = workspace,
                   .source_hash = source_hash},
          .gemm_class = parsed.gemm_class,
          .tile = tile,
          .stages = stages};
}

#define TESSERA_GEMM_VARIANT(arch, symbol, id, class_name, recipe, tile_m, tile_n, tile_k, stages, workspace, hash) \
  MakeVariant(id, class_name, recipe, GemmTile{tile_m, tile_n, tile_k}, stages, workspace, hash),
constexpr GemmVariant kVariants[] = {
#include "kernels/gemm/gemm_variants.inc"
};
#undef TESSERA_GEMM_VARIANT

constexpr bool AccumulationIsNamedFastWithoutChoice() {
  for (const GemmVariant& variant : kVariants) {
    const GemmClass& c = variant.gemm_class;
    if (!HasAccumulationChoice(c.a, c.b) && c.accumulation != Accumulation::kFast) return false;
  }
  return true;
}
static_assert(AccumulationIsNamedFastWithoutChoice(),
              "gemm.kernels.toml: accum_choice and HasAccumulationChoice must name the same pairs");

// All of both operands where that is no more than kWanted, else parts of them; a tile of each is the least.
std::optional<std::int64_t> PackedWorkspaceBytes(const GemmVariant& variant, std::int64_t batch, std::int64_t m,
                                                 std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kWanted = (std::int64_t{64} << 20) - 2 * kPackAlignment;
  constexpr std::int64_t kLongest = std::int64_t{1} << 50;
  if (k > kLongest) return std::nullopt;
  const std::int64_t row = PackedRowBytes(k);
  const std::int64_t least =
      (std::min<std::int64_t>(m, variant.tile.m) + std::min<std::int64_t>(n, variant.tile.n)) * row;
  std::int64_t all = 0;
  const bool many = __builtin_add_overflow(m, n, &all) || __builtin_mul_overflow(all, row, &all) ||
                    __builtin_mul_overflow(all, batch, &all);
  return std::max(least, many ? kWanted : std::min(all, kWanted)) + 2 * kPackAlignment;
}

}  // namespace

std::span<const GemmVariant> GemmVariants() {
  return kVariants;
}

std::optional<std::size_t> FindGemmVariant(std::string_view id) {
  for (std::size_t i = 0; i < std::size(kVariants); ++i) {
    if (kVariants[i].info.id == id) return i;
  }
  return std::nullopt;
}

std::optional<std::int64_t> GemmWorkspaceBytes(const GemmVariant& variant, std::int64_t batch, std::int64_t m,
                                               std::int64_t n, std::int64_t k, int split) {
  if (batch == 0 || m == 0 || n == 0) return 0;
  if (variant.info.workspace == WorkspaceRule::kNone || variant.info.workspace == WorkspaceRule::kCluster) return 0;
  if (variant.info.workspace == WorkspaceRule::kLibrary) return kLibraryWorkspaceBytes;
  if (variant.info.workspace == WorkspaceRule::kPacked) return PackedWorkspaceBytes(variant, batch, m, n, k);
  std::int64_t bytes = static_cast<std::int64_t>(GemmAccumulatorBytes(variant.gemm_class));
  for (const std::int64_t factor : {batch, m, n, static_cast<std::int64_t>(split)}) {
    if (__builtin_mul_overflow(bytes, factor, &bytes)) return std::nullopt;
  }
  return bytes;
}

}  // namespace tessera::kernels
