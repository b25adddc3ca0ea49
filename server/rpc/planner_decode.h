// Problems of the Planner service -> problems of the planner: the last code that sees their messages. Errors begin with
// the field's path.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kernels/catalog/variant.h"
#include "planner/gemm_planner.h"
#include "tessera/v1/planner.pb.h"

namespace tessera::server {

// Families become alternatives of a variant as they are planned.
struct ProbedProblem {
  planner::GemmProblem gemm;
  std::optional<kernels::Backend> backend;  // strict; nullopt = the daemon's default
  std::string device;                       // of the planner's table; empty = those that are served
};

// `field`: the path of `problem` in its request. Which trees can address the operands follows from their strides and
// alignment, as in a call.
absl::StatusOr<ProbedProblem> DecodeProblem(const v1::Problem& problem, std::string_view field);

}  // namespace tessera::server
