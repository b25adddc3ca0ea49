#include "client/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tessera::client {
namespace {

// Calls visit(offset in bytes) for each element in row-major order.
template <typename Visit>
void ForEachElement(const TensorView& view, Visit visit) {
  const auto step = static_cast<std::int64_t>(DTypeBytes(view.dtype));
  std::vector<std::int64_t> index(view.shape.size(), 0);
  std::int64_t offset = 0;
  for (std::int64_t left = view.elements(); left > 0; --left) {
    visit(offset * step);
    for (std::size_t dim = index.size(); dim-- > 0;) {
      offset += view.strides[dim];
      if (++index[dim] < view.shape[dim]) break;
      offset -= index[dim] * view.strides[dim];
      index[dim] = 0;
    }
  }
}

}  // namespace

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

TensorView InlineTensor(std::byte* data, DType dtype, std::vector<std::int64_t> shape,
                        std::vector<std::int64_t> strides) {
  if (strides.empty()) strides = PackedStrides(shape);
  return {.buffer_id = {},
          .data = data,
          .byte_offset = 0,
          .dtype = dtype,
          .shape = std::move(shape),
          .strides = std::move(strides)};
}

std::string PackTensor(const TensorView& view) {
  const std::size_t step = DTypeBytes(view.dtype);
  std::string packed(static_cast<std::size_t>(view.elements()) * step, '\0');
  if (packed.empty()) return packed;
  if (view.strides == PackedStrides(view.shape)) {
    std::memcpy(packed.data(), view.data, packed.size());
    return packed;
  }
  char* to = packed.data();
  ForEachElement(view, [&](std::int64_t offset) {
    std::memcpy(to, view.data + offset, step);
    to += step;
  });
  return packed;
}

absl::Status UnpackTensor(std::string_view packed, const TensorView& view) {
  const std::size_t step = DTypeBytes(view.dtype);
  const std::size_t bytes = static_cast<std::size_t>(view.elements()) * step;
  if (packed.size() != bytes) {
    return absl::InternalError(
        absl::StrCat("the reply carries ", packed.size(), " bytes for a tensor of ", bytes, " bytes"));
  }
  const char* from = packed.data();
  ForEachElement(view, [&](std::int64_t offset) {
    std::memcpy(view.data + offset, from, step);
    from += step;
  });
  return absl::OkStatus();
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
