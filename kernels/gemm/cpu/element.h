// Operand elements of the CPU variants: storage type and decoder to float32, chosen at compile time.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/float_codec.h"

namespace tessera::kernels::cpu {

template <DType kType>
struct Element;

template <>
struct Element<DType::kBf16> {
  using Storage = std::uint16_t;
  static float Decode(Storage bits) { return DecodeBf16(bits); }
};
template <>
struct Element<DType::kE4m3> {
  using Storage = std::uint8_t;
  static float Decode(Storage code) { return kE4m3Values[code]; }
};
template <>
struct Element<DType::kE5m2> {
  using Storage = std::uint8_t;
  static float Decode(Storage code) { return kE5m2Values[code]; }
};
template <>
struct Element<DType::kS8> {
  using Storage = std::int8_t;
  static float Decode(Storage value) { return static_cast<float>(value); }
};

// int8 sums are exact, for any K: 64-bit accumulators. Everything else accumulates in float32.
template <DType kA, DType kB>
inline constexpr bool kIntegerProduct = kA == DType::kS8 && kB == DType::kS8;

// float32 holds every integer up to 2^24, so a float32 sum of this many int8 products (at most 2^14 each) is exact.
inline constexpr int kExactIntegerK = 1024;

}  // namespace tessera::kernels::cpu
