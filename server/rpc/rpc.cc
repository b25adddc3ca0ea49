#include "server/rpc/rpc.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/tls.h"

namespace tessera::server {
namespace {

absl::StatusOr<Peer> PeerOf(const grpc::CallbackServerContext& context, PeerRegistry& peers) {
  // Only TLS connections have an authenticated peer; all others are known by their descriptor.
  if (const auto auth = context.auth_context(); auth != nullptr && auth->IsPeerAuthenticated()) {
    if (std::optional<Peer> peer = PeerOfCertificate(*auth); peer.has_value()) return *std::move(peer);
    return absl::UnauthenticatedError("the client certificate has no subject, which is what names a caller");
  }
  absl::StatusOr<Peer> peer = peers.Find(context.peer());
  if (peer.status().code() == absl::StatusCode::kNotFound) return absl::UnauthenticatedError(MessageOf(peer.status()));
  return peer;
}

}  // namespace

static_assert(static_cast<int>(absl::StatusCode::kCancelled) == grpc::StatusCode::CANCELLED &&
                  static_cast<int>(absl::StatusCode::kUnauthenticated) == grpc::StatusCode::UNAUTHENTICATED,
              "both number the codes as google.rpc.Code does");

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), MessageOf(status)};
}

Access AccessOf(RpcMethod method) {
  switch (method) {
    case RpcMethod::kComputeGemm:
    case RpcMethod::kComputeExecute:
    case RpcMethod::kComputeStream:
    case RpcMethod::kAdminServerInfo:
    case RpcMethod::kPlannerProbe:
    case RpcMethod::kPlannerFacts:
    case RpcMethod::kPlannerTileVocabulary:
      return Access::kAnyone;
    case RpcMethod::kMemoryOpenSession:
    case RpcMethod::kMemoryAttach:
    case RpcMethod::kMemoryKeepAlive:
    case RpcMethod::kMemoryCloseSession:
    case RpcMethod::kMemoryListSessions:
    case RpcMethod::kMemoryImportBuffer:
    case RpcMethod::kMemoryAllocateBuffer:
    case RpcMethod::kMemoryReleaseBuffer:
    case RpcMethod::kMemoryShareBuffer:
    case RpcMethod::kMemoryOpenStream:
    case RpcMethod::kMemoryCreateTimeline:
    case RpcMethod::kMemoryImportEvent:
    case RpcMethod::kMemorySignalTimeline:
    case RpcMethod::kMemorySynchronize:
    case RpcMethod::kMemoryReleaseSync:
    case RpcMethod::kMemoryListBuffers:
    case RpcMethod::kPlannerState:
    case RpcMethod::kPlannerExportRows:
      return Access::kNode;
    case RpcMethod::kAdminGetConfig:
    case RpcMethod::kAdminSetLogLevel:
    case RpcMethod::kAdminEndSession:
    case RpcMethod::kAdminDrain:
    case RpcMethod::kPlannerSetPlanner:
    case RpcMethod::kPlannerSetTable:
    case RpcMethod::kPlannerInjectRows:
    case RpcMethod::kPlannerSetLog:
    case RpcMethod::kPlannerSetStaging:
    case RpcMethod::kPlannerRollback:
    case RpcMethod::kPlannerImportRows:
    case RpcMethod::kPlannerListChanges:     // says who administrators are
    case RpcMethod::kPlannerWatchDecisions:  // shapes of everybody's problems
      break;
  }
  return Access::kAdministrator;
}

absl::StatusOr<Peer> RpcScope::Admit(const grpc::CallbackServerContext& context, RpcMethod method) const {
  ASSIGN_OR_RETURN(Peer peer, PeerOf(context, peers));
  switch (AccessOf(method)) {
    case Access::kAnyone:
      break;
    case Access::kNode:
      if (peer.kind == PeerKind::kLocal) break;
      return absl::PermissionDeniedError(
          absl::StrCat(Av(LabelText(method)), ": ", peer.Principal(),
                       " calls over TCP; sessions and buffers are for processes of this node, at its Unix socket. Over "
                       "TCP, send inline tensors"));
    case Access::kAdministrator:
      RETURN_IF_ERROR(RequireAdministrator(peer));
      break;
  }
  return peer;
}

absl::StatusOr<std::shared_ptr<Session>> RpcScope::SessionOf(const grpc::CallbackServerContext& context,
                                                             const Peer& peer) const {
  const auto [begin, end] = context.client_metadata().equal_range(kSessionMetadata);
  if (begin == end) return std::shared_ptr<Session>();
  const std::string field = absl::StrCat("metadata ", kSessionMetadata);
  if (std::next(begin) != end) return absl::InvalidArgumentError(absl::StrCat(field, ": given twice"));
  Id token;
  if (!Id::Parse(std::string_view(begin->second.data(), begin->second.size()), token)) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", begin->second.size(), " bytes; a token has ", Id::kBytes));
  }
  absl::StatusOr<std::shared_ptr<Session>> session = sessions.FindSession(peer, token);
  if (!session.ok()) return InField(field, session.status());
  return session;
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
  const auto listed = [](const auto& list, const auto& item) {
    return std::find(list.begin(), list.end(), item) != list.end();
  };
  switch (peer.kind) {
    case PeerKind::kLocal:
      return peer.uid == 0 || peer.uid == ::geteuid() || listed(settings.admin_uids, peer.uid);
    case PeerKind::kCertificate:
      return listed(settings.admin_subjects, peer.subject);
    case PeerKind::kAnonymous:
      break;
  }
  return false;
}

absl::Status RpcScope::RequireAdministrator(const Peer& peer) const {
  if (IsAdministrator(peer)) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      peer.Principal(), " is no administrator of this daemon: needed is uid 0, uid ", ::geteuid(),
      ", a uid of the setting admin_uids or, over TLS, a certificate subject of the setting admin_subjects"));
}

void RpcScope::Finished(RpcMethod method, const absl::Status& status,
                        std::chrono::steady_clock::time_point start) const {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  metrics.RpcFinished(method, static_cast<int>(status.code()), seconds.count());
  if (!status.ok()) {
    spdlog::debug("{} -> {}: {}", LabelText(method), absl::StatusCodeToString(status.code()), MessageOf(status));
  }
}

}  // namespace tessera::server
