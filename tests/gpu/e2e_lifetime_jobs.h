// Client jobs about how long memory lives: of its owner, of the daemon, and of whoever uses it beside them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/gpu/e2e_client.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_report.h"

namespace tessera::gpu_test {

// Jobs that end by themselves:
//   import-cycles     `cycles` imports and releases of one allocation by each route: nothing stays. In the daemon's PID
//                     namespace
//   reused-address    memory that took over an address from its predecessor is never taken for it
//   released-running  a buffer that is released, or whose session is closed, while products use it: the answer comes
//                     when they are over
//   sub-buffers       buffers inside one allocation show their own bytes
//   shared            another process's session uses a buffer for as long as it is shared, and no longer
//   guest             that other process, with a board
//   order             chains of products over streams and timelines, in one submission, answered when launched
//   producer          a kernel of this process writes what a product reads
bool IsLifetimeJob(std::string_view job);
absl::StatusOr<std::vector<Row>> RunLifetimeJob(const ClientJob& job);

// Jobs that go on until they are killed, or told to stop on their board:
//   watch      looks at the GPU's free memory
//   bystander  computes and compares
//   victim-*   see kVictimKinds in e2e_lifetimes.h
// A watchdog ends them if nobody does.
bool IsCompanionJob(std::string_view job);
absl::Status RunCompanionJob(const ClientJob& job);

// The jobs that have a file of their own. An error is of the test's own means.
absl::Status RunImportCycles(const ClientJob& job, Row& row);
absl::Status RunReusedAddress(const ClientJob& job, Row& row);
absl::Status RunReleasedRunning(const ClientJob& job, Row& row);
absl::Status RunShared(const ClientJob& job, Row& row);
absl::Status RunOrder(const ClientJob& job, Row& row);
absl::Status RunGuest(const ClientJob& job, Row& row);

// What they have in common.
inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;

double SecondsSince(std::chrono::steady_clock::time_point begin);
void CheckOk(Row& row, const std::string& what, const absl::Status& status);
void CheckRight(Row& row, const std::string& what, const std::string& wrong);  // right: nothing is wrong

// As Eventually, for what is over in a moment; false if it is not in 20 s.
template <typename Condition>
bool Soon(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// cudaMalloc until `address` comes back; null if it does not in a few.
absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocateAt(const std::byte* address, std::size_t bytes);
absl::StatusOr<std::vector<std::byte>> BytesOf(const DeviceAllocation& memory);

}  // namespace tessera::gpu_test
