// Gemm calls of a session, or of a client without one: tensors as buffers or inside the message.

#include <utility>

#include "client/client.h"
#include "client/core.h"
#include "client/gemm_encoding.h"
#include "common/status_macros.h"

namespace tessera::client {
namespace {

using Clock = std::chrono::steady_clock;

// All that one call needs until its answer.
struct GemmCall {
  GemmCall(std::shared_ptr<ClientCore> client_core, std::shared_ptr<SessionCore> session_core, const GemmSpec& spec)
      : client(std::move(client_core)), session(std::move(session_core)), d(spec.d) {
    Encode(spec, *request.mutable_op(), *request.mutable_options());
    PrepareCompute(session.get(), context, spec.timeout);
  }

  absl::StatusOr<GemmResult> Result(const grpc::Status& status) {
    RETURN_IF_ERROR(FromUnaryCall(status));
    return Decode(*reply.mutable_report(), reply.inline_result(), d, start);
  }

  std::shared_ptr<ClientCore> client;
  std::shared_ptr<SessionCore> session;  // null: none
  TensorView d;
  grpc::ClientContext context;
  v1::GemmRequest request;
  v1::GemmReply reply;
  Clock::time_point start = Clock::now();
};

absl::StatusOr<GemmResult> RunCall(GemmCall& call) {
  call.start = Clock::now();
  return call.Result(call.client->compute->Gemm(&call.context, call.request, &call.reply));
}

void StartCall(std::shared_ptr<GemmCall> call, std::function<void(absl::StatusOr<GemmResult>)> done) {
  GemmCall& running = *call;
  running.start = Clock::now();
  running.client->compute->async()->Gemm(&running.context, &running.request, &running.reply,
                                         [call = std::move(call), done = std::move(done)](const grpc::Status& status) {
                                           EnteredCallbackThread();
                                           done(call->Result(status));
                                         });
}

std::future<absl::StatusOr<GemmResult>> StartCall(std::shared_ptr<GemmCall> call) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<GemmResult>>>();
  std::future<absl::StatusOr<GemmResult>> future = promise->get_future();
  StartCall(std::move(call), [promise](absl::StatusOr<GemmResult> result) { promise->set_value(std::move(result)); });
  return future;
}

}  // namespace

absl::StatusOr<GemmResult> Session::Gemm(const GemmSpec& spec) {
  GemmCall call(core_->client, core_, spec);
  return RunCall(call);
}

void Session::GemmAsync(const GemmSpec& spec, std::function<void(absl::StatusOr<GemmResult>)> done) {
  StartCall(std::make_shared<GemmCall>(core_->client, core_, spec), std::move(done));
}

std::future<absl::StatusOr<GemmResult>> Session::GemmAsync(const GemmSpec& spec) {
  return StartCall(std::make_shared<GemmCall>(core_->client, core_, spec));
}

absl::StatusOr<GemmResult> Client::Gemm(const GemmSpec& spec) {
  GemmCall call(core_, nullptr, spec);
  return RunCall(call);
}

std::future<absl::StatusOr<GemmResult>> Client::GemmAsync(const GemmSpec& spec) {
  return StartCall(std::make_shared<GemmCall>(core_, nullptr, spec));
}

}  // namespace tessera::client
