// The gRPC server. It listens nowhere itself: every connection is accepted and identified before gRPC gets it.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_builder.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/rpc/reflection_service.h"
#include "server/session/peer.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

struct RpcServerOptions {
  std::vector<grpc::Service*> services;  // outlive the server
  std::int64_t message_bytes_max = 0;
  std::int64_t calls_per_connection_max = 0;
  std::int64_t memory_bytes_max = 0;             // of messages on the way in and out, all connections together
  std::shared_ptr<grpc::ServerCredentials> tls;  // null: ServeTls is not called
  Metrics* metrics = nullptr;                    // counts requests that no handler gets to see; outlives the server
};

class RpcServer {
 public:
  // Health checks and reflection are served besides. `peers` outlives the server.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const RpcServerOptions& options, PeerRegistry& peers);

  // Stops taking calls and waits for those that are running; a second for those of streams, and a little longer for
  // clients to read their answers.
  ~RpcServer();

  // Each takes one accepted, non-blocking connection. What cannot be served is closed, and logged.
  void ServeLocal(UniqueFd connection);               // of a Unix socket: the kernel tells who it is
  void ServeAnonymous(UniqueFd connection);           // plain TCP
  void ServeTls(UniqueFd connection);                 // TCP: its certificate tells who it is
  void Serve(UniqueFd connection, const Peer& peer);  // of whoever the caller says

  // What grpc.health.v1 answers, for each service and for the whole.
  void SetServing(bool serving);

 private:
  RpcServer(const RpcServerOptions& options, PeerRegistry& peers);
  absl::Status Build();

  const RpcServerOptions options_;
  PeerRegistry& peers_;
  ReflectionService reflection_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> tls_;
};

}  // namespace tessera::server
