#include "server/rpc/unreadable_request.h"

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::server {
namespace {

namespace ge = grpc::experimental;

// "/tessera.v1.Compute/Gemm" -> its method, for all that the daemon serves.
std::optional<RpcMethod> MethodOfPath(std::string_view path) {
  static const auto* const methods = [] {
    auto* by_path = new std::unordered_map<std::string, RpcMethod>();
    for (std::size_t i = 0; i < kLabelValues<RpcMethod>; ++i) {
      const auto method = static_cast<RpcMethod>(i);
      std::string name(LabelText(method));
      name[name.find('.')] = '/';
      by_path->emplace(absl::StrCat("/tessera.v1.", name), method);
    }
    return by_path;
  }();
  const auto found = methods->find(std::string(path));
  if (found == methods->end()) return std::nullopt;
  return found->second;
}

class Interceptor final : public ge::Interceptor {
 public:
  Interceptor(RpcMethod method, Metrics& metrics) : method_(method), metrics_(metrics) {}

  void Intercept(ge::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(ge::InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = batch->GetSendStatus();
      // No answer of ours is without a text.
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty()) {
        metrics_.RpcFinished(method_, grpc::StatusCode::INVALID_ARGUMENT, 0);
        batch->ModifySendStatus({grpc::StatusCode::INVALID_ARGUMENT,
                                 absl::StrCat("request: not a readable message of ", Av(LabelText(method_)))});
      }
    }
    batch->Proceed();
  }

 private:
  const RpcMethod method_;
  Metrics& metrics_;
};

class Factory final : public ge::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(Metrics& metrics) : metrics_(metrics) {}

  // gRPC owns the result. Null: nothing to intercept.
  ge::Interceptor* CreateServerInterceptor(ge::ServerRpcInfo* info) override {
    const std::optional<RpcMethod> method = MethodOfPath(info->method());
    if (!method.has_value()) return nullptr;
    // Reads its messages itself, and an interceptor would cost each of them.
    if (*method == RpcMethod::kComputeStream) return nullptr;
    return new Interceptor(*method, metrics_);
  }

 private:
  Metrics& metrics_;
};

}  // namespace

std::vector<std::unique_ptr<ge::ServerInterceptorFactoryInterface>> AnswerUnreadableRequests(Metrics& metrics) {
  std::vector<std::unique_ptr<ge::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<Factory>(metrics));
  return factories;
}

}  // namespace tessera::server
