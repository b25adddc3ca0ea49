#include "client/gemm_encoding.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace tessera::client {
namespace {

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

void EncodeScale(const Scale& scale, v1::Scale& message) {
  if (const float* scalar = std::get_if<float>(&scale)) {
    message.set_scalar(*scalar);
  } else {
    EncodeInput(std::get<TensorView>(scale), *message.mutable_vector());
  }
}

}  // namespace

void Encode(const GemmSpec& spec, v1::GemmOp& op, v1::SubmitOptions& options) {
  EncodeInput(spec.a, *op.mutable_a());
  EncodeInput(spec.b, *op.mutable_b());
  EncodeOutput(spec.d, *op.mutable_d());
  if (spec.a_scale.has_value()) EncodeScale(*spec.a_scale, *op.mutable_a_scale());
  if (spec.b_scale.has_value()) EncodeScale(*spec.b_scale, *op.mutable_b_scale());
  if (spec.bias.has_value()) EncodeInput(*spec.bias, *op.mutable_epilogue()->mutable_bias());
  op.set_accumulation(spec.accumulation);
  options.set_backend(spec.backend);
  options.set_profile(spec.profile);
  EncodeOrder(spec.order, options);
}

void EncodeOrder(const OrderSpec& order, v1::SubmitOptions& options) {
  const auto add = [](const SyncPoint& point, v1::SyncPoint& to) {
    to.set_id(point.id);
    to.set_value(point.value);
  };
  options.set_stream(order.stream);
  for (const SyncPoint& point : order.wait) add(point, *options.add_wait());
  for (const SyncPoint& point : order.signal) add(point, *options.add_signal());
  options.set_reply_when(order.reply_when);
  options.set_timeout_ms(static_cast<std::uint64_t>(std::max<std::int64_t>(0, order.launch_timeout.count())));
}

absl::StatusOr<GemmResult> Decode(v1::OpReport& report, const std::string& inline_result, const TensorView& d,
                                  std::chrono::steady_clock::time_point start) {
  const auto round_trip = std::chrono::steady_clock::now() - start;
  if (d.is_inline()) RETURN_IF_ERROR(UnpackTensor(inline_result, d));
  return GemmResult{.report = std::move(report), .round_trip = round_trip};
}

}  // namespace tessera::client
