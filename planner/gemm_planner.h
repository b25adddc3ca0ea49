// GEMM problem -> plan.
//
// The chain of sources is override > injected > built-in rows > model > degraded bands. This file holds the last link:
// bands that always match, so that planning is a total function over every class that the catalogue has.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/plan.h"

namespace tessera::planner {

struct GemmProblem {
  kernels::GemmClass gemm_class;
  std::int64_t batch = 1;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  // Trees of variants whose loaders can address the operands: their strides and alignment.
  kernels::ArchSet addressable = {kernels::Arch::kCpu, kernels::Arch::kSm80, kernels::Arch::kSm89,
                                  kernels::Arch::kSm90a, kernels::Arch::kVendor};
};

class GemmPlanner {
 public:
  // `catalogue` must outlive the planner.
  explicit GemmPlanner(std::span<const kernels::GemmVariant> catalogue);

  // The plan of `problem` on a device of these facts. UNIMPLEMENTED, with the reason, if the catalogue has no variant
  // of that class for the device. Thread-safe.
  absl::StatusOr<Plan> Decide(const GemmProblem& problem, const DeviceFacts& facts) const;

 private:
  const std::vector<std::size_t>* VariantsOf(const GemmProblem& problem, const DeviceFacts& facts) const;

  std::span<const kernels::GemmVariant> catalogue_;
  // Class and backend -> indices of its variants.
  std::unordered_map<std::uint32_t, std::vector<std::size_t>> by_class_;
};

}  // namespace tessera::planner
