// tessera.v1.Memory over the session table.
#pragma once

#include "server/exec/executor.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/memory.grpc.pb.h"

namespace tessera::server {

class MemoryService final : public v1::Memory::CallbackService {
 public:
  MemoryService(RpcScope& scope, Executor& executor) : scope_(scope), executor_(executor) {}

  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* context, const v1::OpenSessionRequest* request,
                                        v1::OpenSessionReply* reply) override;
  grpc::ServerWriteReactor<v1::AttachReply>* Attach(grpc::CallbackServerContext* context,
                                                    const v1::AttachRequest* request) override;
  grpc::ServerUnaryReactor* KeepAlive(grpc::CallbackServerContext* context, const v1::KeepAliveRequest* request,
                                      v1::KeepAliveReply* reply) override;
  grpc::ServerUnaryReactor* CloseSession(grpc::CallbackServerContext* context, const v1::CloseSessionRequest* request,
                                         v1::CloseSessionReply* reply) override;
  grpc::ServerUnaryReactor* ImportBuffer(grpc::CallbackServerContext* context, const v1::ImportBufferRequest* request,
                                         v1::ImportBufferReply* reply) override;
  grpc::ServerUnaryReactor* AllocateBuffer(grpc::CallbackServerContext* context,
                                           const v1::AllocateBufferRequest* request,
                                           v1::AllocateBufferReply* reply) override;
  grpc::ServerUnaryReactor* ReleaseBuffer(grpc::CallbackServerContext* context, const v1::ReleaseBufferRequest* request,
                                          v1::ReleaseBufferReply* reply) override;
  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context, const v1::ListSessionsRequest* request,
                                         v1::ListSessionsReply* reply) override;
  grpc::ServerUnaryReactor* ShareBuffer(grpc::CallbackServerContext* context, const v1::ShareBufferRequest* request,
                                        v1::ShareBufferReply* reply) override;
  grpc::ServerUnaryReactor* OpenStream(grpc::CallbackServerContext* context, const v1::OpenStreamRequest* request,
                                       v1::OpenStreamReply* reply) override;
  grpc::ServerUnaryReactor* CreateTimeline(grpc::CallbackServerContext* context,
                                           const v1::CreateTimelineRequest* request,
                                           v1::CreateTimelineReply* reply) override;
  grpc::ServerUnaryReactor* ImportEvent(grpc::CallbackServerContext* context, const v1::ImportEventRequest* request,
                                        v1::ImportEventReply* reply) override;
  grpc::ServerUnaryReactor* SignalTimeline(grpc::CallbackServerContext* context,
                                           const v1::SignalTimelineRequest* request,
                                           v1::SignalTimelineReply* reply) override;
  grpc::ServerUnaryReactor* Synchronize(grpc::CallbackServerContext* context, const v1::SynchronizeRequest* request,
                                        v1::SynchronizeReply* reply) override;
  grpc::ServerUnaryReactor* ReleaseSync(grpc::CallbackServerContext* context, const v1::ReleaseSyncRequest* request,
                                        v1::ReleaseSyncReply* reply) override;
  grpc::ServerUnaryReactor* ListBuffers(grpc::CallbackServerContext* context, const v1::ListBuffersRequest* request,
                                        v1::ListBuffersReply* reply) override;

 private:
  RpcScope& scope_;
  Executor& executor_;
};

}  // namespace tessera::server
