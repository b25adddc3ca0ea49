// The real tesserad on a socket of its own, and what the kernel and its metrics say that it holds, seen from outside.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "client/client.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {

// How much slower everything is than it should be, and whether the size of a process tells what it holds: a
// sanitizer's allocator keeps freed memory for a while.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

class DaemonProcess {
 public:
  // `program`: tesserad. It serves when this returns, without a GPU, with HTTP on a free port of loopback.
  explicit DaemonProcess(std::string program, std::vector<std::string> flags = {});

  // Another one on the same socket, after the one before has ended.
  void StartAgain();

  ChildProcess& child() { return *child_; }
  pid_t pid() const { return pid_; }
  std::string socket() const { return directory_.File("d.sock"); }
  const std::string& http_address() const { return http_address_; }

  absl::StatusOr<client::Client> Connect(std::chrono::milliseconds timeout = std::chrono::seconds(20)) const;
  std::string Metrics() const { return HttpGet(http_address_, "/metrics").body; }

 private:
  const std::string program_;
  const std::vector<std::string> flags_;
  const TemporaryDirectory directory_;
  std::optional<ChildProcess> child_;
  pid_t pid_ = -1;
  std::string http_address_;
};

// A process as /proc shows it.
struct ProcessView {
  std::size_t mappings = 0;
  std::size_t file_mappings = 0;   // with a file behind them, memfds included: the rest is stacks and heaps
  std::size_t memfd_mappings = 0;  // memory of clients, and the daemon's that they may use
  std::map<std::string, std::size_t> descriptors;  // socket, memfd, anon_inode:[eventpoll], .. -> how many are open
  std::size_t threads = 0;
  std::int64_t resident_bytes = 0;
};

ProcessView ViewProcess(pid_t pid);
std::ostream& operator<<(std::ostream& out, const ProcessView& view);

// Seeds of random delays and the like: TESSERA_TEST_SEED, else another one at each run. Printed, so that a failure can
// be repeated.
std::uint64_t TestSeed();

}  // namespace tessera::e2e
