#include "server/session/session_table.h"

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
                           std::function<std::shared_ptr<SessionLane>()> make_lane)
    : epoch_(epoch),
      limits_(limits),
      metrics_(metrics),
      make_lane_(std::move(make_lane)),
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
  NewBuffer result{.id = {}, .bytes = buffer->bytes()};
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

absl::StatusOr<SessionTable::NewBuffer> SessionTable::AllocateBuffer(Session& session, std::uint64_t bytes) {
  ASSIGN_OR_RETURN(std::shared_ptr<Buffer> buffer, Buffer::Allocate(bytes, session.budget_));
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
