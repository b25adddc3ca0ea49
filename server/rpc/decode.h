// Requests -> calls: the last code that sees protobuf. Checks everything a message says about itself; errors begin with
// the field's path. Fields that are not served yet answer UNIMPLEMENTED naming them.
#pragma once

#include <optional>

#include "absl/status/statusor.h"
#include "kernels/catalog/variant.h"
#include "server/exec/call.h"
#include "tessera/v1/compute.pb.h"

namespace tessera::server {

// The call refers to the request's inline data: the request must outlive it.
absl::StatusOr<GemmCall> DecodeGemm(const v1::GemmOp& op);

struct DecodedOptions {
  std::optional<kernels::Backend> backend;  // strict; nullopt = the daemon's default
  bool profile = false;
};

absl::StatusOr<DecodedOptions> DecodeOptions(const v1::SubmitOptions& options);

}  // namespace tessera::server
