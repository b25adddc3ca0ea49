// What it costs a client to have a product between two kernels of its own computed by the daemon, where the GPU alone
// orders the three.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace tessera::gpu_test {

// A measuring process as those of bench_workers.h. Lines: `handover_pipelined`, on one stream call with 16 products
// unanswered at most, and `handover_unary`, each product a call that is answered when it is launched (ENQUEUED).
absl::Status BenchHandover(const std::string& socket, const std::string& lines);

}  // namespace tessera::gpu_test
