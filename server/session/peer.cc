#include "server/session/peer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
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

PeerRegistry::Range UsableRange() {
  const int end = RaiseDescriptorLimit();
  return {.first = std::min(kFirstConnection, end / 2), .end = end};
}

// The inode of the socket behind a descriptor; 0 if there is none.
ino_t SocketOf(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return 0;
  return status.st_ino;
}

absl::Status UnknownConnection(std::string_view name) {
  return absl::NotFoundError(absl::StrCat("connection ", Av(name), " has no known peer"));
}

absl::StatusOr<int> ParseName(std::string_view name) {
  constexpr std::string_view kPrefix = "fd:";
  if (name.substr(0, kPrefix.size()) != kPrefix) return UnknownConnection(name);
  const std::string_view digits = name.substr(kPrefix.size());
  int number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool whole = error == std::errc() && end == digits.data() + digits.size();
  if (!whole || digits != std::to_string(number)) return UnknownConnection(name);
  return number;
}

}  // namespace

std::string Peer::Principal() const {
  switch (kind) {
    case PeerKind::kLocal:
      return "uid:" + std::to_string(uid);
    case PeerKind::kCertificate:
      return "subject:" + subject;
    case PeerKind::kAnonymous:
      break;
  }
  return "anonymous";
}

bool SamePrincipal(const Peer& a, const Peer& b) {
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case PeerKind::kLocal:
      return a.uid == b.uid;
    case PeerKind::kCertificate:
      return a.subject == b.subject;
    case PeerKind::kAnonymous:
      break;
  }
  return false;
}

absl::StatusOr<Peer> PeerOfSocket(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return ErrnoStatus(absl::StatusCode::kUnauthenticated, "SO_PEERCRED");
  }
  // What the kernel says of a socket that is not a Unix one. (A pid of 0 only means another pid namespace.)
  if (credentials.uid == static_cast<uid_t>(-1)) {
    return absl::UnauthenticatedError("SO_PEERCRED: the kernel knows no peer of this socket");
  }
  return Peer{.pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid};
}

PeerRegistry::PeerRegistry(const ConnectionLimits& limits, Metrics& metrics, std::optional<Range> range)
    : limits_(limits), range_(range.has_value() ? *range : UsableRange()), metrics_(metrics), next_(range_.first) {}

// With mutex_ held, as all private methods.
absl::StatusOr<int> PeerRegistry::NextNumber(int fd) {
  int number = ::fcntl(fd, F_DUPFD_CLOEXEC, next_);
  if (number < 0 || number >= range_.end) {  // the range is used up: start over at its beginning
    if (number >= 0) ::close(number);
    number = ::fcntl(fd, F_DUPFD_CLOEXEC, range_.first);
  }
  if (number < 0) return ErrnoStatus(absl::StatusCode::kResourceExhausted, "no descriptor free for a connection");
  if (number >= range_.end) {
    ::close(number);
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", range_.end - range_.first, " connection numbers are in use"));
  }
  next_ = number + 1 < range_.end ? number + 1 : range_.first;
  return number;
}

absl::StatusOr<int> PeerRegistry::Add(int fd, std::optional<Peer> peer, const std::string& account) {
  const absl::Status room = CheckRoom(account);
  if (!room.ok()) {
    const auto over = std::count_if(connections_.begin(), connections_.end(),
                                    [](const auto& entry) { return !entry.second.admitted; });
    if (!peer.has_value() || static_cast<std::size_t>(over) >= kOverLimitMax) return room;
  }
  ASSIGN_OR_RETURN(const int number, NextNumber(fd));
  connections_[number] = {
      .peer = std::move(peer), .account = account, .socket = SocketOf(number), .admitted = room.ok()};
  return number;
}

absl::StatusOr<int> PeerRegistry::Adopt(int fd, const Peer& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return Add(fd, peer, peer.Principal());
}

absl::StatusOr<int> PeerRegistry::AdoptUnnamed(int fd, const std::string& account) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return Add(fd, std::nullopt, account);
}

absl::StatusOr<Peer> PeerRegistry::Find(std::string_view name) {
  ASSIGN_OR_RETURN(const int number, ParseName(name));
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = connections_.find(number);
  if (found == connections_.end() || !found->second.peer.has_value()) return UnknownConnection(name);
  if (found->second.admitted) return *found->second.peer;

  const Peer peer = *found->second.peer;
  RETURN_IF_ERROR(CheckRoom(peer.Principal()));
  connections_[number].admitted = true;
  return peer;
}

std::size_t PeerRegistry::CountOpen() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ForgetClosed();
  return connections_.size();
}

void PeerRegistry::HangUp() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ForgetClosed();
  for (const auto& [number, connection] : connections_) ::shutdown(number, SHUT_RDWR);  // its owner closes it
}

void PeerRegistry::ForgetClosed() {
  std::erase_if(connections_, [](const auto& entry) { return SocketOf(entry.first) != entry.second.socket; });
}

std::optional<Limit> PeerRegistry::LimitReachedBy(const std::string& account) const {
  std::size_t all = 0;
  std::size_t mine = 0;
  for (const auto& [number, connection] : connections_) {
    if (!connection.admitted) continue;
    ++all;
    if (connection.account == account) ++mine;
  }
  if (mine >= limits_.connections_per_principal_max) return Limit::kConnectionsPerPrincipal;
  if (all >= limits_.connections_max) return Limit::kConnections;
  return std::nullopt;
}

// Asks the kernel which connections are still open only when it matters.
absl::Status PeerRegistry::CheckRoom(const std::string& account) {
  if (!LimitReachedBy(account).has_value()) return absl::OkStatus();
  ForgetClosed();
  const std::optional<Limit> limit = LimitReachedBy(account);
  if (!limit.has_value()) return absl::OkStatus();
  metrics_.Refused(*limit);
  if (*limit == Limit::kConnections) {
    return absl::ResourceExhaustedError(
        absl::StrCat("connections_max: all ", limits_.connections_max, " connections are taken; call again later"));
  }
  return absl::ResourceExhaustedError(absl::StrCat("connections_per_principal_max: ", account, " has ",
                                                   limits_.connections_per_principal_max,
                                                   " connections open; close one and call again"));
}

}  // namespace tessera::server
