// A decoded call: what the client asked for, free of protobuf, before any id was looked up. Decoding has checked what a
// tensor says about itself (rank, extents, strides, type); binding checks it against memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/dtype.h"
#include "kernels/catalog/gemm_class.h"
#include "server/session/id.h"

namespace tessera::server {

inline constexpr int kRankMax = 5;

struct TensorRef {
  enum class Storage { kBuffer, kInlineData, kInlineResult };

  std::string_view field;  // path in the request, such as "op.a"; a literal
  Storage storage = Storage::kBuffer;
  Id buffer;                                 // kBuffer
  const std::string* inline_data = nullptr;  // kInlineData; owned by the request
  std::uint64_t byte_offset = 0;
  DType dtype = DType::kUnspecified;
  int rank = 0;
  std::array<std::int64_t, kRankMax> shape{};   // extents, slowest first; not negative
  std::array<std::int64_t, kRankMax> stride{};  // elements; not negative
};

struct ScaleRef {
  float scalar = 1.0F;
  std::optional<TensorRef> vector;
};

struct GemmCall {
  TensorRef a, b, d;
  std::optional<ScaleRef> a_scale, b_scale;
  std::optional<TensorRef> bias;
  kernels::Accumulation accumulation = kernels::Accumulation::kFast;
};

}  // namespace tessera::server
