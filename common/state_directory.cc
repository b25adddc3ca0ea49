#include "common/state_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera {
namespace {

constexpr std::size_t kNameLimit = 128;
constexpr mode_t kDirectoryMode = 0700;
constexpr mode_t kFileMode = 0644;

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::StatusCode::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::StatusCode::kResourceExhausted;
    case ELOOP:   // a link, which O_NOFOLLOW refuses
    case ENXIO:   // a socket, or a FIFO that nobody reads
    case ENODEV:  // a device without a driver
    case EISDIR:
    case ENOTEMPTY:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

// `call` again as long as a signal interrupts it.
template <typename Call>
auto Uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// mkdir for each missing part of an absolute path.
absl::Status MakeDirectories(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    // Whatever else stands there, or keeps us from looking, the open that follows tells.
    if (::mkdir(part.c_str(), kDirectoryMode) != 0 && errno != EEXIST) {
      const int error = errno;
      struct stat found {};
      // A read-only file system refuses before it looks whether the directory exists.
      if (::stat(part.c_str(), &found) != 0)
        return ErrnoStatus(CodeOf(error), "cannot create directory " + part, error);
    }
    if (end == std::string::npos) return absl::OkStatus();
  }
}

}  // namespace

absl::Status CheckFileName(std::string_view name) {
  const auto allowed = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  };
  if (name.empty()) return absl::InvalidArgumentError("a file name is empty");
  if (name.size() > kNameLimit) {
    return absl::InvalidArgumentError(
        absl::StrCat("a file name of ", name.size(), " characters; at most ", kNameLimit, " are allowed"));
  }
  if (name.front() == '.' || !std::all_of(name.begin(), name.end(), allowed)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", absl::CHexEscape(Av(name)), "' is no file name: letters, digits, '.', '_' and '-', the first no dot"));
  }
  return absl::OkStatus();
}

absl::StatusOr<StateDirectory> StateDirectory::Open(const std::string& path, bool create) {
  if (path.empty() || path.front() != '/' || path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("'", absl::CHexEscape(path), "' is no absolute path"));
  }
  if (create) RETURN_IF_ERROR(MakeDirectories(path));
  UniqueFd fd(Uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (!fd) {
    const int error = errno;  // making the message may change it
    return ErrnoStatus(CodeOf(error), "cannot open directory " + path, error);
  }
  return StateDirectory(path, std::move(fd));
}

absl::Status StateDirectory::CheckWritable() const {
  if (::faccessat(fd_.get(), ".", W_OK | X_OK, AT_EACCESS) != 0) return Failed("write into", "", errno);
  return absl::OkStatus();
}

absl::StatusOr<std::string> StateDirectory::Read(std::string_view name, std::size_t limit) const {
  ASSIGN_OR_RETURN(const UniqueFd file, OpenRegular(name, O_RDONLY));
  const auto too_large = [&] {
    return absl::OutOfRangeError(absl::StrCat(path_, "/", Av(name), " has more than ", limit, " bytes"));
  };
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0) return Failed("look at", name, errno);
  if (static_cast<std::size_t>(facts.st_size) > limit) return too_large();
  // One byte more than the file has, to see its end; a file that grows meanwhile stays bounded too.
  std::string contents(static_cast<std::size_t>(facts.st_size) + 1, '\0');
  std::size_t filled = 0;
  while (true) {
    const ssize_t got =
        Uninterrupted([&] { return ::read(file.get(), contents.data() + filled, contents.size() - filled); });
    if (got < 0) return Failed("read", name, errno);
    if (got == 0) break;
    filled += static_cast<std::size_t>(got);
    if (filled > limit) return too_large();
    if (filled == contents.size()) contents.resize(std::min(2 * contents.size(), limit + 1));
  }
  contents.resize(filled);
  return contents;
}

absl::Status StateDirectory::Replace(std::string_view name, std::string_view contents) const {
  RETURN_IF_ERROR(CheckFileName(name));
  const std::string target(name);
  const std::string temporary = target + ".tmp";
  RETURN_IF_ERROR(CheckFileName(temporary));
  absl::Status written = WriteWhole(temporary, contents);
  if (written.ok() && ::renameat(fd_.get(), temporary.c_str(), fd_.get(), target.c_str()) != 0) {
    written = Failed("replace", name, errno);
  }
  if (!written.ok()) {
    // Frees the space at once; failing leaves a file that the next writer removes.
    ::unlinkat(fd_.get(), temporary.c_str(), 0);
    return written;
  }
  // The new name is lasting only with the directory.
  if (Uninterrupted([&] { return ::fsync(fd_.get()); }) != 0) return Failed("sync the directory of", name, errno);
  return absl::OkStatus();
}

absl::Status StateDirectory::Rename(std::string_view from, std::string_view to) const {
  RETURN_IF_ERROR(CheckFileName(from));
  RETURN_IF_ERROR(CheckFileName(to));
  if (::renameat(fd_.get(), std::string(from).c_str(), fd_.get(), std::string(to).c_str()) != 0) {
    return Failed("rename", from, errno);
  }
  return absl::OkStatus();
}

absl::StatusOr<FileLock> StateDirectory::Lock(std::string_view name, std::chrono::milliseconds patience) const {
  constexpr std::chrono::milliseconds kPause(5);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    ASSIGN_OR_RETURN(UniqueFd file, OpenRegular(name, O_RDWR | O_CREAT));
    // Asks instead of waiting: the holder may be stopped, and no signal should be needed to end the wait.
    while (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) return Failed("lock", name, errno);
      if (std::chrono::steady_clock::now() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("another process has held ", path_, "/", Av(name), " for ", patience.count(), " ms"));
      }
      std::this_thread::sleep_for(kPause);
    }
    // Who empties the directory removes the lock file too: a lock on a file without its name excludes nobody.
    ASSIGN_OR_RETURN(const bool still_named, IsStillNamed(file, std::string(name)));
    if (still_named) return FileLock(std::move(file));
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(path_, "/", Av(name), " is being removed again and again"));
    }
  }
}

absl::Status StateDirectory::Failed(std::string_view doing, std::string_view name, int error) const {
  return ErrnoStatus(CodeOf(error), absl::StrCat("cannot ", Av(doing), " ", path_, name.empty() ? "" : "/", Av(name)),
                     error);
}

absl::StatusOr<UniqueFd> StateDirectory::OpenRegular(std::string_view name, int flags) const {
  RETURN_IF_ERROR(CheckFileName(name));
  // O_NONBLOCK: a FIFO in the file's place would otherwise wait for a peer.
  UniqueFd file(Uninterrupted([&] {
    return ::openat(fd_.get(), std::string(name).c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
                    kFileMode);
  }));
  if (!file) return Failed("open", name, errno);
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0) return Failed("look at", name, errno);
  if (!S_ISREG(facts.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path_, "/", Av(name), " is no regular file"));
  }
  return file;
}

absl::Status StateDirectory::WriteWhole(const std::string& name, std::string_view contents) const {
  // Whatever a killed writer or somebody else left: a new file is ours alone, and no link is followed.
  if (::unlinkat(fd_.get(), name.c_str(), 0) != 0 && errno != ENOENT) return Failed("remove", name, errno);
  ASSIGN_OR_RETURN(const UniqueFd file, OpenRegular(name, O_WRONLY | O_CREAT | O_EXCL));
  while (!contents.empty()) {
    const ssize_t put = Uninterrupted([&] { return ::write(file.get(), contents.data(), contents.size()); });
    if (put < 0) return Failed("write", name, errno);
    contents.remove_prefix(static_cast<std::size_t>(put));
  }
  if (Uninterrupted([&] { return ::fsync(file.get()); }) != 0) return Failed("sync", name, errno);
  return absl::OkStatus();
}

absl::StatusOr<bool> StateDirectory::IsStillNamed(const UniqueFd& file, const std::string& name) const {
  struct stat held {};
  struct stat named {};
  if (::fstat(file.get(), &held) != 0) return Failed("look at", name, errno);
  if (::fstatat(fd_.get(), name.c_str(), &named, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return false;
    return Failed("look at", name, errno);
  }
  return held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

}  // namespace tessera
