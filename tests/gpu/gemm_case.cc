#include "tests/gpu/gemm_case.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "tests/oracle/codec.h"

namespace tessera::gpu_test {
namespace {

using kernels::kGemmBatchDimsMax;
using oracle::BiasMode;
using oracle::Random;

constexpr std::size_t kGuardBytes = 256;  // also the alignment of an allocation, so that `offset` is what it says
constexpr std::byte kFloatPattern{0xff};  // NaN in every float format
constexpr std::byte kIntegerPattern{0x7b};

std::int64_t RoundUp(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// --- Cases -----------------------------------------------------------------------------------------------------------

GpuCase Shape(std::string name, std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.name = std::move(name), .m = m, .n = n, .k = k};
}

GpuCase With(GpuCase problem, const View& all) {
  problem.a = problem.b = problem.d = all;
  return problem;
}

// Strides and addresses that every variant takes; edges in each dimension.
void AddAlignedCases(std::vector<GpuCase>& cases) {
  cases.push_back(Shape("aligned", 128, 256, 128));
  cases.back().reduced = cases.back().raster = true;
  cases.push_back(Shape("aligned, several tiles", 512, 768, 320));
  cases.back().raster = true;
  cases.push_back(Shape("aligned, one element", 1, 1, 1));
  cases.push_back(Shape("aligned, tail of M", 129, 256, 128));
  cases.push_back(Shape("aligned, M short of a tile", 63, 128, 256));
  cases.push_back(Shape("aligned, tail of N", 128, 257, 128));
  cases.push_back(Shape("aligned, N short of a tile", 256, 7, 192));
  cases.push_back(Shape("aligned, tail of K", 192, 128, 127));
  cases.push_back(Shape("aligned, K short of a tile", 128, 128, 15));
  cases.push_back(Shape("aligned, all tails", 257, 131, 193));
  cases.back().reduced = cases.back().raster = true;
  cases.push_back(Shape("aligned, one row", 1, 1024, 515));
  cases.push_back(Shape("aligned, eight rows", 8, 776, 1032));
  cases.push_back(Shape("aligned, one column", 515, 1, 256));
  cases.push_back(Shape("K = 1", 130, 67, 1));
  cases.push_back(Shape("K = 0", 130, 67, 0));
  cases.back().reduced = true;
  cases.push_back(Shape("K = 0 with bias", 67, 130, 0));
  cases.back().bias = BiasMode::kF32;
  cases.push_back(Shape("large K", 64, 96, 4096));
  cases.push_back(Shape("large K, tails", 33, 65, 8191));
  cases.push_back(Shape("very large K", 17, 24, 20'000));
}

// Where the Hopper tiles end: 16, 32, 64, 128 and 256 of M and N, 64 and 128 of K, a cluster's pairs of tiles, and
// slices of K of which some are empty.
void AddTileEdgeCases(std::vector<GpuCase>& cases) {
  const std::array<std::int64_t, 8> rows = {15, 16, 17, 31, 33, 64, 65, 127};
  const std::array<std::int64_t, 8> columns = {127, 128, 129, 255, 256, 257, 16, 385};
  const std::array<std::int64_t, 8> depths = {63, 64, 65, 127, 129, 448, 513, 1000};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    cases.push_back(Shape("tile edge " + std::to_string(i), rows[i], columns[i], depths[i]));
    cases.back().bias = i % 2 == 0 ? BiasMode::kF32 : BiasMode::kNone;
    cases.back().vector_scales = i % 3 != 0;
  }
  cases.push_back(Shape("few rows, many columns", 5, 17'000, 136));
  cases.back().raster = true;
  cases.push_back(Shape("few rows, more tiles than clusters, long K", 33, 9000, 1100));
  cases.push_back(Shape("pairs of tiles, the last one alone", 2100, 520, 136));
  cases.back().raster = true;
  cases.push_back(Shape("two tiles, the second of one row", 129, 300, 520));
  cases.push_back(Shape("columns around 160", 300, 159, 136));
  cases.push_back(Shape("columns around twice 160", 256, 321, 200));
  cases.push_back(Shape("many tiles of 160 columns a block", 2048, 5200, 264));
  cases.push_back(Shape("more steps than stages", 260, 512, 3000));
  cases.push_back(Shape("few rows, batch, A broadcast", 9, 200, 300));
  cases.back().batch = {2, 1, 3};
  cases.back().a_broadcast = {true, false, true};
  cases.back().bias = BiasMode::kBf16;
  cases.push_back(Shape("few rows, batch, B broadcast", 40, 140, 260));
  cases.back().batch = {1, 2, 2};
  cases.back().b_broadcast = {false, true, true};
  cases.push_back(Shape("few rows, D by columns", 20, 150, 200));
  cases.back().d_by_columns = true;
  cases.push_back(Shape("few rows, D with every second element", 20, 150, 200));
  cases.back().d = {.fine = 2, .offset = 1};
  cases.push_back(With(Shape("few rows, misaligned", 12, 256, 256), {.pitch = 16, .offset = 1}));
  cases.push_back(Shape("rows of D aligned to 8 bytes only", 140, 260, 128));
  cases.back().d = {.pitch = 4};
  cases.push_back(Shape("few rows of NaN and infinity", 13, 264, 1000));
  cases.back().fill = Fill::kSpecial;
  cases.push_back(Shape("few rows, one-hot B", 24, 320, 1030));
  cases.back().fill = Fill::kOneHot;
  cases.push_back(Shape("the longest sum that int32 holds", 3, 20, 131'071));
  cases.back().fill = Fill::kLargest;
  cases.push_back(Shape("a sum that int32 may not hold", 3, 20, 131'072));
  cases.back().fill = Fill::kLargest;
}

void AddPackedCases(std::vector<GpuCase>& cases) {
  cases.push_back(With(Shape("packed, one element", 1, 1, 1), kPacked));
  cases.back().reduced = true;
  cases.push_back(With(Shape("packed, tiny", 2, 3, 5), kPacked));
  cases.push_back(With(Shape("packed, small primes", 13, 17, 19), kPacked));
  cases.push_back(With(Shape("packed, primes", 97, 53, 31), kPacked));
  cases.back().reduced = true;
  cases.push_back(With(Shape("packed, larger primes", 211, 307, 401), kPacked));
  cases.back().raster = true;
  cases.push_back(With(Shape("packed, even", 256, 256, 256), kPacked));
  cases.push_back(With(Shape("packed, large K", 31, 47, 5003), kPacked));
}

void AddStridedCases(std::vector<GpuCase>& cases) {
  cases.push_back(With(Shape("rows apart by whole vectors", 130, 136, 96), {.pitch = 16, .padding = 64}));
  cases.push_back(With(Shape("rows apart by odd strides", 129, 131, 65), {.padding = 3}));
  cases.back().reduced = true;
  cases.push_back(With(Shape("odd offsets", 128, 128, 64), {.pitch = 16, .offset = 1}));
  cases.push_back(With(Shape("odd strides and offsets", 67, 129, 131), {.padding = 5, .offset = 3}));
  cases.back().reduced = true;
  cases.push_back(Shape("A with every second element", 130, 64, 96));
  cases.back().a = {.fine = 2, .pitch = 16};
  cases.push_back(Shape("B with every second element", 65, 131, 97));
  cases.back().b = {.fine = 2, .offset = 1};
  cases.back().reduced = true;
  cases.push_back(Shape("all rows of A the same", 129, 64, 80));
  cases.back().a = {.padding = 2, .one_row = true};
  cases.push_back(Shape("all rows of B the same", 66, 130, 72));
  cases.back().b = {.padding = 2, .one_row = true};
  cases.push_back(Shape("one row, stride 0", 1, 130, 136));
  cases.back().a.one_row = true;
  cases.push_back(Shape("D with every second element", 130, 132, 64));
  cases.back().d = {.fine = 2, .offset = 1};
  cases.back().reduced = true;
  cases.push_back(Shape("D by columns", 131, 66, 64));
  cases.back().d_by_columns = true;
}

void AddBatchCases(std::vector<GpuCase>& cases) {
  cases.push_back(Shape("batch", 130, 72, 64));
  cases.back().batch = {1, 1, 3};
  cases.push_back(Shape("batch of two dimensions, A and B broadcast", 67, 136, 96));
  cases.back().batch = {1, 2, 3};
  cases.back().a_broadcast = {false, true, false};
  cases.back().b_broadcast = {false, false, true};
  cases.back().bias = BiasMode::kF32;
  cases.push_back(Shape("batch of three dimensions, B broadcast", 65, 64, 33));
  cases.back().batch = {2, 3, 2};
  cases.back().b_broadcast = {true, true, true};
  cases.push_back(With(Shape("packed batch, all broadcast somewhere", 33, 35, 29), kPacked));
  cases.back().batch = {2, 2, 3};
  cases.back().a_broadcast = {true, false, true};
  cases.back().b_broadcast = {false, true, false};
  cases.back().reduced = true;
}

void AddEpilogueCases(std::vector<GpuCase>& cases) {
  cases.push_back(Shape("bias f32", 131, 200, 64));
  cases.back().bias = BiasMode::kF32;
  cases.back().reduced = true;
  cases.push_back(Shape("bias f32, stride 2", 64, 131, 32));
  cases.back().bias = BiasMode::kF32;
  cases.back().bias_stride = 2;
  cases.push_back(Shape("bias bf16", 130, 136, 16));
  cases.back().bias = BiasMode::kBf16;
  cases.push_back(With(Shape("bias bf16, stride 2, odd offset", 65, 67, 35), kPacked));
  cases.back().bias = BiasMode::kBf16;
  cases.back().bias_stride = 2;
  cases.back().bias_offset = 1;
  cases.back().vector_scales = false;
  cases.back().reduced = true;
}

void AddValueCases(std::vector<GpuCase>& cases) {
  cases.push_back(Shape("one-hot B", 256, 320, 192));
  cases.back().fill = Fill::kOneHot;
  cases.back().raster = true;
  cases.push_back(With(Shape("one-hot B, primes", 151, 283, 577), {.padding = 1, .offset = 1}));
  cases.back().fill = Fill::kOneHot;
  cases.push_back(Shape("one-hot B, batch", 97, 130, 136));
  cases.back().fill = Fill::kOneHot;
  cases.back().batch = {1, 2, 2};
  cases.push_back(Shape("integers", 257, 264, 2056));
  cases.back().fill = Fill::kIntegers;
  cases.back().bias = BiasMode::kF32;
  cases.push_back(With(Shape("integers, packed", 129, 65, 1031), kPacked));
  cases.back().fill = Fill::kIntegers;
  cases.push_back(Shape("NaN and infinity", 193, 264, 136));
  cases.back().fill = Fill::kSpecial;
  cases.back().bias = BiasMode::kF32;
  cases.push_back(With(Shape("NaN and infinity, packed, offset", 65, 130, 33), {.padding = 7, .offset = 3}));
  cases.back().fill = Fill::kSpecial;
  cases.back().reduced = true;
}

// More than two waves of the largest tiles, long K with many tiles, and sizes that no tile divides.
void AddLargeCases(std::vector<GpuCase>& cases) {
  cases.push_back(Shape("large, several waves", 3000, 3100, 200));
  cases.back().raster = true;
  cases.push_back(Shape("large, K of 4096", 1024, 1152, 4096));
  cases.push_back(With(Shape("large, primes", 1031, 1033, 1039), kPacked));
}

// --- Numbers ---------------------------------------------------------------------------------------------------------

double DrawValue(Random& random, Fill fill, DType dtype) {
  if (fill == Fill::kIntegers) return static_cast<double>(random.Int(-3, 3));
  if (dtype == DType::kS8) return fill == Fill::kLargest ? -128 : static_cast<double>(random.Int(-128, 127));
  return random.Uniform(-1, 1);
}

double DrawSpecial(Random& random, DType dtype) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (dtype == DType::kS8) return random.Int(0, 1) == 0 ? -128 : 127;
  switch (random.Int(0, 2)) {
    case 0:
      return std::numeric_limits<double>::quiet_NaN();
    case 1:
      return kInfinity;
    default:
      return -kInfinity;
  }
}

// Integers that the type holds exactly, different for neighbours in every direction.
double CountedValue(DType dtype, std::int64_t matrix, std::int64_t row, std::int64_t col) {
  const std::int64_t range = IsFp8(dtype) ? 15 : 251;
  const std::int64_t value = (matrix * 11 + row * 3 + col * 5) % range - range / 2;
  return static_cast<double>(value);
}

std::int64_t SelectedK(std::int64_t matrix, std::int64_t n, std::int64_t k) {
  return (matrix * 13 + n * 7 + 3) % k;
}

Numbers EmptyNumbers(DType dtype, const GpuCase& problem, const View& view, std::int64_t rows,
                     const std::array<bool, kGemmBatchDimsMax>& broadcast) {
  Numbers numbers{.dtype = dtype, .rows = view.one_row ? std::min<std::int64_t>(rows, 1) : rows, .cols = problem.k};
  std::int64_t elements = numbers.rows * numbers.cols;
  for (int dimension = 0; dimension < kGemmBatchDimsMax; ++dimension) {
    if (!broadcast[dimension]) numbers.batch[dimension] = problem.batch[dimension];
    elements *= numbers.batch[dimension];
  }
  numbers.bytes.resize(static_cast<std::size_t>(elements) * DTypeBytes(dtype));
  return numbers;
}

// value(matrix, row, col) for every element in storage order.
template <typename Value>
void FillNumbers(Numbers& numbers, const Value& value) {
  const std::size_t size = DTypeBytes(numbers.dtype);
  const std::int64_t matrices = numbers.batch[0] * numbers.batch[1] * numbers.batch[2];
  std::byte* element = numbers.bytes.data();
  for (std::int64_t matrix = 0; matrix < matrices; ++matrix) {
    for (std::int64_t row = 0; row < numbers.rows; ++row) {
      for (std::int64_t col = 0; col < numbers.cols; ++col, element += size) {
        oracle::Encode(numbers.dtype, value(matrix, row, col), element);
      }
    }
  }
}

void FillRandom(Numbers& numbers, Fill fill, Random& random) {
  std::int64_t special_col = -1;  // of the current row
  FillNumbers(numbers, [&](std::int64_t, std::int64_t, std::int64_t col) {
    if (col == 0) {
      const bool special = fill == Fill::kSpecial && random.Int(1, 4) == 1;
      special_col = special ? random.Int(0, numbers.cols - 1) : -1;
    }
    return col == special_col ? DrawSpecial(random, numbers.dtype) : DrawValue(random, fill, numbers.dtype);
  });
}

std::vector<float> DrawScales(const GpuCase& problem, DType dtype, std::int64_t count, Random& random) {
  if (oracle::LegalScales(dtype).size() == 1) return {};
  const bool exact = problem.fill == Fill::kIntegers || problem.fill == Fill::kOneHot;
  std::vector<float> scales(static_cast<std::size_t>(problem.vector_scales ? count : 1));
  for (float& scale : scales) {
    scale = exact ? static_cast<float>(1 << random.Int(0, 3)) / 4.0F : static_cast<float>(random.Uniform(0.25, 2));
    if (!exact && random.Int(0, 3) == 0) scale = -scale;
  }
  return scales;
}

std::vector<double> DrawBias(const GpuCase& problem, Random& random) {
  if (problem.bias == BiasMode::kNone) return {};
  const DType dtype = problem.bias == BiasMode::kBf16 ? DType::kBf16 : DType::kF32;
  std::vector<double> bias(static_cast<std::size_t>(problem.n));
  for (double& value : bias) {
    const bool special = problem.fill == Fill::kSpecial && random.Int(1, 16) == 1;
    std::array<std::byte, sizeof(float)> rounded{};
    oracle::Encode(dtype, special ? DrawSpecial(random, dtype) : DrawValue(random, problem.fill, dtype),
                   rounded.data());
    value = oracle::Decode(dtype, rounded.data());
  }
  return bias;
}

// --- Places ----------------------------------------------------------------------------------------------------------

// Strides, position of the first element and size; bytes are left empty. `lead` is the extent of the dimension that is
// not contiguous, `fine` of the one that is.
Placed Place(Placed placed, const View& view, bool cols_contiguous, bool tight) {
  const std::int64_t fine = cols_contiguous ? placed.cols : placed.rows;
  const std::int64_t lead = cols_contiguous ? placed.rows : placed.cols;
  const std::int64_t stride = RoundUp(std::max<std::int64_t>(fine * view.fine + view.padding, 1), view.pitch);
  placed.matrix.row_stride = cols_contiguous ? stride : view.fine;
  placed.matrix.col_stride = cols_contiguous ? view.fine : stride;
  // A repeated row is K-contiguous memory in a K-contiguous layout, and has the finer stride in the others.
  if (view.one_row) placed.matrix.row_stride = 0;
  std::int64_t last = (lead - 1) * stride + (fine - 1) * view.fine;
  std::int64_t matrix_elements = lead * stride;
  for (int dimension = kGemmBatchDimsMax - 1; dimension >= 0; --dimension) {
    if (placed.batch[dimension] > 1) placed.matrix.batch_stride[dimension] = matrix_elements;
    last += (placed.batch[dimension] - 1) * placed.matrix.batch_stride[dimension];
    matrix_elements *= placed.batch[dimension];
  }
  const std::int64_t elements = matrix_elements == 0 ? 0 : last + 1;
  const std::size_t size = DTypeBytes(placed.dtype);
  placed.first_byte = kGuardBytes + static_cast<std::size_t>(view.offset) * size;
  placed.bytes.resize(placed.first_byte + static_cast<std::size_t>(elements) * size + (tight ? 0 : kGuardBytes));
  return placed;
}

}  // namespace

std::vector<GpuCase> ConformanceCases() {
  std::vector<GpuCase> cases;
  AddAlignedCases(cases);
  AddTileEdgeCases(cases);
  AddPackedCases(cases);
  AddStridedCases(cases);
  AddBatchCases(cases);
  AddEpilogueCases(cases);
  AddValueCases(cases);
  AddLargeCases(cases);
  return cases;
}

GpuCase ControlCase(Fill fill) {
  GpuCase problem = Shape("control", 200, 144, 1040);
  problem.d = {.pitch = 16, .padding = 16};
  problem.vector_scales = false;
  problem.fill = fill;
  return problem;
}

CaseData MakeCaseData(const GpuCase& problem, DType a, DType b, std::uint64_t seed) {
  Random random(seed);
  CaseData data{.problem = problem,
                .a = EmptyNumbers(a, problem, problem.a, problem.m, problem.a_broadcast),
                .b = EmptyNumbers(b, problem, problem.b, problem.n, problem.b_broadcast)};
  if (problem.fill == Fill::kOneHot) {
    FillNumbers(data.a, [&](std::int64_t matrix, std::int64_t row, std::int64_t col) {
      return CountedValue(a, matrix, row, col);
    });
    FillNumbers(data.b, [&](std::int64_t matrix, std::int64_t row, std::int64_t col) {
      return col == SelectedK(matrix, row, problem.k) ? 1.0 : 0.0;
    });
  } else {
    FillRandom(data.a, problem.fill, random);
    FillRandom(data.b, problem.fill, random);
  }
  data.a_scales = DrawScales(problem, a, problem.m, random);
  data.b_scales = DrawScales(problem, b, problem.n, random);
  data.bias = DrawBias(problem, random);
  return data;
}

Placed PlaceInput(const Numbers& numbers, const View& view, bool cols_contiguous, bool tight) {
  Placed placed = Place({.dtype = numbers.dtype, .rows = numbers.rows, .cols = numbers.cols, .batch = numbers.batch},
                        view, cols_contiguous, tight);
  std::fill(placed.bytes.begin(), placed.bytes.end(), numbers.dtype == DType::kS8 ? kIntegerPattern : kFloatPattern);
  const std::size_t size = DTypeBytes(numbers.dtype);
  const std::byte* element = numbers.bytes.data();
  ForEachElement(placed, [&](std::size_t at) {
    std::memcpy(placed.bytes.data() + at, element, size);
    element += size;
  });
  return placed;
}

Placed PlaceOutput(const GpuCase& problem, DType dtype, bool tight) {
  return Place({.dtype = dtype, .rows = problem.m, .cols = problem.n, .batch = problem.batch}, problem.d,
               !problem.d_by_columns, tight);
}

}  // namespace tessera::gpu_test
