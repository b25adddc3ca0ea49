// `tessera bench stream`: the daemon's Compute.Stream, many products on the way, beside a bare echo stream.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "client/cli/output.h"

namespace tessera::client::cli {

// The report, one JSON object a line.
absl::StatusOr<std::string> StreamBenchLines(const GlobalOptions& options, const std::string& git);

}  // namespace tessera::client::cli
