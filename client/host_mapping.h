// Part of a memfd, mapped here until the object is gone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace tessera::client {

class HostMapping {
 public:
  // Offsets need not be page-aligned.
  static absl::StatusOr<HostMapping> Map(int fd, std::uint64_t byte_offset, std::uint64_t bytes);

  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&&) = delete;
  ~HostMapping();

  std::byte* data() const { return static_cast<std::byte*>(start_) + lead_; }
  std::uint64_t bytes() const { return bytes_ - lead_; }

 private:
  HostMapping(void* start, std::uint64_t bytes, std::uint64_t lead) : start_(start), bytes_(bytes), lead_(lead) {}
  void* start_;
  std::uint64_t bytes_;
  std::uint64_t lead_;  // from the page's beginning to data()
};

}  // namespace tessera::client
