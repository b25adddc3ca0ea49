// The class of a GEMM: what is asked of a kernel, as opposed to how it does it. Written as
// gemm.<arch>.<A>_<B>.<out>.<accumulation>.<layout>, and parsed from that text at compile time, so that the rows state
// each fact once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/dtype.h"
#include "kernels/catalog/variant.h"

namespace tessera::kernels {

enum class Accumulation : std::uint8_t { kFast, kExact };
inline constexpr std::string_view kAccumulationNames[] = {"fast", "exact"};

// Storage order of A and B; D's strides are a run-time argument.
enum class GemmLayout : std::uint8_t {
  kNT,  // A K-contiguous, B K-contiguous
  kNN,  // A K-contiguous, B N-contiguous
  kTN,  // A M-contiguous, B N-contiguous
  kTT,  // A M-contiguous, B K-contiguous
};
inline constexpr std::string_view kGemmLayoutNames[] = {"NT", "NN", "TN", "TT"};

constexpr GemmLayout GemmLayoutOf(bool a_k_contiguous, bool b_k_contiguous) {
  if (a_k_contiguous) return b_k_contiguous ? GemmLayout::kNT : GemmLayout::kNN;
  return b_k_contiguous ? GemmLayout::kTT : GemmLayout::kTN;
}

struct GemmClass {
  DType a = DType::kUnspecified;
  DType b = DType::kUnspecified;
  DType out = DType::kUnspecified;
  Accumulation accumulation = Accumulation::kFast;
  GemmLayout layout = GemmLayout::kNT;

  friend constexpr bool operator==(const GemmClass&, const GemmClass&) = default;

  // Equal classes have equal keys.
  constexpr std::uint32_t Key() const {
    return static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b) << 4U | static_cast<std::uint32_t>(out) << 8U |
           static_cast<std::uint32_t>(accumulation) << 12U | static_cast<std::uint32_t>(layout) << 16U;
  }

  // "bf16_bf16.bf16.fast.NT": the class without family and architecture.
  std::string ToString() const {
    std::string text(DTypeName(a));
    text.append("_").append(DTypeName(b)).append(".").append(DTypeName(out)).append(".");
    text.append(kAccumulationNames[static_cast<int>(accumulation)]).append(".");
    return text.append(kGemmLayoutNames[static_cast<int>(layout)]);
  }
};

// Pairs that let a request choose its accumulation; all others have one, named fast.
constexpr bool HasAccumulationChoice(DType a, DType b) {
  return IsFp8(a) && IsFp8(b);
}

namespace internal {

// Cuts `text` at the first `separator`; the head is returned and removed with the separator.
constexpr std::string_view TakeUntil(std::string_view& text, char separator) {
  const std::size_t at = text.find(separator);
  const std::string_view head = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view() : text.substr(at + 1);
  return head;
}

template <std::size_t kCount>
constexpr int IndexOf(const std::string_view (&names)[kCount], std::string_view name) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace internal

struct NamedGemmClass {
  Arch arch = Arch::kCpu;
  GemmClass gemm_class;
};

// Parses a full class name; nullopt if any part is unknown.
constexpr std::optional<NamedGemmClass> ParseGemmClass(std::string_view name) {
  NamedGemmClass parsed;
  if (internal::TakeUntil(name, '.') != "gemm") return std::nullopt;
  const int arch = internal::IndexOf(kArchNames, internal::TakeUntil(name, '.'));
  if (arch < 0) return std::nullopt;
  parsed.arch = static_cast<Arch>(arch);
  std::string_view pair = internal::TakeUntil(name, '.');
  parsed.gemm_class.a = DTypeFromName(internal::TakeUntil(pair, '_'));
  parsed.gemm_class.b = DTypeFromName(pair);
  parsed.gemm_class.out = DTypeFromName(internal::TakeUntil(name, '.'));
  const int accumulation = internal::IndexOf(kAccumulationNames, internal::TakeUntil(name, '.'));
  const int layout = internal::IndexOf(kGemmLayoutNames, name);
  if (parsed.gemm_class.a == DType::kUnspecified || parsed.gemm_class.b == DType::kUnspecified ||
      parsed.gemm_class.out == DType::kUnspecified || accumulation < 0 || layout < 0) {
    return std::nullopt;
  }
  parsed.gemm_class.accumulation = static_cast<Accumulation>(accumulation);
  parsed.gemm_class.layout = static_cast<GemmLayout>(layout);
  return parsed;
}

}  // namespace tessera::kernels
