#include "client/host_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::client {

absl::StatusOr<HostMapping> HostMapping::Map(int fd, std::uint64_t byte_offset, std::uint64_t bytes) {
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t lead = byte_offset % page_bytes;
  void* start =
      ::mmap(nullptr, bytes + lead, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(byte_offset - lead));
  if (start == MAP_FAILED) {
    return ErrnoStatus(absl::StatusCode::kResourceExhausted, absl::StrCat("mapping ", bytes, " bytes"));
  }
  return HostMapping(start, bytes + lead, lead);
}

HostMapping::HostMapping(HostMapping&& other) noexcept
    : start_(std::exchange(other.start_, nullptr)), bytes_(other.bytes_), lead_(other.lead_) {}

HostMapping::~HostMapping() {
  if (start_ != nullptr) ::munmap(start_, bytes_);
}

}  // namespace tessera::client
