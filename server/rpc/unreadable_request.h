// An answer for requests whose bytes are no message of their method. gRPC does not call a handler for them, and would
// say UNIMPLEMENTED with no text.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <vector>

#include "server/telemetry/metrics.h"

namespace tessera::server {

// For ServerBuilder: such calls answer INVALID_ARGUMENT, and are counted. `metrics` outlives the server.
std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> AnswerUnreadableRequests(
    Metrics& metrics);

}  // namespace tessera::server
