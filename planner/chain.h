// The chain: override rows, injected rows, built-in rows, the model, the degraded bands. The first that has a plan
// decides. For any family.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/statusor.h"
#include "planner/config.h"
#include "planner/family.h"
#include "planner/plan.h"
#include "planner/probe.h"
#include "planner/reason.h"

namespace tessera::planner {

// Rows that were passed over on the way to a decision, by reason.
struct PassedOver {
  std::array<std::uint32_t, kCountedReasons> by_reason{};
  bool any = false;

  void Add(Reason reason) {
    if (!IsCounted(reason)) return;
    ++by_reason[static_cast<std::size_t>(reason)];
    any = true;
  }
};

template <PlanFamily Family>
class Chain {
 public:
  using Problem = typename Family::Problem;

  // All must outlive the chain. `probe`: null, or where to note what was looked at, up to `candidates_max`.
  Chain(const Family& family, const PlannerConfig& config, const Problem& problem, const DeviceFacts& facts,
        PassedOver& passed, Probe* probe = nullptr, std::size_t candidates_max = 0)
      : family_(family),
        config_(config),
        problem_(problem),
        facts_(facts),
        staged_(Family::Staged(facts, config.staging)),
        passed_(passed),
        probe_(probe),
        candidates_max_(candidates_max) {}

  absl::StatusOr<Plan> Decide() {
    const std::optional<Plan> plan = Find();
    if (probe_ != nullptr) NoteVariants(plan);
    if (plan.has_value()) return *plan;
    return family_.NoPlan(problem_, facts_, staged_);
  }

 private:
  std::optional<Plan> Find() {
    if (family_.Variants(problem_, facts_).empty()) return std::nullopt;
    if (config_.AsksRows()) {
      for (const Tier tier : {Tier::kOverride, Tier::kInjected, Tier::kBuiltin}) {
        if (std::optional<Plan> plan = FromRows(tier)) return plan;
      }
    }
    if (config_.AsksModel()) {
      ModelAnswer answer = family_.Model(problem_, facts_, staged_);
      if (probe_ != nullptr) probe_->detail = std::move(answer.detail);
      if (answer.plan.has_value()) {
        answer.plan->source = Source::kModel;
        return answer.plan;
      }
    }
    std::optional<Plan> plan = family_.Degraded(problem_, facts_, staged_);
    if (plan.has_value()) plan->source = Source::kDegraded;
    return plan;
  }

  std::optional<Plan> FromRows(Tier tier) {
    const RowSet& set = config_.tier(tier);
    if (set.rows().empty()) return std::nullopt;
    for (const std::uint32_t index : set.Find(Family::ClassKey(problem_, facts_))) {
      const Row& row = set.rows()[index];
      std::optional<std::size_t> variant;
      const std::variant<Plan, Reason> outcome = Ask(row, variant);
      if (const Plan* plan = std::get_if<Plan>(&outcome)) {
        Plan decided = *plan;
        decided.source = SourceOf(tier);
        if (probe_ != nullptr) probe_->row = row;
        return decided;
      }
      const Reason reason = std::get<Reason>(outcome);
      passed_.Add(reason);
      if (probe_ != nullptr) Note({.source = SourceOf(tier), .variant = variant, .row = row, .reason = reason});
    }
    return std::nullopt;
  }

  std::variant<Plan, Reason> Ask(const Row& row, std::optional<std::size_t>& variant) const {
    const Extents extents = Family::ExtentsOf(problem_);
    for (std::size_t axis = 0; axis < kAxesMax; ++axis) {
      if (!row.bands[axis].Has(extents[axis])) return Reason::kBands;
    }
    const auto variants = family_.Variants(problem_, facts_);
    const auto named = std::find_if(variants.begin(), variants.end(), [&](std::size_t index) {
      const kernels::VariantInfo& info = family_.Info(index);
      return info.recipe == row.recipe && info.class_name == row.class_name;
    });
    if (named == variants.end()) return Reason::kUnknownRecipe;
    variant = *named;
    if (const auto reason = family_.WhyNot(*named, problem_, facts_, staged_)) return *reason;
    if (!Fills(row, *named)) return Reason::kBlocks;
    return family_.PlanOf(*named, row, problem_, facts_, staged_);
  }

  // The gates, in numbers that do not overflow: tiles are at most 2^50, and gates at most 2^20 (ParseRows).
  bool Fills(const Row& row, std::size_t variant) const {
    if (row.waves == 0 && row.blocks == 0) return true;
    const std::int64_t tiles = family_.Tiles(variant, problem_);
    const std::int64_t processors = std::max(1, facts_.processors);
    if (row.blocks > 0 && tiles / processors < row.blocks) return false;
    return row.waves == 0 || tiles / (processors * family_.Resident(variant, facts_)) >= row.waves;
  }

  // Why each variant of the class but the chosen one lost.
  void NoteVariants(const std::optional<Plan>& plan) {
    const bool by_row = plan.has_value() && probe_->row.has_value();
    for (const std::size_t variant : family_.Variants(problem_, facts_)) {
      if (plan.has_value() && plan->variant == variant) continue;
      Reason reason = by_row ? Reason::kRowDecided : Reason::kOutranked;
      if (const auto why = family_.WhyNot(variant, problem_, facts_, staged_)) {
        reason = *why;
      } else {
        const std::variant<Plan, Reason> launch = family_.PlanOf(variant, Row{}, problem_, facts_, staged_);
        if (const Reason* illegal = std::get_if<Reason>(&launch)) reason = *illegal;
      }
      Note({.source = plan.has_value() ? plan->source : Source::kDegraded, .variant = variant, .reason = reason});
    }
  }

  void Note(Candidate candidate) {
    if (probe_->candidates.size() < candidates_max_) {
      probe_->candidates.push_back(std::move(candidate));
    } else {
      probe_->more = true;
    }
  }

  const Family& family_;
  const PlannerConfig& config_;
  const Problem& problem_;
  const DeviceFacts& facts_;
  const DeviceFacts staged_;
  PassedOver& passed_;
  Probe* const probe_;
  const std::size_t candidates_max_;
};

}  // namespace tessera::planner
