// tessera.v1.Admin: what the daemon says about itself, and how it is told to go.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/exec/executor.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/admin.grpc.pb.h"

namespace tessera::server {

// Facts that are fixed once the daemon serves, and its two switches.
struct AdminScope {
  std::string socket;
  std::string side_channel;
  std::string http_address;
  std::string tcp_address;
  IsolationMode isolation = IsolationMode::kNone;
  std::uint32_t restarts = 0;
  std::vector<SettingValue> setting_report;
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  std::function<bool()> draining;
  std::function<std::size_t()> cleanups_stuck;
  std::function<void()> drain;
};

class AdminService final : public v1::Admin::CallbackService {
 public:
  AdminService(RpcScope& scope, Executor& executor, AdminScope admin)
      : scope_(scope), executor_(executor), admin_(std::move(admin)) {}

  grpc::ServerUnaryReactor* ServerInfo(grpc::CallbackServerContext* context, const v1::ServerInfoRequest* request,
                                       v1::ServerInfoReply* reply) override;
  grpc::ServerUnaryReactor* GetConfig(grpc::CallbackServerContext* context, const v1::GetConfigRequest* request,
                                      v1::GetConfigReply* reply) override;
  grpc::ServerUnaryReactor* SetLogLevel(grpc::CallbackServerContext* context, const v1::SetLogLevelRequest* request,
                                        v1::SetLogLevelReply* reply) override;
  grpc::ServerUnaryReactor* EndSession(grpc::CallbackServerContext* context, const v1::EndSessionRequest* request,
                                       v1::EndSessionReply* reply) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainReply* reply) override;

 private:
  RpcScope& scope_;
  Executor& executor_;
  const AdminScope admin_;
};

}  // namespace tessera::server
