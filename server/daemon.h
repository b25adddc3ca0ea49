// The daemon: builds every part from the settings, starts serving, drains, stops. main() and the end-to-end tests run
// the same object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/config/settings.h"

namespace tessera::server {

class Daemon {
 public:
  // Serves when this returns. Errors name what could not be had (socket, HTTP port) and what to do. `restarts`: times
  // that a supervisor has started it before.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const LoadedSettings& settings, std::uint32_t restarts = 0);

  // Stops at once; running operations still finish.
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Begins to drain and returns: readiness and health drop first, then new work is refused, running work finishes.
  // Thread-safe; calling it again does nothing.
  void RequestDrain();

  // Returns once the daemon has drained, or the setting drain_grace_s has passed since RequestDrain. True = everything
  // that was accepted has finished.
  bool AwaitDrained();

  // Whether the GPU's context was lost, which drains the daemon too.
  bool gpu_lost() const;

  // UUID of the GPU that it serves; empty without one.
  std::string gpu_uuid() const;

  // Removes the socket files, for a process that is about to end without running destructors.
  void RemoveSockets();

  const std::string& socket() const;
  std::string http_address() const;  // with the real port; empty if off
  std::string tcp_address() const;   // likewise

 private:
  class Parts;
  explicit Daemon(std::unique_ptr<Parts> parts);
  const std::unique_ptr<Parts> parts_;
};

}  // namespace tessera::server
