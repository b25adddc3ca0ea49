#include "server/rpc/grpc_log.h"

#include <grpc/support/log.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <mutex>

namespace tessera::server {
namespace {

using Clock = std::chrono::steady_clock;

void LogMessage(gpr_log_func_args* args) {
  if (args->severity != GPR_LOG_SEVERITY_ERROR) return;
  static std::mutex mutex;
  static Clock::time_point last;
  static std::uint64_t unsaid = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const Clock::time_point now = Clock::now();
  if (last != Clock::time_point() && now - last < std::chrono::seconds(1)) {
    ++unsaid;
    return;
  }
  if (unsaid > 0) spdlog::warn("gRPC: {} more messages within a second of the last", unsaid);
  spdlog::warn("gRPC: {}", args->message);
  unsaid = 0;
  last = now;
}

}  // namespace

void LogGrpcMessages() {
  gpr_set_log_function(&LogMessage);
}

}  // namespace tessera::server
