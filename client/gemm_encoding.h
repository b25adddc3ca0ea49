// A GemmSpec as a message, and an answer as a GemmResult: what single calls and streams share.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "tessera/v1/types.pb.h"

namespace tessera::client {

// Fills `op` and `options`, both empty before. Copies the elements of inline tensors.
void EncodeOrder(const OrderSpec& order, v1::SubmitOptions& options);
void Encode(const GemmSpec& spec, v1::GemmOp& op, v1::SubmitOptions& options);

// The answer of the daemon to a call whose output is `d`: takes `report`, writes `inline_result` through `d` if that is
// inline.
absl::StatusOr<GemmResult> Decode(v1::OpReport& report, const std::string& inline_result, const TensorView& d,
                                  std::chrono::steady_clock::time_point start);

}  // namespace tessera::client
