// The cases of the isolation program. Each adds what it measures to the report of its stage, and what it finds wrong;
// an error is of a case that could not be carried through.
#pragma once

#include "absl/status/status.h"
#include "tests/gpu/e2e_daemon.h"
#include "tests/gpu/isolation_stage.h"

namespace tessera::gpu_test {

// What a change of the process that uses the GPU costs, client to daemon and back.
absl::Status MeasureHandover(Stage& stage, TestDaemon& daemon);
// What is left of a busy client's speed when there is a second one.
absl::Status MeasureTwoClients(Stage& stage, TestDaemon& daemon);
// Whom a stream that waits for ever stops, in its process and beside.
absl::Status MeasureStuckWait(Stage& stage, TestDaemon& daemon);
// A client is killed in the middle of its own and the daemon's kernels.
absl::Status MeasureKilledClient(Stage& stage, TestDaemon& daemon);

// Without a daemon: whether a second user gets a context beside the first one's.
absl::Status MeasureSecondUser(Stage& stage);

// With a supervised daemon of its own: somebody else faults while products are under way.
absl::Status MeasureFault(Stage& stage);

}  // namespace tessera::gpu_test
