#include "common/fd_message.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstring>

#include "common/text.h"

namespace tessera {
namespace {

// Room for more descriptors than we accept, so that a surplus arrives, is seen and is closed, rather than truncated.
constexpr std::size_t kFdRoom = 16;

void CollectFds(const msghdr& header, std::vector<UniqueFd>& fds) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(const_cast<msghdr*>(&header), c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
}

}  // namespace

absl::Status SendFdMessage(int socket, std::string_view bytes, int fd) {
  if (bytes.empty() || bytes.size() > kFdMessageBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("side channel message of ", bytes.size(), " bytes: allowed are 1 to ", kFdMessageBytesMax));
  }
  iovec io{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &io;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (fd >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &fd, sizeof(int));
  }
  while (::sendmsg(socket, &header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    return ErrnoStatus(absl::StatusCode::kUnavailable, "side channel: sendmsg");
  }
  return absl::OkStatus();
}

absl::StatusOr<FdMessage> ReceiveFdMessage(int socket) {
  FdMessage message;
  message.bytes.resize(kFdMessageBytesMax);
  iovec io{message.bytes.data(), message.bytes.size()};
  msghdr header{};
  header.msg_iov = &io;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kFdRoom)> control{};
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t got = -1;
  do {
    got = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == ECONNRESET) {
      message.bytes.clear();
      return message;
    }
    return ErrnoStatus(absl::StatusCode::kUnavailable, "side channel: recvmsg");
  }
  CollectFds(header, message.fds);
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("side channel message: longer than the limit of ", kFdMessageBytesMax, " bytes"));
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0 || message.fds.size() > kFdMessageFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("side channel message: more than ", kFdMessageFdsMax, " descriptor, or the daemon has none free"));
  }
  message.bytes.resize(static_cast<std::size_t>(got));
  return message;
}

absl::StatusOr<UniqueFd> ConnectSeqpacket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path of ", path.size(), " bytes: the system allows ",
                                                   sizeof(address.sun_path) - 1, ": ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) return ErrnoStatus(absl::StatusCode::kResourceExhausted, "socket");
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(absl::StatusCode::kUnavailable, absl::StrCat("connect to ", path));
  }
  return fd;
}

}  // namespace tessera
