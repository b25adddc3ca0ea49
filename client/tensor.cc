#include "client/tensor.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace tessera::client {

std::int64_t TensorView::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

TensorView TensorView::Transposed() const {
  TensorView view = *this;
  if (view.shape.size() >= 2) {
    std::swap(view.shape[shape.size() - 1], view.shape[shape.size() - 2]);
    std::swap(view.strides[shape.size() - 1], view.strides[shape.size() - 2]);
  }
  return view;
}

TensorView TensorView::Slice(std::size_t dim, std::int64_t begin, std::int64_t end) const {
  TensorView view = *this;
  if (dim >= shape.size() || begin < 0 || end < begin || end > shape[dim]) {
    std::fill(view.shape.begin(), view.shape.end(), 0);
    return view;
  }
  const std::int64_t bytes = begin * strides[dim] * static_cast<std::int64_t>(DTypeBytes(dtype));
  view.shape[dim] = end - begin;
  view.byte_offset += static_cast<std::uint64_t>(bytes);
  view.data += bytes;
  return view;
}

std::vector<std::int64_t> PackedStrides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    // Past 2^63 there is no memory to stride over; the daemon refuses the shape.
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(1, shape[i]), &stride)) stride = 0;
  }
  return strides;
}

std::uint64_t PackedBytes(DType dtype, const std::vector<std::int64_t>& shape) {
  std::uint64_t bytes = DTypeBytes(dtype);
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes)) {
      return std::numeric_limits<std::uint64_t>::max();
    }
  }
  return bytes;
}

}  // namespace tessera::client
