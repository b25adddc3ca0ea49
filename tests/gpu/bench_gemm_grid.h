// What the GEMM benchmark measures: cells, in families that are asked for by name. Free of CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/catalog/gemm_class.h"

namespace tessera::gpu_test {

enum class BenchFamily : std::uint8_t { kBf16, kFp8, kFp8Exact, kFp8RowCol, kInt8, kLayouts, kHoldout };
inline constexpr std::array<std::string_view, 7> kBenchFamilyNames = {"bf16", "fp8",     "fp8_exact", "fp8_rowcol",
                                                                      "int8", "layouts", "holdout"};
constexpr std::string_view BenchFamilyName(BenchFamily family) {
  return kBenchFamilyNames[static_cast<std::size_t>(family)];
}
std::optional<BenchFamily> BenchFamilyFrom(std::string_view name);

enum class BenchScales : std::uint8_t {
  kNone,
  kTensor,  // one value an operand
  kRowCol,  // one value a row of A, one a channel of B
};
inline constexpr std::array<std::string_view, 3> kBenchScalesNames = {"none", "tensor", "row_col"};
constexpr std::string_view BenchScalesName(BenchScales scales) {
  return kBenchScalesNames[static_cast<std::size_t>(scales)];
}

struct BenchCell {
  BenchFamily family = BenchFamily::kBf16;
  kernels::GemmClass gemm_class;
  BenchScales scales = BenchScales::kNone;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;

  // Measured after the card has been kept busy, and so slowed down by its power limit; else after it has idled. Small
  // products are waited for in between by those who make them, large ones come one after another.
  bool Sustained() const { return m >= 512; }
  double Flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
  std::string Pair() const;      // bf16_bf16
  std::string Describe() const;  // bf16_bf16.bf16.fast.NT none 16 x 4096 x 4096
};

// No cell twice, in all families together. `small`: some cells of each family, for a look.
std::vector<BenchCell> CellsOf(BenchFamily family, bool small);

}  // namespace tessera::gpu_test
