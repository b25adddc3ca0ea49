#include "tests/fuzz/planner_rows.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/gemm_planner.h"
#include "planner/known_devices.h"
#include "planner/row_set.h"
#include "tests/planner/plan_checks.h"
#include "tests/planner/slow_reading.h"

namespace tessera::fuzz {
namespace {

using planner::DeviceFacts;
using planner::GemmProblem;
using planner::Row;

void Require(bool holds, std::string_view what, std::string_view input) {
  if (holds) return;
  std::cerr << "broken promise: " << what << "\n" << input << std::endl;
  std::abort();
}

std::span<const planner::RowSchema* const> Schemas() {
  static const planner::RowSchema* const kSchemas[] = {&planner::GemmFamily::Schema()};
  return kSchemas;
}

class Choices {
 public:
  explicit Choices(std::string_view bytes) : bytes_(bytes) {}

  std::size_t Below(std::size_t limit) {
    const auto byte = static_cast<unsigned char>(bytes_[at_++]);
    return static_cast<unsigned char>(byte - 'a') % limit;
  }

 private:
  std::string_view bytes_;
  std::size_t at_ = 0;
};

std::int64_t Extent(Choices& choices) {
  constexpr std::int64_t kExtents[] = {512, 0, 1, 16, 17, 64, 128, 4096, 65'537, std::int64_t{1} << 31};
  return kExtents[choices.Below(std::size(kExtents))];
}

DeviceFacts Facts(Choices& choices) {
  const auto devices = planner::KnownDevices();
  const std::size_t device = choices.Below(devices.size() + 1);
  return device == 0 ? planner::CpuFacts(8) : devices[device - 1].facts;
}

GemmProblem Problem(Choices& choices, const DeviceFacts& facts) {
  std::vector<std::size_t> of_backend;
  for (std::size_t i = 0; i < kernels::GemmVariants().size(); ++i) {
    if (kernels::GemmVariants()[i].info.backend == facts.backend) of_backend.push_back(i);
  }
  GemmProblem problem;
  problem.gemm_class = kernels::GemmVariants()[of_backend[choices.Below(of_backend.size())]].gemm_class;
  problem.m = Extent(choices);
  problem.n = Extent(choices);
  problem.k = Extent(choices);
  problem.batch = choices.Below(3) == 0 ? 1 : Extent(choices);
  return problem;
}

// "<name><number>" of which the number is cut off the front of `text`; nullopt if it does not begin so.
std::optional<std::size_t> TakeNumber(std::string_view& text, std::string_view name) {
  if (!text.starts_with(name)) return std::nullopt;
  text.remove_prefix(name.size());
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

// The line of that number, from 1; nullopt if the text has fewer.
std::optional<std::string_view> LineOf(std::string_view text, std::size_t number) {
  for (std::size_t line = 1; line < number; ++line) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    text.remove_prefix(end + 1);
  }
  return text.substr(0, text.find('\n'));
}

// Lookup by class against a reading of all rows in their order, for every class that the rows or the problem have.
void CheckLookup(const planner::RowSet& set, const GemmProblem& problem, const DeviceFacts& facts,
                 std::string_view input) {
  struct Wanted {
    kernels::GemmClass gemm_class;
    kernels::Backend backend;
    std::uint64_t key;
  };
  std::vector<Wanted> wanted = {{problem.gemm_class, facts.backend, planner::GemmFamily::ClassKey(problem, facts)}};
  std::set<std::uint64_t> keys = {wanted.front().key};
  for (const Row& row : set.rows()) {
    const auto named = kernels::ParseGemmClass(row.class_name);
    Require(named.has_value(), "a row of no class", input);
    if (!keys.insert(row.class_key).second) continue;
    wanted.push_back({named->gemm_class, kernels::BackendOf(named->arch), row.class_key});
  }
  for (const Wanted& of : wanted) {
    std::vector<std::uint32_t> slow;
    for (std::size_t i = 0; i < set.rows().size(); ++i) {
      const auto named = kernels::ParseGemmClass(set.rows()[i].class_name);
      if (named->gemm_class == of.gemm_class && kernels::BackendOf(named->arch) == of.backend) {
        slow.push_back(static_cast<std::uint32_t>(i));
      }
    }
    const auto found = set.Find(of.key);
    Require(std::equal(found.begin(), found.end(), slow.begin(), slow.end()), "lookup is not a reading", input);
  }
}

std::optional<planner::Plan> SlowPlan(std::span<const Row> rows, const GemmProblem& problem, const DeviceFacts& facts) {
  for (const Row& row : rows) {
    std::optional<planner::Plan> plan = planner::ReadRow(row, problem, facts);
    if (!plan.has_value()) continue;
    plan->source = planner::Source::kOverride;
    return plan;
  }
  return std::nullopt;
}

RowsOutcome CheckPlan(planner::RowSetPtr rows, const GemmProblem& problem, const DeviceFacts& facts,
                      std::string_view input) {
  static const planner::GemmPlanner& rowless = *new planner::GemmPlanner(kernels::GemmVariants());
  const auto expected = SlowPlan(rows->rows(), problem, facts);
  planner::PlannerConfig config;
  config.tier_ptr(planner::Tier::kOverride) = std::move(rows);
  const auto plan = planner::GemmPlanner(kernels::GemmVariants(), std::move(config)).Decide(problem, facts);
  const auto plain = rowless.Decide(problem, facts);
  Require(plan.ok() || !plain.ok(), "rows took a plan away", input);
  Require(plan.ok() || !expected.has_value(), "a row that decides gave no plan", input);
  if (!plan.ok()) {
    Require(plan.status().code() == absl::StatusCode::kUnimplemented, "no plan, for another reason", input);
    return RowsOutcome::kPassedOver;
  }
  Require(planner::WhyIllegalPlan(*plan, problem, facts).empty(), "an illegal plan", input);
  if (!expected.has_value()) {
    Require(plain.ok() && *plan == *plain, "rows that do not decide change the plan", input);
    return RowsOutcome::kPassedOver;
  }
  planner::Plan decided = *plan;
  if (expected->raster == 0) decided.raster = 0;  // the planner's to choose
  Require(decided == *expected, "the plan is not that of the first row that can", input);
  return RowsOutcome::kDecided;
}

}  // namespace

RowsQuestion QuestionOf(std::string_view input) {
  Choices choices(input.substr(0, kChoices));
  const DeviceFacts facts = Facts(choices);
  return {.problem = Problem(choices, facts), .facts = facts};
}

std::string WhyBadRefusal(std::string_view text, bool invalid, std::string_view message) {
  if (message.size() >= 400) return "it repeats its input";
  if (!invalid) return message.starts_with("line ") || message.starts_with("the text ") ? "" : "it does not say where";
  const auto line = TakeNumber(message, "line ");
  const auto column = TakeNumber(message, ", column ");
  if (!line.has_value() || !column.has_value() || !message.starts_with(", ")) return "it does not say where";
  const auto of_text = *line == 0 ? std::nullopt : LineOf(text, *line);
  if (!of_text.has_value()) return "the text has no such line";
  return *column == 0 || *column > of_text->size() + 1 ? "the line has no such column" : "";
}

RowsOutcome DrivePlannerRows(std::string_view input, std::string* refusal) {
  if (input.size() < kChoices) return RowsOutcome::kRefused;
  const std::string_view text = input.substr(kChoices);
  absl::StatusOr<std::vector<Row>> rows = planner::ParseRows(text, Schemas());
  if (!rows.ok()) {
    const bool invalid = rows.status().code() == absl::StatusCode::kInvalidArgument;
    Require(invalid || rows.status().code() == absl::StatusCode::kResourceExhausted, "a refusal of another kind",
            input);
    const std::string message = MessageOf(rows.status());
    const std::string why = WhyBadRefusal(text, invalid, message);
    Require(why.empty(), "a refusal: " + why + ": " + message, input);
    if (refusal != nullptr) *refusal = message;
    return RowsOutcome::kRefused;
  }
  Require(rows->size() <= planner::kRowLimits.rows, "more rows than a tier may have", input);
  const std::string canonical = planner::ToText(*rows, Schemas());
  const auto again = planner::ParseRows(canonical, Schemas());
  Require(again.ok() && *again == *rows, "rows do not survive being text", input);
  Require(planner::ToText(*again, Schemas()) == canonical, "text of rows has two forms", input);

  const auto& [problem, facts] = QuestionOf(input);
  const auto set = std::make_shared<const planner::RowSet>(*std::move(rows));
  CheckLookup(*set, problem, facts, input);
  return CheckPlan(set, problem, facts, input);
}

}  // namespace tessera::fuzz
