// Decisions, and what there is to look at. Changes are in planner_changes.cc.

#include "planner/planner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/chain.h"

namespace tessera::planner {
namespace {

std::int64_t NowUs() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

constexpr Tier kAllTiers[] = {Tier::kOverride, Tier::kInjected, Tier::kBuiltin};

}  // namespace

Planner::Planner(PlannerOptions options)
    : options_(std::move(options)),
      gemm_(options_.gemm_catalogue),
      cache_(options_.cached_plans_max),
      audit_(options_.audit_directory),
      counters_(options_.gemm_catalogue.size()) {
  auto start = std::make_shared<PlannerConfig>(options_.start);
  start->revision = 1;
  config_ = std::move(start);
  revision_.store(1, std::memory_order_release);
}

absl::StatusOr<Plan> Planner::Decide(const GemmProblem& problem, const DeviceFacts& facts) {
  const std::uint64_t revision = revision_.load(std::memory_order_acquire);
  const std::optional<Plan> plan = cache_.Find(GemmCache::KeyOf(GemmFamily::Key(problem), facts, revision));
  if (!plan.has_value()) return Make(problem, facts);
  counters_.Decided(*plan);
  if (hub_.Wanted(/*cached=*/true)) hub_.Publish(Tell(problem, *plan, revision, /*cached=*/true));
  return *plan;
}

absl::StatusOr<Plan> Planner::Make(const GemmProblem& problem, const DeviceFacts& facts) {
  const std::shared_ptr<const PlannerConfig> by = config();
  PassedOver passed;
  absl::StatusOr<Plan> plan = Chain(gemm_, *by, problem, facts, passed).Decide();
  counters_.Passed(passed);
  if (!plan.ok()) {
    counters_.Refused();
    return plan;
  }
  counters_.Made();
  counters_.Decided(*plan);
  cache_.Insert(GemmCache::KeyOf(GemmFamily::Key(problem), facts, by->revision), *plan);
  if (hub_.Wanted(/*cached=*/false) || (by->log && options_.log)) {
    const Decision decision = Tell(problem, *plan, by->revision, /*cached=*/false);
    hub_.Publish(decision);
    if (by->log && options_.log) options_.log(decision);
  }
  return plan;
}

Decision Planner::Tell(const GemmProblem& problem, const Plan& plan, std::uint64_t revision, bool cached) const {
  const kernels::VariantInfo& info = gemm_.Info(plan.variant);
  return {.time_unix_us = NowUs(),
          .revision = revision,
          .family = GemmFamily::Schema().family(),
          .variant_id = info.id,
          .class_name = info.class_name,
          .problem = GemmFamily::ToText(problem),
          .plan = plan,
          .cached = cached};
}

std::shared_ptr<const PlannerConfig> Planner::config() const {
  const std::lock_guard<std::mutex> lock(config_mutex_);
  return config_;
}

PlannerState Planner::State() const {
  PlannerState state;
  {
    const std::lock_guard<std::mutex> lock(config_mutex_);
    state.config = config_;
    for (const auto& old : history_) state.revisions.push_back(old->revision);
  }
  const std::uint64_t decided = counters_.decided();
  state.cache_misses = counters_.made() + counters_.refused();
  // Read at different moments: a decision that is being counted may be in one of the two only.
  state.cache_hits = decided - std::min(decided, counters_.made());
  state.cached_plans = cache_.Count(state.config->revision);
  state.cached_plans_max = cache_.capacity();
  state.passed_over = counters_.passed();
  state.refusals = counters_.refused();
  state.changes = counters_.changes();
  state.refused_changes = counters_.refused_changes();
  state.watchers = hub_.watchers();
  state.watch_entries_lost = hub_.lost();
  state.audit = audit_.Stats();
  return state;
}

Probe Planner::ProbePlan(const Question& question, std::size_t candidates_max) const {
  const std::shared_ptr<const PlannerConfig> by = config();
  Probe probe;
  probe.revision = by->revision;
  PassedOver passed;
  probe.plan =
      Chain(gemm_, *by, question.gemm, question.facts, passed, &probe, std::min(candidates_max, kProbeCandidatesMax))
          .Decide();
  return probe;
}

absl::StatusOr<Plan> Planner::DecideBy(const PlannerConfig& config, const Question& question) const {
  PassedOver passed;
  return Chain(gemm_, config, question.gemm, question.facts, passed).Decide();
}

ExportedRows Planner::ExportRows(std::optional<Tier> tier) const {
  const std::shared_ptr<const PlannerConfig> by = config();
  const RowSchema* const schemas[] = {&GemmFamily::Schema()};
  ExportedRows exported{.revision = by->revision, .text = {}, .rows = 0};
  for (const Tier of : kAllTiers) {
    if (tier.has_value() && *tier != of) continue;
    const auto rows = by->tier(of).rows();
    absl::StrAppend(&exported.text, "# ", Av(TierName(of)), ": ", rows.size(), " rows\n", ToText(rows, schemas));
    exported.rows += rows.size();
  }
  return exported;
}

AuditPage Planner::Changes(std::size_t limit, std::uint64_t before_sequence) const {
  return audit_.List(limit, before_sequence);
}

std::vector<VariantDecisions> Planner::Decisions() const {
  std::vector<VariantDecisions> decisions;
  for (std::size_t variant = 0; variant < options_.gemm_catalogue.size(); ++variant) {
    for (std::size_t source = 0; source < kSourceNames.size(); ++source) {
      const std::uint64_t count = counters_.decided(variant, static_cast<Source>(source));
      if (count > 0) decisions.push_back({variant, static_cast<Source>(source), count});
    }
  }
  return decisions;
}

std::uint64_t Planner::Decisions(std::size_t variant, Source source) const {
  return variant < options_.gemm_catalogue.size() ? counters_.decided(variant, source) : 0;
}

}  // namespace tessera::planner
