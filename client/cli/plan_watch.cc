// `tessera plan watch`: decisions as they are made.

#include <cstdio>
#include <limits>

#include "client/cli/plan.h"

namespace tessera::client::cli {
namespace {

using nlohmann::json;

struct Arguments {
  std::string prefix;
  bool cached = false;
  std::uint32_t buffer = 0;
  std::uint64_t count = 0;
};

void PrintDecision(const v1::Decision& decision, bool as_json) {
  if (as_json) {
    json document = ToJson(decision.plan());
    document["time_unix_us"] = decision.time_unix_us();
    document["revision"] = decision.revision();
    document["family"] = decision.family();
    document["problem"] = decision.problem();
    document["cached"] = decision.cached();
    PrintDocument(document, -1);
    return;
  }
  const v1::PlanInfo& plan = decision.plan();
  std::printf("%s  r%llu  %s  ->  %s  (%s%s, split %u, raster %s)\n", TimeText(decision.time_unix_us() / 1000).c_str(),
              static_cast<unsigned long long>(decision.revision()), decision.problem().c_str(), plan.variant().c_str(),
              plan.source().c_str(), decision.cached() ? ", cached" : "", plan.split(), RasterText(plan).c_str());
}

int Run(const GlobalOptions& options, const Arguments& arguments) {
  return WithPlanner(options, [&](const Planner& planner) {
    v1::WatchDecisionsRequest request;
    request.set_class_prefix(arguments.prefix);
    request.set_cached(arguments.cached);
    request.set_buffer(arguments.buffer);
    std::uint64_t shown = 0;
    std::uint64_t lost = 0;
    const auto done = [&] { return arguments.count > 0 && shown >= arguments.count; };
    const absl::Status status = planner.WatchDecisions(request, [&](const v1::WatchDecisionsReply& reply) {
      if (reply.lost() > lost) {
        options.json ? PrintDocument({{"lost", reply.lost()}}, -1)
                     : void(std::printf("(%s lost)\n", Counted(reply.lost() - lost, "decision").c_str()));
        lost = reply.lost();
      }
      for (const v1::Decision& decision : reply.decisions()) {
        if (done()) break;
        PrintDecision(decision, options.json);
        ++shown;
      }
      std::fflush(stdout);
      return !done();
    });
    return status.ok() ? kExitOk : Fail(options, status);
  });
}

}  // namespace

void AddPlanWatch(CLI::App& plan, const GlobalOptions& options, std::vector<Command>& commands) {
  CLI::App* watch = plan.add_subcommand("watch", "Decisions as they are made, until interrupted (administrators)");
  auto own = std::make_shared<Arguments>();
  watch->add_option("--class", own->prefix, "Only variants that begin so, such as gemm.sm90a.bf16");
  watch->add_flag("--cached", own->cached, "Also plans that the cache had: one line for each launch");
  watch->add_option("--buffer", own->buffer, "Decisions that wait while this end is slow; 0 = 1024")
      ->capture_default_str()
      ->check(CLI::Range(0, 65536));
  watch->add_option("--count", own->count, "Stop after so many; 0 = never")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()));
  commands.push_back({watch, [&options, own] { return Run(options, *own); }});
}

}  // namespace tessera::client::cli
