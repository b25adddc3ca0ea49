// Element types: one row a type, in `kDTypeRows`. Everything that depends on a type (wire enum, size, the
// name printed in ids and tables) reads this table. POD only: device code and the catalogue include it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

// Values equal `tessera.v1.DType`; server/rpc/decode.cc proves it with static_asserts.
enum class DType : std::uint8_t {
  kUnspecified = 0,
  kBf16 = 1,  // bfloat16
  kF16 = 2,   // IEEE half
  kF32 = 3,   // IEEE single
  kE4m3 = 4,  // 8-bit float, 4 exponent bits, finite range +-448, no infinity (OCP FP8 E4M3)
  kE5m2 = 5,  // 8-bit float, 5 exponent bits, infinities and NaN as IEEE (OCP FP8 E5M2)
  kS8 = 6,    // two's complement 8-bit integer
  kS32 = 7,   // two's complement 32-bit integer
};

struct DTypeRow {
  DType dtype;
  std::string_view name;         // as in catalogue ids and on the command line
  std::size_t bytes;             // element size
  std::string_view safetensors;  // the type's name in a .safetensors header
};

inline constexpr std::array<DTypeRow, 7> kDTypeRows = {{
    {DType::kBf16, "bf16", 2, "BF16"},
    {DType::kF16, "f16", 2, "F16"},
    {DType::kF32, "f32", 4, "F32"},
    {DType::kE4m3, "e4m3", 1, "F8_E4M3"},
    {DType::kE5m2, "e5m2", 1, "F8_E5M2"},
    {DType::kS8, "s8", 1, "I8"},
    {DType::kS32, "s32", 4, "I32"},
}};

constexpr bool IsKnown(DType dtype) {
  for (const DTypeRow& row : kDTypeRows) {
    if (row.dtype == dtype) return true;
  }
  return false;
}

// Bytes of one element; 0 for an unknown type.
constexpr std::size_t DTypeBytes(DType dtype) {
  for (const DTypeRow& row : kDTypeRows) {
    if (row.dtype == dtype) return row.bytes;
  }
  return 0;
}

constexpr std::string_view DTypeName(DType dtype) {
  for (const DTypeRow& row : kDTypeRows) {
    if (row.dtype == dtype) return row.name;
  }
  return "unspecified";
}

// The type of that name (`DTypeRow::name`), or kUnspecified.
constexpr DType DTypeFromName(std::string_view name) {
  for (const DTypeRow& row : kDTypeRows) {
    if (row.name == name) return row.dtype;
  }
  return DType::kUnspecified;
}

constexpr bool IsFp8(DType dtype) {
  return dtype == DType::kE4m3 || dtype == DType::kE5m2;
}

}  // namespace tessera
