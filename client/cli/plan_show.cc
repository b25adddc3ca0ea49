// `tessera plan state`, `facts`, `vocabulary`, `export` and `audit`.

#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/plan.h"

namespace tessera::client::cli {
namespace {

using nlohmann::json;

std::string OnOff(bool on) {
  return on ? "on" : "off";
}

json StateJson(const v1::PlannerStateReply& state) {
  json rows = json::object();
  for (const v1::RowCount& row : state.rows()) rows[row.tier()] = row.rows();
  json passed_over = json::object();
  for (const v1::ReasonCount& reason : state.rows_passed_over()) passed_over[reason.reason()] = reason.count();
  return {{"revision", state.revision()},
          {"mode", state.mode()},
          {"mode_is_default", state.mode_is_default()},
          {"rows_off", state.rows_off()},
          {"rows", rows},
          {"log", state.log()},
          {"tma", state.tma()},
          {"mx", state.mx()},
          {"revisions", std::vector<std::uint64_t>(state.revisions().begin(), state.revisions().end())},
          {"cache_hits", state.cache_hits()},
          {"cache_misses", state.cache_misses()},
          {"cached_plans", state.cached_plans()},
          {"cached_plans_max", state.cached_plans_max()},
          {"rows_passed_over", passed_over},
          {"watchers", state.watchers()},
          {"watch_entries_lost", state.watch_entries_lost()},
          {"rows_file", state.rows_file()},
          {"rows_file_error", state.rows_file_error()},
          {"changes", state.changes()},
          {"changes_persisted", state.changes_persisted()}};
}

std::string RowsText(const v1::PlannerStateReply& state) {
  if (state.rows_off()) return "off (`tessera plan table --clear` switches them on)";
  return absl::StrJoin(state.rows(), ", ", [](std::string* out, const v1::RowCount& row) {
    absl::StrAppend(out, row.rows(), " ", row.tier());
  });
}

void PrintState(const v1::PlannerStateReply& state) {
  Table table({"planner", "revision " + std::to_string(state.revision())});
  table.Add({"mode", state.mode() + (state.mode_is_default() ? " (default)" : "")});
  table.Add({"rows", RowsText(state)});
  table.Add({"staging", "tma " + OnOff(state.tma()) + ", mx " + OnOff(state.mx())});
  table.Add({"log", OnOff(state.log())});
  table.Add({"rollback to", state.revisions().empty() ? "nothing yet" : absl::StrJoin(state.revisions(), " ")});
  table.Add({"cache", absl::StrCat(state.cached_plans(), " of ", state.cached_plans_max(), " plans, ",
                                   state.cache_hits(), " hits, ", state.cache_misses(), " misses")});
  const std::string file = state.rows_file().empty() ? "none" : state.rows_file();
  table.Add({"rows file", file + (state.rows_file_error().empty() ? "" : " (" + state.rows_file_error() + ")")});
  table.Add({"changes", absl::StrCat(state.changes(), state.changes_persisted() ? ", kept over restarts" : "")});
  table.Add({"watchers", absl::StrCat(state.watchers(), ", ", state.watch_entries_lost(), " entries lost")});
  std::fputs(table.ToString().c_str(), stdout);
  if (state.rows_passed_over().empty()) return;
  Table passed({"\nrows passed over", "times"});
  for (const v1::ReasonCount& reason : state.rows_passed_over()) {
    passed.Add({reason.reason(), std::to_string(reason.count())});
  }
  std::fputs(passed.ToString().c_str(), stdout);
}

int RunState(const GlobalOptions& options) {
  return WithPlanner(options, [&](const Planner& planner) {
    const auto state = planner.State();
    if (!state.ok()) return Fail(options, state.status());
    options.json ? PrintDocument(StateJson(*state)) : PrintState(*state);
    return kExitOk;
  });
}

std::string BytesOrUnknown(std::uint64_t bytes) {
  return bytes == 0 ? "-" : HumanBytes(bytes);
}

int RunFacts(const GlobalOptions& options) {
  return WithPlanner(options, [&](const Planner& planner) {
    const auto facts = planner.Facts();
    if (!facts.ok()) return Fail(options, facts.status());
    json devices = json::array();
    Table table({"device", "served", "backend", "trees", "processors", "L2", "shared/block", "shared/processor",
                 "workspace", "description"});
    for (const v1::DeviceFactsInfo& device : facts->devices()) {
      devices.push_back({{"name", device.name()},
                         {"served", device.served()},
                         {"backend", device.backend()},
                         {"archs", std::vector<std::string>(device.archs().begin(), device.archs().end())},
                         {"processors", device.processors()},
                         {"l2_bytes", device.l2_bytes()},
                         {"shared_bytes_per_block", device.shared_bytes_per_block()},
                         {"shared_bytes_per_processor", device.shared_bytes_per_processor()},
                         {"workspace_bytes_max", device.workspace_bytes_max()},
                         {"description", device.description()}});
      table.Add({device.name(), device.served() ? "yes" : "no", device.backend(), absl::StrJoin(device.archs(), " "),
                 std::to_string(device.processors()), BytesOrUnknown(device.l2_bytes()),
                 BytesOrUnknown(device.shared_bytes_per_block()), BytesOrUnknown(device.shared_bytes_per_processor()),
                 BytesOrUnknown(device.workspace_bytes_max()), device.description()});
    }
    options.json ? PrintDocument(devices) : void(std::fputs(table.ToString().c_str(), stdout));
    return kExitOk;
  });
}

std::string NumberOrUnknown(std::uint64_t value) {
  return value == 0 ? "-" : std::to_string(value);
}

int RunVocabulary(const GlobalOptions& options, const std::string& prefix, bool all) {
  return WithPlanner(options, [&](const Planner& planner) {
    v1::TileVocabularyRequest request;
    request.set_class_prefix(prefix);
    const auto vocabulary = planner.TileVocabulary(request);
    if (!vocabulary.ok()) return Fail(options, vocabulary.status());
    json recipes = json::array();
    Table table({"class", "recipe", "here", "stages", "shared", "threads", "split", "raster"});
    for (const v1::Recipe& recipe : vocabulary->recipes()) {
      if (!all && !recipe.available()) continue;
      recipes.push_back({{"variant", recipe.variant()},
                         {"family", recipe.family()},
                         {"class", recipe.class_name()},
                         {"recipe", recipe.recipe()},
                         {"arch", recipe.arch()},
                         {"backend", recipe.backend()},
                         {"tile", {recipe.tile_m(), recipe.tile_n(), recipe.tile_k()}},
                         {"stages", recipe.stages()},
                         {"shared_bytes", recipe.shared_bytes()},
                         {"threads", recipe.threads()},
                         {"takes_split", recipe.takes_split()},
                         {"takes_raster", recipe.takes_raster()},
                         {"source_hash", recipe.source_hash()},
                         {"available", recipe.available()}});
      table.Add({recipe.class_name(), recipe.recipe(), recipe.available() ? "yes" : "no",
                 NumberOrUnknown(recipe.stages()), BytesOrUnknown(recipe.shared_bytes()),
                 NumberOrUnknown(recipe.threads()), recipe.takes_split() ? "yes" : "no",
                 recipe.takes_raster() ? "yes" : "no"});
    }
    if (options.json) {
      PrintDocument(recipes);
    } else {
      std::fputs(table.ToString().c_str(), stdout);
      std::printf("%s%s\n", Counted(recipes.size(), "recipe").c_str(),
                  all ? "" : " on devices that are served; --all lists those of others");
    }
    return kExitOk;
  });
}

int RunExport(const GlobalOptions& options, const std::string& tier, const std::string& path) {
  return WithPlanner(options, [&](const Planner& planner) {
    v1::ExportRowsRequest request;
    request.set_tier(tier == "override"   ? v1::ROW_TIER_OVERRIDE
                     : tier == "injected" ? v1::ROW_TIER_INJECTED
                     : tier == "builtin"  ? v1::ROW_TIER_BUILTIN
                                          : v1::ROW_TIER_UNSPECIFIED);
    const auto rows = planner.ExportRows(request);
    if (!rows.ok()) return Fail(options, rows.status());
    if (path.empty()) {
      options.json ? PrintDocument({{"revision", rows->revision()}, {"rows", rows->rows()}, {"text", rows->text()}})
                   : void(std::fputs(rows->text().c_str(), stdout));
      return kExitOk;
    }
    std::ofstream file(path, std::ios::binary);
    file << rows->text();
    file.close();
    if (!file) return Fail(options, absl::UnavailableError(absl::StrCat("cannot write ", path)));
    options.json ? PrintDocument({{"revision", rows->revision()}, {"rows", rows->rows()}, {"file", path}})
                 : void(std::printf("%s of revision %llu in %s\n", Counted(rows->rows(), "row").c_str(),
                                    static_cast<unsigned long long>(rows->revision()), path.c_str()));
    return kExitOk;
  });
}

// Up to `limit` changes, in as many calls as it takes: a reply has no more than fits into a message.
absl::StatusOr<v1::ListChangesReply> AllChanges(const Planner& planner, std::uint32_t limit) {
  v1::ListChangesReply all;
  do {
    v1::ListChangesRequest request;
    request.set_limit(limit - static_cast<std::uint32_t>(all.changes_size()));
    if (all.changes_size() > 0) request.set_before_sequence(all.changes().rbegin()->sequence());
    absl::StatusOr<v1::ListChangesReply> reply = planner.ListChanges(request);
    if (!reply.ok()) return reply.status();
    if (reply->changes().empty()) break;
    all.mutable_changes()->MergeFrom(reply->changes());
    reply->mutable_changes()->Swap(all.mutable_changes());
    all = *std::move(reply);
  } while (all.more() && all.changes_size() < static_cast<int>(limit));
  return all;
}

json AuditJson(const v1::ListChangesReply& list) {
  json changes = json::array();
  for (const v1::PlannerChange& change : list.changes()) {
    changes.push_back({{"sequence", change.sequence()},
                       {"revision", change.revision()},
                       {"old_revision", change.old_revision()},
                       {"time_unix_ms", change.time_unix_ms()},
                       {"who", change.who()},
                       {"what", change.what()},
                       {"old", change.old_value()},
                       {"new", change.new_value()},
                       {"epoch", change.epoch()}});
  }
  return {{"changes", changes},
          {"more", list.more()},
          {"persisted", list.persisted()},
          {"persist_error", list.persist_error()},
          {"damaged_lines", list.damaged_lines()},
          {"epoch", list.epoch()}};
}

void PrintAudit(const v1::ListChangesReply& list) {
  Table table({"when", "revision", "who", "what", "from", "to"});
  bool earlier = false;
  for (const v1::PlannerChange& change : list.changes()) {
    // Revisions begin anew with each daemon, and only its own can be gone back to.
    const bool own = change.epoch() == list.epoch();
    earlier = earlier || !own;
    table.Add({TimeText(change.time_unix_ms()),
               own ? std::to_string(change.revision()) : absl::StrCat("(", change.revision(), ")"), change.who(),
               change.what(), OneLine(change.old_value()), OneLine(change.new_value())});
  }
  std::fputs(table.ToString().c_str(), stdout);
  std::printf("%s, newest first%s\n", Counted(static_cast<std::uint64_t>(list.changes_size()), "change").c_str(),
              list.more() ? "; --limit shows more" : "");
  if (earlier) std::puts("(revisions of former starts of the daemon, which cannot be gone back to, are in brackets)");
  if (list.persisted()) return;
  if (list.persist_error().empty()) {
    std::puts("the record ends with the daemon, as it has no state_dir");
  } else {
    std::printf("the newest changes are not kept over restarts: %s\n", list.persist_error().c_str());
  }
}

int RunAudit(const GlobalOptions& options, std::uint32_t limit) {
  return WithPlanner(options, [&](const Planner& planner) {
    const auto list = AllChanges(planner, limit);
    if (!list.ok()) return Fail(options, list.status());
    options.json ? PrintDocument(AuditJson(*list)) : PrintAudit(*list);
    return kExitOk;
  });
}

}  // namespace

void AddPlanShow(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  CLI::App* state = plan.add_subcommand("state", "The configuration in force: mode, rows, switches, revision, cache");
  commands.push_back({state, [&options] { return RunState(options); }});

  CLI::App* facts = plan.add_subcommand("facts", "The devices that the planner knows, by the facts it plans with");
  commands.push_back({facts, [&options] { return RunFacts(options); }});

  CLI::App* vocabulary = plan.add_subcommand("vocabulary", "The classes and recipes that rows can name");
  auto prefix = std::make_shared<std::string>();
  auto all = std::make_shared<bool>(false);
  vocabulary->add_option("prefix", *prefix, "Only classes that begin so, such as gemm.sm90a.bf16_bf16");
  vocabulary->add_flag("--all", *all, "Those, too, that no device of this daemon runs");
  commands.push_back({vocabulary, [&options, prefix, all] { return RunVocabulary(options, *prefix, *all); }});

  CLI::App* rows = plan.add_subcommand("export", "Prints rows as text that `plan table` and `plan import` take");
  auto tier = std::make_shared<std::string>("all");
  auto path = std::make_shared<std::string>();
  rows->add_option("--tier", *tier, "Of which source")
      ->capture_default_str()
      ->check(CLI::IsMember({"all", "override", "injected", "builtin"}));
  rows->add_option("--to", *path, "Write to this file");
  commands.push_back({rows, [&options, tier, path] { return RunExport(options, *tier, *path); }});

  CLI::App* audit = plan.add_subcommand("audit", "Who changed what, newest first (administrators)");
  auto limit = std::make_shared<std::uint32_t>(100);
  audit->add_option("--limit", *limit, "At most so many")->capture_default_str()->check(CLI::Range(1, 1000));
  commands.push_back({audit, [&options, limit] { return RunAudit(options, *limit); }});
}

}  // namespace tessera::client::cli
