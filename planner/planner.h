// The planner of a daemon: plans problems by a configuration that can be changed while it serves. The configuration is
// immutable and swapped whole; every change is checked whole, has a revision, is recorded and can be undone.
//
// Thread-safe, all of it. Decide is for the path of every call: for a plan that the cache has it hashes
// a key, reads one set of entries, counts, and takes no lock. Changes are serialised among themselves and hold nobody
// up: decisions that have begun finish by the configuration that they began with, and those that begin after a change
// has returned go by the new one.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/audit_log.h"
#include "planner/config.h"
#include "planner/counters.h"
#include "planner/gemm/family.h"
#include "planner/plan_cache.h"
#include "planner/probe.h"
#include "planner/watch.h"

namespace tessera::planner {

struct PlannerOptions {
  std::span<const kernels::GemmVariant> gemm_catalogue = kernels::GemmVariants();
  PlannerConfig start;                                     // what it begins with, as revision 1
  std::size_t cached_plans_max = 4096;                     // 0 = no cache
  std::size_t revisions_max = 64;                          // that Rollback can go back to
  std::size_t revision_bytes_max = std::size_t{64} << 20;  // of their rows
  std::string epoch;                                       // of the process, for the record
  std::string audit_directory;                             // empty = the record is lost with the process
  // Called for every plan that is made rather than found, while the log is on; may be called at once by many threads.
  std::function<void(const Decision&)> log;
};

// A problem on a device, of any family.
struct Question {
  GemmProblem gemm;
  DeviceFacts facts;
};

struct ChangeOptions {
  std::string who;                                 // for the record
  bool dry_run = false;                            // say what would change
  std::optional<std::uint64_t> expected_revision;  // ABORTED if it is another by now
  std::span<const Question> probes;                // whose plans before and after are to be told
};

struct ProbeChange {
  absl::StatusOr<Plan> before = Plan{};
  absl::StatusOr<Plan> after = Plan{};
  bool changed = false;
};

struct ChangeResult {
  std::uint64_t old_revision = 0;
  std::uint64_t new_revision = 0;  // the old one if nothing was to change; with dry_run the one it would get
  bool changed = false;            // or would be
  bool dry_run = false;
  std::string old_value;  // of what was set, as the record has it
  std::string new_value;
  std::vector<ProbeChange> probes;
  std::array<std::size_t, kTiers> rows{};  // afterwards, by tier
  bool asks_rows = true;                   // whether they are asked then
  std::vector<std::string> warnings;       // of rows that name what this build does not have, at most 16
};

enum class InjectMode : std::uint8_t {
  kAppend,   // ahead of the rows that are there: what comes later wins
  kReplace,  // instead of those that are there
  kClear,    // none; the text is empty
};

// Of one moment, but for the counts, which go on meanwhile.
struct PlannerState {
  std::shared_ptr<const PlannerConfig> config;
  std::vector<std::uint64_t> revisions;  // that Rollback can go back to, oldest first
  std::uint64_t cache_hits = 0;
  std::uint64_t cache_misses = 0;
  std::size_t cached_plans = 0;
  std::size_t cached_plans_max = 0;
  std::array<std::uint64_t, kCountedReasons> passed_over{};  // rows, by Reason, since the start
  std::uint64_t refusals = 0;                                // problems without a plan
  std::uint64_t changes = 0;                                 // by this process
  std::uint64_t refused_changes = 0;                         // wrong, lost a race, or too large
  std::uint32_t watchers = 0;
  std::uint64_t watch_entries_lost = 0;
  AuditStats audit;
};

struct VariantDecisions {
  std::size_t variant = 0;  // index in the GEMM catalogue
  Source source = Source::kDegraded;
  std::uint64_t count = 0;  // > 0
};

struct ExportedRows {
  std::uint64_t revision = 0;
  std::string text;
  std::size_t rows = 0;
};

class Planner {
 public:
  explicit Planner(PlannerOptions options = {});
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  // --- For every call ----------------------------------------------------------------------------------------------

  // The plan of `problem` on a device of these facts. UNIMPLEMENTED, with the reason, if nothing can run it there.
  absl::StatusOr<Plan> Decide(const GemmProblem& problem, const DeviceFacts& facts);

  // --- Changes -----------------------------------------------------------------------------------------------------
  // INVALID_ARGUMENT (of rows: line, column and field), RESOURCE_EXHAUSTED (the limit is named), ABORTED (the message
  // has the present revision), NOT_FOUND (a revision that is not kept), UNIMPLEMENTED. A refused change changes
  // nothing, and one to what is so already makes no revision.

  // `mode`: table, hybrid, model, or empty for the default.
  absl::StatusOr<ChangeResult> SetPlanner(std::string_view mode, const ChangeOptions& options);
  // Override rows; `-` switches all tiers of rows off, and anything else, the empty text too, on again.
  absl::StatusOr<ChangeResult> SetTable(std::string_view text, const ChangeOptions& options);
  absl::StatusOr<ChangeResult> InjectRows(std::string_view text, InjectMode mode, const ChangeOptions& options);
  // InjectRows of what ExportRows gave; the record tells them apart.
  absl::StatusOr<ChangeResult> ImportRows(std::string_view text, InjectMode mode, const ChangeOptions& options);
  absl::StatusOr<ChangeResult> SetLog(bool enabled, const ChangeOptions& options);
  // What is left out stays as it is. `mx`: UNIMPLEMENTED.
  absl::StatusOr<ChangeResult> SetStaging(std::optional<bool> tma, std::optional<bool> mx,
                                          const ChangeOptions& options);
  // Everything to what it was at that revision, as a new one.
  absl::StatusOr<ChangeResult> Rollback(std::uint64_t revision, const ChangeOptions& options);

  // --- To look at --------------------------------------------------------------------------------------------------

  std::shared_ptr<const PlannerConfig> config() const;
  const std::string& epoch() const { return options_.epoch; }
  std::uint64_t revision() const { return revision_.load(std::memory_order_acquire); }
  PlannerState State() const;
  // What Decide would answer, who decided, and why the others lost. Counts nothing and leaves the cache alone.
  Probe ProbePlan(const Question& question, std::size_t candidates_max = kProbeCandidates) const;
  // Rows of one tier, or of all with comments that name them; ImportRows takes both.
  ExportedRows ExportRows(std::optional<Tier> tier) const;
  std::vector<Recipe> TileVocabulary() const { return gemm_.Recipes(); }
  AuditPage Changes(std::size_t limit, std::uint64_t before_sequence) const;
  // Decisions since the start, cached ones included; those that there were.
  std::vector<VariantDecisions> Decisions() const;
  // Of one variant and source: for metrics, read at scrape.
  std::uint64_t Decisions(std::size_t variant, Source source) const;

  // The planner must outlive the subscription.
  std::unique_ptr<WatchSubscription> Watch(WatchOptions options) { return hub_.Subscribe(std::move(options)); }

 private:
  using GemmCache = PlanCache<GemmFamily::kKeyWords>;
  // What a change makes of the configuration in force, with what the record says of it.
  struct Edit {
    PlannerConfig config;
    std::string old_value;
    std::string new_value;
    RowSetPtr from_text = NoRows();  // rows that came with the change, rather than were there
  };
  using Editor = std::function<absl::StatusOr<Edit>(const PlannerConfig& now)>;

  absl::StatusOr<Plan> Make(const GemmProblem& problem, const DeviceFacts& facts);
  Decision Tell(const GemmProblem& problem, const Plan& plan, std::uint64_t revision, bool cached) const;
  absl::StatusOr<ChangeResult> Change(std::string_view what, const ChangeOptions& options, const Editor& edit);
  absl::StatusOr<ChangeResult> Inject(std::string_view what, std::string_view text, InjectMode mode,
                                      const ChangeOptions& options);
  absl::StatusOr<Plan> DecideBy(const PlannerConfig& config, const Question& question) const;
  absl::StatusOr<RowSetPtr> Parse(std::string_view text) const;
  void Install(std::shared_ptr<const PlannerConfig> next);
  void TrimHistory();
  std::vector<std::string> Warnings(const RowSet& from_text) const;

  const PlannerOptions options_;
  const GemmFamily gemm_;
  GemmCache cache_;
  WatchHub hub_;
  AuditLog audit_;
  PlannerCounters counters_;

  std::mutex change_mutex_;  // serialises changes; taken before config_mutex_
  // What cache keys are made with. Set after config_ and before the change returns.
  std::atomic<std::uint64_t> revision_{0};
  mutable std::mutex config_mutex_;  // of the two below; held for a copy of a pointer, or of the revisions
  std::shared_ptr<const PlannerConfig> config_;
  std::deque<std::shared_ptr<const PlannerConfig>> history_;  // older ones, oldest first
};

}  // namespace tessera::planner
