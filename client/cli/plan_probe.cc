// `tessera plan probe`: what a launch would do, who decided, and why the others lost.

#include <cstdio>

#include "client/cli/plan.h"

namespace tessera::client::cli {
namespace {

using nlohmann::json;

struct Arguments {
  ShapeArguments shape;
  std::uint32_t candidates = 64;
};

json ProbeJson(const v1::ProbeReply& reply) {
  json candidates = json::array();
  for (const v1::ProbeCandidate& candidate : reply.candidates()) {
    candidates.push_back({{"variant", candidate.variant()},
                          {"source", candidate.source()},
                          {"row", candidate.row()},
                          {"line", candidate.line()},
                          {"reason", candidate.reason()},
                          {"detail", candidate.detail()}});
  }
  json document = ToJson(reply.plan());
  document["revision"] = reply.revision();
  document["class"] = reply.class_name();
  document["row"] = reply.row();
  document["line"] = reply.line();
  document["detail"] = reply.detail();
  document["candidates"] = candidates;
  document["more"] = reply.more();
  return document;
}

void PrintProbe(const v1::ProbeReply& reply) {
  const v1::PlanInfo& plan = reply.plan();
  Table facts({"plan", plan.variant()});
  facts.Add({"decided by", plan.source() + (reply.detail().empty() ? "" : ": " + reply.detail())});
  if (!reply.row().empty()) {
    facts.Add({"row", (reply.line() == 0 ? "" : "line " + std::to_string(reply.line()) + ": ") + reply.row()});
  }
  facts.Add({"backend", plan.backend()});
  facts.Add({"split", std::to_string(plan.split())});
  facts.Add({"raster", RasterText(plan)});
  facts.Add({"workspace", HumanBytes(plan.workspace_bytes())});
  facts.Add({"revision", std::to_string(reply.revision())});
  std::fputs(facts.ToString().c_str(), stdout);
  if (reply.candidates().empty()) return;
  Table lost({"\nlost", "looked at by", "why", "detail"});
  for (const v1::ProbeCandidate& candidate : reply.candidates()) {
    const std::string where = candidate.line() == 0 ? "" : " line " + std::to_string(candidate.line());
    lost.Add({candidate.variant(), candidate.source() + where, candidate.reason(), candidate.detail()});
  }
  std::fputs(lost.ToString().c_str(), stdout);
  if (reply.more()) std::puts("and more; --candidates shows them");
}

int Run(const GlobalOptions& options, const Arguments& arguments) {
  const auto problem = ToProblem(arguments.shape);
  if (!problem.ok()) return Fail(options, problem.status());
  return WithPlanner(options, [&](const Planner& planner) {
    v1::ProbeRequest request;
    *request.mutable_problem() = *problem;
    request.set_candidates_max(arguments.candidates);
    const auto reply = planner.Probe(request);
    if (!reply.ok()) return Fail(options, reply.status());
    options.json ? PrintDocument(ProbeJson(*reply)) : PrintProbe(*reply);
    return kExitOk;
  });
}

}  // namespace

void AddPlanProbe(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  CLI::App* probe =
      plan.add_subcommand("probe", "What a product of this shape would run, who decided, why others lost");
  auto own = std::make_shared<Arguments>();
  ShapeArguments& shape = own->shape;
  const auto extent = CLI::Range(std::int64_t{1}, std::int64_t{2147483647});
  probe->add_option("-m", shape.m, "Rows of A and D")->required()->check(extent);
  probe->add_option("-n", shape.n, "Rows of B, columns of D")->required()->check(extent);
  probe->add_option("-k", shape.k, "Columns of A and B")->required()->check(extent);
  probe->add_option("--batch", shape.batch, "Products")->capture_default_str()->check(extent);
  probe->add_option("--pair", shape.pair, "Types of A and B: bf16_bf16, e4m3_e5m2, s8_s8, ..")->capture_default_str();
  probe->add_option("--layout", shape.layout, "Storage order of A and B")
      ->capture_default_str()
      ->check(CLI::IsMember({"NT", "NN", "TN", "TT"}));
  probe->add_option("--out", shape.out, "Type of D")->capture_default_str();
  probe->add_option("--accumulation", shape.accumulation, "Of fp8 products")
      ->capture_default_str()
      ->check(CLI::IsMember({"fast", "exact"}));
  CLI::Option* backend = probe->add_option("--backend", shape.backend, "Only this one")
                             ->capture_default_str()
                             ->check(CLI::IsMember({"default", "auto", "cpu", "cuda", "vendor"}));
  probe->add_option("--device", shape.device, "Plan as this device of `plan facts` would")->excludes(backend);
  probe->add_option("--a-stride", shape.a_stride, "Elements between rows of A; 0 = packed")->capture_default_str();
  probe->add_option("--b-stride", shape.b_stride, "Elements between rows of B; 0 = packed")->capture_default_str();
  probe->add_option("--alignment", shape.alignment, "Of the operands in bytes, a power of two; 0 = 256")
      ->capture_default_str();
  probe->add_option("--candidates", own->candidates, "Show at most so many that lost")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  commands.push_back({probe, [&options, own] { return Run(options, *own); }});
}

}  // namespace tessera::client::cli
