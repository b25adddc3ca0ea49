#include "server/session/session_table.h"

#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {
namespace {

absl::Status CheckLabel(std::string_view label) {
  if (label.size() > SessionTable::kLabelBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("label: ", label.size(), " bytes; at most ", SessionTable::kLabelBytesMax));
  }
  if (!std::all_of(label.begin(), label.end(), [](char c) { return c >= 0x20 && c < 0x7f; })) {
    return absl::InvalidArgumentError("label: printable ASCII only");
  }
  return absl::OkStatus();
}

absl::Status CheckAllocationId(std::string_view field, std::uint64_t allocation_id) {
  if (allocation_id != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      Av(field),
      ": missing; CU_POINTER_ATTRIBUTE_BUFFER_ID, or any number that this session gives no other allocation"));
}

absl::StatusOr<LegacyHandle> ParseLegacyHandle(const std::string& bytes) {
  LegacyHandle handle;
  if (bytes.size() != handle.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda_ipc_handle.handle: ", bytes.size(), " bytes; cudaIpcMemHandle_t has ", handle.size()));
  }
  std::copy(bytes.begin(), bytes.end(), handle.begin());
  return handle;
}

// The driver tells processes apart by PID number alone: a handle of a process with the daemon's own number (both may be
// 1, each in its container) is taken for the daemon's, and opening it fails.
absl::Status CheckExporter(const Peer& peer, std::int64_t exporter_pid) {
  constexpr char kInstead[] = "; use memory that the daemon allocates, or pass cuMemCreate memory as a cuda_descriptor";
  if (exporter_pid <= 0) {
    return absl::InvalidArgumentError(
        "cuda_ipc_handle.exporter_pid: must be getpid() of the process that owns the memory");
  }
  if (peer.pid == ::getpid()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cuda_ipc_handle: a process cannot open its own handle, and you are the daemon's process", kInstead));
  }
  if (exporter_pid == ::getpid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("cuda_ipc_handle.exporter_pid: ", exporter_pid,
                     " is the daemon's PID number, too, and the driver refuses such handles", kInstead));
  }
  return absl::OkStatus();
}

bool SameOpenFile(int a, int b) {
  const pid_t self = ::getpid();
  return ::syscall(SYS_kcmp, self, self, KCMP_FILE, a, b) == 0;  // where it is not permitted: not known to be the same
}

}  // namespace

std::uint64_t PrincipalCounts::Of(const std::string& principal) const {
  const auto found = counts_.find(principal);
  return found == counts_.end() ? 0 : found->second;
}

void PrincipalCounts::Remove(const std::string& principal) {
  const auto found = counts_.find(principal);
  if (--found->second == 0) counts_.erase(found);
}

SessionTable::SessionTable(std::uint32_t epoch, const SessionLimits& limits, Metrics& metrics,
                           std::function<std::shared_ptr<SessionLane>()> make_lane, std::vector<DeviceMemory*> devices)
    : epoch_(epoch),
      limits_(limits),
      metrics_(metrics),
      make_lane_(std::move(make_lane)),
      devices_(std::move(devices)),
      budget_(std::make_shared<ByteBudget>(Limit::kBufferBytes, limits.buffer_bytes_max, metrics, nullptr)),
      leases_("lease", epoch),
      sessions_("session", epoch),
      buffers_("buffer", epoch) {}

absl::Status SessionTable::LimitReached(Limit limit, std::uint64_t value) {
  metrics_.Refused(limit);
  return absl::ResourceExhaustedError(absl::StrCat(Av(LabelText(limit)), ": the limit of ", value, " is reached"));
}

absl::StatusOr<Id> SessionTable::OpenLease(const Peer& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string principal = peer.Principal();
  if (leases_of_.Of(principal) >= limits_.leases_per_principal_max) {
    return LimitReached(Limit::kConnectionsPerPrincipal, limits_.leases_per_principal_max);
  }
  if (leases_.size() >= limits_.leases_max) return LimitReached(Limit::kSideConnections, limits_.leases_max);
  leases_of_.Add(principal);
  Id lease;
  leases_.Insert([&](const Id& id) {
    lease = id;
    return Lease{.peer = peer, .session = {}, .waiting = {}};
  });
  return lease;
}

void SessionTable::CloseLease(const Id& lease) {
  std::optional<Lease> closed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed = leases_.Remove(lease);
    if (closed.has_value()) leases_of_.Remove(closed->peer.Principal());
  }
  if (!closed.has_value() || closed->session == Id{}) return;
  // The session may have been closed by its owner before; then there is nothing to end.
  EndSession(closed->session, SessionEnd::kLeaseLost).status().IgnoreError();
}

absl::StatusOr<std::uint64_t> SessionTable::KeepDescriptor(const Id& lease, UniqueFd fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(Lease * found, leases_.Find(lease));
  if (found->waiting.size() >= kWaitingDescriptorsMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kWaitingDescriptorsMax, " descriptors already wait for ImportBuffer on this connection"));
  }
  const std::uint64_t ticket = next_ticket_++;
  found->waiting.emplace(ticket, std::move(fd));
  return ticket;
}

absl::StatusOr<BufferPin> SessionTable::ExportBuffer(const Id& lease, const Id& buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(Lease * holder, leases_.Find(lease));
  if (holder->session == Id{}) return absl::FailedPreconditionError("no session was opened on this connection");
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * session, sessions_.Find(holder->session));
  ASSIGN_OR_RETURN(OwnedBuffer * owned, FindOwned(**session, buffer));
  if (owned->buffer->origin() != BufferOrigin::kAllocated) {
    return absl::FailedPreconditionError("imported memory; its descriptor is the client's own");
  }
  return BufferPin(owned->buffer);
}

absl::StatusOr<Id> SessionTable::OpenSession(const Peer& peer, const Id& lease, std::string_view label) {
  RETURN_IF_ERROR(CheckLabel(label));
  std::shared_ptr<Session> session(new Session());
  session->peer_ = peer;
  session->label_ = label;
  session->lease_ = lease;
  session->lane_ = make_lane_();
  session->budget_ = limits_.session_buffer_bytes_max == 0
                         ? budget_
                         : std::make_shared<ByteBudget>(Limit::kSessionBufferBytes, limits_.session_buffer_bytes_max,
                                                        metrics_, budget_);

  const std::lock_guard<std::mutex> lock(mutex_);
  const absl::StatusOr<Lease*> found = leases_.Find(lease);
  if (!found.ok()) return InField("lease", found.status());
  Lease* const holder = *found;
  if (!SamePrincipal(holder->peer, peer)) return absl::PermissionDeniedError("lease: belongs to another principal");
  if (!(holder->session == Id{})) return absl::AlreadyExistsError("lease: a session was opened on it before");
  const std::string principal = peer.Principal();
  if (sessions_of_.Of(principal) >= limits_.sessions_per_principal_max) {
    return LimitReached(Limit::kSessionsPerPrincipal, limits_.sessions_per_principal_max);
  }
  if (sessions_.size() >= limits_.sessions_max) return LimitReached(Limit::kSessions, limits_.sessions_max);
  sessions_of_.Add(principal);
  sessions_.Insert([&](const Id& id) {
    session->id_ = id;
    return session;
  });
  holder->session = session->id_;
  metrics_.SessionOpened();
  return session->id_;
}

absl::StatusOr<std::shared_ptr<Session>> SessionTable::FindSession(const Peer& peer, const Id& token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * session, sessions_.Find(token));
  if (!SamePrincipal((*session)->peer_, peer)) {
    return absl::PermissionDeniedError("session: belongs to another principal");
  }
  return *session;
}

absl::StatusOr<std::size_t> SessionTable::EndSession(const Id& token, SessionEnd reason) {
  std::shared_ptr<Session> session;
  std::vector<OwnedBuffer> dropped;  // freed after the lock, unless running calls hold them
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ASSIGN_OR_RETURN(std::shared_ptr<Session> * found, sessions_.Find(token));
    session = *found;
    session->ended_.store(true, std::memory_order_release);
    for (const Id& id : session->buffers_) {
      if (auto owned = buffers_.Remove(id); owned.has_value()) dropped.push_back(std::move(*owned));
    }
    session->buffers_.clear();
    sessions_.Remove(token);
    sessions_of_.Remove(session->peer_.Principal());
  }
  for (const OwnedBuffer& owned : dropped) metrics_.BufferRemoved(owned.buffer->origin(), owned.buffer->bytes());
  metrics_.SessionEnded(reason);
  return dropped.size();
}

void SessionTable::EndAllSessions(SessionEnd reason) {
  std::vector<Id> tokens;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sessions_.ForEach([&](const Id& id, const std::shared_ptr<Session>&) { tokens.push_back(id); });
  }
  for (const Id& token : tokens) EndSession(token, reason).status().IgnoreError();  // its owner may be quicker
}

absl::StatusOr<UniqueFd> SessionTable::TakeDescriptor(const Session& session, std::uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(Lease * lease, leases_.Find(session.lease_));
  const auto found = lease->waiting.find(ticket);
  if (found == lease->waiting.end()) {
    return absl::NotFoundError(absl::StrCat("descriptor_ticket: no descriptor waits under ", ticket));
  }
  UniqueFd fd = std::move(found->second);
  lease->waiting.erase(found);
  return fd;
}

absl::Status SessionTable::CheckRoomForBuffer(const Session& session) {
  if (session.ended()) return absl::NotFoundError("no such session");
  if (session.buffers_.size() >= limits_.buffers_per_session_max) {
    return LimitReached(Limit::kBuffersPerSession, limits_.buffers_per_session_max);
  }
  return absl::OkStatus();
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::Register(Session& session, std::shared_ptr<Buffer> buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(CheckRoomForBuffer(session));
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * owner, sessions_.Find(session.id_));
  NewBuffer result{.id = {}, .bytes = buffer->bytes(), .space = buffer->space()};
  metrics_.BufferAdded(buffer->origin(), buffer->bytes());
  buffers_.Insert([&](const Id& id) {
    result.id = id;
    return OwnedBuffer{.buffer = std::move(buffer), .owner = *owner};
  });
  session.buffers_.push_back(result.id);
  return result;
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::ImportBuffer(Session& session, std::uint64_t ticket,
                                                                   std::uint64_t byte_offset, std::uint64_t bytes) {
  ASSIGN_OR_RETURN(UniqueFd fd, TakeDescriptor(session, ticket));
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, Buffer::Import(std::move(fd), byte_offset, bytes, session.budget_));
  return Register(session, std::move(buffer));
}

absl::StatusOr<DeviceMemory*> SessionTable::FindDevice(std::string_view field, std::string_view uuid) const {
  if (uuid.empty()) return absl::InvalidArgumentError(absl::StrCat(Av(field), ": missing; the GPU's UUID"));
  if (uuid.starts_with("MIG-")) {
    return absl::UnimplementedError(
        absl::StrCat(Av(field), ": ", Av(uuid), " is a MIG instance; only whole GPUs are served"));
  }
  if (devices_.empty()) {
    return absl::UnimplementedError(
        absl::StrCat(Av(field), ": ", Av(uuid), "; this daemon serves no GPU, only buffers in host memory"));
  }
  std::string served;
  for (DeviceMemory* const device : devices_) {
    if (uuid == device->uuid()) return device;
    absl::StrAppend(&served, served.empty() ? "" : ", ", device->uuid());
  }
  return absl::InvalidArgumentError(absl::StrCat(Av(field), ": ", Av(uuid), "; this daemon serves ", served));
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::ImportLegacy(Session& session, const LegacyImport& import) {
  ASSIGN_OR_RETURN(DeviceMemory* const device, FindDevice("cuda_ipc_handle.device_uuid", import.device_uuid));
  ASSIGN_OR_RETURN(const LegacyHandle handle, ParseLegacyHandle(import.handle));
  RETURN_IF_ERROR(CheckAllocationId("cuda_ipc_handle.allocation_id", import.allocation_id));
  RETURN_IF_ERROR(CheckExporter(session.peer(), import.exporter_pid));
  auto allocation = session.imports_.Get(absl::StrCat("handle ", device->uuid(), import.handle), import.allocation_id,
                                         [&] { return device->ImportLegacy(handle); });
  if (!allocation.ok()) return InField("cuda_ipc_handle", allocation.status());
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer,
                   Buffer::Show(*std::move(allocation), MemorySpace::Gpu(device->uuid()), import.byte_offset,
                                import.bytes, session.budget_));
  return Register(session, std::move(buffer));
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::ImportDescriptor(Session& session,
                                                                       const DescriptorImport& import) {
  ASSIGN_OR_RETURN(UniqueFd fd, TakeDescriptor(session, import.ticket));
  ASSIGN_OR_RETURN(DeviceMemory* const device, FindDevice("cuda_descriptor.device_uuid", import.device_uuid));
  RETURN_IF_ERROR(CheckAllocationId("cuda_descriptor.allocation_id", import.allocation_id));
  const std::uint64_t granularity = device->granularity();
  if (import.allocation_bytes == 0 || import.allocation_bytes % granularity != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cuda_descriptor.allocation_bytes: ", import.allocation_bytes,
                                                   "; the size given to cuMemCreate, a multiple of ", granularity));
  }
  if (IsExportOf(session, fd)) {
    return absl::InvalidArgumentError(
        "cuda_descriptor: shows a buffer that the daemon allocated; use that buffer's id");
  }
  auto allocation =
      session.imports_.Get(absl::StrCat("descriptor ", device->uuid(), " ", import.allocation_id), import.allocation_id,
                           [&] { return device->ImportDescriptor(std::move(fd), import.allocation_bytes); });
  if (!allocation.ok()) return InField("cuda_descriptor", allocation.status());
  if ((*allocation)->bytes() != import.allocation_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("cuda_descriptor.allocation_bytes: ", import.allocation_bytes,
                                                   "; allocation ", import.allocation_id, " was imported with ",
                                                   (*allocation)->bytes()));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer,
                   Buffer::Show(*std::move(allocation), MemorySpace::Gpu(device->uuid()), import.byte_offset,
                                import.bytes, session.budget_));
  return Register(session, std::move(buffer));
}

bool SessionTable::IsExportOf(const Session& session, const UniqueFd& fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(session.buffers_.begin(), session.buffers_.end(), [&](const Id& id) {
    const absl::StatusOr<OwnedBuffer*> owned = buffers_.Find(id);
    return owned.ok() && (*owned)->buffer->fd() >= 0 && SameOpenFile(fd.get(), (*owned)->buffer->fd());
  });
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::AllocateBuffer(Session& session, std::uint64_t bytes,
                                                                     std::string_view space) {
  if (space.empty() || space == "host") {
    ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, Buffer::Allocate(bytes, session.budget_));
    return Register(session, std::move(buffer));
  }
  const bool named = space.starts_with("GPU-") || space.starts_with("MIG-");
  if (!named && space != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat("space: \"", Av(space), "\"; host, cuda or a GPU's UUID"));
  }
  const bool first = space == "cuda" && !devices_.empty();
  ASSIGN_OR_RETURN(DeviceMemory* const device, FindDevice("space", first ? devices_.front()->uuid() : space));
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, Buffer::AllocateOn(*device, bytes, session.budget_));
  return Register(session, std::move(buffer));
}

absl::StatusOr<SessionTable::OwnedBuffer*> SessionTable::FindOwned(const Session& session, const Id& buffer) {
  ASSIGN_OR_RETURN(OwnedBuffer * owned, buffers_.Find(buffer));
  if (owned->owner.get() != &session) return absl::PermissionDeniedError("buffer belongs to another session");
  return owned;
}

absl::Status SessionTable::ReleaseBuffer(const Session& session, const Id& buffer) {
  std::optional<OwnedBuffer> released;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(FindOwned(session, buffer).status());
  released = buffers_.Remove(buffer);
  metrics_.BufferRemoved(released->buffer->origin(), released->buffer->bytes());
  std::vector<Id>& mine = released->owner->buffers_;
  mine.erase(std::find(mine.begin(), mine.end(), buffer));
  return absl::OkStatus();
}

absl::StatusOr<BufferPin> SessionTable::PinBuffer(const Session& session, const Id& buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(OwnedBuffer * owned, FindOwned(session, buffer));
  return BufferPin(owned->buffer);
}

std::vector<BufferRow> SessionTable::ListBuffers(const std::function<bool(const Peer& owner)>& include) {
  std::vector<BufferRow> rows;
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  buffers_.ForEach([&](const Id& id, const OwnedBuffer& owned) {
    if (!include(owned.owner->peer_)) return;
    rows.push_back({.id = id,
                    .origin = owned.buffer->origin(),
                    .space = owned.buffer->space(),
                    .bytes = owned.buffer->bytes(),
                    .users = owned.buffer->users(),
                    .age = now - owned.buffer->created(),
                    .owner = owned.owner->peer_,
                    .session_label = owned.owner->label_});
  });
  return rows;
}

SessionCounts SessionTable::Counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {.sessions = sessions_.size(), .buffers = buffers_.size(), .bytes_mapped = budget_->used()};
}

}  // namespace tessera::server
