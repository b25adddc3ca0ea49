// Changes of the configuration.

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "planner/planner.h"

namespace tessera::planner {
namespace {

constexpr std::size_t kWarningsMax = 16;

std::string ModeValue(const PlannerConfig& config) {
  return absl::StrCat(Av(ModeName(config.mode)), config.mode_is_default ? " (default)" : "");
}

// No more than what the record keeps: a table of thousands of rows need not become text for that. Where not all fit,
// the last line says how many there are.
std::string RowsValue(const RowSet& rows) {
  constexpr std::size_t kLastLineBytes = 32;
  std::string text;
  std::size_t shown = 0;
  for (const Row& row : rows.rows()) {
    const std::string line = ToText(row, GemmFamily::Schema());
    if (text.size() + line.size() + kLastLineBytes > kAuditValueBytesMax) break;
    absl::StrAppend(&text, line, "\n");
    ++shown;
  }
  if (shown < rows.rows().size()) absl::StrAppend(&text, "... ", rows.rows().size(), " rows\n");
  return text;
}

std::string TableValue(const PlannerConfig& config) {
  return config.rows_off ? "-" : RowsValue(config.tier(Tier::kOverride));
}

std::string Switch(bool on) {
  return on ? "on" : "off";
}

std::string StagingValue(const PlannerConfig& config) {
  return absl::StrCat("tma=", Switch(config.staging.tma), " mx=", Switch(config.staging.mx));
}

std::string Shortened(std::string text) {
  constexpr std::string_view kMark = "...";
  if (text.size() > kAuditValueBytesMax) {
    text.resize(kAuditValueBytesMax - kMark.size());
    text.append(kMark);
  }
  return text;
}

bool SamePlan(const absl::StatusOr<Plan>& before, const absl::StatusOr<Plan>& after) {
  if (before.ok() != after.ok()) return false;
  return before.ok() ? *before == *after : before.status() == after.status();
}

}  // namespace

absl::StatusOr<ChangeResult> Planner::Change(std::string_view what, const ChangeOptions& options, const Editor& edit) {
  const std::lock_guard<std::mutex> changing(change_mutex_);
  const std::shared_ptr<const PlannerConfig> now = config();
  const auto refuse = [this](absl::Status status) {
    counters_.ChangeRefused();
    return status;
  };
  if (options.expected_revision.has_value() && *options.expected_revision != now->revision) {
    return refuse(absl::AbortedError(absl::StrCat("expected_revision: is ", *options.expected_revision,
                                                  ", and the configuration has revision ", now->revision,
                                                  "; look at what has changed, then try again with that")));
  }
  absl::StatusOr<Edit> edited = edit(*now);
  if (!edited.ok()) return refuse(edited.status());

  auto next = std::make_shared<PlannerConfig>(std::move(edited->config));
  next->revision = now->revision;
  ChangeResult result{.old_revision = now->revision,
                      .changed = !Alike(*now, *next),
                      .dry_run = options.dry_run,
                      .old_value = Shortened(std::move(edited->old_value)),
                      .new_value = Shortened(std::move(edited->new_value))};
  if (result.changed) ++next->revision;
  result.new_revision = next->revision;
  result.asks_rows = next->AsksRows();
  result.warnings = Warnings(*edited->from_text);
  for (std::size_t tier = 0; tier < kTiers; ++tier) result.rows[tier] = next->rows[tier]->rows().size();
  for (const Question& question : options.probes) {
    ProbeChange probe{.before = DecideBy(*now, question), .after = DecideBy(*next, question)};
    probe.changed = !SamePlan(probe.before, probe.after);
    result.probes.push_back(std::move(probe));
  }
  if (options.dry_run || !result.changed) return result;

  Install(std::move(next));
  counters_.Changed();
  audit_.Append({.old_revision = result.old_revision,
                 .revision = result.new_revision,
                 .epoch = options_.epoch,
                 .who = options.who,
                 .what = std::string(what),
                 .old_value = result.old_value,
                 .new_value = result.new_value});
  return result;
}

void Planner::Install(std::shared_ptr<const PlannerConfig> next) {
  const std::uint64_t revision = next->revision;
  {
    const std::lock_guard<std::mutex> lock(config_mutex_);
    history_.push_back(std::exchange(config_, std::move(next)));
    TrimHistory();
  }
  // After the configuration: who sees this revision and misses the cache plans by it or by a later one.
  revision_.store(revision, std::memory_order_release);
}

void Planner::TrimHistory() {
  std::unordered_set<const RowSet*> counted;
  std::size_t bytes = 0;
  std::size_t kept = 0;
  for (auto old = history_.rbegin(); old != history_.rend() && kept < options_.revisions_max; ++old) {
    for (const RowSetPtr& rows : (*old)->rows) {
      if (counted.insert(rows.get()).second) bytes += rows->bytes();
    }
    if (bytes > options_.revision_bytes_max) break;
    ++kept;
  }
  history_.erase(history_.begin(), history_.end() - static_cast<std::ptrdiff_t>(kept));
}

// Rows that can never match in this build are no error: a table may be older or younger than it. But whoever sets them
// should hear.
std::vector<std::string> Planner::Warnings(const RowSet& from_text) const {
  std::vector<std::string> warnings;
  for (const Row& row : from_text.rows()) {
    const bool known = std::any_of(
        options_.gemm_catalogue.begin(), options_.gemm_catalogue.end(), [&](const kernels::GemmVariant& variant) {
          return variant.info.recipe == row.recipe && variant.info.class_name == row.class_name;
        });
    if (known) continue;
    warnings.push_back(absl::StrCat("line ", row.line, ": this build has no recipe ", row.recipe, " in ",
                                    row.class_name, "; the row is passed over"));
    if (warnings.size() == kWarningsMax) break;
  }
  return warnings;
}

absl::StatusOr<RowSetPtr> Planner::Parse(std::string_view text) const {
  const RowSchema* const schemas[] = {&GemmFamily::Schema()};
  ASSIGN_OR_RETURN(std::vector<Row> rows, ParseRows(text, schemas));
  if (rows.empty()) return NoRows();
  return std::make_shared<const RowSet>(std::move(rows));
}

absl::StatusOr<ChangeResult> Planner::SetPlanner(std::string_view mode, const ChangeOptions& options) {
  return Change("SetPlanner", options, [&](const PlannerConfig& now) -> absl::StatusOr<Edit> {
    Edit edit{.config = now, .old_value = ModeValue(now), .new_value = {}};
    const auto named = mode.empty() ? kDefaultMode : ModeFromName(mode);
    if (!named.has_value()) {
      return absl::InvalidArgumentError("mode: takes table, hybrid, model, or nothing for the default");
    }
    edit.config.mode = *named;
    edit.config.mode_is_default = mode.empty();
    edit.new_value = ModeValue(edit.config);
    return edit;
  });
}

absl::StatusOr<ChangeResult> Planner::SetTable(std::string_view text, const ChangeOptions& options) {
  return Change("SetTable", options, [&](const PlannerConfig& now) -> absl::StatusOr<Edit> {
    Edit edit{.config = now, .old_value = TableValue(now), .new_value = {}};
    edit.config.rows_off = Sv(absl::StripAsciiWhitespace(Av(text))) == "-";
    RowSetPtr& rows = edit.config.tier_ptr(Tier::kOverride);
    rows = NoRows();
    if (!edit.config.rows_off) {
      auto parsed = Parse(text);
      if (!parsed.ok()) return InField("text", parsed.status());
      rows = *std::move(parsed);
      edit.from_text = rows;
    }
    edit.new_value = TableValue(edit.config);
    return edit;
  });
}

absl::StatusOr<ChangeResult> Planner::Inject(std::string_view what, std::string_view text, InjectMode mode,
                                             const ChangeOptions& options) {
  return Change(what, options, [&](const PlannerConfig& now) -> absl::StatusOr<Edit> {
    Edit edit{.config = now, .old_value = RowsValue(now.tier(Tier::kInjected)), .new_value = {}};
    auto parsed = Parse(text);
    if (!parsed.ok()) return InField("text", parsed.status());
    RowSetPtr rows = *std::move(parsed);
    edit.from_text = rows;
    if (mode == InjectMode::kClear && !rows->rows().empty()) {
      return absl::InvalidArgumentError("text: has rows, and the mode clears them");
    }
    if (mode == InjectMode::kAppend && rows->rows().empty()) {
      rows = now.rows[static_cast<std::size_t>(Tier::kInjected)];
    } else if (mode == InjectMode::kAppend) {
      const auto behind = now.tier(Tier::kInjected).rows();
      std::vector<Row> all(rows->rows().begin(), rows->rows().end());
      if (all.size() + behind.size() > kRowLimits.rows) {
        return absl::ResourceExhaustedError(absl::StrCat("text: ", all.size(), " rows beside the ", behind.size(),
                                                         " there are; at most ", kRowLimits.rows,
                                                         " are kept of a tier"));
      }
      all.insert(all.end(), behind.begin(), behind.end());
      rows = std::make_shared<const RowSet>(std::move(all));
    }
    edit.config.tier_ptr(Tier::kInjected) = std::move(rows);
    edit.new_value = RowsValue(edit.config.tier(Tier::kInjected));
    return edit;
  });
}

absl::StatusOr<ChangeResult> Planner::InjectRows(std::string_view text, InjectMode mode, const ChangeOptions& options) {
  return Inject("InjectRows", text, mode, options);
}

absl::StatusOr<ChangeResult> Planner::ImportRows(std::string_view text, InjectMode mode, const ChangeOptions& options) {
  return Inject("ImportRows", text, mode, options);
}

absl::StatusOr<ChangeResult> Planner::SetLog(bool enabled, const ChangeOptions& options) {
  return Change("SetLog", options, [&](const PlannerConfig& now) -> absl::StatusOr<Edit> {
    Edit edit{.config = now, .old_value = Switch(now.log), .new_value = Switch(enabled)};
    edit.config.log = enabled;
    return edit;
  });
}

absl::StatusOr<ChangeResult> Planner::SetStaging(std::optional<bool> tma, std::optional<bool> mx,
                                                 const ChangeOptions& options) {
  return Change("SetStaging", options, [&](const PlannerConfig& now) -> absl::StatusOr<Edit> {
    if (mx.has_value()) return absl::UnimplementedError("mx: this build has no block-scaled kernels");
    Edit edit{.config = now, .old_value = StagingValue(now), .new_value = {}};
    edit.config.staging.tma = tma.value_or(now.staging.tma);
    edit.new_value = StagingValue(edit.config);
    return edit;
  });
}

absl::StatusOr<ChangeResult> Planner::Rollback(std::uint64_t revision, const ChangeOptions& options) {
  return Change("Rollback", options, [&](const PlannerConfig& now) -> absl::StatusOr<Edit> {
    Edit edit{.config = now,
              .old_value = absl::StrCat("revision ", now.revision),
              .new_value = absl::StrCat("as revision ", revision)};
    if (revision == now.revision) return edit;
    const std::lock_guard<std::mutex> lock(config_mutex_);
    const auto kept =
        std::find_if(history_.begin(), history_.end(), [&](const auto& old) { return old->revision == revision; });
    if (kept == history_.end()) {
      return absl::NotFoundError(
          absl::StrCat("revision: ", revision, " is not kept",
                       history_.empty() ? std::string("; there is no earlier one")
                                        : absl::StrCat("; the oldest that is, is ", history_.front()->revision)));
    }
    edit.config = **kept;
    return edit;
  });
}

}  // namespace tessera::planner
