// Memory.Synchronize: a call that waits for work or for a point of a timeline.
#pragma once

#include <grpcpp/grpcpp.h>

#include "server/exec/executor.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/memory.pb.h"

namespace tessera::server {

// Owned by gRPC from here on.
grpc::ServerUnaryReactor* ServeSynchronize(grpc::CallbackServerContext& context, RpcScope& scope, Executor& executor,
                                           const v1::SynchronizeRequest& request, v1::SynchronizeReply& reply);

}  // namespace tessera::server
