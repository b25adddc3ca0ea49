// Memory.Attach: a call that is a lease for as long as it lasts.
#pragma once

#include <grpcpp/grpcpp.h>

#include "server/rpc/rpc.h"
#include "tessera/v1/memory.pb.h"

namespace tessera::server {

// Owned by gRPC from here on.
grpc::ServerWriteReactor<v1::AttachReply>* ServeAttach(grpc::CallbackServerContext& context, RpcScope& scope);

}  // namespace tessera::server
