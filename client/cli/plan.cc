// `tessera plan`: the planner of a daemon. What its subcommands share.
#include "client/cli/plan.h"

#include <charconv>
#include <cstdio>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/dtype.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client::cli {
namespace {

template <typename Enum>
using Names = std::initializer_list<std::pair<const char*, Enum>>;

template <typename Enum>
absl::StatusOr<Enum> Lookup(std::string_view what, const std::string& name, Names<Enum> names) {
  std::string known;
  for (const auto& [text, value] : names) {
    if (name == text) return value;
    absl::StrAppend(&known, known.empty() ? "" : ", ", text);
  }
  return absl::InvalidArgumentError(absl::StrCat(Av(what), " ", name, ": takes ", known));
}

absl::StatusOr<v1::GemmLayout> LayoutOf(const std::string& name) {
  return Lookup<v1::GemmLayout>(
      "--layout", name,
      {{"NT", v1::GEMM_LAYOUT_NT}, {"NN", v1::GEMM_LAYOUT_NN}, {"TN", v1::GEMM_LAYOUT_TN}, {"TT", v1::GEMM_LAYOUT_TT}});
}

absl::StatusOr<v1::Backend> BackendOf(const std::string& name) {
  return Lookup<v1::Backend>("--backend", name,
                             {{"default", v1::BACKEND_UNSPECIFIED},
                              {"auto", v1::BACKEND_AUTO},
                              {"cpu", v1::BACKEND_CPU},
                              {"cuda", v1::BACKEND_CUDA},
                              {"vendor", v1::BACKEND_VENDOR}});
}

absl::StatusOr<v1::Accumulation> AccumulationOf(const std::string& name) {
  return Lookup<v1::Accumulation>("--accumulation", name,
                                  {{"fast", v1::ACCUMULATION_FAST}, {"exact", v1::ACCUMULATION_EXACT}});
}

absl::StatusOr<v1::DType> TypeOf(std::string_view what, const std::string& name) {
  const DType dtype = DTypeFromName(name);
  if (dtype == DType::kUnspecified) {
    return absl::InvalidArgumentError(absl::StrCat(Av(what), ": ", name, " is none of bf16, f16, f32, e4m3, e5m2, s8"));
  }
  return static_cast<v1::DType>(dtype);  // numbered alike, see common/dtype.h
}

absl::StatusOr<std::int64_t> Extent(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--probe: '", text, "' is no extent; give MxNxK, such as 512x1024x64"));
  }
  return value;
}

}  // namespace

absl::StatusOr<v1::Problem> ToProblem(const ShapeArguments& arguments) {
  v1::Problem problem;
  v1::GemmShape& shape = *problem.mutable_gemm();
  const std::vector<std::string> pair = absl::StrSplit(arguments.pair, '_');
  if (pair.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat("--pair ", arguments.pair, ": give A_B, such as e4m3_e5m2"));
  }
  ASSIGN_OR_RETURN(const v1::DType a, TypeOf("--pair", pair[0]));
  ASSIGN_OR_RETURN(const v1::DType b, TypeOf("--pair", pair[1]));
  ASSIGN_OR_RETURN(const v1::DType d, TypeOf("--out", arguments.out));
  ASSIGN_OR_RETURN(const v1::GemmLayout layout, LayoutOf(arguments.layout));
  ASSIGN_OR_RETURN(const v1::Accumulation accumulation, AccumulationOf(arguments.accumulation));
  ASSIGN_OR_RETURN(const v1::Backend backend, BackendOf(arguments.backend));
  shape.set_a(a);
  shape.set_b(b);
  shape.set_d(d);
  shape.set_layout(layout);
  shape.set_accumulation(accumulation);
  shape.set_batch(arguments.batch);
  shape.set_m(arguments.m);
  shape.set_n(arguments.n);
  shape.set_k(arguments.k);
  shape.set_a_stride(arguments.a_stride);
  shape.set_b_stride(arguments.b_stride);
  shape.set_alignment_bytes(arguments.alignment);
  problem.set_backend(backend);
  problem.set_device(arguments.device);
  return problem;
}

absl::StatusOr<v1::Problem> ParseShape(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  const std::vector<std::string> extents = absl::StrSplit(parts[0], 'x');
  if (extents.size() != 3) {
    return absl::InvalidArgumentError(absl::StrCat("--probe ", text,
                                                   ": give MxNxK and, behind colons, pair, layout and output, such as "
                                                   "512x1024x64:s8_s8:NT:f32"));
  }
  ShapeArguments shape;
  ASSIGN_OR_RETURN(shape.m, Extent(extents[0]));
  ASSIGN_OR_RETURN(shape.n, Extent(extents[1]));
  ASSIGN_OR_RETURN(shape.k, Extent(extents[2]));
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    if (part.find('_') != std::string::npos) {
      shape.pair = part;
    } else if (LayoutOf(part).ok()) {
      shape.layout = part;
    } else if (AccumulationOf(part).ok()) {
      shape.accumulation = part;
    } else if (DTypeFromName(part) != DType::kUnspecified) {
      shape.out = part;
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--probe ", text, ": '", part,
                                                     "' is no pair (such as e4m3_e5m2), layout (NT, NN, TN, TT), ",
                                                     "accumulation (fast, exact) or type of the output (bf16, f32)"));
    }
  }
  absl::StatusOr<v1::Problem> problem = ToProblem(shape);
  if (!problem.ok()) return InField(absl::StrCat("--probe ", text), problem.status());
  return problem;
}

nlohmann::json ToJson(const v1::PlanInfo& plan) {
  return {{"variant", plan.variant()}, {"backend", plan.backend()}, {"source", plan.source()},
          {"split", plan.split()},     {"raster", plan.raster()},   {"workspace_bytes", plan.workspace_bytes()}};
}

void PrintDocument(const nlohmann::json& document, int indent) {
  std::printf("%s\n", document.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

std::string RasterText(const v1::PlanInfo& plan) {
  return plan.raster() == 0 ? "-" : std::to_string(plan.raster());
}

std::string OneLine(const std::string& value) {
  std::vector<std::string> lines = absl::StrSplit(value, '\n');
  while (lines.size() > 1 && lines.back().empty()) lines.pop_back();
  if (lines.size() == 1) return lines[0].empty() ? "nothing" : lines[0];
  // The record keeps as many rows as fit; its last line says how many there were, "... 4096 rows".
  std::uint64_t count = lines.size();
  std::string_view last = lines.back();
  constexpr std::string_view kMark = "... ";
  if (last.starts_with(kMark)) {
    last.remove_prefix(kMark.size());
    std::from_chars(last.data(), last.data() + last.size(), count);
  }
  return absl::StrCat(lines[0], " (and ", count - 1, " more)");
}

std::string TimeText(std::int64_t unix_ms) {
  const std::time_t seconds = unix_ms / 1000;
  std::tm utc{};
  char text[32];
  if (::gmtime_r(&seconds, &utc) == nullptr) return "?";
  return std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%SZ", &utc) == 0 ? "?" : text;
}

int WithPlanner(const GlobalOptions& options, const std::function<int(const Planner&)>& show) {
  const auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  return show(Planner(*client));
}

Command AddPlan(CLI::App& app, const GlobalOptions& options) {
  CLI::App* plan = app.add_subcommand("plan", "The planner: what runs which problem, why, and how to change that");
  plan->require_subcommand(1);
  plan->footer("Changes are for administrators, take effect while the daemon serves, and can be rolled back.");
  const auto commands = std::make_shared<std::vector<Command>>();
  AddPlanShow(*plan, options, *commands);
  AddPlanProbe(*plan, options, *commands);
  AddPlanChange(*plan, options, *commands);
  AddPlanWatch(*plan, options, *commands);
  return {plan, [commands] {
            for (const Command& command : *commands) {
              if (command.app->parsed()) return command.run();
            }
            return kExitUsage;
          }};
}

}  // namespace tessera::client::cli
