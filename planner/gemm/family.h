// The GEMM family: what the shared parts of the planner ask of it (planner/family.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/family.h"
#include "planner/gemm/problem.h"

namespace tessera::planner {

// Thread-safe: immutable.
class GemmFamily {
 public:
  using Problem = GemmProblem;
  static constexpr std::size_t kKeyWords = 5;

  // `catalogue` must outlive the family.
  explicit GemmFamily(std::span<const kernels::GemmVariant> catalogue);

  static const RowSchema& Schema();
  static std::array<std::uint64_t, kKeyWords> Key(const GemmProblem& problem);
  static Extents ExtentsOf(const GemmProblem& problem);
  static std::uint64_t ClassKey(const GemmProblem& problem, const DeviceFacts& facts);
  static std::string ToText(const GemmProblem& problem);
  static DeviceFacts Staged(const DeviceFacts& facts, const Staging& staging);

  std::span<const std::size_t> Variants(const GemmProblem& problem, const DeviceFacts& facts) const;
  const kernels::VariantInfo& Info(std::size_t variant) const { return catalogue_[variant].info; }
  std::optional<Reason> WhyNot(std::size_t variant, const GemmProblem& problem, const DeviceFacts& facts,
                               const DeviceFacts& staged) const;
  std::int64_t Tiles(std::size_t variant, const GemmProblem& problem) const;
  std::int64_t Resident(std::size_t variant, const DeviceFacts& facts) const;
  std::variant<Plan, Reason> PlanOf(std::size_t variant, const Row& row, const GemmProblem& problem,
                                    const DeviceFacts& facts, const DeviceFacts& staged) const;
  ModelAnswer Model(const GemmProblem& problem, const DeviceFacts& facts, const DeviceFacts& staged) const;
  std::optional<Plan> Degraded(const GemmProblem& problem, const DeviceFacts& facts, const DeviceFacts& staged) const;
  absl::Status NoPlan(const GemmProblem& problem, const DeviceFacts& facts, const DeviceFacts& staged) const;

  std::vector<Recipe> Recipes() const;

 private:
  // Those of Variants that can run it.
  std::vector<std::size_t> Candidates(const GemmProblem& problem, const DeviceFacts& facts,
                                      const DeviceFacts& staged) const;

  std::span<const kernels::GemmVariant> catalogue_;
  // ClassKey -> indices of its variants.
  std::unordered_map<std::uint64_t, std::vector<std::size_t>> by_class_;
};
static_assert(PlanFamily<GemmFamily>);

}  // namespace tessera::planner
