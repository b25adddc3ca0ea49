// A directory in which a program keeps what should outlive it: files that are whole or absent whatever kills the
// writer, shared with other processes under locks. What is found there is not trusted: names cannot leave the
// directory, links are not followed, nothing blocks, reads are bounded.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace tessera {

// Whether `name` can be a file of such a directory: 1 to 128 letters, digits, '.', '_' and '-', the first no dot.
absl::Status CheckFileName(std::string_view name);

// A lock among processes and among holders in one process. Ends with the object or with the process.
class FileLock {
 public:
  FileLock(FileLock&&) = default;
  FileLock& operator=(FileLock&&) = default;

 private:
  friend class StateDirectory;
  explicit FileLock(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

// All calls may block on the disk. Codes of what went wrong:
//   INVALID_ARGUMENT     a name that CheckFileName refuses, or a path that is not absolute
//   NOT_FOUND            no such file or directory
//   PERMISSION_DENIED    not allowed, or a read-only file system
//   RESOURCE_EXHAUSTED   no space, no quota, or the process may not write files of that size
//   FAILED_PRECONDITION  what bears the name is no regular file
//   OUT_OF_RANGE         the file is larger than the reader takes
//   DEADLINE_EXCEEDED    somebody else holds the lock
//   UNAVAILABLE          anything else that the system reports
// Thread-safe: const after Open.
class StateDirectory {
 public:
  // The directory `path`. With `create` it and what is missing above it are made, for this user alone (mode 0700).
  static absl::StatusOr<StateDirectory> Open(const std::string& path, bool create);

  // Whether this process may create files here. A full disk shows only in writing.
  absl::Status CheckWritable() const;

  // All of the file, of which nothing is read if it has more than `limit` bytes.
  absl::StatusOr<std::string> Read(std::string_view name, std::size_t limit) const;

  // Makes `contents` the file's, atomically, and lasting when this returns OK. Writes `name`.tmp first, so writers of
  // one name hold its lock; what a killed writer left there is removed.
  absl::Status Replace(std::string_view name, std::string_view contents) const;

  // Gives a file another name, and so replaces what had that. Moves links themselves, and what is no file.
  absl::Status Rename(std::string_view from, std::string_view to) const;

  // Waits at most `patience` for the lock that the file `name`, which stays empty, stands for.
  absl::StatusOr<FileLock> Lock(std::string_view name, std::chrono::milliseconds patience) const;

 private:
  StateDirectory(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  absl::Status Failed(std::string_view doing, std::string_view name, int error) const;
  // The error of the name, or that `name` is not what it should be.
  absl::StatusOr<UniqueFd> OpenRegular(std::string_view name, int flags) const;
  absl::Status WriteWhole(const std::string& name, std::string_view contents) const;
  absl::StatusOr<bool> IsStillNamed(const UniqueFd& file, const std::string& name) const;

  std::string path_;
  UniqueFd fd_;
};

}  // namespace tessera
