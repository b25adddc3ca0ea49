#include "server/exec/overlap.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::server {
namespace {

// Bytes that the dimensions whose stride is not a multiple of `pitch` span: the view's footprint modulo the pitch.
std::uint64_t ResidualSpan(const StridedBytes& view, std::int64_t pitch) {
  std::uint64_t span = view.element_bytes;
  for (int i = 0; i < view.rank; ++i) {
    if (view.stride_bytes[i] % pitch == 0) continue;
    span += static_cast<std::uint64_t>(view.shape[i] - 1) * static_cast<std::uint64_t>(view.stride_bytes[i]);
  }
  return span;
}

// Both views repeat with the same pitch: they are apart if their footprints within one period are.
bool ApartWithPitch(const StridedBytes& a, const StridedBytes& b, std::int64_t pitch) {
  const auto period = static_cast<std::uint64_t>(pitch);
  const std::uint64_t a_span = ResidualSpan(a, pitch);
  const std::uint64_t b_span = ResidualSpan(b, pitch);
  if (a_span > period || b_span > period) return false;
  const std::uint64_t a_to_b = (b.begin % period + period - a.begin % period) % period;
  const std::uint64_t b_to_a = (a.begin % period + period - b.begin % period) % period;
  return a_to_b >= a_span && b_to_a >= b_span;
}

}  // namespace

std::uint64_t StridedBytes::Span() const {
  std::uint64_t span = element_bytes;
  for (int i = 0; i < rank; ++i) {
    span += static_cast<std::uint64_t>(shape[i] - 1) * static_cast<std::uint64_t>(stride_bytes[i]);
  }
  return span;
}

bool MayOverlap(const StridedBytes& a, const StridedBytes& b) {
  if (a.begin + a.Span() <= b.begin || b.begin + b.Span() <= a.begin) return false;
  for (const StridedBytes* view : {&a, &b}) {
    for (int i = 0; i < view->rank; ++i) {
      if (view->shape[i] > 1 && view->stride_bytes[i] > 0 && ApartWithPitch(a, b, view->stride_bytes[i])) return false;
    }
  }
  return true;
}

bool MayOverlapItself(const StridedBytes& view) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, extent
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] > 1) dims.emplace_back(view.stride_bytes[i], view.shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  // Each dimension must step over everything that the finer ones cover.
  auto covered = static_cast<std::int64_t>(view.element_bytes);
  for (const auto& [stride, extent] : dims) {
    if (stride < covered) return true;
    covered += stride * (extent - 1);
  }
  return false;
}

}  // namespace tessera::server
