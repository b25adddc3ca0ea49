// What a family of kernels tells the chain, the cache and the rows about itself. Nothing here knows of M, N and K.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "absl/status/status.h"
#include "kernels/catalog/variant.h"
#include "planner/config.h"
#include "planner/plan.h"
#include "planner/reason.h"
#include "planner/row.h"

namespace tessera::planner {

// Answer of a model: a plan, and for people what it went by. No plan: it abstains.
struct ModelAnswer {
  std::optional<Plan> plan;
  std::string detail;
};

// A recipe that rows can name, with its geometry.
struct Recipe {
  std::size_t variant = 0;  // index in the family's catalogue
  std::string_view family;
  kernels::VariantInfo info;
  std::array<int, 3> tile{};      // by the family's axes
  int stages = 0;                 // tiles of K that are under way at once; 0 = no such pipeline
  std::int64_t shared_bytes = 0;  // of a block; 0 = none, or not known
  int threads = 0;                // of a block; 0 = none, or not known
  bool takes_split = false;
  bool takes_raster = false;
};

// `facts` are a device's; `staged` the same less what SetStaging has switched off. Variants are indices in the family's
// catalogue. All members are const and thread-safe.
template <typename F>
concept PlanFamily = requires(const F& family, const typename F::Problem& problem, const DeviceFacts& facts,
                              const DeviceFacts& staged, const Staging& staging, std::size_t variant, const Row& row) {
  { F::Schema() } -> std::convertible_to<const RowSchema&>;
  { F::Key(problem) } -> std::same_as<std::array<std::uint64_t, F::kKeyWords>>;  // equal only for equal problems
  { F::ExtentsOf(problem) } -> std::same_as<Extents>;                            // by the schema's axes
  { F::ClassKey(problem, facts) } -> std::same_as<std::uint64_t>;                // as RowSchema::ClassKey
  { F::ToText(problem) } -> std::same_as<std::string>;
  { F::Staged(facts, staging) } -> std::same_as<DeviceFacts>;
  { family.Variants(problem, facts) } -> std::same_as<std::span<const std::size_t>>;  // of the class, any tree
  { family.Info(variant) } -> std::same_as<const kernels::VariantInfo&>;
  // Why the variant cannot run the problem, whatever the launch's shape.
  { family.WhyNot(variant, problem, facts, staged) } -> std::same_as<std::optional<Reason>>;
  { family.Tiles(variant, problem) } -> std::same_as<std::int64_t>;
  { family.Resident(variant, facts) } -> std::same_as<std::int64_t>;  // blocks a processor holds at once, >= 1
  // The launch that the row's knobs ask for, or why it is not legal.
  { family.PlanOf(variant, row, problem, facts, staged) } -> std::same_as<std::variant<Plan, Reason>>;
  { family.Model(problem, facts, staged) } -> std::same_as<ModelAnswer>;
  // Answers wherever any variant can run.
  { family.Degraded(problem, facts, staged) } -> std::same_as<std::optional<Plan>>;
  { family.NoPlan(problem, facts, staged) } -> std::same_as<absl::Status>;  // UNIMPLEMENTED, with the reason
};

}  // namespace tessera::planner
