#include "server/session/peer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>

#include "common/text.h"

namespace tessera::server {
namespace {

// Below: the daemon's own descriptors (listeners, logs, buffers). Above: connections.
constexpr int kFirstConnection = 1024;
constexpr int kLastConnection = 65536;

// One past the highest descriptor number this process may use, after raising its limit as far as is useful.
int RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kFirstConnection;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, kLastConnection);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::getrlimit(RLIMIT_NOFILE, &limit);
  }
  return static_cast<int>(std::min<rlim_t>(limit.rlim_cur, kLastConnection));
}

}  // namespace

absl::StatusOr<Peer> PeerOfSocket(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return ErrnoStatus(absl::StatusCode::kUnauthenticated, "SO_PEERCRED");
  }
  return Peer{.pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid};
}

PeerRegistry::PeerRegistry()
    : first_(std::min(kFirstConnection, RaiseDescriptorLimit() / 2)), end_(RaiseDescriptorLimit()), next_(first_) {}

absl::StatusOr<int> PeerRegistry::Adopt(int fd, const Peer& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int number = ::fcntl(fd, F_DUPFD_CLOEXEC, next_);
  if (number < 0 || number >= end_) {  // the range is used up: start over at its beginning
    if (number >= 0) ::close(number);
    number = ::fcntl(fd, F_DUPFD_CLOEXEC, first_);
  }
  if (number < 0) return ErrnoStatus(absl::StatusCode::kResourceExhausted, "no descriptor free for a connection");
  if (number >= end_) {
    ::close(number);
    return absl::ResourceExhaustedError(absl::StrCat("all ", end_ - first_, " connection numbers are in use"));
  }
  next_ = number + 1 < end_ ? number + 1 : first_;
  peers_[number] = peer;
  return number;
}

std::optional<Peer> PeerRegistry::Find(std::string_view name) const {
  constexpr std::string_view kPrefix = "fd:";
  if (name.substr(0, kPrefix.size()) != kPrefix) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  int number = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end != name.data() + name.size() || name != std::to_string(number)) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = peers_.find(number);
  if (found == peers_.end()) return std::nullopt;
  return found->second;
}

}  // namespace tessera::server
