// What tests of sessions and buffers need from the system: memfds as a client makes them, a directory that goes away,
// and how many descriptors this process has open.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "common/unique_fd.h"

namespace tessera::server {

// A memfd of `bytes` zeros with `seals`; empty if the system refuses any part of that.
inline UniqueFd MakeMemfd(std::uint64_t bytes, int seals = F_SEAL_SHRINK, unsigned flags = 0) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return {};
  if (seals != 0 && ::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) return {};
  return fd;
}

inline UniqueFd Duplicate(const UniqueFd& fd) {
  return UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
}

// The same file with other access, such as O_RDONLY.
inline UniqueFd Reopen(const UniqueFd& fd, int flags) {
  return UniqueFd(::open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), flags | O_CLOEXEC));
}

// One datagram with any number of descriptors; what the system said.
inline ssize_t SendDatagram(int socket, const std::string& bytes, const std::vector<int>& fds) {
  iovec io{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &io;
  header.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(c), fds.data(), sizeof(int) * fds.size());
  }
  return ::sendmsg(socket, &header, MSG_NOSIGNAL);
}

inline std::size_t OpenDescriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string();
    if (::mkdtemp(name.data()) != nullptr) path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }  // empty if it could not be made

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::server
