// Whether two strided views share a byte. Exact in general is a hard integer problem; this answers "no" only when that
// is certain, and finds the cases that people use: disjoint ranges, and slices of one parent with a common pitch.
#pragma once

#include <array>
#include <cstdint>

#include "server/exec/call.h"

namespace tessera::server {

struct StridedBytes {
  std::uint64_t begin = 0;  // first byte of element [0, .., 0], within the memory that both views are of
  std::uint64_t element_bytes = 1;
  int rank = 0;
  std::array<std::int64_t, kRankMax> shape{};         // all positive
  std::array<std::int64_t, kRankMax> stride_bytes{};  // not negative

  // Bytes from the first element's first to the last element's last.
  std::uint64_t Span() const;
};

bool MayOverlap(const StridedBytes& a, const StridedBytes& b);

// Whether two different indices may name the same byte.
bool MayOverlapItself(const StridedBytes& view);

}  // namespace tessera::server
