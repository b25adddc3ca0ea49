#include "server/planner_setup.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "common/unique_fd.h"
#include "planner/gemm/family.h"
#include "planner/row_set.h"

namespace tessera::server {
namespace {

// A regular file of at most what a table may have: a pipe would block, a device never end.
absl::StatusOr<std::string> ReadTable(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return ErrnoStatus(absl::StatusCode::kInvalidArgument, path);
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0) return ErrnoStatus(absl::StatusCode::kInvalidArgument, path);
  if (!S_ISREG(facts.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": is no regular file"));
  std::string text(planner::kRowLimits.text_bytes + 1, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(absl::StatusCode::kInvalidArgument, path);
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  text.resize(size);
  return text;
}

absl::StatusOr<planner::RowSetPtr> LoadTable(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTable(path));
  const planner::RowSchema* const schemas[] = {&planner::GemmFamily::Schema()};
  absl::StatusOr<std::vector<planner::Row>> rows = planner::ParseRows(text, schemas);
  if (!rows.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", rows.status().message()));
  return std::make_shared<const planner::RowSet>(*std::move(rows));
}

bool IsDefault(const LoadedSettings& settings, std::string_view name) {
  const auto is_named = [&](const SettingValue& value) { return value.name == name; };
  const auto found = std::find_if(settings.report.begin(), settings.report.end(), is_named);
  return found == settings.report.end() || found->source == "default";
}

void LogDecision(const planner::Decision& decision) {
  spdlog::info("plan: {} -> {} ({}, split {}, raster {}, revision {})", decision.problem, decision.variant_id,
               planner::SourceName(decision.plan.source), decision.plan.split, decision.plan.raster, decision.revision);
}

}  // namespace

absl::StatusOr<planner::PlannerOptions> PlannerOptionsOf(const LoadedSettings& settings, std::string epoch) {
  const Settings& values = settings.values;
  planner::PlannerOptions options{.cached_plans_max = static_cast<std::size_t>(values.planner_cache_plans),
                                  .epoch = std::move(epoch),
                                  .audit_directory = values.state_dir,
                                  .log = LogDecision};
  planner::PlannerConfig& start = options.start;
  start.mode = planner::ModeFromName(values.planner_mode).value_or(planner::kDefaultMode);
  start.mode_is_default = IsDefault(settings, "planner_mode");
  start.log = values.planner_log;
  start.staging.tma = values.planner_tma;
  start.rows_off = values.planner_table == "-";
  if (values.planner_table.empty() || start.rows_off) return options;
  absl::StatusOr<planner::RowSetPtr> rows = LoadTable(values.planner_table);
  if (!rows.ok()) return InField("planner_table", rows.status());
  start.tier_ptr(planner::Tier::kOverride) = *std::move(rows);
  return options;
}

PlannerReading ReadingOf(const planner::PlannerState& state, const planner::TuningCounters& store) {
  PlannerReading reading{.revision = state.config->revision,
                         .changes = state.changes,
                         .audit_errors = state.audit.write_failures,
                         .cache_hits = state.cache_hits,
                         .cache_misses = state.cache_misses,
                         .cached_plans = state.cached_plans,
                         .passed_over = state.passed_over,
                         .watchers = state.watchers,
                         .watch_lost = state.watch_entries_lost,
                         .store = store};
  for (std::size_t tier = 0; tier < planner::kTiers; ++tier) {
    reading.rows[tier] = state.config->rows[tier]->rows().size();
  }
  return reading;
}

}  // namespace tessera::server
