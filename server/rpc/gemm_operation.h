// From a GemmOp to an operation for the executor, and back to a report: what Gemm and Stream share.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/exec/executor.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/types.pb.h"

namespace tessera::server {

// Decodes options and op and binds the tensors. `operation.session` is set before; `gemm` and `backend` are filled in.
// The result says whether a report with times is asked for. Errors name fields as `op...` and `options...`. The
// message, and `inline_result`, outlive the operation.
absl::StatusOr<bool> BindOperation(const RpcScope& scope, const v1::GemmOp& op, const v1::SubmitOptions& options,
                                   std::string* inline_result, Operation& operation);

// Operation::still_wanted of a call: its deadline, and whether its client has left.
absl::Status StillWanted(const grpc::CallbackServerContext& context, const std::atomic<bool>& cancelled);

void FillReport(const OperationReport& from, bool profile, v1::OpReport& to);

}  // namespace tessera::server
