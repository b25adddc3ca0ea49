// The table of all GEMM variants of this build, from kernels/gemm/gemm.kernels.toml.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kernels/catalog/gemm_class.h"
#include "kernels/catalog/variant.h"

namespace tessera::kernels {

struct GemmTile {
  int m = 0;
  int n = 0;
  int k = 0;
};

struct GemmVariant {
  VariantInfo info;
  GemmClass gemm_class;
  GemmTile tile;
  int stages = 0;  // tiles of K that are under way at once; 0 = no such pipeline
};

// In row order. An index into this table names a variant for kernels/launch and for metrics.
std::span<const GemmVariant> GemmVariants();

std::optional<std::size_t> FindGemmVariant(std::string_view id);

// Accumulators of integer pairs are 64-bit (their sums are exact), of all others float32.
constexpr std::size_t GemmAccumulatorBytes(const GemmClass& gemm_class) {
  return gemm_class.a == DType::kS8 && gemm_class.b == DType::kS8 ? 8 : 4;
}

// Of variants that pack operands of one byte: bytes from one packed row to the next.
inline constexpr std::int64_t kPackAlignment = 256;
constexpr std::int64_t PackedRowBytes(std::int64_t k) {
  constexpr std::int64_t kLine = 16;
  return (k + kLine - 1) / kLine * kLine;
}

// Extents that they take: what the copy engine's coordinates reach, and for integers sums that fit 32 bits. Whatever
// the strides and the alignment.
constexpr bool PackedTakes(const GemmClass& gemm_class, std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kExtents = std::int64_t{1} << 31;
  constexpr std::int64_t kIntegerSum = std::int64_t{1} << 17;
  return m < kExtents && n < kExtents && k < (gemm_class.a == DType::kS8 ? kIntegerSum : kExtents);
}

// Scratch that a launch with `split` K slices needs; nullopt if the number does not fit 63 bits.
std::optional<std::int64_t> GemmWorkspaceBytes(const GemmVariant& variant, std::int64_t batch, std::int64_t m,
                                               std::int64_t n, std::int64_t k, int split);

}  // namespace tessera::kernels
