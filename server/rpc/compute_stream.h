// Compute.Stream: one call that carries many submissions, pipelined.
#pragma once

#include <grpcpp/grpcpp.h>

#include "server/exec/executor.h"
#include "server/rpc/rpc.h"

namespace tessera::server {

// Of one call: read, and not yet answered by a reply that the transport has taken.
inline constexpr int kStreamInFlightMax = 64;

// Serves one call; deletes itself at its end.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServeComputeStream(grpc::CallbackServerContext& context,
                                                                                RpcScope& scope, Executor& executor);

}  // namespace tessera::server
