#include "server/rpc/op_report.h"

#include <string>
#include <string_view>

namespace tessera::server {

void FillReport(const OperationReport& from, bool profile, v1::OpReport& to) {
  const auto set = [](std::string* text, std::string_view value) { text->assign(value.data(), value.size()); };
  set(to.mutable_variant(), from.variant);
  set(to.mutable_backend(), kernels::BackendName(from.backend));
  if (!from.variant.empty()) set(to.mutable_source(), planner::SourceName(from.source));
  to.set_split(static_cast<std::uint32_t>(from.split));
  to.set_flops(from.flops);
  if (!profile) return;
  to.mutable_timing()->set_queue_ns(from.queue_ns);
  to.mutable_timing()->set_plan_ns(from.plan_ns);
  to.mutable_timing()->set_run_ns(from.run_ns);
}

}  // namespace tessera::server
