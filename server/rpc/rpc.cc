#include "server/rpc/rpc.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::server {

static_assert(static_cast<int>(absl::StatusCode::kCancelled) == grpc::StatusCode::CANCELLED &&
                  static_cast<int>(absl::StatusCode::kUnauthenticated) == grpc::StatusCode::UNAUTHENTICATED,
              "both number the codes as google.rpc.Code does");

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), MessageOf(status)};
}

absl::StatusOr<Peer> RpcScope::PeerOf(const grpc::CallbackServerContext& context) const {
  const std::string name = context.peer();
  if (const std::optional<Peer> peer = peers.Find(name); peer.has_value()) return *peer;
  return absl::UnauthenticatedError(absl::StrCat("connection ", name, " has no known peer"));
}

absl::StatusOr<std::shared_ptr<Session>> RpcScope::SessionOf(const grpc::CallbackServerContext& context,
                                                             const Peer& peer) const {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kSessionMetadata);
  if (found == metadata.end()) return std::shared_ptr<Session>();
  Id token;
  if (!Id::Parse(std::string_view(found->second.data(), found->second.size()), token)) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", kSessionMetadata, ": ", found->second.size(), " bytes; a token has ", Id::kBytes));
  }
  return sessions.FindSession(peer, token);
}

absl::StatusOr<std::shared_ptr<Session>> RpcScope::RequireSession(const grpc::CallbackServerContext& context,
                                                                  const Peer& peer) const {
  auto session = SessionOf(context, peer);
  if (session.ok() && *session == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", kSessionMetadata, ": missing; this call needs the token of Memory.OpenSession"));
  }
  return session;
}

bool RpcScope::IsAdministrator(const Peer& peer) const {
  const UidList& admins = settings.admin_uids;
  return peer.uid == 0 || peer.uid == ::geteuid() || std::find(admins.begin(), admins.end(), peer.uid) != admins.end();
}

void RpcScope::Finished(RpcMethod method, const absl::Status& status,
                        std::chrono::steady_clock::time_point start) const {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  metrics.RpcFinished(method, static_cast<int>(status.code()), seconds.count());
  if (!status.ok()) {
    spdlog::debug("{} -> {}: {}", LabelText(method), absl::StatusCodeToString(status.code()), MessageOf(status));
  }
}

absl::Status RpcScope::RequireAdministrator(const Peer& peer) const {
  if (IsAdministrator(peer)) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(peer.Principal(),
                                                  " is no administrator of this daemon: needed is uid 0, "
                                                  "uid ",
                                                  ::geteuid(), ", or a uid of the setting admin_uids"));
}

}  // namespace tessera::server
