// What must be gone when a client is: clients of every kind are killed at random points, and the daemon, the GPU's
// memory and a client beside them are watched.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/gpu/e2e_process.h"
#include "tests/gpu/e2e_report.h"

namespace tessera::gpu_test {

// Kinds of clients that are killed: in the middle of imports by either route; with buffers that nobody uses; with large
// products running; with more of them than the daemon launches ahead; with answers of a stream that it does not read;
// with kernels of its own that write what the daemon reads, which is the last. The jobs are victim-<kind>.
inline constexpr std::array<std::string_view, 7> kVictimKinds = {"handles", "descriptors", "idle",   "running",
                                                                 "queued",  "unread",      "kernels"};

// What one process holds, by /proc.
struct Footprint {
  std::int64_t maps = 0;
  std::int64_t file_maps = 0;  // of those, of files, memfds and devices: threads and the heap come and go without
  std::int64_t descriptors = 0;
  std::int64_t resident_bytes = 0;
};

// Of the daemon of process number `pid`; an error if that is none.
absl::StatusOr<Footprint> FootprintOfDaemon(int pid);

// Checks that `after` holds no more than `before`, but for `tolerance`, and remarks on both.
void CheckFootprint(Row& row, const Footprint& before, const Footprint& after, const Footprint& tolerance);

// The daemon and the means of one environment.
struct LifetimeStage {
  client::Client* daemon = nullptr;  // may administer
  bool same_pids = true;             // process numbers that the daemon tells are those of this process
  // Whether clients with kernels of their own are killed: not under MPS, where the end of such a client may end the
  // contexts of all (docs/guides/isolation.md).
  bool own_kernels = true;
  std::uint64_t seed = 0;
  // A client process for `job`, with a board (e2e_board.h) at that path.
  std::function<absl::StatusOr<Process>(const std::string& job, const std::string& board)> start;
  std::function<std::string(const std::string& name)> new_path;                // of a file that is not there yet
  std::function<std::chrono::milliseconds(std::chrono::milliseconds)> within;  // a limit, cut by what time is left
};

// `rounds` clients, of all kinds in turns.
Row RunKilled(const LifetimeStage& stage, int rounds);

}  // namespace tessera::gpu_test
