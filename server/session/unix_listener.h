// A listening Unix socket at a path: its directory, its permissions, and what to do about a socket that is already
// there.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace tessera::server {

// Owns the socket file and a lock on `<path>.lock`; both go with it.
class UnixListener {
 public:
  // `type` is SOCK_STREAM or SOCK_SEQPACKET. The directory is made (0750) if missing and must be nobody else's to
  // write. A stale socket is replaced; ALREADY_EXISTS if another process is serving there.
  static absl::StatusOr<UnixListener> Open(const std::string& path, int type);

  UnixListener(UnixListener&&) = default;
  UnixListener& operator=(UnixListener&&) = delete;
  ~UnixListener();

  int fd() const { return socket_.get(); }  // non-blocking, listening
  const std::string& path() const { return path_; }

 private:
  UnixListener(std::string path, UniqueFd lock);

  std::string path_;
  UniqueFd lock_;
  UniqueFd socket_;
};

}  // namespace tessera::server
