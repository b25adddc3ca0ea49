// From requests of Compute to a submission for the executor, and back to reports: what its calls share.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/exec/executor.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/compute.pb.h"
#include "tessera/v1/types.pb.h"

namespace tessera::server {

inline constexpr int kOpsMax = 64;  // of one submission

// Decodes options and op and binds what they name. `submission.session` is set before. The result says whether reports
// with times are asked for. Errors name fields as `op...` and `options...`. The message, and `inline_result`, outlive
// the submission.
absl::StatusOr<bool> BindGemmRequest(const RpcScope& scope, const v1::GemmOp& op, const v1::SubmitOptions& options,
                                     std::string* inline_result, Submission& submission);

// The same of a message Submission, with a result added for each op. Errors name fields as `submission...`.
absl::StatusOr<bool> BindSubmission(const RpcScope& scope, const v1::Submission& message,
                                    google::protobuf::RepeatedPtrField<v1::OpResult>& results, Submission& submission);

// Errors of an accepted submission, with fields named as BindSubmission does.
absl::Status InSubmission(const absl::Status& status);

// Submission::still_wanted of a call: its deadline, and whether its client has left.
absl::Status StillWanted(std::chrono::system_clock::time_point deadline, const std::atomic<bool>& cancelled);

// The client has left: what of the session is not wanted any more goes without waiting for its turn. Null: no session.
void DropUnwanted(const RpcScope& scope, const std::shared_ptr<Session>& session);

void FillReport(const OperationReport& from, bool profile, v1::OpReport& to);
void FillReports(std::span<const OperationReport> from, bool profile,
                 google::protobuf::RepeatedPtrField<v1::OpResult>& to);

}  // namespace tessera::server
