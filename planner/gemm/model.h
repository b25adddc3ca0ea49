// What is reckoned from a device's sizes rather than measured.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/catalog/gemm_catalog.h"
#include "planner/family.h"
#include "planner/gemm/problem.h"
#include "planner/plan.h"

namespace tessera::planner {

// Blocks of the variant that one processor holds at once, by shared memory and threads: registers are not known here.
// At least 1, also where a size is not known.
std::int64_t ResidentBlocks(const kernels::GemmVariant& variant, const DeviceFacts& facts);

// The model of the portable tree: most blocks a processor, then most stages, then the catalogue's order. Pricing waves,
// or flops and bytes, ranks tiles worse than that (planner/README.md). It abstains on the CPU, on GPUs of which the
// bands were measured, of unknown sizes, and where it would have to leave the choice to the catalogue's order alone.
// `candidates`: those that can run, in the catalogue's order.
ModelAnswer PlanByResidency(std::span<const kernels::GemmVariant> catalogue, std::span<const std::size_t> candidates,
                            const GemmProblem& problem, const DeviceFacts& facts, const DeviceFacts& staged);

// Whether reckoning may speak: a GPU without a tree of its own.
bool IsPortableDevice(const DeviceFacts& facts);

// Tiles of M that are walked together so that what they share of A stays in L2 while B passes by; 0 = the variant's own
// choice.
int RasterFor(const kernels::GemmVariant& variant, const GemmProblem& problem, const DeviceFacts& facts);

}  // namespace tessera::planner
