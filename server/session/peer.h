// Who is at the other end of a connection, as the kernel says.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/status/statusor.h"

namespace tessera::server {

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;

  // The identity that owns things: "uid:1000".
  std::string Principal() const { return "uid:" + std::to_string(uid); }
};

// SO_PEERCRED of a connected Unix socket: credentials at the time of connect, checked by the kernel.
absl::StatusOr<Peer> PeerOfSocket(int fd);

// Finds the peer of a gRPC call. gRPC names a connection that it was given as a descriptor "fd:<number>", so the number
// must mean one connection for as long as a call of it may live: each accepted connection gets a number above the last
// one, and numbers start over only after the whole range was used.
class PeerRegistry {
 public:
  PeerRegistry();

  // Duplicates `fd` to the next number, close-on-exec, and remembers its peer. The caller owns the result; `fd` stays
  // open. RESOURCE_EXHAUSTED if the process has no number free.
  absl::StatusOr<int> Adopt(int fd, const Peer& peer);

  // The peer of the connection that gRPC calls `name` (ServerContext::peer()); nullopt for anything else.
  std::optional<Peer> Find(std::string_view name) const;

 private:
  const int first_;  // range of connection numbers, [first_, end_)
  const int end_;
  int next_;
  mutable std::mutex mutex_;
  std::unordered_map<int, Peer> peers_;  // at most one entry a number
};

}  // namespace tessera::server
