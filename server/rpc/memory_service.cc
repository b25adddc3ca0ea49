#include "server/rpc/memory_service.h"

#include <chrono>
#include <memory>

#include "common/status_macros.h"
#include "common/text.h"

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

void FillInfo(const BufferRow& row, v1::BufferInfo& info) {
  info.set_buffer_id(row.id.Bytes());
  info.set_origin(row.origin == BufferOrigin::kImported ? v1::BUFFER_ORIGIN_IMPORTED : v1::BUFFER_ORIGIN_ALLOCATED);
  info.set_space(row.space.Name());
  info.set_bytes(row.bytes);
  info.set_references(row.users);
  info.set_age_ms(static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(row.age).count()));
  info.set_principal(row.owner.Principal());
  info.set_owner_pid(row.owner.pid);
  info.set_session_label(row.session_label);
}

}  // namespace

grpc::ServerUnaryReactor* MemoryService::OpenSession(grpc::CallbackServerContext* context,
                                                     const v1::OpenSessionRequest* request,
                                                     v1::OpenSessionReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryOpenSession, [&](const Peer& peer) -> absl::Status {
    if (request->lease().empty()) {
      return absl::InvalidArgumentError(
          "lease: missing; connect to the side channel (ServerInfo.side_channel) and take it from the Welcome");
    }
    ASSIGN_OR_RETURN(const Id lease, ParseId(request->lease(), "lease"));
    ASSIGN_OR_RETURN(const Id token, scope_.sessions.OpenSession(peer, lease, request->label()));
    reply->set_token(token.Bytes());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* MemoryService::CloseSession(grpc::CallbackServerContext* context,
                                                      const v1::CloseSessionRequest* /*request*/,
                                                      v1::CloseSessionReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryCloseSession, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const std::size_t released, scope_.sessions.EndSession(session->id(), SessionEnd::kClosed));
    reply->set_buffers_released(static_cast<std::uint32_t>(released));
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
  return Answer(context, scope_, RpcMethod::kMemoryReleaseBuffer, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.RequireSession(*context, peer));
    ASSIGN_OR_RETURN(const Id buffer, ParseId(request->buffer_id(), "buffer_id"));
    return InField("buffer_id", scope_.sessions.ReleaseBuffer(*session, buffer));
  });
}

grpc::ServerUnaryReactor* MemoryService::ListBuffers(grpc::CallbackServerContext* context,
                                                     const v1::ListBuffersRequest* request,
                                                     v1::ListBuffersReply* reply) {
  return Answer(context, scope_, RpcMethod::kMemoryListBuffers, [&](const Peer& peer) -> absl::Status {
    if (request->all_principals()) RETURN_IF_ERROR(scope_.RequireAdministrator(peer));
    const auto include = [&](const Peer& owner) { return request->all_principals() || SamePrincipal(owner, peer); };
    for (const BufferRow& row : scope_.sessions.ListBuffers(include)) FillInfo(row, *reply->add_buffers());
    return absl::OkStatus();
  });
}

}  // namespace tessera::server
