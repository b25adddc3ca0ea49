#include "client/client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client {
namespace {

// One short unary call of a service stub with the client's timeout.
template <typename Reply, typename Stub, typename Request>
absl::StatusOr<Reply> Call(const ClientCore& core, Stub& stub,
                           grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                           const Request& request) {
  grpc::ClientContext context;
  core.Prepare(context);
  Reply reply;
  RETURN_IF_ERROR(FromUnaryCall((stub.*method)(&context, request, &reply)));
  return reply;
}

}  // namespace

absl::StatusOr<Client> Client::Connect(ConnectOptions options) {
  ASSIGN_OR_RETURN(std::shared_ptr<ClientCore> core, ClientCore::Make(std::move(options)));
  Client client(std::move(core));
  const absl::Status status = client.ServerInfo().status();
  const bool unreachable =
      status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kDeadlineExceeded;
  if (unreachable && client.remote()) {
    return absl::UnavailableError(
        absl::StrCat("no daemon answers at ", client.core_->options.address,
                     "; it must be started with --tcp-address, and both ends with matching TLS files or both without (",
                     status.message(), ")"));
  }
  if (unreachable) {
    return absl::UnavailableError(absl::StrCat("no daemon answers at ", client.socket(),
                                               "; start tesserad, or name its socket with --socket or TESSERA_SOCKET (",
                                               status.message(), ")"));
  }
  RETURN_IF_ERROR(status);
  return client;
}

Client::Client(std::shared_ptr<ClientCore> core) : core_(std::move(core)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

absl::StatusOr<Session> Client::OpenSession(std::string_view label) {
  return OpenSession(SessionOptions{.label = std::string(label)});
}

absl::StatusOr<Session> Client::OpenSession(const SessionOptions& options) {
  if (remote()) {
    return absl::FailedPreconditionError(
        "sessions need the daemon's Unix socket; over TCP use inline tensors (Client::Gemm)");
  }
  ASSIGN_OR_RETURN(std::shared_ptr<SessionCore> core, SessionCore::Open(core_, options));
  return Session(std::move(core));
}

absl::StatusOr<v1::ServerInfoReply> Client::ServerInfo() const {
  return Call<v1::ServerInfoReply>(*core_, *core_->admin, &v1::Admin::Stub::ServerInfo, v1::ServerInfoRequest());
}

absl::StatusOr<v1::ListBuffersReply> Client::ListBuffers(bool all_principals) const {
  v1::ListBuffersReply all;
  v1::ListBuffersRequest request;
  request.set_all_principals(all_principals);
  while (true) {
    ASSIGN_OR_RETURN(v1::ListBuffersReply page,
                     Call<v1::ListBuffersReply>(*core_, *core_->memory, &v1::Memory::Stub::ListBuffers, request));
    const bool more = page.more() && page.buffers_size() > 0;
    if (more) request.set_after(page.buffers(page.buffers_size() - 1).buffer_id());
    page.clear_more();
    all.MergeFrom(page);
    if (!more) return all;
  }
}

absl::StatusOr<v1::ListSessionsReply> Client::ListSessions(bool all_principals) const {
  v1::ListSessionsReply all;
  v1::ListSessionsRequest request;
  request.set_all_principals(all_principals);
  while (true) {
    ASSIGN_OR_RETURN(v1::ListSessionsReply page,
                     Call<v1::ListSessionsReply>(*core_, *core_->memory, &v1::Memory::Stub::ListSessions, request));
    const bool more = page.more() && page.sessions_size() > 0;
    if (more) request.set_after(page.sessions(page.sessions_size() - 1).name());
    page.clear_more();
    all.MergeFrom(page);
    if (!more) return all;
  }
}

absl::StatusOr<v1::GetConfigReply> Client::GetConfig() const {
  return Call<v1::GetConfigReply>(*core_, *core_->admin, &v1::Admin::Stub::GetConfig, v1::GetConfigRequest());
}

absl::StatusOr<std::string> Client::SetLogLevel(std::string_view level) const {
  v1::SetLogLevelRequest request;
  request.set_level(std::string(level));
  ASSIGN_OR_RETURN(v1::SetLogLevelReply reply,
                   Call<v1::SetLogLevelReply>(*core_, *core_->admin, &v1::Admin::Stub::SetLogLevel, request));
  return reply.previous();
}

absl::StatusOr<v1::EndSessionReply> Client::EndSession(std::string_view name) const {
  v1::EndSessionRequest request;
  request.set_name(std::string(name));
  return Call<v1::EndSessionReply>(*core_, *core_->admin, &v1::Admin::Stub::EndSession, request);
}

absl::StatusOr<v1::DrainReply> Client::Drain() const {
  return Call<v1::DrainReply>(*core_, *core_->admin, &v1::Admin::Stub::Drain, v1::DrainRequest());
}

std::shared_ptr<grpc::Channel> Client::channel() const {
  return core_->channel;
}
const std::string& Client::socket() const {
  return core_->options.socket;
}
bool Client::remote() const {
  return !core_->options.address.empty();
}

}  // namespace tessera::client
