// One datagram of bytes with file descriptors (SCM_RIGHTS) over a SOCK_SEQPACKET Unix socket: the framing of the
// side channel, whose messages are `tessera.v1.SideRequest` and `SideReply`. Used by the daemon and the client.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace tessera {

inline constexpr std::size_t kFdMessageBytesMax = 4096;  // of one datagram
inline constexpr std::size_t kFdMessageFdsMax = 1;       // descriptors in one datagram

struct FdMessage {
  std::string bytes;          // empty = the peer closed the connection
  std::vector<UniqueFd> fds;  // close-on-exec
};

// Sends one datagram; `fd` -1 sends none. UNAVAILABLE if the peer is gone or (non-blocking socket) its queue is full.
absl::Status SendFdMessage(int socket, std::string_view bytes, int fd = -1);

// Receives one datagram. An empty `bytes` is end of stream; UNAVAILABLE "would block" on a non-blocking socket with
// nothing to read; INVALID_ARGUMENT for a datagram over the limits (its descriptors are closed).
absl::StatusOr<FdMessage> ReceiveFdMessage(int socket);

// A connected SOCK_SEQPACKET socket at `path`, blocking, close-on-exec.
absl::StatusOr<UniqueFd> ConnectSeqpacket(const std::string& path);

}  // namespace tessera
