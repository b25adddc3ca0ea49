#include "server/rpc/planner_encode.h"

#include <algorithm>
#include <string>

#include "common/text.h"
#include "planner/gemm/family.h"
#include "planner/row_set.h"

namespace tessera::server {
namespace {

const kernels::VariantInfo& InfoOf(std::size_t variant) {
  return kernels::GemmVariants()[variant].info;
}

std::uint64_t Unsigned(std::int64_t value) {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, value));
}

}  // namespace

void Encode(const planner::Plan& plan, v1::PlanInfo& to) {
  const kernels::VariantInfo& info = InfoOf(plan.variant);
  to.set_variant(std::string(info.id));
  to.set_backend(std::string(kernels::BackendName(info.backend)));
  to.set_source(std::string(planner::SourceName(plan.source)));
  to.set_split(static_cast<std::uint32_t>(plan.split));
  to.set_raster(static_cast<std::uint32_t>(plan.raster));
  to.set_workspace_bytes(Unsigned(plan.workspace_bytes));
}

void Encode(const planner::Decision& decision, v1::Decision& to) {
  to.set_time_unix_us(decision.time_unix_us);
  to.set_revision(decision.revision);
  to.set_family(std::string(decision.family));
  to.set_problem(decision.problem);
  Encode(decision.plan, *to.mutable_plan());
  to.set_cached(decision.cached);
}

void Encode(const planner::ChangeResult& result, v1::ChangeReply& to) {
  to.set_old_revision(result.old_revision);
  to.set_new_revision(result.new_revision);
  to.set_changed(result.changed);
  to.set_dry_run(result.dry_run);
  to.set_old_value(result.old_value);
  to.set_new_value(result.new_value);
  std::size_t rows = 0;
  for (const std::size_t count : result.rows) rows += count;
  to.set_rows(result.asks_rows ? static_cast<std::uint32_t>(rows) : 0);
  std::uint32_t changed = 0;
  for (const planner::ProbeChange& probe : result.probes) {
    v1::ProbeChange& each = *to.add_probes();
    each.set_changed(probe.changed);
    changed += probe.changed ? 1 : 0;
    probe.before.ok() ? Encode(*probe.before, *each.mutable_before())
                      : each.set_before_error(MessageOf(probe.before.status()));
    probe.after.ok() ? Encode(*probe.after, *each.mutable_after())
                     : each.set_after_error(MessageOf(probe.after.status()));
  }
  to.set_probes_changed(changed);
  for (const std::string& warning : result.warnings) to.add_warnings(warning);
}

void Encode(const planner::PlannerState& state, v1::PlannerStateReply& to) {
  const planner::PlannerConfig& config = *state.config;
  to.set_revision(config.revision);
  to.set_mode(std::string(planner::ModeName(config.mode)));
  to.set_mode_is_default(config.mode_is_default);
  to.set_rows_off(config.rows_off);
  for (const planner::Tier tier : {planner::Tier::kOverride, planner::Tier::kInjected, planner::Tier::kBuiltin}) {
    v1::RowCount& count = *to.add_rows();
    count.set_tier(std::string(planner::TierName(tier)));
    count.set_rows(static_cast<std::uint32_t>(config.tier(tier).rows().size()));
  }
  to.set_log(config.log);
  to.set_tma(config.staging.tma);
  to.set_mx(config.staging.mx);
  for (const std::uint64_t revision : state.revisions) to.add_revisions(revision);
  to.set_cache_hits(state.cache_hits);
  to.set_cache_misses(state.cache_misses);
  to.set_cached_plans(state.cached_plans);
  to.set_cached_plans_max(state.cached_plans_max);
  for (std::size_t i = 0; i < state.passed_over.size(); ++i) {
    if (state.passed_over[i] == 0) continue;
    v1::ReasonCount& count = *to.add_rows_passed_over();
    count.set_reason(std::string(planner::kReasonNames[i]));
    count.set_count(state.passed_over[i]);
  }
  to.set_watchers(state.watchers);
  to.set_watch_entries_lost(state.watch_entries_lost);
  to.set_changes(state.audit.entries);
  to.set_changes_persisted(state.audit.persisted);
}

void Encode(const planner::AuditEntry& entry, v1::PlannerChange& to) {
  to.set_sequence(entry.sequence);
  to.set_revision(entry.revision);
  to.set_old_revision(entry.old_revision);
  to.set_time_unix_ms(entry.time_unix_ms);
  to.set_who(entry.who);
  to.set_what(entry.what);
  to.set_old_value(entry.old_value);
  to.set_new_value(entry.new_value);
  to.set_epoch(entry.epoch);
}

void Encode(const planner::Probe& probe, v1::ProbeReply& to) {
  const planner::RowSchema& schema = planner::GemmFamily::Schema();
  to.set_revision(probe.revision);
  Encode(*probe.plan, *to.mutable_plan());
  to.set_class_name(std::string(InfoOf(probe.plan->variant).class_name));
  if (probe.row.has_value()) {
    to.set_row(planner::ToText(*probe.row, schema));
    to.set_line(static_cast<std::uint32_t>(probe.row->line));
  }
  for (const planner::Candidate& candidate : probe.candidates) {
    v1::ProbeCandidate& each = *to.add_candidates();
    if (candidate.variant.has_value()) {
      each.set_variant(std::string(InfoOf(*candidate.variant).id));
    } else if (candidate.row.has_value()) {
      each.set_variant(candidate.row->class_name + "/" + candidate.row->recipe);
    }
    each.set_source(std::string(planner::SourceName(candidate.source)));
    if (candidate.row.has_value()) {
      each.set_row(planner::ToText(*candidate.row, schema));
      each.set_line(static_cast<std::uint32_t>(candidate.row->line));
    }
    each.set_reason(std::string(planner::ReasonName(candidate.reason)));
    each.set_detail(std::string(planner::Explain(candidate.reason)));
  }
  to.set_more(probe.more);
  to.set_detail(probe.detail);
}

void Encode(const planner::Recipe& recipe, bool available, v1::Recipe& to) {
  to.set_variant(std::string(recipe.info.id));
  to.set_family(std::string(recipe.family));
  to.set_class_name(std::string(recipe.info.class_name));
  to.set_recipe(std::string(recipe.info.recipe));
  to.set_arch(std::string(kernels::ArchName(recipe.info.arch)));
  to.set_backend(std::string(kernels::BackendName(recipe.info.backend)));
  to.set_tile_m(static_cast<std::uint32_t>(recipe.tile[0]));
  to.set_tile_n(static_cast<std::uint32_t>(recipe.tile[1]));
  to.set_tile_k(static_cast<std::uint32_t>(recipe.tile[2]));
  to.set_stages(static_cast<std::uint32_t>(recipe.stages));
  to.set_shared_bytes(Unsigned(recipe.shared_bytes));
  to.set_threads(static_cast<std::uint32_t>(recipe.threads));
  to.set_takes_split(recipe.takes_split);
  to.set_takes_raster(recipe.takes_raster);
  to.set_source_hash(std::string(recipe.info.source_hash));
  to.set_available(available);
}

void Encode(const planner::DeviceFacts& facts, std::string_view name, std::string_view description, bool served,
            v1::DeviceFactsInfo& to) {
  to.set_name(std::string(name));
  to.set_backend(std::string(kernels::BackendName(facts.backend)));
  to.set_description(std::string(description));
  for (std::size_t i = 0; i < std::size(kernels::kArchNames); ++i) {
    if (facts.archs.Has(static_cast<kernels::Arch>(i))) to.add_archs(std::string(kernels::kArchNames[i]));
  }
  to.set_processors(static_cast<std::uint32_t>(std::max(0, facts.processors)));
  to.set_l2_bytes(Unsigned(facts.l2_bytes));
  to.set_shared_bytes_per_block(Unsigned(facts.shared_bytes_per_block));
  to.set_shared_bytes_per_processor(Unsigned(facts.shared_bytes_per_processor));
  to.set_workspace_bytes_max(Unsigned(facts.workspace_bytes_max));
  to.set_served(served);
}

}  // namespace tessera::server
