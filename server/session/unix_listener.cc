#include "server/session/unix_listener.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {
namespace {

constexpr int kBacklog = 128;

// A directory that others may write could hold their socket under our name.
absl::Status PrepareDirectory(const std::filesystem::path& directory) {
  std::error_code error;
  const bool made = std::filesystem::create_directories(directory, error);
  if (error)
    return absl::FailedPreconditionError(absl::StrCat("cannot make ", directory.string(), ": ", error.message()));
  if (made && ::chmod(directory.c_str(), 0750) != 0) {
    return ErrnoStatus(absl::StatusCode::kFailedPrecondition, absl::StrCat("chmod 0750 ", directory.string()));
  }
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {
    return ErrnoStatus(absl::StatusCode::kFailedPrecondition, directory.string());
  }
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory.string(), " belongs to uid ", info.st_uid, "; choose another directory with --socket"));
  }
  if ((info.st_mode & (S_IWOTH | S_IWGRP)) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory.string(), " can be written by others; choose a directory of mode 0750 with --socket"));
  }
  return absl::OkStatus();
}

std::string LockPathOf(const std::string& path) {
  return path + ".lock";
}

bool IsFileAt(int fd, const std::string& path) {
  struct stat held {};
  struct stat present {};
  return ::fstat(fd, &held) == 0 && ::stat(path.c_str(), &present) == 0 && held.st_dev == present.st_dev &&
         held.st_ino == present.st_ino;
}

// Held while we serve: whoever has the lock may remove a socket file, because nobody serves it.
absl::StatusOr<UniqueFd> LockPath(const std::string& path) {
  const std::string lock_path = LockPathOf(path);
  UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0640));
  if (!lock) return ErrnoStatus(absl::StatusCode::kFailedPrecondition, lock_path);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return absl::AlreadyExistsError(
          absl::StrCat("another daemon is serving at ", path, "; stop it or choose another path with --socket"));
    }
    return ErrnoStatus(absl::StatusCode::kFailedPrecondition, lock_path);
  }
  // A daemon that was just leaving may have removed the file between our open and our lock; then the next one locks
  // another file, and both would believe to be alone.
  if (!IsFileAt(lock.get(), lock_path)) return LockPath(path);
  return lock;
}

absl::Status RemoveStaleSocket(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoStatus(absl::StatusCode::kFailedPrecondition, path);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " exists and is no socket; move it away"));
  }
  if (::unlink(path.c_str()) != 0) return ErrnoStatus(absl::StatusCode::kFailedPrecondition, path);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<UnixListener> UnixListener::Open(const std::string& path, int type) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path of ", path.size(), " bytes: the system allows ",
                                                   sizeof(address.sun_path) - 1, ": ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  RETURN_IF_ERROR(PrepareDirectory(std::filesystem::absolute(path).parent_path()));
  ASSIGN_OR_RETURN(UniqueFd lock, LockPath(path));
  UnixListener listener(path, std::move(lock));
  RETURN_IF_ERROR(RemoveStaleSocket(path));

  UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return ErrnoStatus(absl::StatusCode::kResourceExhausted, "socket");
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(absl::StatusCode::kFailedPrecondition, absl::StrCat("bind ", path));
  }
  listener.socket_ = std::move(socket);
  // The directory decides who can reach the socket; whoever can, may connect.
  if (::chmod(path.c_str(), 0666) != 0 || ::listen(listener.fd(), kBacklog) != 0) {
    return ErrnoStatus(absl::StatusCode::kFailedPrecondition, absl::StrCat("listen on ", path));
  }
  return listener;
}

UnixListener::UnixListener(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}

UnixListener::~UnixListener() {
  if (socket_) ::unlink(path_.c_str());
  if (lock_) ::unlink(LockPathOf(path_).c_str());  // the lock itself goes after it, with the descriptor
}

}  // namespace tessera::server
