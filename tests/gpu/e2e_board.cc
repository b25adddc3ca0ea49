#include "tests/gpu/e2e_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/text.h"
#include "common/unique_fd.h"

namespace tessera::gpu_test {

void Board::Unmapper::operator()(Page* page) const {
  ::munmap(page, sizeof(Page));
}

absl::StatusOr<Board> Board::Map(const std::string& path, int flags) {
  const UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0640));
  if (!file) return ErrnoStatus(absl::StatusCode::kFailedPrecondition, path);
  if ((flags & O_CREAT) != 0 && ::ftruncate(file.get(), sizeof(Page)) != 0) {
    return ErrnoStatus(absl::StatusCode::kResourceExhausted, path);
  }
  void* const address = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (address == MAP_FAILED) return ErrnoStatus(absl::StatusCode::kResourceExhausted, path);
  return Board(static_cast<Page*>(address));  // a new file's zeros are atomics of value 0
}

absl::StatusOr<Board> Board::Make(const std::string& path) {
  return Map(path, O_CREAT | O_EXCL);
}

absl::StatusOr<Board> Board::Open(const std::string& path) {
  return Map(path, 0);
}

}  // namespace tessera::gpu_test
