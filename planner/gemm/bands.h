// The last link of the chain for GEMM: bands that always match, so that planning is a total function over every class
// that the catalogue has.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "kernels/catalog/gemm_catalog.h"
#include "planner/gemm/problem.h"
#include "planner/plan.h"

namespace tessera::planner {

// More tiles than any launch has, and few enough to reckon with.
inline constexpr std::int64_t kManyTiles = std::int64_t{1} << 50;

// Tiles of m x n outputs in the whole problem, at most kManyTiles.
std::int64_t CountTiles(const GemmProblem& problem, std::int64_t m, std::int64_t n);

// Whether the variant's loaders reach the problem's operands as they lie.
bool CanAddress(const kernels::GemmVariant& variant, const GemmProblem& problem);

// Slices of K that suit the variant, 1 where it takes none.
int SplitFor(const kernels::GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts);

// `variants`: of the problem's class and the device's backend. nullopt: none of them can run it.
std::optional<Plan> PlanByBands(std::span<const kernels::GemmVariant> catalogue, std::span<const std::size_t> variants,
                                const GemmProblem& problem, const DeviceFacts& facts);

}  // namespace tessera::planner
