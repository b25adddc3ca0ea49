// One cell of the GEMM benchmark, measured: what the planner chooses for backend cuda beside the best of what cuBLASLt
// proposes, on the same numbers, in turns.
#pragma once

#include "absl/status/statusor.h"
#include "planner/plan.h"
#include "tests/gpu/bench_gemm_grid.h"
#include "tests/gpu/bench_gemm_race.h"
#include "tests/gpu/bench_gemm_rows.h"

namespace tessera::gpu_test {

// UNIMPLEMENTED, with the planner's words, where it refuses the product to a device of `facts`; DATA_LOSS where either
// product is wrong.
absl::StatusOr<BenchResult> MeasureCell(const BenchCell& cell, const planner::DeviceFacts& facts, Stopwatch& watch);

}  // namespace tessera::gpu_test
