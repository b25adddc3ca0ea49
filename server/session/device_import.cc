#include "server/session/device_import.h"

#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {
namespace {

absl::Status CheckAllocationId(std::string_view field, std::uint64_t allocation_id) {
  if (allocation_id != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      Av(field),
      ": missing; CU_POINTER_ATTRIBUTE_BUFFER_ID, or any number that this session gives no other allocation"));
}

absl::StatusOr<LegacyHandle> ParseLegacyHandle(std::string_view field, std::string_view type,
                                               const std::string& bytes) {
  LegacyHandle handle;
  if (bytes.size() != handle.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Av(field), ": ", bytes.size(), " bytes; ", Av(type), " has ", handle.size()));
  }
  std::copy(bytes.begin(), bytes.end(), handle.begin());
  return handle;
}

// The driver tells processes apart by PID number alone: a handle of a process with the daemon's own number (both may be
// 1, each in its container) is taken for the daemon's, and opening it fails.
absl::Status CheckExporter(const Peer& peer, std::int64_t exporter_pid, std::string_view instead) {
  if (exporter_pid <= 0) {
    return absl::InvalidArgumentError("exporter_pid: must be getpid() of the process that made the handle");
  }
  if (peer.pid == ::getpid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("handle: a process cannot open its own handle, and you are the daemon's process; ", Av(instead)));
  }
  if (exporter_pid == ::getpid()) {
    return absl::FailedPreconditionError(absl::StrCat("exporter_pid: ", exporter_pid,
                                                      " is the daemon's PID number, too, and the driver refuses such "
                                                      "handles; ",
                                                      Av(instead)));
  }
  return absl::OkStatus();
}

// The error of a check of a message that is the field cuda_ipc_handle.
absl::Status InCudaIpcHandle(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("cuda_ipc_handle.", MessageOf(status)));
}

}  // namespace

absl::StatusOr<LegacyHandle> CheckLegacyImport(const LegacyImport& import, const Peer& peer) {
  ASSIGN_OR_RETURN(const LegacyHandle handle,
                   ParseLegacyHandle("cuda_ipc_handle.handle", "cudaIpcMemHandle_t", import.handle));
  RETURN_IF_ERROR(CheckAllocationId("cuda_ipc_handle.allocation_id", import.allocation_id));
  RETURN_IF_ERROR(InCudaIpcHandle(
      CheckExporter(peer, import.exporter_pid,
                    "use memory that the daemon allocates, or pass cuMemCreate memory as a cuda_descriptor")));
  return handle;
}

absl::StatusOr<LegacyHandle> CheckEventImport(const EventImport& import, const Peer& peer) {
  ASSIGN_OR_RETURN(const LegacyHandle handle, ParseLegacyHandle("handle", "cudaIpcEventHandle_t", import.handle));
  RETURN_IF_ERROR(CheckExporter(peer, import.exporter_pid, "use an exported timeline"));
  return handle;
}

absl::Status CheckDescriptorImport(const DescriptorImport& import, std::uint64_t granularity) {
  RETURN_IF_ERROR(CheckAllocationId("cuda_descriptor.allocation_id", import.allocation_id));
  if (import.allocation_bytes != 0 && import.allocation_bytes % granularity == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("cuda_descriptor.allocation_bytes: ", import.allocation_bytes,
                                                 "; the size given to cuMemCreate, a multiple of ", granularity));
}

bool SameOpenFile(int a, int b) {
  const pid_t self = ::getpid();
  return ::syscall(SYS_kcmp, self, self, KCMP_FILE, a, b) == 0;
}

}  // namespace tessera::server
