// Who is at the other end of a connection, and how many connections they have.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

// What vouches for a caller.
enum class PeerKind {
  kLocal,        // the kernel: credentials of a Unix socket
  kCertificate,  // a client certificate, over TCP
  kAnonymous,    // nothing: plain TCP on loopback
};

struct Peer {
  pid_t pid = 0;  // kLocal only, as uid and gid
  uid_t uid = 0;
  gid_t gid = 0;
  PeerKind kind = PeerKind::kLocal;
  std::string subject;  // kCertificate: as RFC 2253 writes it, such as "CN=trainer,O=Example"

  // The identity that owns things: "uid:1000", "subject:CN=trainer,O=Example" or "anonymous".
  std::string Principal() const;
};

// Whether two callers are one owner. Anonymous callers are never the same as anybody.
bool SamePrincipal(const Peer& a, const Peer& b);

// SO_PEERCRED of a connected Unix socket: credentials at the time of connect, checked by the kernel.
absl::StatusOr<Peer> PeerOfSocket(int fd);

struct ConnectionLimits {
  std::size_t connections_max = 0;
  std::size_t connections_per_principal_max = 0;
};

// The connections that were handed to gRPC, and who is at their other end.
//
// gRPC names a connection that it was given as a descriptor "fd:<number>", so the number must mean one connection for
// as long as a call of it may live. gRPC closes a descriptor only after the last call of its connection is gone; beyond
// that, each accepted connection gets a number above the last one, and numbers start over only after the whole range
// was used.
//
// gRPC does not tell when a connection ends either: it is over once its number is closed or means another socket.
class PeerRegistry {
 public:
  // Connections over a limit that are kept, so that their calls can be told which limit it is; more are closed.
  static constexpr std::size_t kOverLimitMax = 64;

  struct Range {
    int first = 0;
    int end = 0;  // one past the last
  };

  // `range`: the numbers to use; nullopt = from the process's limit, which is raised as far as is useful.
  PeerRegistry(const ConnectionLimits& limits, Metrics& metrics, std::optional<Range> range = std::nullopt);

  // Duplicates `fd` to the next number, close-on-exec, and remembers its peer. The caller owns the result; `fd` stays
  // open. RESOURCE_EXHAUSTED if a limit is far exceeded or the process has no number free.
  absl::StatusOr<int> Adopt(int fd, const Peer& peer);

  // The same for a connection whose calls name their caller themselves (TLS): it counts as `account`'s, such as
  // "address:10.0.0.7", and Find does not know it. Over a limit it is refused.
  absl::StatusOr<int> AdoptUnnamed(int fd, const std::string& account);

  // The peer of the connection that gRPC calls `name` (ServerContext::peer()). NOT_FOUND for anything else.
  // RESOURCE_EXHAUSTED, naming the limit, while the connection is over one.
  absl::StatusOr<Peer> Find(std::string_view name);

  std::size_t CountOpen();

  // Ends every connection under whatever is still to be read or written on it.
  void HangUp();

 private:
  struct Connection {
    std::optional<Peer> peer;
    std::string account;
    ino_t socket = 0;  // inode: no other socket has it while this one is open
    bool admitted = true;
  };

  absl::StatusOr<int> NextNumber(int fd);
  absl::StatusOr<int> Add(int fd, std::optional<Peer> peer, const std::string& account);
  void ForgetClosed();
  std::optional<Limit> LimitReachedBy(const std::string& account) const;
  absl::Status CheckRoom(const std::string& account);

  const ConnectionLimits limits_;
  const Range range_;
  Metrics& metrics_;
  std::mutex mutex_;
  int next_;
  std::unordered_map<int, Connection> connections_;  // by number; closed ones stay until somebody needs the room
};

}  // namespace tessera::server
