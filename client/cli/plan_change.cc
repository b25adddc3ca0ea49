// `tessera plan set`, `table`, `inject`, `import`, `log`, `staging` and `rollback`.

#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/plan.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client::cli {
namespace {

using nlohmann::json;

constexpr std::size_t kTextBytesMax = std::size_t{64} << 20;  // more than any daemon takes in a message

// What every change takes.
struct ChangeArguments {
  bool dry_run = false;
  std::optional<std::uint64_t> expected_revision;
  std::vector<std::string> probes;
};

struct RowArguments {
  std::string file;
  std::vector<std::string> rows;
  bool clear = false;
  bool off = false;
  bool replace = false;
  bool persist = false;
  ChangeArguments change;
};

absl::StatusOr<v1::ChangeOptions> ToOptions(const ChangeArguments& arguments) {
  v1::ChangeOptions options;
  options.set_dry_run(arguments.dry_run);
  if (arguments.expected_revision.has_value()) options.set_expected_revision(*arguments.expected_revision);
  for (const std::string& probe : arguments.probes) {
    ASSIGN_OR_RETURN(*options.add_probes(), ParseShape(probe));
  }
  return options;
}

// Messages are UTF-8, and the library that writes them says no more than that they are not.
absl::Status CheckText(const std::string& path, const std::string& text) {
  int number = 1;
  for (const absl::string_view part : absl::StrSplit(text, '\n')) {
    const std::string line(part);
    const std::string quoted = json(line).dump(-1, ' ', false, json::error_handler_t::replace);
    if (json::parse(quoted, nullptr, /*allow_exceptions=*/false) != line) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": line ", number, " is not UTF-8 text; is this a table of rows?"));
    }
    ++number;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadRows(const RowArguments& arguments) {
  if (!arguments.rows.empty()) {
    const std::string rows = absl::StrJoin(arguments.rows, "\n") + "\n";
    RETURN_IF_ERROR(CheckText("--row", rows));
    return rows;
  }
  std::ifstream file(arguments.file, std::ios::binary);
  if (!file) return ErrnoStatus(absl::StatusCode::kNotFound, arguments.file);
  std::string text;
  char block[65536];
  while (file.read(block, sizeof(block)), file.gcount() > 0) {
    text.append(block, static_cast<std::size_t>(file.gcount()));
    if (text.size() > kTextBytesMax) return absl::InvalidArgumentError(absl::StrCat(arguments.file, ": too large"));
  }
  if (file.bad()) return ErrnoStatus(absl::StatusCode::kUnavailable, arguments.file);
  RETURN_IF_ERROR(CheckText(arguments.file, text));
  return text;
}

json ChangeJson(const v1::ChangeReply& reply) {
  json probes = json::array();
  for (const v1::ProbeChange& probe : reply.probes()) {
    probes.push_back({{"changed", probe.changed()},
                      {"before", probe.has_before() ? ToJson(probe.before()) : json({{"error", probe.before_error()}})},
                      {"after", probe.has_after() ? ToJson(probe.after()) : json({{"error", probe.after_error()}})}});
  }
  return {{"old_revision", reply.old_revision()},
          {"new_revision", reply.new_revision()},
          {"changed", reply.changed()},
          {"dry_run", reply.dry_run()},
          {"old", reply.old_value()},
          {"new", reply.new_value()},
          {"rows", reply.rows()},
          {"probes", probes},
          {"probes_changed", reply.probes_changed()},
          {"rows_persisted", reply.rows_persisted()},
          {"persist_error", reply.persist_error()},
          {"warnings", std::vector<std::string>(reply.warnings().begin(), reply.warnings().end())}};
}

std::string PlanText(bool there, const v1::PlanInfo& plan, const std::string& error) {
  if (!there) return error;
  return absl::StrCat(plan.variant(), " (", plan.source(), ", split ", plan.split(), ", raster ", RasterText(plan),
                      ")");
}

void PrintChange(const v1::ChangeReply& reply, const ChangeArguments& arguments) {
  if (!reply.changed()) {
    std::printf("nothing to change, revision %llu stays\n", static_cast<unsigned long long>(reply.old_revision()));
  } else {
    // Rows have arrows of their own: each side on a line.
    std::printf("%srevision %llu -> %llu\n  from  %s\n  to    %s\n", reply.dry_run() ? "would be " : "",
                static_cast<unsigned long long>(reply.old_revision()),
                static_cast<unsigned long long>(reply.new_revision()), OneLine(reply.old_value()).c_str(),
                OneLine(reply.new_value()).c_str());
  }
  std::printf("%s in force%s\n", Counted(reply.rows(), "row").c_str(), reply.dry_run() ? " then" : "");
  if (reply.rows_persisted() > 0) std::printf("%s in the file\n", Counted(reply.rows_persisted(), "row").c_str());
  if (!reply.persist_error().empty()) std::printf("not persisted: %s\n", reply.persist_error().c_str());
  for (const std::string& warning : reply.warnings()) std::printf("warning: %s\n", warning.c_str());
  if (reply.probes().empty()) return;
  Table table({"problem", "changes", "before", "after"});
  for (int i = 0; i < reply.probes_size(); ++i) {
    const v1::ProbeChange& probe = reply.probes(i);
    table.Add({arguments.probes[static_cast<std::size_t>(i)], probe.changed() ? "yes" : "no",
               PlanText(probe.has_before(), probe.before(), probe.before_error()),
               PlanText(probe.has_after(), probe.after(), probe.after_error())});
  }
  std::fputs(table.ToString().c_str(), stdout);
}

// Fills the options of `request`, sends it by `method`, prints the answer.
template <typename Request>
int Send(const GlobalOptions& global, const ChangeArguments& arguments, Request request,
         absl::StatusOr<v1::ChangeReply> (Planner::*method)(const Request&) const) {
  auto options = ToOptions(arguments);
  if (!options.ok()) return Fail(global, options.status());
  *request.mutable_options() = *std::move(options);
  return WithPlanner(global, [&](const Planner& planner) {
    const auto reply = (planner.*method)(request);
    if (!reply.ok()) return Fail(global, reply.status());
    global.json ? PrintDocument(ChangeJson(*reply)) : PrintChange(*reply, arguments);
    return reply->persist_error().empty() ? kExitOk : kExitFailed;
  });
}

int RunTable(const GlobalOptions& global, const RowArguments& arguments) {
  v1::SetTableRequest request;
  if (arguments.off || arguments.file == "-") {
    request.set_text("-");
  } else if (!arguments.clear) {
    auto text = ReadRows(arguments);
    if (!text.ok()) return Fail(global, text.status());
    request.set_text(*std::move(text));
  }
  return Send(global, arguments.change, request, &Planner::SetTable);
}

v1::InjectMode ModeOf(const RowArguments& arguments) {
  if (arguments.clear) return v1::INJECT_MODE_CLEAR;
  return arguments.replace ? v1::INJECT_MODE_REPLACE : v1::INJECT_MODE_APPEND;
}

int RunInject(const GlobalOptions& global, const RowArguments& arguments) {
  v1::InjectRowsRequest request;
  request.set_mode(ModeOf(arguments));
  if (!arguments.clear) {
    auto text = ReadRows(arguments);
    if (!text.ok()) return Fail(global, text.status());
    request.set_text(*std::move(text));
  }
  return Send(global, arguments.change, request, &Planner::InjectRows);
}

int RunImport(const GlobalOptions& global, const RowArguments& arguments) {
  v1::ImportRowsRequest request;
  request.set_mode(ModeOf(arguments));
  request.set_persist(arguments.persist);
  if (!arguments.clear) {
    auto text = ReadRows(arguments);
    if (!text.ok()) return Fail(global, text.status());
    request.set_text(*std::move(text));
  }
  return Send(global, arguments.change, request, &Planner::ImportRows);
}

CLI::Range RevisionRange() {
  return {std::int64_t{1}, std::numeric_limits<std::int64_t>::max()};
}

void AddChangeOptions(CLI::App& command, ChangeArguments& arguments) {
  command.add_flag("--dry-run", arguments.dry_run, "Show what would change, and change nothing");
  command
      .add_option("--expect-revision", arguments.expected_revision, "Only if the configuration still has this revision")
      ->check(RevisionRange());
  command
      .add_option("--probe", arguments.probes,
                  "Show the plan of this problem before and after; MxNxK[:PAIR][:LAYOUT][:OUT], may be repeated")
      ->type_name("SHAPE")
      ->allow_extra_args(false);
}

// Where rows come from: exactly one of a file, --row and what `others` are.
void AddRowOptions(CLI::App& command, RowArguments& arguments, const std::string& file_help) {
  CLI::Option_group* const source = command.add_option_group("rows", "Exactly one of");
  source->add_option("file", arguments.file, file_help);
  source->add_option("--row", arguments.rows, "A row itself; may be repeated")
      ->type_name("ROW")
      ->allow_extra_args(false);
  source->add_flag("--clear", arguments.clear, "No rows: remove those that are there");
  source->require_option(1);
  AddChangeOptions(command, arguments.change);
}

void AddSet(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  CLI::App* set = plan.add_subcommand("set", "Sets the mode: table, hybrid, model, or default (administrators)");
  auto mode = std::make_shared<std::string>();
  auto change = std::make_shared<ChangeArguments>();
  set->add_option("mode", *mode, "table = rows, bands; hybrid = rows, model, bands; model = model, bands")
      ->required()
      ->check(CLI::IsMember({"table", "hybrid", "model", "default"}));
  AddChangeOptions(*set, *change);
  commands.push_back({set, [&options, mode, change] {
                        v1::SetPlannerRequest request;
                        if (*mode != "default") request.set_mode(*mode);
                        return Send(options, *change, request, &Planner::SetPlanner);
                      }});
}

void AddRows(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  CLI::App* table = plan.add_subcommand("table", "Sets or removes the override rows (administrators)");
  auto override_rows = std::make_shared<RowArguments>();
  AddRowOptions(*table, *override_rows, "File of rows, read here; - switches rows of every source off");
  table->get_option_group("rows")->add_flag("--off", override_rows->off, "Switch rows of every source off");
  commands.push_back({table, [&options, override_rows] { return RunTable(options, *override_rows); }});

  CLI::App* inject = plan.add_subcommand("inject", "Adds rows below the override rows (administrators)");
  auto injected = std::make_shared<RowArguments>();
  AddRowOptions(*inject, *injected, "File of rows, read here");
  inject->add_flag("--replace", injected->replace, "Instead of the injected rows that are there");
  commands.push_back({inject, [&options, injected] { return RunInject(options, *injected); }});

  CLI::App* import = plan.add_subcommand("import", "Injects rows of `plan export`, and may keep them (administrators)");
  auto imported = std::make_shared<RowArguments>();
  AddRowOptions(*import, *imported, "File of rows, read here");
  import->add_flag("--replace", imported->replace, "Instead of the injected rows that are there");
  import->add_flag("--persist", imported->persist, "Keep the injected rows over restarts, for devices of this kind");
  commands.push_back({import, [&options, imported] { return RunImport(options, *imported); }});
}

void AddSwitches(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  CLI::App* log = plan.add_subcommand("log", "Switches the log of decisions on or off (administrators)");
  auto enabled = std::make_shared<std::string>();
  auto log_change = std::make_shared<ChangeArguments>();
  log->add_option("switch", *enabled, "on or off")->required()->check(CLI::IsMember({"on", "off"}));
  AddChangeOptions(*log, *log_change);
  commands.push_back({log, [&options, enabled, log_change] {
                        v1::SetLogRequest request;
                        request.set_enabled(*enabled == "on");
                        return Send(options, *log_change, request, &Planner::SetLog);
                      }});

  CLI::App* staging =
      plan.add_subcommand("staging", "Switches kinds of kernels on or off, to compare (administrators)");
  auto tma = std::make_shared<std::string>();
  auto mx = std::make_shared<std::string>();
  auto staging_change = std::make_shared<ChangeArguments>();
  CLI::Option_group* const switches = staging->add_option_group("switches", "At least one of");
  switches->add_option("--tma", *tma, "on or off: Hopper kernels, which load by the copy engine")
      ->check(CLI::IsMember({"on", "off"}));
  switches->add_option("--mx", *mx, "on or off: block-scaled kernels; there are none yet")
      ->check(CLI::IsMember({"on", "off"}));
  switches->require_option(1, 2);
  AddChangeOptions(*staging, *staging_change);
  commands.push_back({staging, [&options, tma, mx, staging_change] {
                        v1::SetStagingRequest request;
                        if (!tma->empty()) request.set_tma(*tma == "on");
                        if (!mx->empty()) request.set_mx(*mx == "on");
                        return Send(options, *staging_change, request, &Planner::SetStaging);
                      }});
}

void AddRollback(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  CLI::App* rollback = plan.add_subcommand("rollback", "Sets everything as it was at a revision (administrators)");
  auto revision = std::make_shared<std::uint64_t>(0);
  auto change = std::make_shared<ChangeArguments>();
  rollback->add_option("revision", *revision, "One that `plan state` lists")->required()->check(RevisionRange());
  AddChangeOptions(*rollback, *change);
  commands.push_back({rollback, [&options, revision, change] {
                        v1::RollbackRequest request;
                        request.set_revision(*revision);
                        return Send(options, *change, request, &Planner::Rollback);
                      }});
}

}  // namespace

void AddPlanChange(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  AddSet(plan, options, commands);
  AddRows(plan, options, commands);
  AddSwitches(plan, options, commands);
  AddRollback(plan, options, commands);
}

}  // namespace tessera::client::cli
