// A strided view of memory: what operations take. A small value; making one moves no data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "common/dtype.h"

namespace tessera::client {

// Either of a Buffer, while that lives, or of this process's own memory (InlineTensor): such a tensor travels inside
// the message, up to the daemon's inline_bytes_max, and needs neither a session nor the daemon to be on this node.
// Shapes and strides are in elements, slowest dimension first.
struct TensorView {
  std::string buffer_id;          // empty: inline
  std::byte* data = nullptr;      // element [0, .., 0] in this process
  std::uint64_t byte_offset = 0;  // of that element within the buffer
  DType dtype = DType::kUnspecified;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  std::int64_t elements() const;
  bool is_inline() const { return buffer_id.empty(); }

  // The same elements with the last two dimensions exchanged.
  TensorView Transposed() const;
  // Elements [begin, end) of dimension `dim`. Out of range is a programmer's error and gives an empty view.
  TensorView Slice(std::size_t dim, std::int64_t begin, std::int64_t end) const;
};

// A view of memory that stays the caller's; packed row-major unless strides are given.
TensorView InlineTensor(std::byte* data, DType dtype, std::vector<std::int64_t> shape,
                        std::vector<std::int64_t> strides = {});

// The elements in row-major order, without gaps.
std::string PackTensor(const TensorView& view);
// The reverse. INTERNAL if `packed` has another size than the view's elements.
absl::Status UnpackTensor(std::string_view packed, const TensorView& view);

// Row-major strides of `shape`.
std::vector<std::int64_t> PackedStrides(const std::vector<std::int64_t>& shape);

// Bytes that a packed tensor of that shape takes; the largest number there is where that does not fit, which no
// allocation grants.
std::uint64_t PackedBytes(DType dtype, const std::vector<std::int64_t>& shape);

}  // namespace tessera::client
