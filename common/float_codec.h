// Conversions between float32 and the narrow element types, one element at a time: for the CPU kernels, and for clients
// that fill or read tensors. bfloat16 is the upper half of a binary32; e4m3 and e5m2 are those of the OCP 8-bit
// Floating Point Specification (OFP8); half is IEEE binary16.
//
// Encoding rounds to nearest even. The 8-bit types saturate (infinity too); NaN stays NaN and -0 keeps its sign.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/dtype.h"

namespace tessera {

constexpr float DecodeBf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

constexpr std::uint16_t EncodeBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>(bits >> 16U | 0x40U);
  const std::uint32_t round_to_even = 0x7fffU + (bits >> 16U & 1U);
  return static_cast<std::uint16_t>((bits + round_to_even) >> 16U);
}

// A binary format narrower than float32: sign, exponent, mantissa.
struct NarrowFormat {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // false: the top exponent holds numbers, and all ones is the one NaN
  bool saturates;     // encoding gives the largest number where IEEE gives infinity

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr int top_exponent() const { return (1 << exponent_bits) - 1; }
  constexpr int mantissa_mask() const { return (1 << mantissa_bits) - 1; }
  constexpr int sign_bit() const { return 1 << (exponent_bits + mantissa_bits); }
  // Codes without their sign.
  constexpr int infinity() const { return top_exponent() << mantissa_bits; }
  constexpr int nan() const { return infinity() | mantissa_mask(); }
  constexpr int largest() const { return has_infinity ? infinity() - 1 : nan() - 1; }
};
inline constexpr NarrowFormat kE4m3{4, 3, /*has_infinity=*/false, /*saturates=*/true};
inline constexpr NarrowFormat kE5m2{5, 2, /*has_infinity=*/true, /*saturates=*/true};
inline constexpr NarrowFormat kHalf{5, 10, /*has_infinity=*/true, /*saturates=*/false};

constexpr float DecodeNarrow(int code, const NarrowFormat& format) {
  const int exponent = code >> format.mantissa_bits & format.top_exponent();
  const int mantissa = code & format.mantissa_mask();
  const float sign = (code & format.sign_bit()) != 0 ? -1.0F : 1.0F;
  if (format.has_infinity && exponent == format.top_exponent()) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  if (!format.has_infinity && (code & format.nan()) == format.nan()) return std::numeric_limits<float>::quiet_NaN();
  float magnitude = static_cast<float>(exponent == 0 ? mantissa : mantissa + (1 << format.mantissa_bits));
  int power = (exponent == 0 ? 1 : exponent) - format.bias() - format.mantissa_bits;
  for (; power > 0; --power) magnitude *= 2.0F;
  for (; power < 0; ++power) magnitude *= 0.5F;
  return sign * magnitude;
}

inline int EncodeNarrow(float value, const NarrowFormat& format) {
  const int sign = std::signbit(value) ? format.sign_bit() : 0;
  if (std::isnan(value)) return sign | format.nan();
  const int overflow = format.saturates ? format.largest() : format.infinity();
  if (std::isinf(value)) return sign | overflow;
  // Count in units of the value's last place; below the normal range that place is fixed.
  const float magnitude = std::fabs(value);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int last_place = std::max(exponent - 1, 1 - format.bias()) - format.mantissa_bits;
  const auto units = static_cast<std::int64_t>(std::nearbyint(std::ldexp(magnitude, -last_place)));
  // The code of `units` in this binade: the implicit bit adds one to the exponent field, and a carry adds another.
  const std::int64_t code = units + (static_cast<std::int64_t>(last_place + format.mantissa_bits + format.bias() - 1)
                                     << format.mantissa_bits);
  return sign |
         static_cast<int>(std::min<std::int64_t>(code, format.largest() + 1) > format.largest() ? overflow : code);
}

constexpr std::array<float, 256> MakeFp8Table(const NarrowFormat& format) {
  std::array<float, 256> table{};
  for (int code = 0; code < 256; ++code) table[static_cast<std::size_t>(code)] = DecodeNarrow(code, format);
  return table;
}
inline constexpr std::array<float, 256> kE4m3Values = MakeFp8Table(kE4m3);
inline constexpr std::array<float, 256> kE5m2Values = MakeFp8Table(kE5m2);

namespace internal {

template <typename T>
T LoadElement(const void* element) {
  T value;
  std::memcpy(&value, element, sizeof(value));
  return value;
}

template <typename T>
void StoreElement(void* element, T value) {
  std::memcpy(element, &value, sizeof(value));
}

// Rounds to an integer of type T, saturating; NaN gives 0.
template <typename T>
T RoundToInteger(float value) {
  if (std::isnan(value)) return 0;
  const double rounded = std::nearbyint(static_cast<double>(value));
  return static_cast<T>(std::clamp<double>(rounded, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
}

}  // namespace internal

// One element of any type, at any address.
inline float DecodeElement(DType dtype, const void* element) {
  switch (dtype) {
    case DType::kBf16:
      return DecodeBf16(internal::LoadElement<std::uint16_t>(element));
    case DType::kF16:
      return DecodeNarrow(internal::LoadElement<std::uint16_t>(element), kHalf);
    case DType::kF32:
      return internal::LoadElement<float>(element);
    case DType::kE4m3:
      return kE4m3Values[internal::LoadElement<std::uint8_t>(element)];
    case DType::kE5m2:
      return kE5m2Values[internal::LoadElement<std::uint8_t>(element)];
    case DType::kS8:
      return internal::LoadElement<std::int8_t>(element);
    case DType::kS32:
      return static_cast<float>(internal::LoadElement<std::int32_t>(element));
    case DType::kUnspecified:
      break;
  }
  return std::numeric_limits<float>::quiet_NaN();
}

inline void EncodeElement(DType dtype, float value, void* element) {
  switch (dtype) {
    case DType::kBf16:
      return internal::StoreElement(element, EncodeBf16(value));
    case DType::kF16:
      return internal::StoreElement(element, static_cast<std::uint16_t>(EncodeNarrow(value, kHalf)));
    case DType::kF32:
      return internal::StoreElement(element, value);
    case DType::kE4m3:
      return internal::StoreElement(element, static_cast<std::uint8_t>(EncodeNarrow(value, kE4m3)));
    case DType::kE5m2:
      return internal::StoreElement(element, static_cast<std::uint8_t>(EncodeNarrow(value, kE5m2)));
    case DType::kS8:
      return internal::StoreElement(element, internal::RoundToInteger<std::int8_t>(value));
    case DType::kS32:
      return internal::StoreElement(element, internal::RoundToInteger<std::int32_t>(value));
    case DType::kUnspecified:
      return;
  }
}

}  // namespace tessera
