#include "server/session/session_table.h"

#include <algorithm>
#include <utility>

#include <spdlog/spdlog.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
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

std::uint64_t OrNoLimit(std::uint64_t limit) {
  return limit == 0 ? kNoLimit : limit;
}

// Slot first: that is the order in which tables show their entries.
bool Before(const Id& a, const Id& b) {
  return a.index != b.index ? a.index < b.index : a.generation < b.generation;
}

template <typename Row>
Page<Row> PageOf(std::vector<Row> rows, const PageRequest& request) {
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return Before(a.id, b.id); });
  Page<Row> page;
  for (Row& row : rows) {
    if (request.after.has_value() && !Before(*request.after, row.id)) continue;
    page.more = page.rows.size() >= request.limit;
    if (page.more) break;
    page.rows.push_back(std::move(row));
  }
  return page;
}

std::chrono::milliseconds Milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration);
}

// uid:1000, as ServerInfo tells callers: only users of this node have sessions. It must be spelt as there, since texts
// are compared, and are shown to others.
absl::Status CheckPrincipal(const std::string& principal) {
  std::uint32_t uid = 0;
  const absl::string_view text = principal;
  if (absl::StartsWith(text, "uid:") && absl::SimpleAtoi(text.substr(4), &uid) && text.substr(4) == absl::StrCat(uid)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("principal: must be such as uid:1000; `tessera status` tells a caller's own");
}

}  // namespace

SessionTable::SessionTable(std::uint32_t epoch, const SessionLimits& limits, Metrics& metrics, Reaper& reaper,
                           MakeLane make_lane, std::vector<DeviceMemory*> devices)
    : epoch_(epoch),
      limits_(limits),
      metrics_(metrics),
      reaper_(reaper),
      make_lane_(std::move(make_lane)),
      devices_(std::move(devices)),
      memory_(std::make_shared<MemoryBudget>(MemoryLimits{.bytes_limit = Limit::kBufferBytes,
                                                          .bytes_max = limits.buffer_bytes_max,
                                                          .buffers_limit = Limit::kBuffers,
                                                          .buffers_max = limits.buffers_max},
                                             metrics)),
      accounts_({.bytes_limit = Limit::kBufferBytesPerPrincipal,
                 .bytes_max = OrNoLimit(limits.principal_buffer_bytes_max),
                 .buffers_limit = Limit::kBuffersPerPrincipal,
                 .buffers_max = limits.buffers_per_principal_max},
                metrics, memory_),
      leases_("lease", epoch),
      sessions_("session", epoch),
      buffers_("buffer", epoch),
      syncs_("stream, timeline or event", epoch) {}

absl::Status SessionTable::LimitReached(Limit limit, std::uint64_t value) {
  metrics_.Refused(limit);
  return absl::ResourceExhaustedError(absl::StrCat(Av(LabelText(limit)), ": the limit of ", value, " is reached"));
}

absl::StatusOr<Id> SessionTable::OpenLease(const Peer& peer, LeaseKind kind) {
  std::shared_ptr<Account> account = accounts_.Of(peer);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (account->leases >= limits_.leases_per_principal_max) {
    return LimitReached(Limit::kConnectionsPerPrincipal, limits_.leases_per_principal_max);
  }
  if (leases_.size() >= limits_.leases_max) return LimitReached(Limit::kSideConnections, limits_.leases_max);
  ++account->leases;
  metrics_.LeaseOpened(kind);
  Id lease;
  leases_.Insert([&](const Id& id) {
    lease = id;
    return Lease{.peer = peer, .kind = kind, .account = std::move(account), .session = {}, .waiting = {}};
  });
  return lease;
}

void SessionTable::CloseLease(const Id& lease) {
  std::optional<Lease> closed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed = leases_.Remove(lease);
    if (!closed.has_value()) return;
    --closed->account->leases;
  }
  metrics_.LeaseClosed(closed->kind);
  if (closed->session == Id{}) return;
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

absl::StatusOr<Session*> SessionTable::SessionOn(const Id& lease) {
  ASSIGN_OR_RETURN(Lease * holder, leases_.Find(lease));
  if (holder->session == Id{}) return absl::FailedPreconditionError("no session was opened on this connection");
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * session, sessions_.Find(holder->session));
  return session->get();
}

absl::StatusOr<BufferPin> SessionTable::ExportBuffer(const Id& lease, const Id& buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(Session * session, SessionOn(lease));
  ASSIGN_OR_RETURN(OwnedBuffer * owned, FindOwned(*session, buffer));
  if (owned->buffer->origin() != BufferOrigin::kAllocated) {
    return absl::FailedPreconditionError("imported memory; its descriptor is the client's own");
  }
  return BufferPin(owned->buffer);
}

std::shared_ptr<Session> SessionTable::MakeSession(const Peer& peer, std::string_view label) {
  std::shared_ptr<Session> session(new Session());
  session->peer_ = peer;
  session->label_ = label;
  session->lane_ = make_lane_(StreamSpec{});
  session->account_ = accounts_.Of(peer);
  // Memory that is not gone counts for its principal, and so holds the account.
  const std::shared_ptr<MemoryBudget> of_principal(session->account_, session->account_->memory.get());
  session->memory_ =
      std::make_shared<MemoryBudget>(MemoryLimits{.bytes_limit = Limit::kSessionBufferBytes,
                                                  .bytes_max = OrNoLimit(limits_.session_buffer_bytes_max),
                                                  .buffers_limit = Limit::kBuffersPerSession,
                                                  .buffers_max = limits_.buffers_per_session_max},
                                     metrics_, of_principal);
  return session;
}

absl::StatusOr<Id> SessionTable::Admit(const std::shared_ptr<Session>& session) {
  Account& account = *session->account_;
  if (account.sessions >= limits_.sessions_per_principal_max) {
    return LimitReached(Limit::kSessionsPerPrincipal, limits_.sessions_per_principal_max);
  }
  if (sessions_.size() >= limits_.sessions_max) return LimitReached(Limit::kSessions, limits_.sessions_max);
  ++account.sessions;
  metrics_.SessionOpened();
  Id token;
  sessions_.Insert([&](const Id& id) {
    token = id;
    session->id_ = id;
    return session;
  });
  return token;
}

absl::StatusOr<Id> SessionTable::OpenSession(const Peer& peer, const Id& lease, std::string_view label) {
  RETURN_IF_ERROR(CheckLabel(label));
  std::shared_ptr<Session> session = MakeSession(peer, label);
  session->lease_ = lease;

  const std::lock_guard<std::mutex> lock(mutex_);
  const absl::StatusOr<Lease*> found = leases_.Find(lease);
  if (!found.ok()) return InField("lease", found.status());
  Lease* const holder = *found;
  if (!SamePrincipal(holder->peer, peer)) return absl::PermissionDeniedError("lease: belongs to another principal");
  if (!(holder->session == Id{})) return absl::AlreadyExistsError("lease: a session was opened on it before");
  session->lease_kind_ = holder->kind;
  ASSIGN_OR_RETURN(holder->session, Admit(session));
  return holder->session;
}

absl::StatusOr<Id> SessionTable::OpenSession(const Peer& peer, std::chrono::milliseconds ttl, std::string_view label) {
  RETURN_IF_ERROR(CheckLabel(label));
  if (ttl < kTtlMin || ttl > limits_.ttl_max) {
    return absl::InvalidArgumentError(absl::StrCat("ttl_ms: ", ttl.count(), "; from ", kTtlMin.count(), " to ",
                                                   limits_.ttl_max.count(), " (lease_ttl_max_s)"));
  }
  std::shared_ptr<Session> session = MakeSession(peer, label);
  session->lease_kind_ = LeaseKind::kTtl;
  session->ttl_ = ttl;
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(const Id token, Admit(session));
  metrics_.LeaseOpened(LeaseKind::kTtl);
  return token;
}

absl::StatusOr<std::chrono::milliseconds> SessionTable::KeepAlive(const Session& session) const {
  if (session.lease_kind_ == LeaseKind::kTtl) return session.ttl_;
  return absl::FailedPreconditionError(
      absl::StrCat("the session's lease is its ",
                   session.lease_kind_ == LeaseKind::kAttach ? "call of Attach" : "connection to the side channel",
                   ", and needs no keeping alive"));
}

absl::StatusOr<std::shared_ptr<Session>> SessionTable::FindSession(const Peer& peer, const Id& token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * session, sessions_.Find(token));
  if (!SamePrincipal((*session)->peer_, peer)) {
    return absl::PermissionDeniedError("session: belongs to another principal");
  }
  (*session)->Touch();
  return *session;
}

absl::StatusOr<std::size_t> SessionTable::EndSession(const Id& token, SessionEnd reason, GoneToken gone) {
  std::shared_ptr<Session> session;
  std::vector<OwnedBuffer> dropped;
  std::vector<OwnedSync> syncs;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ASSIGN_OR_RETURN(std::shared_ptr<Session> * found, sessions_.Find(token));
    session = *found;
    session->ended_.store(true, std::memory_order_release);
    for (const Id& id : session->buffers_) {
      std::optional<OwnedBuffer> owned = buffers_.Remove(id);
      owned->buffer->HoldUntilGone(gone);
      dropped.push_back(*std::move(owned));
    }
    session->buffers_.clear();
    syncs = TakeSyncs(*session);
    session->token_of_end_->gone = gone;
    session->token_of_end_.reset();
    sessions_.Remove(token);
    --session->account_->sessions;
    Remember(session, reason);
  }
  for (const OwnedBuffer& owned : dropped) metrics_.BufferRemoved(owned.buffer->origin(), owned.buffer->bytes());
  metrics_.SessionEnded(reason);
  if (session->lease_kind_ == LeaseKind::kTtl) metrics_.LeaseClosed(LeaseKind::kTtl);
  const std::size_t count = dropped.size();
  // What running calls hold goes with the last of them.
  reaper_.Post([session = std::move(session), dropped = std::move(dropped), syncs = std::move(syncs),
                gone = std::move(gone)]() mutable {
    session->end().Close(absl::CancelledError("the session has ended"));
    session->lane()->DropUnwanted();
    for (const OwnedSync& sync : syncs) {
      if (sync.lane != nullptr) sync.lane->DropUnwanted();
    }
    // Not before: what was dropped has signalled.
    for (const OwnedSync& sync : syncs) {
      if (sync.timeline != nullptr) sync.timeline->Close(absl::AbortedError("the session of a timeline has ended"));
    }
    syncs.clear();
    dropped.clear();
    session.reset();
    gone.reset();
  });
  return count;
}

absl::StatusOr<std::size_t> SessionTable::EndSession(std::uint32_t index, std::uint32_t generation, SessionEnd reason) {
  std::optional<Id> token;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    token = sessions_.IdOf(index, generation);
  }
  if (!token.has_value()) return absl::NotFoundError("no such session is open");
  return EndSession(*token, reason);
}

void SessionTable::EndAllSessions(SessionEnd reason) {
  std::vector<Id> tokens;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sessions_.ForEach([&](const Id& id, const std::shared_ptr<Session>&) { tokens.push_back(id); });
  }
  for (const Id& token : tokens) EndSession(token, reason).status().IgnoreError();  // its owner may be quicker
}

void SessionTable::Remember(const std::shared_ptr<Session>& session, SessionEnd reason) {
  ended_.push_back({.row = {.id = session->id_,
                            .label = session->label_,
                            .owner = session->peer_,
                            .lease = session->lease_kind_,
                            .state = SessionState::kEnding,
                            .end = reason},
                    .session = session,
                    .memory = session->memory_,
                    .opened = session->opened_,
                    .last_call = session->last_call(),
                    .ended = Clock::now()});
}

void SessionTable::ForgetGone() {
  ended_.remove_if([](const EndedSession& ended) {
    const bool gone = ended.session.expired() && ended.memory->used().buffers == 0;
    if (gone && ended.row.state == SessionState::kQuarantined) {
      spdlog::warn("session {}.{} of {}, which was stuck, is gone", ended.row.id.index, ended.row.id.generation,
                   ended.row.owner.Principal());
    }
    return gone;
  });
}

void SessionTable::Tick(Clock::time_point now) {
  std::vector<Id> expired;
  std::vector<std::shared_ptr<Session>> alive;  // let go of without the lock: each may turn out to be the last owner
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sessions_.ForEach([&](const Id& id, const std::shared_ptr<Session>& session) {
      const bool timed = session->lease_kind_ == LeaseKind::kTtl;
      if (timed && now - session->last_call() > session->ttl_) expired.push_back(id);
    });
    ForgetGone();
    for (EndedSession& ended : ended_) {
      if (ended.row.state == SessionState::kQuarantined || now - ended.ended <= limits_.cleanup_patience) continue;
      ended.row.state = SessionState::kQuarantined;
      metrics_.Quarantined();
      alive.push_back(ended.session.lock());
      const std::int64_t in_flight = alive.back() == nullptr ? 0 : alive.back()->lane()->in_flight();
      const MemoryUse held = ended.memory->used();
      spdlog::error(
          "session {}.{} of {} (pid {}, \"{}\") ended {} ms ago and is not gone: operations in flight: {}, "
          "buffers: {}, of {} bytes; those without operations of its own are used by others, or stuck",
          ended.row.id.index, ended.row.id.generation, ended.row.owner.Principal(), ended.row.owner.pid,
          ended.row.label, Milliseconds(now - ended.ended).count(), in_flight, held.buffers, held.bytes);
    }
  }
  for (const Id& token : expired) EndSession(token, SessionEnd::kExpired).status().IgnoreError();  // or it was closed
}

SessionRow SessionTable::RowOf(const EndedSession& ended, Clock::time_point now) const {
  SessionRow row = ended.row;
  row.age = now - ended.opened;
  row.idle = now - ended.last_call;
  row.memory = ended.memory->used();
  return row;
}

Page<SessionRow> SessionTable::ListSessions(const Includes& include, const PageRequest& page) {
  const Clock::time_point now = Clock::now();
  std::vector<SessionRow> rows;
  std::vector<std::shared_ptr<Session>> alive;  // let go of without the lock: each may turn out to be the last owner
  const std::lock_guard<std::mutex> lock(mutex_);
  ForgetGone();
  sessions_.ForEach([&](const Id& id, const std::shared_ptr<Session>& session) {
    if (!include(session->peer_)) return;
    SessionRow row{.id = id,
                   .label = session->label_,
                   .owner = session->peer_,
                   .lease = session->lease_kind_,
                   .age = now - session->opened_,
                   .idle = now - session->last_call(),
                   .memory = session->memory_->used(),
                   .in_flight = session->lane()->in_flight(),
                   .gated = session->lane()->gated(),
                   .streams = session->num_streams_,
                   .timelines = session->syncs_.size() - session->num_streams_};
    for (const Id& sync : session->syncs_) {
      const SessionLane* const lane = (*syncs_.Find(sync))->lane.get();
      row.in_flight += lane == nullptr ? 0 : lane->in_flight();
      row.gated += lane == nullptr ? 0 : lane->gated();
    }
    if (row.lease == LeaseKind::kTtl) row.ttl_left = std::max(session->ttl_ - Milliseconds(row.idle), {});
    rows.push_back(std::move(row));
  });
  for (const EndedSession& ended : ended_) {
    if (!include(ended.row.owner)) continue;
    rows.push_back(RowOf(ended, now));
    alive.push_back(ended.session.lock());
    if (alive.back() != nullptr) rows.back().in_flight = alive.back()->lane()->in_flight();
  }
  return PageOf(std::move(rows), page);
}

absl::StatusOr<UniqueFd> SessionTable::TakeDescriptor(const Session& session, std::uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (session.lease_kind_ != LeaseKind::kSideChannel) {
    return absl::FailedPreconditionError(
        "descriptor_ticket: descriptors need a session that was opened on a connection to the side channel");
  }
  ASSIGN_OR_RETURN(Lease * lease, leases_.Find(session.lease_));
  const auto found = lease->waiting.find(ticket);
  if (found == lease->waiting.end()) {
    return absl::NotFoundError(absl::StrCat("descriptor_ticket: no descriptor waits under ", ticket));
  }
  UniqueFd fd = std::move(found->second);
  lease->waiting.erase(found);
  return fd;
}

BufferHome SessionTable::HomeOf(const Session& session) {
  return {.budget = session.memory_, .reaper = &reaper_};
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::Register(Session& session, std::shared_ptr<Buffer> buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * owner, sessions_.Find(session.id_));  // it may have ended meanwhile
  NewBuffer result{.id = {}, .bytes = buffer->bytes(), .space = buffer->space()};
  metrics_.BufferAdded(buffer->origin(), buffer->bytes());
  buffers_.Insert([&](const Id& id) {
    result.id = id;
    return OwnedBuffer{.buffer = std::move(buffer), .owner = *owner, .shares = {}};
  });
  session.buffers_.push_back(result.id);
  return result;
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::ImportBuffer(Session& session, std::uint64_t ticket,
                                                                   std::uint64_t byte_offset, std::uint64_t bytes) {
  ASSIGN_OR_RETURN(UniqueFd fd, TakeDescriptor(session, ticket));
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, Buffer::Import(std::move(fd), byte_offset, bytes, HomeOf(session)));
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

void SessionTable::LetGo(std::shared_ptr<Mapping> mapping) {
  reaper_.Post([mapping = std::move(mapping)]() mutable { mapping.reset(); });
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::Show(Session& session, std::shared_ptr<Mapping> allocation,
                                                           const DeviceMemory& device, std::uint64_t byte_offset,
                                                           std::uint64_t bytes) {
  absl::StatusOr<std::shared_ptr<Buffer>> buffer =
      Buffer::Show(allocation, MemorySpace::Gpu(device.uuid()), byte_offset, bytes, HomeOf(session));
  LetGo(std::move(allocation));
  RETURN_IF_ERROR(buffer.status());
  return Register(session, *std::move(buffer));
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::ImportLegacy(Session& session, const LegacyImport& import) {
  ASSIGN_OR_RETURN(DeviceMemory* const device, FindDevice("cuda_ipc_handle.device_uuid", import.device_uuid));
  ASSIGN_OR_RETURN(const LegacyHandle handle, CheckLegacyImport(import, session.peer()));
  auto allocation = session.imports_.Get(absl::StrCat("handle ", device->uuid(), import.handle), import.allocation_id,
                                         [&] { return device->ImportLegacy(handle); });
  if (!allocation.ok()) return InField("cuda_ipc_handle", allocation.status());
  return Show(session, *std::move(allocation), *device, import.byte_offset, import.bytes);
}

absl::StatusOr<SessionTable::NewBuffer> SessionTable::ImportDescriptor(Session& session,
                                                                       const DescriptorImport& import) {
  ASSIGN_OR_RETURN(UniqueFd fd, TakeDescriptor(session, import.ticket));
  ASSIGN_OR_RETURN(DeviceMemory* const device, FindDevice("cuda_descriptor.device_uuid", import.device_uuid));
  RETURN_IF_ERROR(CheckDescriptorImport(import, device->granularity()));
  if (IsExportOf(session, fd)) {
    return absl::InvalidArgumentError(
        "cuda_descriptor: shows a buffer that the daemon allocated; use that buffer's id");
  }
  auto allocation =
      session.imports_.Get(absl::StrCat("descriptor ", device->uuid(), " ", import.allocation_id), import.allocation_id,
                           [&] { return device->ImportDescriptor(std::move(fd), import.allocation_bytes); });
  if (!allocation.ok()) return InField("cuda_descriptor", allocation.status());
  if (const std::uint64_t bytes = (*allocation)->bytes(); bytes != import.allocation_bytes) {
    LetGo(*std::move(allocation));
    return absl::InvalidArgumentError(absl::StrCat("cuda_descriptor.allocation_bytes: ", import.allocation_bytes,
                                                   "; allocation ", import.allocation_id, " was imported with ",
                                                   bytes));
  }
  return Show(session, *std::move(allocation), *device, import.byte_offset, import.bytes);
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
    ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, Buffer::Allocate(bytes, HomeOf(session)));
    return Register(session, std::move(buffer));
  }
  const bool named = space.starts_with("GPU-") || space.starts_with("MIG-");
  if (!named && space != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat("space: \"", Av(space), "\"; host, cuda or a GPU's UUID"));
  }
  const bool first = space == "cuda" && !devices_.empty();
  ASSIGN_OR_RETURN(DeviceMemory* const device, FindDevice("space", first ? devices_.front()->uuid() : space));
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, Buffer::AllocateOn(*device, bytes, HomeOf(session)));
  return Register(session, std::move(buffer));
}

absl::StatusOr<SessionTable::OwnedBuffer*> SessionTable::FindOwned(const Session& session, const Id& buffer) {
  ASSIGN_OR_RETURN(OwnedBuffer * owned, buffers_.Find(buffer));
  if (owned->owner.get() != &session) return absl::PermissionDeniedError("buffer belongs to another session");
  return owned;
}

absl::Status SessionTable::ReleaseBuffer(const Session& session, const Id& buffer, GoneToken gone) {
  std::optional<OwnedBuffer> released;  // let go of after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(FindOwned(session, buffer).status());
  released = buffers_.Remove(buffer);
  released->buffer->HoldUntilGone(
      std::make_shared<std::pair<GoneToken, GoneToken>>(std::move(gone), released->owner->token_of_end_));
  metrics_.BufferRemoved(released->buffer->origin(), released->buffer->bytes());
  std::vector<Id>& mine = released->owner->buffers_;
  mine.erase(std::find(mine.begin(), mine.end(), buffer));
  return absl::OkStatus();
}

absl::StatusOr<std::uint32_t> SessionTable::ShareBuffer(const Session& session, const Id& buffer,
                                                        const std::string& principal,
                                                        std::optional<BufferAccess> access) {
  RETURN_IF_ERROR(CheckPrincipal(principal));
  const std::lock_guard<std::mutex> lock(mutex_);
  const absl::StatusOr<OwnedBuffer*> owned = FindOwned(session, buffer);
  if (!owned.ok()) return InField("buffer_id", owned.status());
  std::vector<BufferShare>& shares = (*owned)->shares;
  const auto found = std::find_if(shares.begin(), shares.end(),
                                  [&](const BufferShare& share) { return share.principal == principal; });
  if (!access.has_value()) {
    if (found != shares.end()) shares.erase(found);
  } else if (found != shares.end()) {
    found->access = *access;
  } else {
    if (shares.size() >= kSharesMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("principal: the buffer is shared with ", kSharesMax, " already, which is the most"));
    }
    shares.push_back({.principal = principal, .access = *access});
  }
  return (*owned)->buffer->users();
}

absl::StatusOr<BufferPin> SessionTable::PinBuffer(const Session& session, const Id& buffer, BufferAccess access) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(OwnedBuffer * found, buffers_.Find(buffer));
  if (found->owner.get() == &session) return BufferPin(found->buffer);
  const auto share = std::find_if(found->shares.begin(), found->shares.end(), [&](const BufferShare& with) {
    return with.principal == session.account_->principal;
  });
  if (share == found->shares.end()) return absl::PermissionDeniedError("buffer belongs to another session");
  if (access == BufferAccess::kReadWrite && share->access == BufferAccess::kRead) {
    return absl::PermissionDeniedError("buffer belongs to another session, and is shared for reading only");
  }
  return BufferPin(found->buffer);
}

Page<BufferRow> SessionTable::ListBuffers(const Includes& include, const std::string& shared_with,
                                          const PageRequest& page) {
  std::vector<BufferRow> rows;
  const auto now = Clock::now();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    buffers_.ForEach([&](const Id& id, const OwnedBuffer& owned) {
      const bool is_shared = std::any_of(owned.shares.begin(), owned.shares.end(),
                                         [&](const BufferShare& share) { return share.principal == shared_with; });
      if (!is_shared && !include(owned.owner->peer_)) return;
      rows.push_back({.id = id,
                      .origin = owned.buffer->origin(),
                      .space = owned.buffer->space(),
                      .bytes = owned.buffer->bytes(),
                      .users = owned.buffer->users(),
                      .age = now - owned.buffer->created(),
                      .owner = owned.owner->peer_,
                      .session = owned.owner->id_,
                      .session_label = owned.owner->label_,
                      .shares = owned.shares});
    });
  }
  return PageOf(std::move(rows), page);
}

SessionCounts SessionTable::Counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ForgetGone();
  SessionCounts counts{.sessions = sessions_.size(),
                       .ending = ended_.size(),
                       .buffers = buffers_.size(),
                       .streams = num_streams_,
                       .timelines = syncs_.size() - num_streams_,
                       .bytes_held = memory_->used().bytes};
  for (const EndedSession& ended : ended_) {
    if (ended.row.state == SessionState::kQuarantined) ++counts.quarantined;
  }
  return counts;
}

absl::StatusOr<Id> SessionTable::OpenStream(Session& session, const StreamSpec& spec) {
  OwnedSync sync{.lane = make_lane_(spec)};
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * owner, sessions_.Find(session.id_));
  if (session.num_streams_ >= limits_.streams_per_session_max) {
    return LimitReached(Limit::kStreamsPerSession, limits_.streams_per_session_max);
  }
  sync.owner = *owner;
  Id stream;
  syncs_.Insert([&](const Id& id) {
    stream = id;
    return std::move(sync);
  });
  session.syncs_.push_back(stream);
  ++session.num_streams_;
  ++num_streams_;
  return stream;
}

absl::StatusOr<Id> SessionTable::RegisterSync(Session& session, OwnedSync sync) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(std::shared_ptr<Session> * owner, sessions_.Find(session.id_));
  if (session.syncs_.size() - session.num_streams_ >= limits_.timelines_per_session_max) {
    return LimitReached(Limit::kTimelinesPerSession, limits_.timelines_per_session_max);
  }
  sync.owner = *owner;
  Id result;
  syncs_.Insert([&](const Id& id) {
    result = id;
    return std::move(sync);
  });
  session.syncs_.push_back(result);
  return result;
}

absl::StatusOr<SharedWord> SessionTable::TakeWord(Session& session, std::uint64_t value) {
  if (value >= kSyncValueMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("initial_value: ", value, "; an exported timeline stays below ", kSyncValueMax));
  }
  const std::lock_guard<std::mutex> lock(session.page_mutex_);
  if (session.page_ == nullptr) {
    ASSIGN_OR_RETURN(std::unique_ptr<SyncPage> page, SyncPage::Make(devices_));
    // A GPU gives it back, which may take its time.
    session.page_ = std::shared_ptr<SyncPage>(
        page.release(), [&reaper = reaper_](SyncPage* gone) { reaper.Post([gone] { delete gone; }); });
  }
  std::optional<SharedWord> word = session.page_->Take(value);
  if (word.has_value()) return *std::move(word);
  return absl::ResourceExhaustedError(
      absl::StrCat("exported: a session has at most ", SyncPage::kSlots, " exported timelines"));
}

absl::StatusOr<Id> SessionTable::CreateTimeline(Session& session, TimelineSpec spec) {
  if (spec.shared_with.size() > kSharesMax) {
    return absl::InvalidArgumentError(absl::StrCat("shared_with: ", spec.shared_with.size(), "; at most ", kSharesMax));
  }
  for (const std::string& principal : spec.shared_with) {
    if (!CheckPrincipal(principal).ok()) {
      return absl::InvalidArgumentError("shared_with: must be such as uid:1000; `tessera status` tells a caller's own");
    }
  }
  OwnedSync sync{.shared_with = std::move(spec.shared_with)};
  if (spec.exported) {
    ASSIGN_OR_RETURN(SharedWord word, TakeWord(session, spec.value));
    sync.timeline = std::make_shared<Timeline>(std::move(word), poller_);
  } else {
    sync.timeline = std::make_shared<Timeline>(spec.value);
  }
  return RegisterSync(session, std::move(sync));
}

absl::StatusOr<Id> SessionTable::ImportEvent(Session& session, const EventImport& import) {
  ASSIGN_OR_RETURN(const LegacyHandle handle, CheckEventImport(import, session.peer_));
  ASSIGN_OR_RETURN(DeviceMemory* const device, FindDevice("device_uuid", import.device_uuid));
  absl::StatusOr<std::unique_ptr<DeviceEvent>> event = device->ImportEvent(handle);
  if (!event.ok()) return InField("handle", event.status());
  const auto destroy = [&reaper = reaper_](DeviceEvent* gone) { reaper.Post([gone] { delete gone; }); };
  return RegisterSync(session, {.event = std::shared_ptr<DeviceEvent>(event->release(), destroy)});
}

absl::StatusOr<SessionTable::OwnedSync*> SessionTable::FindSync(const Session& session, const Id& sync) {
  ASSIGN_OR_RETURN(OwnedSync * found, syncs_.Find(sync));
  if (found->owner.get() != &session) return absl::PermissionDeniedError("belongs to another session");
  return found;
}

absl::StatusOr<std::shared_ptr<SessionLane>> SessionTable::FindStream(const Session& session, const Id& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(OwnedSync * found, FindSync(session, stream));
  if (found->lane == nullptr) return absl::InvalidArgumentError("is not a stream");
  return found->lane;
}

absl::StatusOr<SessionTable::FoundPoint> SessionTable::FindPoint(const Session& session, const Id& sync) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(OwnedSync * found, syncs_.Find(sync));
  const bool own = found->owner.get() == &session;
  const bool shared = std::find(found->shared_with.begin(), found->shared_with.end(), session.account_->principal) !=
                      found->shared_with.end();
  if (!own && !shared) return absl::PermissionDeniedError("belongs to another session");
  if (found->lane != nullptr) return absl::InvalidArgumentError("is a stream, not a timeline or an event");
  return FoundPoint{.timeline = found->timeline, .event = found->event, .own = own};
}

namespace {

// Polled for as long as somebody has its timeline.
class AwaitedEvent final : public Pollable {
 public:
  explicit AwaitedEvent(std::shared_ptr<DeviceEvent> event) : event_(std::move(event)) {}
  Timeline& timeline() { return timeline_; }

  bool Poll() override {
    const absl::StatusOr<bool> done = event_->Done();
    if (done.ok() && !*done) return true;
    timeline_.Signal(1, done.status());
    return false;
  }

 private:
  const std::shared_ptr<DeviceEvent> event_;
  Timeline timeline_;
};

}  // namespace

std::shared_ptr<Timeline> SessionTable::Await(const std::shared_ptr<DeviceEvent>& event) {
  const auto awaited = std::make_shared<AwaitedEvent>(event);
  if (awaited->Poll()) poller_->Add(awaited);
  return {awaited, &awaited->timeline()};
}

absl::StatusOr<std::shared_ptr<Timeline>> SessionTable::ExportTimeline(const Id& lease, const Id& timeline) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(Session * session, SessionOn(lease));
  ASSIGN_OR_RETURN(OwnedSync * found, FindSync(*session, timeline));
  if (found->timeline == nullptr) return absl::InvalidArgumentError("is not a timeline");
  if (found->timeline->word() == nullptr) return absl::FailedPreconditionError("was created without `exported`");
  return found->timeline;
}

absl::Status SessionTable::ReleaseSync(Session& session, const Id& sync) {
  std::optional<OwnedSync> released;  // let go of after the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(FindSync(session, sync).status());
    released = syncs_.Remove(sync);
    session.syncs_.erase(std::find(session.syncs_.begin(), session.syncs_.end(), sync));
    if (released->lane != nullptr) {
      std::erase_if(session.released_lanes_, [](const auto& lane) { return lane.expired(); });
      session.released_lanes_.push_back(released->lane);
      --session.num_streams_;
      --num_streams_;
    }
  }
  if (released->timeline != nullptr) released->timeline->Close(absl::AbortedError("a timeline was released"));
  return absl::OkStatus();
}

std::vector<SessionTable::OwnedSync> SessionTable::TakeSyncs(Session& session) {
  std::vector<OwnedSync> syncs;
  for (const Id& id : session.syncs_) syncs.push_back(*syncs_.Remove(id));
  for (const auto& released : session.released_lanes_) {
    if (auto lane = released.lock(); lane != nullptr) {
      syncs.push_back({.lane = std::move(lane)});
    }
  }
  num_streams_ -= session.num_streams_;
  session.syncs_.clear();
  session.num_streams_ = 0;
  return syncs;
}

std::vector<std::shared_ptr<SessionLane>> SessionTable::LanesOf(const Session& session) {
  std::vector<std::shared_ptr<SessionLane>> lanes = {session.lane_};
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Id& id : session.syncs_) {
    if (const auto& lane = (*syncs_.Find(id))->lane; lane != nullptr) lanes.push_back(lane);
  }
  for (const auto& released : session.released_lanes_) {
    if (auto lane = released.lock(); lane != nullptr) lanes.push_back(std::move(lane));
  }
  return lanes;
}

}  // namespace tessera::server
