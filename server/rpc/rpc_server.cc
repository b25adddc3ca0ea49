#include "server/rpc/rpc_server.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_posix.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <future>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/grpc_log.h"
#include "server/rpc/unreadable_request.h"
#include "server/session/tcp_listener.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tessera/v1/planner.grpc.pb.h"

namespace tessera::server {
namespace {

using namespace std::chrono_literals;

// Those that health checks know.
std::vector<std::string> ServiceNames() {
  return {v1::Compute::service_full_name(), v1::Memory::service_full_name(), v1::Admin::service_full_name(),
          v1::Planner::service_full_name()};
}

// Those that reflection lists.
std::vector<std::string> AllServiceNames() {
  std::vector<std::string> names = ServiceNames();
  names.emplace_back("grpc.health.v1.Health");
  names.emplace_back(grpc::reflection::v1alpha::ServerReflection::service_full_name());
  return names;
}

void LogRefused(std::string_view whose, const absl::Status& status) {
  spdlog::warn("connection of {} refused: {}", whose, MessageOf(status));
}

}  // namespace

RpcServer::RpcServer(const RpcServerOptions& options, PeerRegistry& peers)
    : options_(options), peers_(peers), reflection_(AllServiceNames()) {}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options, PeerRegistry& peers) {
  std::unique_ptr<RpcServer> server(new RpcServer(options, peers));
  RETURN_IF_ERROR(server->Build());
  return server;
}

absl::Status RpcServer::Build() {
  LogGrpcMessages();
  // gRPC's mutexes are Abseil's, and the distribution builds those with the search for deadlocks: a graph of all
  // mutexes under one lock, asked and changed by every one that is taken.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(options_.message_bytes_max));
  builder.SetMaxSendMessageSize(static_cast<int>(options_.message_bytes_max));
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);  // of replies: none is, so none need look
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(options_.calls_per_connection_max));
  // A message of kilobytes may decompress to gigabytes, and gRPC checks its size only then.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // Else whoever sends half of many large messages could fill the machine's memory.
  grpc::ResourceQuota quota("tesserad");
  quota.Resize(static_cast<std::size_t>(options_.memory_bytes_max));
  builder.SetResourceQuota(quota);
  // A client may keep its connection alive during a long call; gRPC's default would answer with GOAWAY.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  for (grpc::Service* service : options_.services) builder.RegisterService(service);
  builder.RegisterService(&reflection_);
  builder.experimental().SetInterceptorCreators(AnswerUnreadableRequests(*options_.metrics));
  if (options_.tls != nullptr) {
    tls_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, options_.tls);
  }
  server_ = builder.BuildAndStart();
  return server_ == nullptr ? absl::InternalError("the gRPC server did not start") : absl::OkStatus();
}

RpcServer::~RpcServer() {
  if (server_ == nullptr) return;
  const std::future<void> stopped = std::async(std::launch::async, [this] {
    server_->Shutdown(std::chrono::system_clock::now() + 1s);
    server_->Wait();
  });
  // An answer that its client does not read is a write without an end, for which gRPC would wait.
  if (stopped.wait_for(1500ms) != std::future_status::ready) peers_.HangUp();
  stopped.wait();
}

void RpcServer::ServeLocal(UniqueFd connection) {
  const absl::StatusOr<Peer> peer = PeerOfSocket(connection.get());
  if (!peer.ok()) return LogRefused("an unknown process", peer.status());
  Serve(std::move(connection), *peer);
}

void RpcServer::ServeAnonymous(UniqueFd connection) {
  Serve(std::move(connection), Peer{.kind = PeerKind::kAnonymous});
}

void RpcServer::Serve(UniqueFd connection, const Peer& peer) {
  const absl::StatusOr<int> number = peers_.Adopt(connection.get(), peer);
  if (!number.ok()) return LogRefused(peer.Principal(), number.status());
  grpc::AddInsecureChannelFromFd(server_.get(), *number);  // owns the number from here on
}

void RpcServer::ServeTls(UniqueFd connection) {
  const std::string account = absl::StrCat("address:", RemoteHost(connection.get()));
  const absl::StatusOr<int> number = peers_.AdoptUnnamed(connection.get(), account);
  if (!number.ok()) return LogRefused(account, number.status());
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
  parameters.fd = *number;  // owned by gRPC from here on
  tls_->HandleNewConnection(&parameters);
}

void RpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  for (const std::string& service : ServiceNames()) health->SetServingStatus(service, serving);
  health->SetServingStatus(serving);
}

}  // namespace tessera::server
