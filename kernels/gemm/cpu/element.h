// Element conversions of the CPU variants: decode to float32, encode from float32 with round to nearest even.
// Formats: bfloat16 is the upper half of a binary32; e4m3 and e5m2 are those of the OCP 8-bit Floating Point
// Specification (OFP8).
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/dtype.h"

namespace tessera::kernels::cpu {

constexpr float DecodeBf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U); }

constexpr std::uint16_t EncodeBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>(bits >> 16U | 0x40U);  // NaN stays NaN
  const std::uint32_t round_to_even = 0x7fffU + (bits >> 16U & 1U);
  return static_cast<std::uint16_t>((bits + round_to_even) >> 16U);
}

// A float with `exponent_bits` and `mantissa_bits` after the sign; `has_infinity` tells e5m2 from e4m3, whose top
// exponent holds numbers and one NaN.
constexpr float DecodeFp8(std::uint8_t code, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const float sign = (code & 0x80U) != 0 ? -1.0F : 1.0F;
  const bool top = exponent == (1 << exponent_bits) - 1;
  if (top && has_infinity) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  if (top && mantissa == (1 << mantissa_bits) - 1) return std::numeric_limits<float>::quiet_NaN();
  float magnitude = static_cast<float>(exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits));
  int power = (exponent == 0 ? 1 : exponent) - bias - mantissa_bits;
  for (; power > 0; --power) magnitude *= 2.0F;
  for (; power < 0; ++power) magnitude *= 0.5F;
  return sign * magnitude;
}

constexpr std::array<float, 256> MakeFp8Table(int exponent_bits, int mantissa_bits, bool has_infinity) {
  std::array<float, 256> table{};
  for (int code = 0; code < 256; ++code) {
    table[static_cast<std::size_t>(code)] =
        DecodeFp8(static_cast<std::uint8_t>(code), exponent_bits, mantissa_bits, has_infinity);
  }
  return table;
}
inline constexpr std::array<float, 256> kE4m3Table = MakeFp8Table(4, 3, /*has_infinity=*/false);
inline constexpr std::array<float, 256> kE5m2Table = MakeFp8Table(5, 2, /*has_infinity=*/true);

// Storage type and decoder of an operand element.
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
  static float Decode(Storage code) { return kE4m3Table[code]; }
};
template <>
struct Element<DType::kE5m2> {
  using Storage = std::uint8_t;
  static float Decode(Storage code) { return kE5m2Table[code]; }
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
