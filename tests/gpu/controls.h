// Mutation controls: launches and results damaged on purpose. The checker that passes the variants must refuse each.
#pragma once

#include <cstddef>

#include "tests/gpu/gemm_problem.h"
#include "tests/gpu/report.h"

namespace tessera::gpu_test {

// On a problem of ControlCase(). `position` is the variant's place in the report.
void RunControls(GemmProblem& problem, Report& report, std::size_t position);

}  // namespace tessera::gpu_test
