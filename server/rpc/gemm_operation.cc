#include "server/rpc/gemm_operation.h"

#include <chrono>
#include <cstdint>
#include <string_view>

#include "common/status_macros.h"
#include "server/rpc/decode.h"

namespace tessera::server {

absl::StatusOr<bool> BindOperation(const RpcScope& scope, const v1::GemmOp& op, const v1::SubmitOptions& options,
                                   std::string* inline_result, Operation& operation) {
  ASSIGN_OR_RETURN(const DecodedOptions decoded, DecodeOptions(options));
  ASSIGN_OR_RETURN(const GemmCall call, DecodeGemm(op));
  const BindScope bind_scope{.sessions = &scope.sessions,
                             .session = operation.session.get(),
                             .inline_result = inline_result,
                             .inline_bytes_max = static_cast<std::uint64_t>(scope.settings.inline_bytes_max),
                             .metrics = &scope.metrics};
  ASSIGN_OR_RETURN(operation.gemm, BindGemm(call, bind_scope));
  operation.backend = decoded.backend;
  return decoded.profile;
}

absl::Status StillWanted(const grpc::CallbackServerContext& context, const std::atomic<bool>& cancelled) {
  if (std::chrono::system_clock::now() >= context.deadline()) {
    return absl::DeadlineExceededError("the deadline passed before the launch; nothing ran");
  }
  if (cancelled.load(std::memory_order_acquire)) return absl::CancelledError("cancelled before the launch");
  return absl::OkStatus();
}

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
