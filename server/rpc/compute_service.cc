#include "server/rpc/compute_service.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/compute_stream.h"
#include "server/rpc/gemm_operation.h"

namespace tessera::server {
namespace {

// One Gemm call. gRPC keeps context, request and reply alive until Finish, and calls OnDone once after it.
//
// An answer that is there before gRPC has seen this reactor goes out by gRPC's own one instead: gRPC runs OnDone of a
// reactor that is not its own on another thread, which costs a small call more than its work.
class GemmReactor final : public grpc::ServerUnaryReactor {
 public:
  GemmReactor(grpc::CallbackServerContext* context, const v1::GemmRequest* request, v1::GemmReply* reply,
              RpcScope& scope, Executor& executor)
      : context_(*context), request_(*request), reply_(*reply), scope_(scope), executor_(executor) {}

  // The answer, if it is there by the time this returns: then the reactor is not needed any more. Otherwise gRPC must
  // get it, and Finish follows.
  std::optional<grpc::Status> Start() {
    if (absl::Status status = Submit(); !status.ok()) Complete(status);
    Phase expected = Phase::kStarting;
    if (phase_.compare_exchange_strong(expected, Phase::kStarted)) return std::nullopt;
    return answer_;
  }

  void OnCancel() override { cancelled_.store(true, std::memory_order_release); }
  void OnDone() override { delete this; }

 private:
  enum class Phase { kStarting, kStarted, kAnsweredInStart };

  // Decode, bind, hand over. An error means that nothing was handed over.
  absl::Status Submit() {
    ASSIGN_OR_RETURN(const Peer peer, scope_.Admit(context_, RpcMethod::kComputeGemm));
    Operation operation;
    ASSIGN_OR_RETURN(operation.session, scope_.SessionOf(context_, peer));
    if (operation.session == nullptr) operation.account = scope_.sessions.AccountOf(peer);
    ASSIGN_OR_RETURN(const bool profile, BindOperation(scope_, request_.op(), request_.options(),
                                                       reply_.mutable_inline_result(), operation));
    operation.still_wanted = [this] { return StillWanted(context_, cancelled_); };
    operation.done = [this, profile](const absl::Status& status, const OperationReport& report) {
      if (status.ok()) FillReport(report, profile, *reply_.mutable_report());
      Complete(status);
    };
    executor_.Submit(std::move(operation));
    return absl::OkStatus();
  }

  // The reactor may be gone when this returns.
  void Complete(const absl::Status& status) {
    scope_.Finished(RpcMethod::kComputeGemm, status, start_);
    answer_ = ToGrpc(status);
    Phase expected = Phase::kStarting;
    if (!phase_.compare_exchange_strong(expected, Phase::kAnsweredInStart)) Finish(answer_);
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  grpc::CallbackServerContext& context_;
  const v1::GemmRequest& request_;
  v1::GemmReply& reply_;
  RpcScope& scope_;
  Executor& executor_;
  std::atomic<bool> cancelled_{false};
  std::atomic<Phase> phase_{Phase::kStarting};
  grpc::Status answer_;  // written before phase_ tells of it
};

}  // namespace

grpc::ServerUnaryReactor* ComputeService::Gemm(grpc::CallbackServerContext* context, const v1::GemmRequest* request,
                                               v1::GemmReply* reply) {
  auto call = std::make_unique<GemmReactor>(context, request, reply, scope_, executor_);
  const std::optional<grpc::Status> answer = call->Start();
  if (!answer.has_value()) return call.release();  // OnDone deletes it
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(*answer);
  return reactor;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeService::Stream(
    grpc::CallbackServerContext* context) {
  return ServeComputeStream(*context, scope_, executor_);
}

}  // namespace tessera::server
