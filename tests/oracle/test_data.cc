// Lays operands out in guarded storages, fills them from a seeded generator and lists the shared cases.
#include "tests/oracle/test_data.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/oracle/codec.h"

namespace tessera::oracle {
namespace {

using kernels::GemmBias;
using kernels::GemmMatrix;
using kernels::GemmParams;
using kernels::GemmScale;
using kernels::kGemmBatchDimsMax;

using BatchShape = std::array<std::int64_t, kGemmBatchDimsMax>;
using BatchFlags = std::array<bool, kGemmBatchDimsMax>;

// 1.3e36 as bf16 and as fp32: finite, so that it differs from an expected NaN, and far from any result.
constexpr std::uint8_t kOutputPattern = 0x7b;
constexpr std::uint8_t kFloatInputPattern = 0xff;  // NaN in every float format
constexpr std::uint8_t kIntegerInputPattern = 0x7b;

constexpr std::int64_t kWorkMax = 1'000'000;  // batch * M * N * K of a listed case stays below

std::uint8_t InputPattern(DType dtype) {
  return dtype == DType::kS8 ? kIntegerInputPattern : kFloatInputPattern;
}

// Strides of one operand, the batch dimensions in which it has its own matrices, and the elements that it spans.
struct Placement {
  GemmMatrix matrix;
  BatchShape extents = {1, 1, 1};
  std::int64_t elements = 0;
};

Placement Place(const GemmCase& problem_case, std::int64_t rows, std::int64_t cols, bool cols_contiguous,
                const BatchFlags& broadcast) {
  Placement placement;
  const std::int64_t leading = (cols_contiguous ? cols : rows) + problem_case.padding;
  placement.matrix.row_stride = cols_contiguous ? leading : 1;
  placement.matrix.col_stride = cols_contiguous ? 1 : leading;
  placement.elements = leading * (cols_contiguous ? rows : cols);
  for (int dimension = kGemmBatchDimsMax - 1; dimension >= 0; --dimension) {
    if (broadcast[dimension]) continue;
    placement.matrix.batch_stride[dimension] = placement.elements;
    placement.extents[dimension] = problem_case.batch[dimension];
    placement.elements *= placement.extents[dimension];
  }
  return placement;
}

double DrawValue(Random& random, Fill fill, DType dtype) {
  if (fill == Fill::kIntegers) return static_cast<double>(random.Int(-3, 3));
  if (dtype == DType::kS8) return static_cast<double>(random.Int(-128, 127));
  return random.Uniform(-1, 1);
}

double DrawSpecial(Random& random, DType dtype) {
  if (dtype == DType::kS8) return random.Int(0, 1) == 0 ? -128 : 127;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::array<double, 3> kSpecials = {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity};
  return kSpecials[static_cast<std::size_t>(random.Int(0, 2))];
}

// Powers of two for the exact fill: then the order of the multiplications does not show.
float DrawScale(Random& random, Fill fill) {
  if (fill == Fill::kIntegers) return std::ldexp(1.0F, static_cast<int>(random.Int(-2, 2)));
  const double magnitude = random.Uniform(0.25, 2);
  return static_cast<float>(random.Int(0, 3) == 0 ? -magnitude : magnitude);
}

bool OneIn(Random& random, std::int64_t n) {
  return random.Int(1, n) == 1;
}

void FillRow(Random& random, Fill fill, DType dtype, const GemmMatrix& matrix, std::int64_t cols, std::byte* row) {
  const auto step = matrix.col_stride * static_cast<std::int64_t>(DTypeBytes(dtype));
  for (std::int64_t col = 0; col < cols; ++col) Encode(dtype, DrawValue(random, fill, dtype), row + col * step);
  if (fill == Fill::kSpecial && cols > 0 && OneIn(random, 4)) {
    Encode(dtype, DrawSpecial(random, dtype), row + random.Int(0, cols - 1) * step);
  }
}

// Every element of A or B that the view reaches, each once.
void FillMatrix(Random& random, Fill fill, DType dtype, const Placement& placement, std::int64_t rows,
                std::int64_t cols, std::byte* first) {
  const auto bytes = static_cast<std::int64_t>(DTypeBytes(dtype));
  const std::int64_t* stride = placement.matrix.batch_stride;
  for (std::int64_t i = 0; i < placement.extents[0]; ++i) {
    for (std::int64_t j = 0; j < placement.extents[1]; ++j) {
      for (std::int64_t l = 0; l < placement.extents[2]; ++l) {
        const std::int64_t matrix = i * stride[0] + j * stride[1] + l * stride[2];
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t offset = matrix + row * placement.matrix.row_stride;
          FillRow(random, fill, dtype, placement.matrix, cols, first + offset * bytes);
        }
      }
    }
  }
}

std::string_view Name(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kNone:
      return "none";
    case ScaleMode::kScalar:
      return "scalar";
    case ScaleMode::kTensor:
      return "tensor";
    case ScaleMode::kVector:
      return "vector";
  }
  return "?";
}

std::string_view Name(BiasMode mode) {
  switch (mode) {
    case BiasMode::kNone:
      return "none";
    case BiasMode::kF32:
      return "f32";
    case BiasMode::kBf16:
      return "bf16";
  }
  return "?";
}

std::string_view Name(Fill fill) {
  switch (fill) {
    case Fill::kUniform:
      return "uniform";
    case Fill::kIntegers:
      return "integers";
    case Fill::kSpecial:
      return "special";
  }
  return "?";
}

// Batch extents, each marked "*" where the operand is broadcast.
void PrintBatch(std::ostream& text, std::string_view operand, const BatchShape& batch, const BatchFlags& broadcast) {
  text << " " << operand << "_batch=";
  for (int dimension = 0; dimension < kGemmBatchDimsMax; ++dimension) {
    text << (dimension == 0 ? "" : "x") << batch[dimension] << (broadcast[dimension] ? "*" : "");
  }
}

// The listed cases before type, layout and scales are set.
std::vector<GemmCase> BaseCases() {
  constexpr auto kF32 = BiasMode::kF32;
  constexpr auto kBf16 = BiasMode::kBf16;
  constexpr auto kIntegers = Fill::kIntegers;
  constexpr auto kSpecial = Fill::kSpecial;
  return {
      // Empty sizes: no result, or bias alone.
      {.m = 0, .n = 16, .k = 16},
      {.m = 16, .n = 0, .k = 16, .bias = kF32},
      {.m = 2, .n = 7, .k = 0},
      {.m = 16, .n = 17, .k = 0, .bias = kF32},
      {.m = 7, .n = 65, .k = 0, .bias = kBf16, .padding = 3},
      // Single rows, columns and terms.
      {.m = 1, .n = 1, .k = 1},
      {.m = 1, .n = 130, .k = 65, .bias = kF32},
      {.m = 130, .n = 1, .k = 33, .bias = kBf16},
      {.m = 33, .n = 64, .k = 1, .fill = kIntegers},
      {.m = 1, .n = 16, .k = 4099, .fill = kIntegers},
      // Below, at and above likely tile edges.
      {.m = 2, .n = 7, .k = 16},
      {.m = 7, .n = 2, .k = 17, .bias = kF32, .fill = kIntegers},
      {.m = 16, .n = 16, .k = 16, .fill = kIntegers},
      {.m = 17, .n = 33, .k = 7, .bias = kBf16},
      {.m = 64, .n = 64, .k = 64, .bias = kF32},
      {.m = 65, .n = 65, .k = 65, .bias = kBf16, .fill = kIntegers},
      {.m = 64, .n = 130, .k = 65},
      {.m = 130, .n = 64, .k = 33, .bias = kF32, .fill = kIntegers},
      {.m = 130, .n = 130, .k = 17},
      // Primes, and a K long enough to be split.
      {.m = 97, .n = 53, .k = 31, .bias = kBf16},
      {.m = 13, .n = 101, .k = 211},
      {.m = 16, .n = 17, .k = 2053, .bias = kF32},
      // Batches.
      {.m = 17, .n = 16, .k = 33, .batch = {1, 1, 3}, .bias = kF32},
      {.m = 7, .n = 33, .k = 16, .batch = {1, 2, 3}, .b_broadcast = {true, true, true}, .fill = kIntegers},
      {.m = 16, .n = 7, .k = 17, .batch = {2, 1, 3}, .a_broadcast = {true, false, false}, .bias = kBf16},
      {.m = 33,
       .n = 17,
       .k = 7,
       .batch = {2, 2, 2},
       .a_broadcast = {false, true, false},
       .b_broadcast = {true, false, true},
       .padding = 3,
       .offset = 1},
      // Rows wider than the matrix, first elements off alignment, strided vectors.
      {.m = 65, .n = 33, .k = 64, .bias = kF32, .padding = 16},
      {.m = 64, .n = 64, .k = 64, .bias = kBf16, .fill = kIntegers, .offset = 1},
      {.m = 33, .n = 65, .k = 130, .bias = kF32, .padding = 5, .offset = 1, .vector_stride = 3},
      // NaN and infinity.
      {.m = 17, .n = 64, .k = 65, .bias = kF32, .fill = kSpecial},
      {.m = 65, .n = 130, .k = 33, .fill = kSpecial, .padding = 7, .offset = 3},
  };
}

std::int64_t Work(const GemmCase& problem_case) {
  std::int64_t work = problem_case.m * problem_case.n * problem_case.k;
  for (const std::int64_t extent : problem_case.batch) work *= extent;
  return work;
}

}  // namespace

std::uint64_t Random::Next() {
  state_ += 0x9e3779b97f4a7c15U;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31);
}

double Random::Uniform(double lo, double hi) {
  const double fraction = static_cast<double>(Next() >> 11) * 0x1p-53;
  return lo + (hi - lo) * fraction;
}

std::int64_t Random::Int(std::int64_t lo, std::int64_t hi) {
  // The remainder's bias is below 2^-32 for so few values.
  return lo + static_cast<std::int64_t>(Next() % static_cast<std::uint64_t>(hi - lo + 1));
}

std::string GemmCase::Describe() const {
  std::ostringstream text;
  text << DTypeName(a) << "_" << DTypeName(b) << "." << DTypeName(d) << " " << layout << " m=" << m << " n=" << n
       << " k=" << k;
  PrintBatch(text, "a", batch, a_broadcast);
  PrintBatch(text, "b", batch, b_broadcast);
  text << " a_scale=" << Name(a_scale) << " b_scale=" << Name(b_scale) << " bias=" << Name(bias)
       << " fill=" << Name(fill) << " padding=" << padding << " offset=" << offset
       << " vector_stride=" << vector_stride;
  return text.str();
}

std::vector<ScaleMode> LegalScales(DType operand) {
  if (operand == DType::kS8) return {ScaleMode::kVector, ScaleMode::kScalar, ScaleMode::kTensor};
  if (IsFp8(operand)) return {ScaleMode::kVector, ScaleMode::kNone, ScaleMode::kScalar, ScaleMode::kTensor};
  return {ScaleMode::kNone};
}

std::vector<GemmCase> StandardCases(DType a, DType b, DType d, std::string_view layout) {
  const std::vector<ScaleMode> a_scales = LegalScales(a);
  const std::vector<ScaleMode> b_scales = LegalScales(b);
  std::vector<GemmCase> cases = BaseCases();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    cases[i].a = a;
    cases[i].b = b;
    cases[i].d = d;
    cases[i].layout = layout;
    // Counts through every combination, A's mode fastest.
    cases[i].a_scale = a_scales[i % a_scales.size()];
    cases[i].b_scale = b_scales[i / a_scales.size() % b_scales.size()];
  }
  return cases;
}

GemmCase RandomCase(Random& random, DType a, DType b, DType d, std::string_view layout) {
  const auto pick = [&random](const auto& choices) {
    return choices[static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(choices.size()) - 1))];
  };
  GemmCase drawn;
  drawn.a = a;
  drawn.b = b;
  drawn.d = d;
  drawn.layout = layout;
  drawn.m = random.Int(0, 200);
  drawn.n = random.Int(0, 200);
  drawn.k = random.Int(0, OneIn(random, 4) ? 3000 : 200);
  for (int dimension = 0; dimension < kGemmBatchDimsMax; ++dimension) {
    if (OneIn(random, 3)) drawn.batch[dimension] = random.Int(1, 4);
    drawn.a_broadcast[dimension] = OneIn(random, 3);
    drawn.b_broadcast[dimension] = OneIn(random, 3);
  }
  drawn.a_scale = pick(LegalScales(a));
  drawn.b_scale = pick(LegalScales(b));
  drawn.bias = pick(std::array{BiasMode::kNone, BiasMode::kF32, BiasMode::kBf16});
  drawn.fill = pick(std::array{Fill::kUniform, Fill::kUniform, Fill::kIntegers, Fill::kSpecial});
  drawn.padding = OneIn(random, 2) ? random.Int(0, 20) : 0;
  drawn.offset = OneIn(random, 2) ? random.Int(0, 20) : 0;
  drawn.vector_stride = OneIn(random, 4) ? random.Int(1, 4) : 1;
  while (Work(drawn) >= kWorkMax) {
    std::int64_t& longest = std::max({std::ref(drawn.m), std::ref(drawn.n), std::ref(drawn.k)});
    longest /= 2;
  }
  return drawn;
}

GuardedStorage::GuardedStorage(DType dtype, std::int64_t elements, std::int64_t offset, std::uint8_t pattern) {
  const auto used = static_cast<std::size_t>(offset + elements) * DTypeBytes(dtype);
  Line line{};
  line.bytes.fill(pattern);
  lines_.assign(used / kLineBytes + 3, line);  // a guard line in front and a whole one behind the last element
  first_byte_ = kLineBytes + static_cast<std::size_t>(offset) * DTypeBytes(dtype);
}

std::byte* GuardedStorage::first() {
  return bytes() + first_byte_;
}
std::byte* GuardedStorage::bytes() {
  return reinterpret_cast<std::byte*>(lines_.data());
}
const std::byte* GuardedStorage::bytes() const {
  return reinterpret_cast<const std::byte*>(lines_.data());
}

// FNV-1a over 64-bit words; the size is a multiple of the line.
std::uint64_t GuardedStorage::Hash() const {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (std::size_t at = 0; at < size(); at += sizeof hash) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes() + at, sizeof word);
    hash = (hash ^ word) * 0x100000001b3U;
  }
  return hash;
}

GemmProblem::GemmProblem(const GemmCase& problem_case, std::uint64_t seed)
    : types_{problem_case.a, problem_case.b, problem_case.d} {
  Random random(seed);
  const GemmCase& c = problem_case;
  params_.m = c.m;
  params_.n = c.n;
  params_.k = c.k;
  std::copy(c.batch.begin(), c.batch.end(), params_.batch_shape);

  const Placement a = Place(c, c.m, c.k, c.layout.at(0) != 'T', c.a_broadcast);
  params_.a = a.matrix;
  GuardedStorage a_storage(c.a, a.elements, c.offset, InputPattern(c.a));
  FillMatrix(random, c.fill, c.a, a, c.m, c.k, a_storage.first());
  params_.a.data = AddInput("A", std::move(a_storage));

  const Placement b = Place(c, c.n, c.k, c.layout.at(1) == 'T', c.b_broadcast);
  params_.b = b.matrix;
  GuardedStorage b_storage(c.b, b.elements, c.offset, InputPattern(c.b));
  FillMatrix(random, c.fill, c.b, b, c.n, c.k, b_storage.first());
  params_.b.data = AddInput("B", std::move(b_storage));

  params_.a_scale = MakeScale("a_scale", c, c.a_scale, c.m, random);
  params_.b_scale = MakeScale("b_scale", c, c.b_scale, c.n, random);
  params_.bias = MakeBias(c, random);

  const Placement d = Place(c, c.m, c.n, true, {});
  params_.d = d.matrix;
  output_ = GuardedStorage(c.d, d.elements, c.offset, kOutputPattern);
  params_.d.data = output_.first();
}

// Keeps a filled storage and its hash; returns its first element, whose address a move does not change.
std::byte* GemmProblem::AddInput(std::string_view name, GuardedStorage storage) {
  const std::uint64_t hash = storage.Hash();
  inputs_.push_back(Input{std::string(name), std::move(storage), hash});
  return inputs_.back().storage.first();
}

GemmScale GemmProblem::MakeScale(std::string_view name, const GemmCase& problem_case, ScaleMode mode,
                                 std::int64_t values, Random& random) {
  GemmScale scale;
  if (mode == ScaleMode::kNone) return scale;
  if (mode == ScaleMode::kScalar) {
    scale.scalar = DrawScale(random, problem_case.fill);
    return scale;
  }
  scale.stride = mode == ScaleMode::kVector ? problem_case.vector_stride : 0;
  const std::int64_t drawn = mode == ScaleMode::kVector ? values : 1;
  const std::int64_t spacing = std::max<std::int64_t>(scale.stride, 1);
  GuardedStorage storage(DType::kF32, drawn * spacing, problem_case.offset, kFloatInputPattern);
  for (std::int64_t i = 0; i < drawn; ++i) {
    Encode(DType::kF32, DrawScale(random, problem_case.fill), storage.first() + i * spacing * 4);
  }
  scale.scalar = std::numeric_limits<float>::quiet_NaN();  // must not be read where there is a vector
  scale.vector = reinterpret_cast<const float*>(AddInput(name, std::move(storage)));
  return scale;
}

GemmBias GemmProblem::MakeBias(const GemmCase& problem_case, Random& random) {
  GemmBias bias;
  if (problem_case.bias == BiasMode::kNone) return bias;
  bias.dtype = problem_case.bias == BiasMode::kBf16 ? DType::kBf16 : DType::kF32;
  bias.stride = problem_case.vector_stride;
  const auto bytes = static_cast<std::int64_t>(DTypeBytes(bias.dtype));
  GuardedStorage storage(bias.dtype, params_.n * bias.stride, problem_case.offset, kFloatInputPattern);
  for (std::int64_t i = 0; i < params_.n; ++i) {
    const bool special = problem_case.fill == Fill::kSpecial && OneIn(random, 16);
    const double value = special ? DrawSpecial(random, bias.dtype) : DrawValue(random, problem_case.fill, bias.dtype);
    Encode(bias.dtype, value, storage.first() + i * bias.stride * bytes);
  }
  bias.data = AddInput("bias", std::move(storage));
  return bias;
}

void GemmProblem::PoisonOutput() {
  std::memset(output_.bytes(), kOutputPattern, output_.size());
}

// Which bytes of D's storage belong to the view.
std::vector<bool> GemmProblem::OutputBytes() const {
  std::vector<bool> owned(output_.size());
  const std::size_t bytes = DTypeBytes(types_.d);
  for (std::int64_t batch = 0; batch < BatchCount(params_); ++batch) {
    for (std::int64_t m = 0; m < params_.m; ++m) {
      for (std::int64_t n = 0; n < params_.n; ++n) {
        const auto element = static_cast<std::size_t>(ElementOffset(params_, params_.d, batch, m, n));
        const std::size_t begin = output_.first_byte() + element * bytes;
        for (std::size_t at = begin; at < begin + bytes; ++at) owned[at] = true;
      }
    }
  }
  return owned;
}

bool GemmProblem::GuardsIntact(std::string* where) const {
  for (const Input& input : inputs_) {
    if (input.storage.Hash() == input.hash) continue;
    *where = "input " + input.name + " was changed";
    return false;
  }
  const std::vector<bool> owned = OutputBytes();
  for (std::size_t at = 0; at < output_.size(); ++at) {
    if (owned[at] || output_.bytes()[at] == std::byte{kOutputPattern}) continue;
    const auto distance = static_cast<std::int64_t>(at) - static_cast<std::int64_t>(output_.first_byte());
    *where = "byte " + std::to_string(distance) + " from D's first element, outside the view, was written";
    return false;
  }
  return true;
}

}  // namespace tessera::oracle
