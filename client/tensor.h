// A strided view of a buffer: what operations take. A small value; making one moves no data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"

namespace tessera::client {

// Valid while its Buffer lives. Shapes and strides are in elements, slowest dimension first.
struct TensorView {
  std::string buffer_id;
  std::byte* data = nullptr;      // element [0, .., 0] in this process
  std::uint64_t byte_offset = 0;  // of that element within the buffer
  DType dtype = DType::kUnspecified;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  std::int64_t elements() const;

  // The same elements with the last two dimensions exchanged.
  TensorView Transposed() const;
  // Elements [begin, end) of dimension `dim`. Out of range is a programmer's error and gives an empty view.
  TensorView Slice(std::size_t dim, std::int64_t begin, std::int64_t end) const;
};

// Row-major strides of `shape`.
std::vector<std::int64_t> PackedStrides(const std::vector<std::int64_t>& shape);

// Bytes that a packed tensor of that shape takes; the largest number there is where that does not fit, which no
// allocation grants.
std::uint64_t PackedBytes(DType dtype, const std::vector<std::int64_t>& shape);

}  // namespace tessera::client
