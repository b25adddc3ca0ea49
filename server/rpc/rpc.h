// What every RPC handler shares: who calls, with which session, how the answer is counted.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/config/settings.h"
#include "server/session/peer.h"
#include "server/session/session_table.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

inline constexpr char kSessionMetadata[] = "tessera-session-bin";

// Same code, same message.
grpc::Status ToGrpc(const absl::Status& status);

// The daemon as its handlers see it; everything outlives the gRPC server.
struct RpcScope {
  const Settings& settings;
  Metrics& metrics;
  PeerRegistry& peers;
  SessionTable& sessions;

  // The peer of the call's connection. UNAUTHENTICATED if the kernel did not vouch for it.
  absl::StatusOr<Peer> PeerOf(const grpc::CallbackServerContext& context) const;
  // The session of the call's metadata, or null if it carries none.
  absl::StatusOr<std::shared_ptr<Session>> SessionOf(const grpc::CallbackServerContext& context,
                                                     const Peer& peer) const;
  absl::StatusOr<std::shared_ptr<Session>> RequireSession(const grpc::CallbackServerContext& context,
                                                          const Peer& peer) const;
  bool IsAdministrator(const Peer& peer) const;
  absl::Status RequireAdministrator(const Peer& peer) const;

  // Counts an answered call and, if it failed, logs it (debug): the one place that does.
  void Finished(RpcMethod method, const absl::Status& status, std::chrono::steady_clock::time_point start) const;
};

// Runs a short handler on the RPC thread, counts it and finishes the call. `handle` returns absl::Status.
template <typename Handler>
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, RpcScope& scope, RpcMethod method,
                                 Handler handle) {
  const auto start = std::chrono::steady_clock::now();
  absl::StatusOr<Peer> peer = scope.PeerOf(*context);
  const absl::Status status = peer.ok() ? handle(*peer) : peer.status();
  scope.Finished(method, status, start);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

}  // namespace tessera::server
