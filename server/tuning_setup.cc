#include "server/tuning_setup.h"

#include <spdlog/spdlog.h>

#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/gemm/family.h"

namespace tessera::server {
namespace {

std::string_view Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

// Null if this build has no such variant.
const kernels::GemmVariant* VariantOf(std::string_view id) {
  const std::optional<std::size_t> index = kernels::FindGemmVariant(id);
  return index.has_value() ? &kernels::GemmVariants()[*index] : nullptr;
}

std::string VariantIdOf(const planner::Row& row) {
  return absl::StrCat(row.class_name, "/", row.recipe);
}

std::string SourceHashOf(std::string_view id) {
  const kernels::GemmVariant* variant = VariantOf(id);
  return variant == nullptr ? "" : std::string(variant->info.source_hash);
}

// The row that a line of a file says. INVALID_ARGUMENT if it says none, or one of another variant or device.
absl::StatusOr<planner::Row> RowOf(const planner::TunedRow& tuned, bool of_cpu) {
  const planner::RowSchema* const schemas[] = {&planner::GemmFamily::Schema()};
  absl::StatusOr<std::vector<planner::Row>> rows = planner::ParseRows(tuned.text, schemas);
  if (!rows.ok()) return rows.status();
  if (rows->size() != 1) return absl::InvalidArgumentError("is not one row");
  if (VariantIdOf(rows->front()) != tuned.variant) {
    return absl::InvalidArgumentError(absl::StrCat("was measured with ", tuned.variant));
  }
  const kernels::GemmVariant* variant = VariantOf(tuned.variant);
  if (variant == nullptr || (variant->info.backend == kernels::Backend::kCpu) != of_cpu) {
    return absl::InvalidArgumentError("is for another device");
  }
  rows->front().line = 0;  // of a text that nobody has seen
  return std::move(rows->front());
}

std::string TextOf(const planner::Row& row) {
  return planner::ToText(row, planner::GemmFamily::Schema());
}

}  // namespace

planner::TuningDirectory RowsDirectoryOf(const Settings& settings) {
  return planner::ChooseTuningDirectory(settings.cache_dir, Variable("XDG_CACHE_HOME"), Variable("HOME"));
}

RowsKeeper::RowsKeeper(const planner::TuningDirectory& directory,
                       std::span<const planner::DeviceSignature> signatures) {
  if (directory.off) {
    error_ = "the setting cache_dir is off";
    return;
  }
  if (directory.path.empty()) {
    Warn("rows are not kept over restarts: cache_dir is not set, and neither XDG_CACHE_HOME nor HOME names a place");
    return;
  }
  for (std::size_t i = 0; i < signatures.size(); ++i) {
    const bool of_cpu = i + 1 == signatures.size();
    planner::TuningStore::Options options{
        .directory = directory.path,
        .signature = signatures[i],
        .source_hash_of = SourceHashOf,
        .check = [of_cpu](const planner::TunedRow& row) { return RowOf(row, of_cpu).status(); },
        .warn = [this](std::string_view message) { Warn(message); }};
    stores_.push_back({.file = std::make_unique<planner::TuningStore>(std::move(options)), .of_cpu = of_cpu});
  }
}

planner::RowSetPtr RowsKeeper::Load() {
  const std::lock_guard lock(mutex_);
  std::vector<planner::Row> rows;
  for (Store& store : stores_) {
    for (planner::TunedRow& tuned : store.file->Load()) {
      absl::StatusOr<planner::Row> row = RowOf(tuned, store.of_cpu);
      // What is over the limit stays in its file.
      if (!row.ok() || rows.size() == planner::kRowLimits.rows) continue;
      store.kept.insert_or_assign(TextOf(*row), std::move(tuned));
      rows.push_back(*std::move(row));
    }
  }
  if (rows.empty()) return planner::NoRows();
  spdlog::info("{} rows of a former run are in force, from {}", rows.size(), file_names());
  return std::make_shared<const planner::RowSet>(std::move(rows));
}

KeptRows RowsKeeper::Keep(const planner::PlannerConfig& config, bool clear) {
  const std::lock_guard lock(mutex_);
  const std::span<const planner::Row> rows = config.tier(planner::Tier::kInjected).rows();
  KeptRows kept;
  std::size_t placed = 0;
  for (Store& store : stores_) {
    placed += RowsOf(store, rows).size();
    const absl::StatusOr<std::size_t> saved = KeepIn(store, rows, clear);
    if (saved.ok()) {
      kept.rows += *saved;
    } else if (kept.status.ok()) {
      kept.status = saved.status();
    }
  }
  SetError(MessageOf(kept.status));
  if (kept.status.ok() && placed < rows.size()) {
    kept.status = absl::FailedPreconditionError(absl::StrCat(
        rows.size() - placed, " rows are not kept: they name kernels of no device of this daemon, or of no build"));
  }
  return kept;
}

std::string RowsKeeper::file_names() const {
  return absl::StrJoin(stores_, ", ", [](std::string* out, const Store& store) { *out += store.file->file_name(); });
}

std::string RowsKeeper::last_error() const {
  const std::lock_guard lock(error_mutex_);
  return error_;
}

planner::TuningCounters RowsKeeper::counters() const {
  planner::TuningCounters sum;
  for (const Store& store : stores_) sum += store.file->counters();
  return sum;
}

void RowsKeeper::Warn(std::string_view message) {
  // Two files are in one directory, with which there is the same trouble.
  if (last_error() == message) return;
  spdlog::warn("{}", message);
  SetError(std::string(message));
}

void RowsKeeper::SetError(std::string message) {
  const std::lock_guard lock(error_mutex_);
  error_ = std::move(message);
}

std::vector<planner::TunedRow> RowsKeeper::RowsOf(const Store& store, std::span<const planner::Row> rows) const {
  const absl::Time now = absl::FromUnixMillis(absl::ToUnixMillis(absl::Now()));
  std::vector<planner::TunedRow> tuned;
  for (const planner::Row& row : rows) {
    planner::TunedRow fresh{.text = TextOf(row), .variant = VariantIdOf(row), .when = now};
    const kernels::GemmVariant* variant = VariantOf(fresh.variant);
    if (variant == nullptr || (variant->info.backend == kernels::Backend::kCpu) != store.of_cpu) continue;
    fresh.source_hash = std::string(variant->info.source_hash);
    if (const auto known = store.kept.find(fresh.text); known != store.kept.end()) {
      fresh.us = known->second.us;
      fresh.when = known->second.when;
    }
    tuned.push_back(std::move(fresh));
  }
  return tuned;
}

absl::StatusOr<std::size_t> RowsKeeper::KeepIn(Store& store, std::span<const planner::Row> rows, bool clear) {
  if (clear) {
    const absl::Status cleared = store.file->Clear();
    if (!cleared.ok()) return cleared;
    store.kept.clear();
    return 0;
  }
  const std::vector<planner::TunedRow> wanted = RowsOf(store, rows);
  RowsByText now;
  for (const planner::TunedRow& row : wanted) now.emplace(row.text, row);
  std::vector<planner::TunedRow> forgotten;
  for (const auto& [text, row] : store.kept) {
    // By hand, a row may stand in the file in another form than the planner's.
    if (const auto found = now.find(text); found == now.end() || found->second != row) forgotten.push_back(row);
  }
  absl::StatusOr<std::size_t> saved = store.file->Save(wanted, forgotten);
  if (saved.ok()) store.kept = std::move(now);
  return saved;
}

}  // namespace tessera::server
