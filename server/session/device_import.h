// What a client says of GPU memory of its own, and what can be checked about it without the GPU. Errors name the fields
// as ImportBufferRequest does.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/session/device_memory.h"
#include "server/session/peer.h"

namespace tessera::server {

struct LegacyImport {
  std::string handle;  // of cudaIpcGetMemHandle
  std::string device_uuid;
  std::uint64_t allocation_id = 0;
  std::int64_t exporter_pid = 0;  // getpid() of the process that made the handle, as that process sees it
  std::uint64_t byte_offset = 0;
  std::uint64_t bytes = 0;  // 0 = to the end
};

struct DescriptorImport {
  std::uint64_t ticket = 0;  // of a descriptor of a VMM allocation
  std::string device_uuid;
  std::uint64_t allocation_id = 0;
  std::uint64_t allocation_bytes = 0;
  std::uint64_t byte_offset = 0;
  std::uint64_t bytes = 0;  // 0 = to the end
};

struct EventImport {
  std::string handle;  // of cudaIpcGetEventHandle
  std::string device_uuid;
  std::int64_t exporter_pid = 0;  // as LegacyImport
};

absl::StatusOr<LegacyHandle> CheckEventImport(const EventImport& import, const Peer& peer);
absl::StatusOr<LegacyHandle> CheckLegacyImport(const LegacyImport& import, const Peer& peer);
absl::Status CheckDescriptorImport(const DescriptorImport& import, std::uint64_t granularity);

// Whether two descriptors of this process are one open file; false where the kernel does not permit to ask.
bool SameOpenFile(int a, int b);

}  // namespace tessera::server
