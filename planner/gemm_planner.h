// GEMM problem -> plan by a configuration that does not change: the chain without cache, counters and history, for
// tests, tools and measurements. The server's is planner/planner.h.
#pragma once

#include <span>

#include "absl/status/statusor.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/config.h"
#include "planner/gemm/family.h"
#include "planner/gemm/problem.h"
#include "planner/plan.h"

namespace tessera::planner {

class GemmPlanner {
 public:
  // `catalogue` must outlive the planner.
  explicit GemmPlanner(std::span<const kernels::GemmVariant> catalogue, PlannerConfig config = {});

  // The plan of `problem` on a device of these facts. UNIMPLEMENTED, with the reason, if the catalogue has no variant
  // of that class for the device. Thread-safe.
  absl::StatusOr<Plan> Decide(const GemmProblem& problem, const DeviceFacts& facts) const;

 private:
  GemmFamily family_;
  PlannerConfig config_;
};

}  // namespace tessera::planner
