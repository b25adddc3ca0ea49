#include "server/rpc/submission_binding.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/decode.h"
#include "server/rpc/sync_point.h"

namespace tessera::server {
namespace {

// `prefix` in front of fields that begin with `from`, which it replaces.
absl::Status Renamed(const absl::Status& status, std::string_view from, std::string_view prefix) {
  if (status.ok()) return status;
  const std::string message = MessageOf(status);
  if (!absl::StartsWith(message, Av(from))) return status;
  return absl::Status(status.code(), absl::StrCat(Av(prefix), message.substr(from.size())));
}

absl::Status BindOp(const RpcScope& scope, const v1::GemmOp& op, std::string* inline_result, Submission& submission) {
  ASSIGN_OR_RETURN(const GemmCall call, DecodeGemm(op));
  const BindScope bind_scope{.sessions = &scope.sessions,
                             .session = submission.session.get(),
                             .inline_result = inline_result,
                             .inline_bytes_max = static_cast<std::uint64_t>(scope.settings.inline_bytes_max),
                             .metrics = &scope.metrics};
  ASSIGN_OR_RETURN(BoundGemm bound, BindGemm(call, bind_scope));
  submission.ops.push_back(std::move(bound));
  return absl::OkStatus();
}

// Events among `points` go to `record`; null: they are waited for.
absl::StatusOr<std::vector<SyncTarget>> BindPoints(const RpcScope& scope, const Session& session,
                                                   const std::vector<DecodedPoint>& points, std::string_view field,
                                                   std::vector<std::shared_ptr<DeviceEvent>>* record) {
  std::vector<SyncTarget> targets;
  for (std::size_t i = 0; i < points.size(); ++i) {
    ASSIGN_OR_RETURN(
        SessionTable::FoundPoint found,
        ResolvePoint(scope.sessions, session, points[i].id, points[i].value, absl::StrCat(Av(field), "[", i, "]")));
    if (found.event == nullptr) {
      targets.push_back({.timeline = std::move(found.timeline), .value = points[i].value, .own = found.own});
    } else if (record != nullptr) {
      record->push_back(std::move(found.event));
    } else {
      targets.push_back({.timeline = scope.sessions.Await(found.event), .value = 1});
    }
  }
  return targets;
}

// What the options name, and what they ask of the operations, which are bound.
absl::Status BindOptions(const RpcScope& scope, const DecodedOptions& options, Submission& submission) {
  submission.backend = options.backend;
  submission.answer_when_launched = options.answer_when_launched;
  if (options.timeout.count() > 0) submission.launch_by = std::chrono::steady_clock::now() + options.timeout;
  if (options.answer_when_launched) {
    for (const BoundGemm& gemm : submission.ops) {
      if (gemm.has_inline_tensor) {
        return absl::InvalidArgumentError(
            "options.reply_when: ENQUEUED answers before the work is done, and so needs all tensors in buffers");
      }
    }
  }
  const bool needs_session = options.stream.has_value() || !options.wait.empty() || !options.signal.empty();
  if (!needs_session) return absl::OkStatus();
  if (submission.session == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("options: stream, wait and signal need metadata ", kSessionMetadata));
  }
  const Session& session = *submission.session;
  if (options.stream.has_value()) {
    absl::StatusOr<std::shared_ptr<SessionLane>> lane = scope.sessions.FindStream(session, *options.stream);
    if (!lane.ok()) return InField("options.stream", lane.status());
    submission.lane = *std::move(lane);
  }
  ASSIGN_OR_RETURN(submission.wait, BindPoints(scope, session, options.wait, "options.wait", nullptr));
  ASSIGN_OR_RETURN(submission.signal, BindPoints(scope, session, options.signal, "options.signal", &submission.record));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<bool> BindGemmRequest(const RpcScope& scope, const v1::GemmOp& op, const v1::SubmitOptions& options,
                                     std::string* inline_result, Submission& submission) {
  ASSIGN_OR_RETURN(const DecodedOptions decoded, DecodeOptions(options));
  RETURN_IF_ERROR(BindOp(scope, op, inline_result, submission));
  RETURN_IF_ERROR(BindOptions(scope, decoded, submission));
  return decoded.profile;
}

absl::StatusOr<bool> BindSubmission(const RpcScope& scope, const v1::Submission& message,
                                    google::protobuf::RepeatedPtrField<v1::OpResult>& results, Submission& submission) {
  if (message.ops_size() == 0) return absl::InvalidArgumentError("submission.ops: none given");
  if (message.ops_size() > kOpsMax) {
    return absl::InvalidArgumentError(absl::StrCat("submission.ops: ", message.ops_size(), "; at most ", kOpsMax));
  }
  const absl::StatusOr<DecodedOptions> decoded = DecodeOptions(message.options());
  if (!decoded.ok()) return InSubmission(decoded.status());
  for (int i = 0; i < message.ops_size(); ++i) {
    const auto field = [i](std::string_view part) { return absl::StrCat("submission.ops[", i, "]", Av(part)); };
    if (!message.ops(i).has_gemm()) return absl::InvalidArgumentError(field(": no kind of op is set"));
    const absl::Status bound = BindOp(scope, message.ops(i).gemm(), results.Add()->mutable_inline_result(), submission);
    if (!bound.ok()) return Renamed(bound, "op.", field(".gemm."));
  }
  RETURN_IF_ERROR(InSubmission(BindOptions(scope, *decoded, submission)));
  return decoded->profile;
}

absl::Status InSubmission(const absl::Status& status) {
  if (status.ok()) return status;
  return Renamed(Renamed(status, "options", "submission.options"), "ops[", "submission.ops[");
}

void DropUnwanted(const RpcScope& scope, const std::shared_ptr<Session>& session) {
  if (session == nullptr) return;
  for (const std::shared_ptr<SessionLane>& lane : scope.sessions.LanesOf(*session)) lane->DropUnwanted();
}

absl::Status StillWanted(std::chrono::system_clock::time_point deadline, const std::atomic<bool>& cancelled) {
  // A client resets its call when its deadline passes, and this clock, which began when the request came, says so
  // later.
  constexpr std::chrono::milliseconds kHeardEarly{100};
  constexpr std::chrono::system_clock::time_point kNever = std::chrono::system_clock::time_point::max();
  const bool left = cancelled.load(std::memory_order_acquire);
  const std::chrono::milliseconds early = left ? kHeardEarly : std::chrono::milliseconds(0);
  if (deadline != kNever && std::chrono::system_clock::now() + early >= deadline) {
    return absl::DeadlineExceededError("the deadline passed before the launch; nothing ran");
  }
  if (left) return absl::CancelledError("cancelled before the launch");
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
  to.mutable_timing()->set_gate_ns(from.gate_ns);
}

void FillReports(std::span<const OperationReport> from, bool profile,
                 google::protobuf::RepeatedPtrField<v1::OpResult>& to) {
  for (std::size_t i = 0; i < from.size(); ++i) FillReport(from[i], profile, *to[static_cast<int>(i)].mutable_report());
}

}  // namespace tessera::server
