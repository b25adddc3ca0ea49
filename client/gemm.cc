// Gemm calls of a session, or of a client without one: tensors as buffers or inside the message.

#include <utility>

#include "client/client.h"
#include "client/core.h"
#include "common/status_macros.h"

namespace tessera::client {
namespace {

using Clock = std::chrono::steady_clock;

void EncodeLayout(const TensorView& view, v1::Tensor& tensor) {
  tensor.set_dtype(static_cast<v1::DType>(view.dtype));
  for (const std::int64_t extent : view.shape) tensor.add_shape(extent);
}

void EncodeBuffer(const TensorView& view, v1::Tensor& tensor) {
  EncodeLayout(view, tensor);
  tensor.set_buffer_id(view.buffer_id);
  tensor.set_byte_offset(view.byte_offset);
  for (const std::int64_t stride : view.strides) tensor.add_strides(stride);
}

void EncodeInput(const TensorView& view, v1::Tensor& tensor) {
  if (!view.is_inline()) return EncodeBuffer(view, tensor);
  EncodeLayout(view, tensor);
  tensor.set_inline_data(PackTensor(view));
}

void EncodeOutput(const TensorView& view, v1::Tensor& tensor) {
  if (!view.is_inline()) return EncodeBuffer(view, tensor);
  EncodeLayout(view, tensor);
  tensor.mutable_inline_result();
}

void Encode(const Scale& scale, v1::Scale& message) {
  if (const float* scalar = std::get_if<float>(&scale)) {
    message.set_scalar(*scalar);
  } else {
    EncodeInput(std::get<TensorView>(scale), *message.mutable_vector());
  }
}

void Encode(const GemmSpec& spec, v1::GemmRequest& request) {
  v1::GemmOp& op = *request.mutable_op();
  EncodeInput(spec.a, *op.mutable_a());
  EncodeInput(spec.b, *op.mutable_b());
  EncodeOutput(spec.d, *op.mutable_d());
  if (spec.a_scale.has_value()) Encode(*spec.a_scale, *op.mutable_a_scale());
  if (spec.b_scale.has_value()) Encode(*spec.b_scale, *op.mutable_b_scale());
  if (spec.bias.has_value()) EncodeInput(*spec.bias, *op.mutable_epilogue()->mutable_bias());
  op.set_accumulation(spec.accumulation);
  request.mutable_options()->set_backend(spec.backend);
  request.mutable_options()->set_profile(spec.profile);
}

// All that one call needs until its answer.
struct GemmCall {
  GemmCall(std::shared_ptr<ClientCore> client_core, std::shared_ptr<SessionCore> session_core, const GemmSpec& spec)
      : client(std::move(client_core)), session(std::move(session_core)), d(spec.d) {
    Encode(spec, request);
    if (session != nullptr) {
      session->Prepare(context, spec.timeout);
    } else if (spec.timeout.count() > 0) {
      context.set_deadline(std::chrono::system_clock::now() + spec.timeout);
    }
  }

  absl::StatusOr<GemmResult> Result(const grpc::Status& status) {
    const Clock::duration round_trip = Clock::now() - start;
    RETURN_IF_ERROR(FromGrpc(status));
    if (d.is_inline()) RETURN_IF_ERROR(UnpackTensor(reply.inline_result(), d));
    return GemmResult{.report = std::move(*reply.mutable_report()), .round_trip = round_trip};
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
