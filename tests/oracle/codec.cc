// One description a format and one pair of conversions for all of them; integers are apart.
#include "tests/oracle/codec.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>

namespace tessera::oracle {
namespace {

// A binary format: sign, exponent biased by 2^(exponent_bits - 1) - 1, mantissa.
struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // the top exponent holds infinity and NaN; else only its all-ones mantissa is NaN
  bool saturates;     // overflow gives the largest finite value

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint64_t sign_bit() const { return std::uint64_t{1} << (exponent_bits + mantissa_bits); }
  std::uint64_t hidden_bit() const { return std::uint64_t{1} << mantissa_bits; }
  std::uint64_t top_exponent() const { return (std::uint64_t{1} << exponent_bits) - 1; }
  std::uint64_t nan_code() const { return sign_bit() - 1; }
  std::uint64_t infinity_code() const { return top_exponent() << mantissa_bits; }
  std::uint64_t finite_code_max() const { return (has_infinity ? infinity_code() : nan_code()) - 1; }
};

std::optional<FloatFormat> FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return FloatFormat{8, 7, true, false};
    case DType::kF16:
      return FloatFormat{5, 10, true, false};
    case DType::kF32:
      return FloatFormat{8, 23, true, false};
    case DType::kE4m3:
      return FloatFormat{4, 3, false, true};
    case DType::kE5m2:
      return FloatFormat{5, 2, true, true};
    default:
      return std::nullopt;
  }
}

double DecodeFloat(const FloatFormat& format, std::uint64_t code) {
  const std::uint64_t magnitude = code & (format.sign_bit() - 1);
  const double sign = (code & format.sign_bit()) != 0 ? -1.0 : 1.0;
  if (magnitude > format.finite_code_max()) {
    const bool infinite = format.has_infinity && magnitude == format.infinity_code();
    using Limits = std::numeric_limits<double>;
    return std::copysign(infinite ? Limits::infinity() : Limits::quiet_NaN(), sign);
  }
  const std::uint64_t exponent = magnitude >> format.mantissa_bits;
  const std::uint64_t mantissa = magnitude & (format.hidden_bit() - 1);
  const std::uint64_t significand = exponent == 0 ? mantissa : mantissa + format.hidden_bit();
  const int scale = std::max(static_cast<int>(exponent), 1) - format.bias() - format.mantissa_bits;
  return sign * std::ldexp(static_cast<double>(significand), scale);
}

// The code of a finite, positive value, or one above finite_code_max() where it overflows.
std::uint64_t RoundToCode(const FloatFormat& format, double magnitude) {
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias());
  // Exact: the result is small, and dividing by the format's spacing never loses bits of a double that matter.
  const double spacings = std::ldexp(magnitude, format.mantissa_bits - exponent);
  const auto significand = static_cast<std::uint64_t>(std::nearbyint(spacings));  // default mode: nearest even
  if (significand < format.hidden_bit()) return significand;                      // subnormal or zero
  // A significand that rounded up to 2 * hidden_bit carries into the exponent by itself.
  const auto biased = static_cast<std::uint64_t>(exponent + format.bias());
  return (biased << format.mantissa_bits) + (significand - format.hidden_bit());
}

std::uint64_t EncodeFloat(const FloatFormat& format, double value) {
  const std::uint64_t sign = std::signbit(value) ? format.sign_bit() : 0;
  if (std::isnan(value)) return sign | format.nan_code();
  if (value == 0) return sign;
  const double magnitude = std::fabs(value);
  if (!std::isinf(value)) {
    const std::uint64_t code = RoundToCode(format, magnitude);
    if (code <= format.finite_code_max()) return sign | code;
  }
  return sign | (format.saturates ? format.finite_code_max() : format.infinity_code());
}

template <typename Integer>
Integer EncodeInteger(double value) {
  if (std::isnan(value)) return 0;
  using Limits = std::numeric_limits<Integer>;
  const double rounded = std::nearbyint(value);
  return static_cast<Integer>(
      std::clamp(rounded, static_cast<double>(Limits::min()), static_cast<double>(Limits::max())));
}

template <typename Word>
Word Load(const void* element) {
  Word word;
  std::memcpy(&word, element, sizeof word);
  return word;
}

template <typename Word>
void Store(Word word, void* element) {
  std::memcpy(element, &word, sizeof word);
}

}  // namespace

double Decode(DType dtype, const void* element) {
  if (dtype == DType::kS8) return Load<std::int8_t>(element);
  if (dtype == DType::kS32) return Load<std::int32_t>(element);
  const std::optional<FloatFormat> format = FormatOf(dtype);
  if (!format.has_value()) return std::numeric_limits<double>::quiet_NaN();
  switch (DTypeBytes(dtype)) {
    case 1:
      return DecodeFloat(*format, Load<std::uint8_t>(element));
    case 2:
      return DecodeFloat(*format, Load<std::uint16_t>(element));
    default:
      return DecodeFloat(*format, Load<std::uint32_t>(element));
  }
}

void Encode(DType dtype, double value, void* element) {
  if (dtype == DType::kS8) return Store(EncodeInteger<std::int8_t>(value), element);
  if (dtype == DType::kS32) return Store(EncodeInteger<std::int32_t>(value), element);
  const std::optional<FloatFormat> format = FormatOf(dtype);
  if (!format.has_value()) return;
  const std::uint64_t code = EncodeFloat(*format, value);
  switch (DTypeBytes(dtype)) {
    case 1:
      return Store(static_cast<std::uint8_t>(code), element);
    case 2:
      return Store(static_cast<std::uint16_t>(code), element);
    default:
      return Store(static_cast<std::uint32_t>(code), element);
  }
}

}  // namespace tessera::oracle
