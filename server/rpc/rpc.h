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

// Who may make a call.
enum class Access {
  kAnyone,         // at a door that is open; on its own data
  kNode,           // processes of this node, at the Unix socket
  kAdministrator,  // uid 0, the daemon's uid, the settings admin_uids and admin_subjects
};
Access AccessOf(RpcMethod method);

// The daemon as its handlers see it; everything outlives the gRPC server.
struct RpcScope {
  const Settings& settings;
  Metrics& metrics;
  PeerRegistry& peers;
  SessionTable& sessions;

  // Who calls, if they may. UNAUTHENTICATED if neither the kernel nor a certificate vouches for them, PERMISSION_DENIED
  // by AccessOf, RESOURCE_EXHAUSTED over a limit of connections.
  absl::StatusOr<Peer> Admit(const grpc::CallbackServerContext& context, RpcMethod method) const;
  // The session of the call's metadata, or null if it carries none.
  absl::StatusOr<std::shared_ptr<Session>> SessionOf(const grpc::CallbackServerContext& context,
                                                     const Peer& peer) const;
  absl::StatusOr<std::shared_ptr<Session>> RequireSession(const grpc::CallbackServerContext& context,
                                                          const Peer& peer) const;
  bool IsAdministrator(const Peer& peer) const;
  absl::Status RequireAdministrator(const Peer& peer) const;  // beyond AccessOf: for part of what a call offers

  // Counts an answered call and, if it failed, logs it (debug): the one place that does.
  void Finished(RpcMethod method, const absl::Status& status, std::chrono::steady_clock::time_point start) const;
};

// Runs a short handler on the RPC thread if the caller may, counts it and finishes the call. `handle` returns
// absl::Status.
template <typename Handler>
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, RpcScope& scope, RpcMethod method,
                                 Handler handle) {
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<Peer> peer = scope.Admit(*context, method);
  const absl::Status status = peer.ok() ? handle(*peer) : peer.status();
  scope.Finished(method, status, start);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

// The same for a handler whose work goes on after it has returned: it passes on the token that it gets, and the call is
// answered once nobody holds that any more. A refusal is answered at once.
template <typename Handler>
grpc::ServerUnaryReactor* AnswerWhenGone(grpc::CallbackServerContext* context, RpcScope& scope, RpcMethod method,
                                         Handler handle) {
  const auto start = std::chrono::steady_clock::now();
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto finish = [&scope, method, start, reactor](const absl::Status& status) {
    scope.Finished(method, status, start);
    reactor->Finish(ToGrpc(status));
  };
  // The deleter needs an object to be called for; it may run on any thread.
  auto answer = std::make_shared<absl::Status>();
  GoneToken gone(answer.get(), [answer, finish](const void*) { finish(*answer); });
  const absl::StatusOr<Peer> peer = scope.Admit(*context, method);
  *answer = peer.ok() ? handle(*peer, gone) : peer.status();
  gone.reset();
  return reactor;
}

}  // namespace tessera::server
