// Requests for products of two sizes, whose inputs and output lie in buffers that are only known by their ids.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/v1/compute.pb.h"

namespace tessera::e2e {

// Every row of A, and every row of B, is the same memory: K numbers of the input buffer, from its beginning. D is at
// the offset `kInputBytes` of the output buffer, so that both may be one.
struct ProductSize {
  std::int64_t extent;  // M and N
  std::int64_t terms;   // K

  // Enough for either buffer.
  std::uint64_t BufferBytes() const {
    return kInputBytes + static_cast<std::uint64_t>(extent * extent) * sizeof(float);
  }

  static constexpr std::uint64_t kInputBytes = std::uint64_t{65'536} * 2;
};

// More than a daemon does on the thread of the call: it has a turn in the queue.
inline constexpr ProductSize kSmallProduct{.extent = 4, .terms = 2048};
// One thread works on it for about a second; a sanitizer makes kernels slower by far.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr ProductSize kSlowProduct{.extent = 768, .terms = 2048};
#else
inline constexpr ProductSize kSlowProduct{.extent = 768, .terms = 65'536};
#endif

inline v1::GemmRequest ProductOf(const ProductSize& size, const std::string& inputs, const std::string& output) {
  v1::GemmRequest request;
  const auto set = [](v1::Tensor& tensor, const std::string& buffer, v1::DType dtype, std::uint64_t at,
                      std::int64_t rows, std::int64_t columns) {
    tensor.set_buffer_id(buffer);
    tensor.set_byte_offset(at);
    tensor.set_dtype(dtype);
    tensor.add_shape(rows);
    tensor.add_shape(columns);
  };
  v1::GemmOp& op = *request.mutable_op();
  for (v1::Tensor* const rows : {op.mutable_a(), op.mutable_b()}) {
    set(*rows, inputs, v1::DTYPE_BF16, 0, size.extent, size.terms);
    rows->add_strides(0);
    rows->add_strides(1);
  }
  set(*op.mutable_d(), output, v1::DTYPE_F32, ProductSize::kInputBytes, size.extent, size.extent);
  return request;
}

}  // namespace tessera::e2e
