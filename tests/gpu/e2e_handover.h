// Work that goes to and fro between a client's streams and the daemon's without the host: over shared timelines and
// imported events, and what becomes of waits that never end.
#pragma once

#include <string_view>

#include "tests/gpu/e2e_client.h"
#include "tests/gpu/e2e_lifetimes.h"
#include "tests/gpu/e2e_report.h"

namespace tessera::gpu_test {

// Client jobs of a row each:
//   handover       kernel, product, kernel, over and over, ordered by the GPU alone
//   handover_host  the same with the product's waits kept by the daemon
//   event_wait     a product waits for an event that this process has recorded behind a kernel
//   event_signal   a kernel waits for an event that the daemon has recorded behind a product
//   stuck_wait     a product waits on the GPU for what never comes: its session ends, and others go on
// and those that go on until they are killed, or told to stop on their board:
//   handover-beside  products that wait for this process, compared
//   handover-waits   a product that waits on the GPU for what never comes
//   handover-event   a product that waits for an event behind a kernel of some seconds
//   handover-heir    another session's product that waits for that process's event
inline constexpr std::string_view kHandoverJobs[] = {"handover", "handover_host", "event_wait", "event_signal",
                                                     "stuck_wait"};
bool IsHandoverJob(std::string_view job);
int RunHandoverJob(const ClientJob& job);  // as RunClient

// Clients are killed whose products wait on the GPU: they go, and a client beside them does not notice.
Row RunKilledInWait(const LifetimeStage& stage);

// A client is killed for whose event the daemon holds a product back: that goes with its session. What becomes of the
// event for another session is looked at, and only told. Not under MPS: a kernel of the client's runs.
Row RunEventOfTheDead(const LifetimeStage& stage);

}  // namespace tessera::gpu_test
