#include "server/rpc/compute_service.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/compute_stream.h"
#include "server/rpc/submission_binding.h"

namespace tessera::server {
namespace {

// What differs between the unary calls.
struct GemmCalls {
  using Request = v1::GemmRequest;
  using Reply = v1::GemmReply;
  static constexpr RpcMethod kMethod = RpcMethod::kComputeGemm;

  static absl::StatusOr<bool> Bind(const RpcScope& scope, const Request& request, Reply& reply,
                                   Submission& submission) {
    return BindGemmRequest(scope, request.op(), request.options(), reply.mutable_inline_result(), submission);
  }
  static void Fill(std::span<const OperationReport> reports, bool profile, Reply& reply) {
    FillReport(reports.front(), profile, *reply.mutable_report());
  }
  static absl::Status Named(const absl::Status& status) { return status; }
};

struct ExecuteCalls {
  using Request = v1::ExecuteRequest;
  using Reply = v1::ExecuteReply;
  static constexpr RpcMethod kMethod = RpcMethod::kComputeExecute;

  static absl::StatusOr<bool> Bind(const RpcScope& scope, const Request& request, Reply& reply,
                                   Submission& submission) {
    return BindSubmission(scope, request.submission(), *reply.mutable_results(), submission);
  }
  static void Fill(std::span<const OperationReport> reports, bool profile, Reply& reply) {
    FillReports(reports, profile, *reply.mutable_results());
  }
  static absl::Status Named(const absl::Status& status) { return InSubmission(status); }
};

// One call. gRPC keeps context, request and reply alive until Finish, and calls OnDone once after it.
//
// An answer that is there before gRPC has seen this reactor goes out by gRPC's own one instead: gRPC runs OnDone of a
// reactor that is not its own on another thread, which costs a small call more than its work.
template <typename Calls>
class UnaryReactor final : public grpc::ServerUnaryReactor {
 public:
  UnaryReactor(grpc::CallbackServerContext* context, const typename Calls::Request* request,
               typename Calls::Reply* reply, RpcScope& scope, Executor& executor)
      : context_(*context), request_(*request), reply_(*reply), scope_(scope), executor_(executor) {}

  // The answer, if it is there by the time this returns: then the reactor is not needed any more. Otherwise gRPC must
  // get it, and Finish follows.
  std::optional<grpc::Status> Start() {
    if (absl::Status status = Submit(); !status.ok()) Complete(status);
    Phase expected = Phase::kStarting;
    if (phase_.compare_exchange_strong(expected, Phase::kStarted)) return std::nullopt;
    return answer_;
  }

  void OnCancel() override {
    cancelled_.store(true, std::memory_order_release);
    DropUnwanted(scope_, session_.lock());
  }
  void OnDone() override { delete this; }

 private:
  enum class Phase { kStarting, kStarted, kAnsweredInStart };

  // Decode, bind, hand over. An error means that nothing was handed over.
  absl::Status Submit() {
    ASSIGN_OR_RETURN(const Peer peer, scope_.Admit(context_, Calls::kMethod));
    Submission submission;
    ASSIGN_OR_RETURN(submission.session, scope_.SessionOf(context_, peer));
    session_ = submission.session;
    if (submission.session == nullptr) submission.account = scope_.sessions.AccountOf(peer);
    ASSIGN_OR_RETURN(const bool profile, Calls::Bind(scope_, request_, reply_, submission));
    submission.still_wanted = [this] { return StillWanted(context_.deadline(), cancelled_); };
    submission.done = [this, profile](const absl::Status& status, std::span<const OperationReport> reports) {
      if (status.ok()) Calls::Fill(reports, profile, reply_);
      Complete(Calls::Named(status));
    };
    executor_.Submit(std::move(submission));
    return absl::OkStatus();
  }

  // The reactor may be gone when this returns.
  void Complete(const absl::Status& status) {
    scope_.Finished(Calls::kMethod, status, start_);
    answer_ = ToGrpc(status);
    Phase expected = Phase::kStarting;
    if (!phase_.compare_exchange_strong(expected, Phase::kAnsweredInStart)) Finish(answer_);
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  grpc::CallbackServerContext& context_;
  const typename Calls::Request& request_;
  typename Calls::Reply& reply_;
  RpcScope& scope_;
  Executor& executor_;
  std::weak_ptr<Session> session_;  // set before gRPC sees the reactor
  std::atomic<bool> cancelled_{false};
  std::atomic<Phase> phase_{Phase::kStarting};
  grpc::Status answer_;  // written before phase_ tells of it
};

template <typename Calls>
grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, const typename Calls::Request* request,
                                typename Calls::Reply* reply, RpcScope& scope, Executor& executor) {
  auto call = std::make_unique<UnaryReactor<Calls>>(context, request, reply, scope, executor);
  const std::optional<grpc::Status> answer = call->Start();
  if (!answer.has_value()) return call.release();  // OnDone deletes it
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(*answer);
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* ComputeService::Gemm(grpc::CallbackServerContext* context, const v1::GemmRequest* request,
                                               v1::GemmReply* reply) {
  return Serve<GemmCalls>(context, request, reply, scope_, executor_);
}

grpc::ServerUnaryReactor* ComputeService::Execute(grpc::CallbackServerContext* context,
                                                  const v1::ExecuteRequest* request, v1::ExecuteReply* reply) {
  return Serve<ExecuteCalls>(context, request, reply, scope_, executor_);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeService::Stream(
    grpc::CallbackServerContext* context) {
  return ServeComputeStream(*context, scope_, executor_);
}

}  // namespace tessera::server
