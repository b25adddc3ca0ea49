#include "server/rpc/admin_service.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>

#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/session_name.h"
#include "server/telemetry/log.h"

namespace tessera::server {

grpc::ServerUnaryReactor* AdminService::ServerInfo(grpc::CallbackServerContext* context,
                                                   const v1::ServerInfoRequest* /*request*/,
                                                   v1::ServerInfoReply* reply) {
  return Answer(context, scope_, RpcMethod::kAdminServerInfo, [&](const Peer& peer) {
    const auto uptime = std::chrono::steady_clock::now() - admin_.started;
    const SessionCounts counts = scope_.sessions.Counts();
    reply->set_version(std::string(Version()));
    reply->set_epoch(fmt::format("{:08x}", scope_.sessions.epoch()));
    reply->set_pid(::getpid());
    reply->set_uptime_ms(
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(uptime).count()));
    reply->set_state(admin_.draining() ? "draining" : "serving");
    reply->set_default_backend(std::string(kernels::BackendName(executor_.default_backend())));
    for (const BackendState& state : executor_.Backends()) {
      v1::BackendInfo* info = reply->add_backends();
      info->set_name(std::string(kernels::BackendName(state.backend)));
      info->set_available(state.available);
      info->set_reason(state.reason);
      info->set_variants(state.variants);
    }
    reply->set_isolation_mode(std::string(LabelText(admin_.isolation)));
    reply->set_socket(admin_.socket);
    reply->set_side_channel(admin_.side_channel);
    reply->set_http_address(admin_.http_address);
    reply->set_tcp_address(admin_.tcp_address);
    reply->set_inline_bytes_max(static_cast<std::uint64_t>(scope_.settings.inline_bytes_max));
    reply->set_message_bytes_max(static_cast<std::uint64_t>(scope_.settings.message_bytes_max));
    reply->set_sessions(static_cast<std::uint32_t>(counts.sessions));
    reply->set_buffers(static_cast<std::uint32_t>(counts.buffers));
    reply->set_buffer_bytes(counts.bytes_held);
    reply->set_sessions_ending(static_cast<std::uint32_t>(counts.ending));
    reply->set_quarantined(static_cast<std::uint32_t>(counts.quarantined + admin_.cleanups_stuck()));
    reply->set_in_flight(executor_.in_flight());
    reply->set_principal(peer.Principal());
    reply->set_administrator(scope_.IsAdministrator(peer));
    reply->set_log_level(LogLevel());
    reply->set_restarts(admin_.restarts);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::GetConfig(grpc::CallbackServerContext* context,
                                                  const v1::GetConfigRequest* /*request*/, v1::GetConfigReply* reply) {
  return Answer(context, scope_, RpcMethod::kAdminGetConfig, [&](const Peer& /*peer*/) {
    for (const SettingValue& value : admin_.setting_report) {
      v1::Setting* setting = reply->add_settings();
      setting->set_name(value.name);
      // The one setting that a running daemon can change.
      const bool changed = value.name == "log_level" && value.value != LogLevel();
      setting->set_value(changed ? LogLevel() : value.value);
      setting->set_default_value(value.default_value);
      setting->set_unit(value.unit);
      setting->set_source(changed ? "runtime" : value.source);
      setting->set_help(value.help);
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SetLogLevel(grpc::CallbackServerContext* context,
                                                    const v1::SetLogLevelRequest* request,
                                                    v1::SetLogLevelReply* reply) {
  return Answer(context, scope_, RpcMethod::kAdminSetLogLevel, [&](const Peer& peer) -> absl::Status {
    absl::StatusOr<std::string> previous = server::SetLogLevel(request->level());
    if (!previous.ok()) return InField("level", previous.status());
    spdlog::info("log level {} -> {} by {}", *previous, request->level(), peer.Principal());
    reply->set_previous(*std::move(previous));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::EndSession(grpc::CallbackServerContext* context,
                                                   const v1::EndSessionRequest* request, v1::EndSessionReply* reply) {
  return Answer(context, scope_, RpcMethod::kAdminEndSession, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const SessionName name, ParseSessionName(request->name(), "name"));
    const absl::StatusOr<std::size_t> released =
        scope_.sessions.EndSession(name.index, name.generation, SessionEnd::kEvicted);
    if (!released.ok()) return InField("name", released.status());
    spdlog::info("session {} ended by {}", request->name(), peer.Principal());
    reply->set_buffers_released(static_cast<std::uint32_t>(*released));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* /*request*/,
                                              v1::DrainReply* reply) {
  return Answer(context, scope_, RpcMethod::kAdminDrain, [&](const Peer& peer) {
    spdlog::info("drain asked for by {}", peer.Principal());
    admin_.drain();
    reply->set_in_flight(executor_.in_flight());
    reply->set_grace_s(static_cast<std::uint32_t>(scope_.settings.drain_grace_s));
    return absl::OkStatus();
  });
}

}  // namespace tessera::server
