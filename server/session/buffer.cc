#include "server/session/buffer.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {
namespace {

// The checks that make a client's descriptor safe to map: its size cannot fall under a reader (SIGBUS), and its pages
// are ordinary memory (a huge-page memfd can fault for lack of pages after the mapping succeeded).
absl::Status CheckMemfd(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError(
        "descriptor: not a memfd; create one with memfd_create(.., MFD_ALLOW_SEALING), or "
        "describe GPU memory in cuda_descriptor");
  }
  struct statfs filesystem {};
  if (::fstatfs(fd, &filesystem) != 0) return ErrnoStatus(absl::StatusCode::kInvalidArgument, "descriptor: fstatfs");
  if (filesystem.f_type != TMPFS_MAGIC) {
    return absl::InvalidArgumentError("descriptor: huge-page memfds are not taken; create it without MFD_HUGETLB");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("descriptor: the memfd is not sealed; add F_SEAL_SHRINK before passing it");
  }
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    return absl::InvalidArgumentError("descriptor: the memfd is sealed against writing; pass it without F_SEAL_WRITE");
  }
  if ((::fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) {
    return absl::InvalidArgumentError("descriptor: open for reading and writing is needed");
  }
  return absl::OkStatus();
}

std::uint64_t PageBytes() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

// A range of a memfd; `fd` is kept only if it is to be passed on.
class MemfdMapping final : public Mapping {
 public:
  static absl::StatusOr<std::shared_ptr<Mapping>> Map(int fd, std::uint64_t byte_offset, std::uint64_t bytes,
                                                      UniqueFd keep) {
    const std::uint64_t lead = byte_offset % PageBytes();
    void* start =
        ::mmap(nullptr, bytes + lead, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(byte_offset - lead));
    if (start == MAP_FAILED) {
      return ErrnoStatus(absl::StatusCode::kResourceExhausted, absl::StrCat("mapping ", bytes, " bytes"));
    }
    return std::make_shared<MemfdMapping>(start, lead, bytes, std::move(keep));
  }

  MemfdMapping(void* start, std::uint64_t lead, std::uint64_t bytes, UniqueFd fd)
      : Mapping(static_cast<std::byte*>(start) + lead, bytes), start_(start), lead_(lead), fd_(std::move(fd)) {}
  ~MemfdMapping() override { ::munmap(start_, lead_ + bytes()); }

  int fd() const override { return fd_.get(); }

 private:
  void* const start_;  // page-aligned, `lead_` bytes before data()
  const std::uint64_t lead_;
  const UniqueFd fd_;
};

// The extent of [byte_offset, byte_offset + bytes) in `what` of `size` bytes, without wrap-around; bytes 0 = to its
// end.
absl::StatusOr<std::uint64_t> BytesWithin(const char* what, std::uint64_t size, std::uint64_t byte_offset,
                                          std::uint64_t bytes) {
  if (byte_offset > size) {
    return absl::InvalidArgumentError(
        absl::StrCat("byte_offset: ", byte_offset, " is past the ", what, "'s ", size, " bytes"));
  }
  if (bytes == 0) bytes = size - byte_offset;
  if (bytes == 0) return absl::InvalidArgumentError(absl::StrCat("bytes: the ", what, " is empty from byte_offset on"));
  if (bytes > size - byte_offset) {
    return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, " from byte_offset ", byte_offset,
                                                   " pass the end of the ", what, "'s ", size, " bytes"));
  }
  return bytes;
}

MemoryKey KeyOf(const Mapping& device_mapping) {
  return {.device = 0, .inode = reinterpret_cast<std::uintptr_t>(device_mapping.data())};
}

}  // namespace

absl::StatusOr<std::shared_ptr<Buffer>> Buffer::Import(UniqueFd fd, std::uint64_t byte_offset, std::uint64_t bytes,
                                                       const BufferHome& home) {
  RETURN_IF_ERROR(CheckMemfd(fd.get()));
  struct stat file {};
  if (::fstat(fd.get(), &file) != 0) return ErrnoStatus(absl::StatusCode::kInvalidArgument, "descriptor: fstat");
  ASSIGN_OR_RETURN(bytes, BytesWithin("memfd", static_cast<std::uint64_t>(file.st_size), byte_offset, bytes));
  ASSIGN_OR_RETURN(Reservation reservation, Reservation::Make(home.budget, bytes));
  std::shared_ptr<Buffer> buffer(new Buffer(bytes, BufferOrigin::kImported, *home.reaper, std::move(reservation)));
  ASSIGN_OR_RETURN(buffer->mapping_, MemfdMapping::Map(fd.get(), byte_offset, bytes, UniqueFd()));
  buffer->data_ = buffer->mapping_->data();
  buffer->memory_ = {.device = file.st_dev, .inode = file.st_ino};
  buffer->memory_offset_ = byte_offset;
  return buffer;
}

absl::StatusOr<std::shared_ptr<Buffer>> Buffer::Allocate(std::uint64_t bytes, const BufferHome& home) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: must be at least 1");
  ASSIGN_OR_RETURN(Reservation reservation, Reservation::Make(home.budget, bytes));
  std::shared_ptr<Buffer> buffer(new Buffer(bytes, BufferOrigin::kAllocated, *home.reaper, std::move(reservation)));
  UniqueFd fd(::memfd_create("tessera-buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return ErrnoStatus(absl::StatusCode::kResourceExhausted, "memfd_create");
  const bool countable = bytes <= static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (!countable || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(absl::StatusCode::kResourceExhausted, absl::StrCat("memory of ", bytes, " bytes"),
                       countable ? errno : EFBIG);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus(absl::StatusCode::kInternal, "sealing a memfd");
  }
  struct stat file {};
  if (::fstat(fd.get(), &file) != 0) return ErrnoStatus(absl::StatusCode::kInternal, "fstat of a memfd");
  const int number = fd.get();
  ASSIGN_OR_RETURN(buffer->mapping_, MemfdMapping::Map(number, 0, bytes, std::move(fd)));
  buffer->data_ = buffer->mapping_->data();
  buffer->memory_ = {.device = file.st_dev, .inode = file.st_ino};
  return buffer;
}

absl::StatusOr<std::shared_ptr<Buffer>> Buffer::AllocateOn(DeviceMemory& device, std::uint64_t bytes,
                                                           const BufferHome& home) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: must be at least 1");
  const std::uint64_t allocated = AllocationBytes(bytes, device.granularity());
  ASSIGN_OR_RETURN(Reservation reservation, Reservation::Make(home.budget, allocated));
  std::shared_ptr<Buffer> buffer(new Buffer(bytes, BufferOrigin::kAllocated, *home.reaper, std::move(reservation)));
  ASSIGN_OR_RETURN(buffer->mapping_, device.Allocate(allocated));
  buffer->space_ = MemorySpace::Gpu(device.uuid());
  buffer->data_ = buffer->mapping_->data();
  buffer->memory_ = KeyOf(*buffer->mapping_);
  return buffer;
}

absl::StatusOr<std::shared_ptr<Buffer>> Buffer::Show(std::shared_ptr<Mapping> allocation, MemorySpace space,
                                                     std::uint64_t byte_offset, std::uint64_t bytes,
                                                     const BufferHome& home) {
  ASSIGN_OR_RETURN(bytes, BytesWithin("allocation", allocation->bytes(), byte_offset, bytes));
  ASSIGN_OR_RETURN(Reservation reservation, Reservation::Make(home.budget, bytes));
  std::shared_ptr<Buffer> buffer(new Buffer(bytes, BufferOrigin::kImported, *home.reaper, std::move(reservation)));
  buffer->mapping_ = std::move(allocation);
  buffer->space_ = std::move(space);
  buffer->data_ = buffer->mapping_->data() + byte_offset;
  buffer->memory_ = KeyOf(*buffer->mapping_);
  buffer->memory_offset_ = byte_offset;
  return buffer;
}

Buffer::~Buffer() {
  if (mapping_ == nullptr) return;  // it never came to be
  reaper_.Post([mapping = std::move(mapping_), reservation = std::make_optional(std::move(reservation_)),
                gone = std::move(gone_)]() mutable {
    mapping.reset();
    reservation.reset();  // not before: its bytes may be given to somebody else
    gone.reset();
  });
}

BufferPin::BufferPin(std::shared_ptr<Buffer> buffer) : buffer_(std::move(buffer)) {
  buffer_->users_.fetch_add(1, std::memory_order_relaxed);
}

BufferPin& BufferPin::operator=(BufferPin&& other) noexcept {
  if (this != &other) {
    Unpin();
    buffer_ = std::move(other.buffer_);
  }
  return *this;
}

BufferPin::~BufferPin() {
  Unpin();
}

void BufferPin::Unpin() {
  if (buffer_ != nullptr) buffer_->users_.fetch_sub(1, std::memory_order_relaxed);
  buffer_.reset();
}

}  // namespace tessera::server
