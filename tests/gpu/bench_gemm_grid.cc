#include "tests/gpu/bench_gemm_grid.h"

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::gpu_test {
namespace {

using kernels::Accumulation;
using kernels::GemmClass;
using kernels::GemmLayout;

struct Weights {
  std::int64_t n;
  std::int64_t k;
};

// Projections of language models of 8 and 70 billion parameters.
constexpr Weights kWeights[] = {{4096, 4096},  {12288, 4096}, {22016, 4096}, {4096, 11008},
                                {10240, 8192}, {57344, 8192}, {8192, 28672}};
constexpr std::int64_t kTokens[] = {1, 16, 64, 128, 512, 2048, 4096, 8192};
constexpr Weights kSmallWeights[] = {{4096, 4096}, {10240, 8192}};
constexpr std::int64_t kSmallTokens[] = {1, 64, 512, 4096};

// Sizes that no choice was made for.
constexpr Weights kHoldoutWeights[] = {{5120, 13824}, {13824, 5120}, {3584, 18944}};
constexpr std::int64_t kHoldoutTokens[] = {96, 300, 1000};

// fp8 of two kinds shares its kernels with e4m3 alone: a few cells show that it is no slower.
constexpr Weights kMixedWeights[] = {{10240, 8192}};
constexpr std::int64_t kMixedTokens[] = {16, 128, 4096};

constexpr std::int64_t kSquares[] = {4096, 8192};

GemmClass Bf16(GemmLayout layout = GemmLayout::kNT, DType out = DType::kBf16) {
  return {.a = DType::kBf16, .b = DType::kBf16, .out = out, .layout = layout};
}

GemmClass Fp8(Accumulation accumulation, DType a = DType::kE4m3, DType b = DType::kE4m3) {
  return {.a = a, .b = b, .out = DType::kBf16, .accumulation = accumulation};
}

constexpr GemmClass kInt8 = {.a = DType::kS8, .b = DType::kS8, .out = DType::kBf16};

class Cells {
 public:
  Cells(BenchFamily family, bool small) : family_(family), small_(small) {}

  void AddProduct(const GemmClass& gemm_class, BenchScales scales, std::span<const Weights> weights,
                  std::span<const std::int64_t> tokens) {
    for (const Weights& matrix : weights) {
      for (const std::int64_t m : tokens) {
        cells_.push_back(
            {.family = family_, .gemm_class = gemm_class, .scales = scales, .m = m, .n = matrix.n, .k = matrix.k});
      }
    }
  }

  void AddGrid(const GemmClass& gemm_class, BenchScales scales) {
    if (small_) {
      AddProduct(gemm_class, scales, kSmallWeights, kSmallTokens);
    } else {
      AddProduct(gemm_class, scales, kWeights, kTokens);
    }
  }

  void AddHoldout(const GemmClass& gemm_class, BenchScales scales) {
    AddProduct(gemm_class, scales, std::span(kHoldoutWeights).first(small_ ? 1 : 3), kHoldoutTokens);
  }

  void AddSquares(const GemmClass& gemm_class) {
    for (const std::int64_t size : std::span(kSquares).first(small_ ? 1 : 2)) {
      const Weights matrix = {size, size};
      AddProduct(gemm_class, BenchScales::kNone, {&matrix, 1}, {&size, 1});
    }
  }

  bool small() const { return small_; }
  std::vector<BenchCell> Take() { return std::move(cells_); }

 private:
  const BenchFamily family_;
  const bool small_;
  std::vector<BenchCell> cells_;
};

void AddFp8(Cells& cells) {
  cells.AddGrid(Fp8(Accumulation::kFast), BenchScales::kTensor);
  if (cells.small()) return;
  for (const auto& [a, b] : {std::pair(DType::kE4m3, DType::kE5m2), std::pair(DType::kE5m2, DType::kE4m3)}) {
    cells.AddProduct(Fp8(Accumulation::kFast, a, b), BenchScales::kTensor, kMixedWeights, kMixedTokens);
  }
}

void AddLayouts(Cells& cells) {
  for (const GemmLayout layout : {GemmLayout::kNN, GemmLayout::kTN, GemmLayout::kTT}) cells.AddSquares(Bf16(layout));
  cells.AddSquares(Bf16(GemmLayout::kNT, DType::kF32));
}

void AddHoldout(Cells& cells) {
  cells.AddHoldout(Bf16(), BenchScales::kNone);
  cells.AddHoldout(Fp8(Accumulation::kFast), BenchScales::kTensor);
  cells.AddHoldout(kInt8, BenchScales::kRowCol);
}

}  // namespace

std::optional<BenchFamily> BenchFamilyFrom(std::string_view name) {
  for (std::size_t i = 0; i < kBenchFamilyNames.size(); ++i) {
    if (kBenchFamilyNames[i] == name) return static_cast<BenchFamily>(i);
  }
  return std::nullopt;
}

std::string BenchCell::Pair() const {
  return absl::StrCat(Av(DTypeName(gemm_class.a)), "_", Av(DTypeName(gemm_class.b)));
}

std::string BenchCell::Describe() const {
  return absl::StrCat(gemm_class.ToString(), " ", Av(BenchScalesName(scales)), " ", m, " x ", n, " x ", k);
}

std::vector<BenchCell> CellsOf(BenchFamily family, bool small) {
  Cells cells(family, small);
  switch (family) {
    case BenchFamily::kBf16:
      cells.AddGrid(Bf16(), BenchScales::kNone);
      break;
    case BenchFamily::kFp8:
      AddFp8(cells);
      break;
    case BenchFamily::kFp8Exact:
      cells.AddGrid(Fp8(Accumulation::kExact), BenchScales::kTensor);
      break;
    case BenchFamily::kFp8RowCol:
      cells.AddGrid(Fp8(Accumulation::kFast), BenchScales::kRowCol);
      break;
    case BenchFamily::kInt8:
      cells.AddGrid(kInt8, BenchScales::kRowCol);
      break;
    case BenchFamily::kLayouts:
      AddLayouts(cells);
      break;
    case BenchFamily::kHoldout:
      AddHoldout(cells);
      break;
  }
  return cells.Take();
}

}  // namespace tessera::gpu_test
