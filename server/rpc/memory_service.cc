#include "server/rpc/memory_service.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/attach.h"
#include "server/rpc/session_name.h"
#include "server/rpc/sync_point.h"
#include "server/rpc/synchronize.h"

namespace tessera::server {
namespace {

absl::StatusOr<Id> ParseId(const std::string& bytes, const char* field) {
  Id id;
  if (Id::Parse(bytes, id)) return id;
  if (bytes.empty()) return absl::InvalidArgumentError(std::string(field) + ": missing");
  return absl::InvalidArgumentError(std::string(field) + ": must be 16 bytes");
}

absl::StatusOr<SessionTable::NewBuffer> Import(SessionTable& sessions, Session& session,
                                               const v1::ImportBufferRequest& request) {
  switch (request.source_case()) {
    case v1::ImportBufferRequest::kCudaIpcHandle:
      if (request.descriptor_ticket() != 0) {
        return absl::InvalidArgumentError("descriptor_ticket: must be 0 with cuda_ipc_handle, which has no descriptor");
      }
      return sessions.ImportLegacy(session, {.handle = request.cuda_ipc_handle().handle(),
                                             .device_uuid = request.cuda_ipc_handle().device_uuid(),
                                             .allocation_id = request.cuda_ipc_handle().allocation_id(),
                                             .exporter_pid = request.cuda_ipc_handle().exporter_pid(),
                                             .byte_offset = request.byte_offset(),
                                             .bytes = request.bytes()});
    case v1::ImportBufferRequest::kCudaDescriptor:
      return sessions.ImportDescriptor(session, {.ticket = request.descriptor_ticket(),
                                                 .device_uuid = request.cuda_descriptor().device_uuid(),
                                                 .allocation_id = request.cuda_descriptor().allocation_id(),
                                                 .allocation_bytes = request.cuda_descriptor().allocation_bytes(),
                                                 .byte_offset = request.byte_offset(),
                                                 .bytes = request.bytes()});
    case v1::ImportBufferRequest::SOURCE_NOT_SET:
      break;
  }
  return sessions.ImportBuffer(session, request.descriptor_ticket(), request.byte_offset(), request.bytes());
}

template <typename Reply>
void FillReply(const SessionTable::NewBuffer& buffer, Reply& reply) {
  reply.set_buffer_id(buffer.id.Bytes());
  reply.set_bytes(buffer.bytes);
  reply.set_space(buffer.space.Name());
}

std::uint64_t InMilliseconds(std::chrono::steady_clock::duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(duration).count());
}

void FillInfo(const BufferRow& row, v1::BufferInfo& info) {
  info.set_buffer_id(row.id.Bytes());
  info.set_origin(row.origin == BufferOrigin::kImported ? v1::BUFFER_ORIGIN_IMPORTED : v1::BUFFER_ORIGIN_ALLOCATED);
  info.set_space(row.space.Name());
  info.set_bytes(row.bytes);
  info.set_references(row.users);
  info.set_age_ms(InMilliseconds(row.age));
  info.set_principal(row.owner.Principal());
  info.set_owner_pid(row.owner.pid);
  info.set_session_label(row.session_label);
  info.set_session(ToString(SessionName::Of(row.session)));
  for (const BufferShare& share : row.shares) {
    v1::BufferShare& to = *info.add_shares();
    to.set_principal(share.principal);
    to.set_access(share.access == BufferAccess::kRead ? v1::BUFFER_ACCESS_READ : v1::BUFFER_ACCESS_READ_WRITE);
  }
}

// Whom else a buffer is shared with is its owner's business.
void KeepShareOf(const std::string& principal, v1::BufferInfo& info) {
  auto& shares = *info.mutable_shares();
  shares.erase(std::remove_if(shares.begin(), shares.end(),
                              [&](const v1::BufferShare& share) { return share.principal() != principal; }),
               shares.end());
}

v1::LeaseKind ToWire(LeaseKind kind) {
  switch (kind) {
    case LeaseKind::kSideChannel:
      return v1::LEASE_KIND_SIDE_CHANNEL;
    case LeaseKind::kAttach:
      return v1::LEASE_KIND_ATTACH;
    case LeaseKind::kTtl:
      return v1::LEASE_KIND_TTL;
  }
  return v1::LEASE_KIND_UNSPECIFIED;
}

v1::SessionState ToWire(SessionState state) {
  switch (state) {
    case SessionState::kOpen:
      return v1::SESSION_STATE_OPEN;
    case SessionState::kEnding:
      return v1::SESSION_STATE_ENDING;
    case SessionState::kQuarantined:
      return v1::SESSION_STATE_QUARANTINED;
  }
  return v1::SESSION_STATE_UNSPECIFIED;
}

void FillInfo(const SessionRow& row, v1::SessionInfo& info) {
  info.set_name(ToString(SessionName::Of(row.id)));
  info.set_label(row.label);
  info.set_principal(row.owner.Principal());
  info.set_owner_pid(row.owner.pid);
  info.set_lease(ToWire(row.lease));
  info.set_ttl_ms(InMilliseconds(row.ttl_left));
  info.set_state(ToWire(row.state));
  if (row.end.has_value()) info.set_end_reason(std::string(LabelText(*row.end)));
  info.set_age_ms(InMilliseconds(row.age));
  info.set_idle_ms(InMilliseconds(row.idle));
  info.set_buffers(static_cast<std::uint32_t>(row.memory.buffers));
  info.set_bytes(row.memory.bytes);
  info.set_in_flight(static_cast<std::uint32_t>(row.in_flight));
  info.set_gated(static_cast<std::uint32_t>(row.gated));
  info.set_streams(static_cast<std::uint32_t>(row.streams));
  info.set_timelines(static_cast<std::uint32_t>(row.timelines));
}

std::chrono::milliseconds TtlOf(std::uint64_t milliseconds) {
  constexpr std::uint64_t kRepresentable = std::uint64_t{1} << 50U;  // far beyond what the setting allows
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(milliseconds, kRepresentable)));
}

// Whose rows a list has: the caller's, or everybody's for an administrator.
absl::StatusOr<SessionTable::Includes> Listed(const RpcScope& scope, const Peer& peer, bool all) {
  if (all) {
    RETURN_IF_ERROR(scope.RequireAdministrator(peer));
    return [](const Peer& /*owner*/) { return true; };
  }
  return [peer](const Peer& owner) { return SamePrincipal(owner, peer); };
}

constexpr std::uint32_t kPageMax = 1000;
constexpr std::int64_t kRowBytesMax = 640;  // of either list, with all of a label and of the shares

// Rows of a page, which must fit into a message.
std::size_t PageLimit(const Settings& settings, std::uint32_t asked) {
  const auto fit = static_cast<std::size_t>(settings.message_bytes_max / kRowBytesMax);
  return std::min<std::size_t>(fit, asked == 0 ? kPageMax : std::min(asked, kPageMax));
}

absl::StatusOr<StreamPriority> PriorityOf(v1::StreamPriority priority) {
  switch (priority) {
    case v1::STREAM_PRIORITY_UNSPECIFIED:
    case v1::STREAM_PRIORITY_NORMAL:
      return StreamPriority::kNormal;
    case v1::STREAM_PRIORITY_LOW:
      return StreamPriority::kLow;
    case v1::STREAM_PRIORITY_HIGH:
      return StreamPriority::kHigh;
    default:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat("priority: unknown value ", static_cast<int>(priority)));
}

// nullopt revokes.
absl::StatusOr<std::optional<BufferAccess>> AccessOf(v1::BufferAccess access) {
  switch (access) {
    case v1::BUFFER_ACCESS_NONE:
      return std::optional<BufferAccess>();
    case v1::BUFFER_ACCESS_READ:
      return BufferAccess::kRead;
    case v1::BUFFER_ACCESS_READ_WRITE:
      return BufferAccess::kReadWrite;
    default:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("access: ", static_cast<int>(access), "; must be NONE, READ or READ_WRITE"));
}

}  // namespace

grpc::ServerUnaryReactor* MemoryService::OpenSession(grpc::CallbackServerContext* context,
                                                     const v1::OpenSessionRequest* request,
                                                     v1::OpenSessionReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryOpenSession, [&](const Peer& peer) -> absl::Status {
    if (request->ttl_ms() != 0) {
      if (!request->lease().empty())
        return absl::InvalidArgumentError("ttl_ms: a session has a lease or a time to live");
      ASSIGN_OR_RETURN(const Id token, scope_.sessions.OpenSession(peer, TtlOf(request->ttl_ms()), request->label()));
      reply->set_token(token.Bytes());
      return absl::OkStatus();
    }
    if (request->lease().empty()) {
      return absl::InvalidArgumentError(
          "lease: missing; connect to the side channel (ServerInfo.side_channel) and take it from the Welcome, or from "
          "Attach, or give a ttl_ms");
    }
    ASSIGN_OR_RETURN(const Id lease, ParseId(request->lease(), "lease"));
    ASSIGN_OR_RETURN(const Id token, scope_.sessions.OpenSession(peer, lease, request->label()));
    reply->set_token(token.Bytes());
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::AttachReply>* MemoryService::Attach(grpc::CallbackServerContext* context,
                                                                 const v1::AttachRequest* /*request*/) {
  return ServeAttach(*context, scope_);
}

grpc::ServerUnaryReactor* MemoryService::KeepAlive(grpc::CallbackServerContext* context,
                                                   const v1::KeepAliveRequest* /*request*/, v1::KeepAliveReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryKeepAlive, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const std::chrono::milliseconds ttl, scope_.sessions.KeepAlive(*session));
    reply->set_ttl_ms(static_cast<std::uint64_t>(ttl.count()));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::CloseSession(grpc::CallbackServerContext* context,
                                                      const v1::CloseSessionRequest* /*request*/,
                                                      v1::CloseSessionReply* reply) {
  return AnswerWhenGone(
      context, scope_, RpcMethod::kMemoryCloseSession, [&](const Peer& peer, const GoneToken& gone) -> absl::Status {
        ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
        ASSIGN_OR_RETURN(const std::size_t released,
                         scope_.sessions.EndSession(session->id(), SessionEnd::kClosed, gone));
        reply->set_buffers_released(static_cast<std::uint32_t>(released));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* MemoryService::ListSessions(grpc::CallbackServerContext* context,
                                                      const v1::ListSessionsRequest* request,
                                                      v1::ListSessionsReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryListSessions, [&](const Peer& peer) -> absl::Status {
    PageRequest page{.after = std::nullopt, .limit = PageLimit(scope_.settings, request->limit())};
    if (!request->after().empty()) {
      ASSIGN_OR_RETURN(const SessionName after, ParseSessionName(request->after(), "after"));
      page.after = Id{.index = after.index, .generation = after.generation};
    }
    ASSIGN_OR_RETURN(const SessionTable::Includes include, Listed(scope_, peer, request->all_principals()));
    const Page<SessionRow> sessions = scope_.sessions.ListSessions(include, page);
    for (const SessionRow& row : sessions.rows) FillInfo(row, *reply->add_sessions());
    reply->set_more(sessions.more);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::ImportBuffer(grpc::CallbackServerContext* context,
                                                      const v1::ImportBufferRequest* request,
                                                      v1::ImportBufferReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryImportBuffer, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const SessionTable::NewBuffer buffer, Import(scope_.sessions, *session, *request));
    FillReply(buffer, *reply);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::AllocateBuffer(grpc::CallbackServerContext* context,
                                                        const v1::AllocateBufferRequest* request,
                                                        v1::AllocateBufferReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryAllocateBuffer, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const SessionTable::NewBuffer buffer,
                     scope_.sessions.AllocateBuffer(*session, request->bytes(), request->space()));
    FillReply(buffer, *reply);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::ReleaseBuffer(grpc::CallbackServerContext* context,
                                                       const v1::ReleaseBufferRequest* request,
                                                       v1::ReleaseBufferReply* /*reply*/) {
  return AnswerWhenGone(
      context, scope_, RpcMethod::kMemoryReleaseBuffer, [&](const Peer& peer, const GoneToken& gone) -> absl::Status {
        ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
        ASSIGN_OR_RETURN(const Id buffer, ParseId(request->buffer_id(), "buffer_id"));
        return InField("buffer_id", scope_.sessions.ReleaseBuffer(*session, buffer, gone));
      });
}

grpc::ServerUnaryReactor* MemoryService::ShareBuffer(grpc::CallbackServerContext* context,
                                                     const v1::ShareBufferRequest* request,
                                                     v1::ShareBufferReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryShareBuffer, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const Id buffer, ParseId(request->buffer_id(), "buffer_id"));
    ASSIGN_OR_RETURN(const std::optional<BufferAccess> access, AccessOf(request->access()));
    const std::string principal = request->principal().empty() ? peer.Principal() : request->principal();
    ASSIGN_OR_RETURN(const std::uint32_t users, scope_.sessions.ShareBuffer(*session, buffer, principal, access));
    reply->set_references(users);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::OpenStream(grpc::CallbackServerContext* context,
                                                    const v1::OpenStreamRequest* request, v1::OpenStreamReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryOpenStream, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const StreamPriority priority, PriorityOf(request->priority()));
    ASSIGN_OR_RETURN(const Id stream,
                     scope_.sessions.OpenStream(*session, {.priority = priority, .gpu_waits = request->gpu_waits()}));
    reply->set_stream_id(stream.Bytes());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::CreateTimeline(grpc::CallbackServerContext* context,
                                                        const v1::CreateTimelineRequest* request,
                                                        v1::CreateTimelineReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryCreateTimeline, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    std::vector<std::string> shared_with(request->shared_with().begin(), request->shared_with().end());
    if (request->shared_with_own()) shared_with.push_back(peer.Principal());
    ASSIGN_OR_RETURN(const Id timeline, scope_.sessions.CreateTimeline(*session, {.value = request->initial_value(),
                                                                                  .shared_with = std::move(shared_with),
                                                                                  .exported = request->exported()}));
    reply->set_timeline_id(timeline.Bytes());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::ImportEvent(grpc::CallbackServerContext* context,
                                                     const v1::ImportEventRequest* request,
                                                     v1::ImportEventReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryImportEvent, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const Id event, scope_.sessions.ImportEvent(*session, {.handle = request->handle(),
                                                                            .device_uuid = request->device_uuid(),
                                                                            .exporter_pid = request->exporter_pid()}));
    reply->set_event_id(event.Bytes());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::SignalTimeline(grpc::CallbackServerContext* context,
                                                        const v1::SignalTimelineRequest* request,
                                                        v1::SignalTimelineReply* /*reply*/) {
  return Answer(context, scope_, RpcMethod::kMemorySignalTimeline, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const Id id, ParseId(request->point().id(), "point.id"));
    const std::uint64_t value = request->point().value();
    ASSIGN_OR_RETURN(const SessionTable::FoundPoint found, ResolvePoint(scope_.sessions, *session, id, value, "point"));
    if (found.event != nullptr) {
      return absl::InvalidArgumentError("point.id: is an event, which only a submission's end signals");
    }
    found.timeline->Signal(value, absl::OkStatus());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::Synchronize(grpc::CallbackServerContext* context,
                                                     const v1::SynchronizeRequest* request,
                                                     v1::SynchronizeReply* reply) {
  return ServeSynchronize(*context, scope_, executor_, *request, *reply);
}

grpc::ServerUnaryReactor* MemoryService::ReleaseSync(grpc::CallbackServerContext* context,
                                                     const v1::ReleaseSyncRequest* request,
                                                     v1::ReleaseSyncReply* /*reply*/) {
  return Answer(context, scope_, RpcMethod::kMemoryReleaseSync, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const Id id, ParseId(request->id(), "id"));
    return InField("id", scope_.sessions.ReleaseSync(*session, id));
  });
}

grpc::ServerUnaryReactor* MemoryService::ListBuffers(grpc::CallbackServerContext* context,
                                                     const v1::ListBuffersRequest* request,
                                                     v1::ListBuffersReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryListBuffers, [&](const Peer& peer) -> absl::Status {
    PageRequest page{.after = std::nullopt, .limit = PageLimit(scope_.settings, request->limit())};
    if (!request->after().empty()) {
      ASSIGN_OR_RETURN(page.after, ParseId(request->after(), "after"));
    }
    ASSIGN_OR_RETURN(const SessionTable::Includes include, Listed(scope_, peer, request->all_principals()));
    const Page<BufferRow> buffers = scope_.sessions.ListBuffers(include, peer.Principal(), page);
    for (const BufferRow& row : buffers.rows) {
      v1::BufferInfo& info = *reply->add_buffers();
      FillInfo(row, info);
      if (!include(row.owner)) KeepShareOf(peer.Principal(), info);
    }
    reply->set_more(buffers.more);
    return absl::OkStatus();
  });
}

}  // namespace tessera::server
