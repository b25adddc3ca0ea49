// What no client library sends: handles and descriptors that are none, or lie. Each must be refused by name, and the
// daemon's context live on.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "tests/gpu/e2e_report.h"

namespace tessera::gpu_test {

// Over a connection, lease and session of its own to the daemon at `socket`. An error is of the test's own means.
absl::Status TryHostileImports(const std::string& socket, Row& row);

}  // namespace tessera::gpu_test
