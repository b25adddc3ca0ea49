// The measuring processes of the benchmark program. Each appends its lines to a file; the program that starts them,
// with or without MPS, adds what is the same for all lines.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace tessera::gpu_test {

// In this process: `plan`, `launch`, `empty_launch`, `launch_sync`, `submit` and `kernel`.
absl::Status BenchLaunch(const std::string& lines);

// Through the daemon at `socket`: `grpc_unary` and `grpc_unary_empty`.
absl::Status BenchDaemon(const std::string& socket, const std::string& lines);

// Our kernels and the vendor's in turns, some shapes in two regimes.
absl::Status BenchVendor(const std::string& lines);

}  // namespace tessera::gpu_test
