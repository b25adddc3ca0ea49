#include "planner/gemm_planner.h"

#include <utility>

#include "planner/chain.h"

namespace tessera::planner {

GemmPlanner::GemmPlanner(std::span<const kernels::GemmVariant> catalogue, PlannerConfig config)
    : family_(catalogue), config_(std::move(config)) {}

absl::StatusOr<Plan> GemmPlanner::Decide(const GemmProblem& problem, const DeviceFacts& facts) const {
  PassedOver passed;
  return Chain(family_, config_, problem, facts, passed).Decide();
}

}  // namespace tessera::planner
