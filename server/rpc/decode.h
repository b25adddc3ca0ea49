// Requests -> calls: the last code that sees protobuf. Checks everything a message says about itself; errors begin with
// the field's path.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/catalog/variant.h"
#include "server/exec/call.h"
#include "server/session/id.h"
#include "tessera/v1/compute.pb.h"

namespace tessera::server {

// The call refers to the request's inline data: the request must outlive it.
absl::StatusOr<GemmCall> DecodeGemm(const v1::GemmOp& op);

struct DecodedPoint {
  Id id;
  std::uint64_t value = 0;
};

struct DecodedOptions {
  std::optional<Id> stream;  // nullopt = the session's own
  std::vector<DecodedPoint> wait;
  std::vector<DecodedPoint> signal;
  bool answer_when_launched = false;
  std::optional<kernels::Backend> backend;  // strict; nullopt = the daemon's default
  bool profile = false;
  std::chrono::milliseconds timeout{0};  // 0 = none
};

// Points that a submission waits for, and as many that it signals.
inline constexpr int kSyncPointsMax = 16;

// nullopt = the daemon's default.
absl::StatusOr<std::optional<kernels::Backend>> DecodeBackend(v1::Backend backend, std::string_view field);
absl::StatusOr<kernels::Accumulation> DecodeAccumulation(v1::Accumulation accumulation, std::string_view field);

absl::StatusOr<DecodedOptions> DecodeOptions(const v1::SubmitOptions& options);

}  // namespace tessera::server
