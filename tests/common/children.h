// What tests of files on disk need: a directory that goes away, and processes that may do less than this one.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

namespace tessera {

inline constexpr int kSkipped = 77;  // exit code of a child that may not do what it needs

class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-scratch-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
    std::filesystem::permissions(path_, std::filesystem::perms(0755));
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// The exit code of `body` in a process of its own; -1 if a signal ended that.
inline int InChild(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Likewise, as a user who owns nothing; kSkipped if this user cannot become another.
inline int AsNobody(const std::function<int()>& body) {
  constexpr uid_t kNobody = 12'345;
  return InChild([&] {
    if (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) return kSkipped;
    return body();
  });
}

// Files of this process get no larger: writes fail as on a full disk. False if that cannot be had.
inline bool LimitFileSize(std::uint64_t bytes) {
  const rlimit small{.rlim_cur = bytes, .rlim_max = bytes};
  return ::signal(SIGXFSZ, SIG_IGN) != SIG_ERR && ::setrlimit(RLIMIT_FSIZE, &small) == 0;
}

inline std::string FileContents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline void WriteFile(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

}  // namespace tessera
