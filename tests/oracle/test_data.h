// Seeded GEMM problems for tests: the description of a case, its operands in guarded host memory, and the shared lists
// of cases. The same case and seed give the same bytes on every machine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "kernels/gemm/gemm_params.h"
#include "tests/oracle/gemm_oracle.h"

namespace tessera::oracle {

// splitmix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Next();
  double Uniform(double lo, double hi);                // [lo, hi)
  std::int64_t Int(std::int64_t lo, std::int64_t hi);  // both ends included; fewer than 2^32 values

 private:
  std::uint64_t state_;
};

enum class ScaleMode {
  kNone,    // scalar 1
  kScalar,  // by value in the parameters
  kTensor,  // one value in memory, stride 0
  kVector,  // one value a row of A or channel of B
};

enum class BiasMode { kNone, kF32, kBf16 };

enum class Fill {
  kUniform,   // floats in [-1, 1), s8 over its whole range, scales of either sign
  kIntegers,  // -3..3, scales powers of two: every intermediate is exact in fp32
  kSpecial,   // kUniform, with NaN or infinity (s8: its extremes) in about a quarter of the rows of A and B
};

struct GemmCase {
  DType a = DType::kBf16;
  DType b = DType::kBf16;
  DType d = DType::kF32;
  std::string layout = "NT";  // A is K-contiguous unless the first letter is T, B only if the second is T
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::array<std::int64_t, kernels::kGemmBatchDimsMax> batch = {1, 1, 1};  // slowest first
  std::array<bool, kernels::kGemmBatchDimsMax> a_broadcast = {};           // A has stride 0 in that dimension
  std::array<bool, kernels::kGemmBatchDimsMax> b_broadcast = {};
  ScaleMode a_scale = ScaleMode::kNone;
  ScaleMode b_scale = ScaleMode::kNone;
  BiasMode bias = BiasMode::kNone;
  Fill fill = Fill::kUniform;
  std::int64_t padding = 0;        // elements between two rows (columns) of A, B and D
  std::int64_t offset = 0;         // elements before the first one of every operand, from a 256-byte boundary
  std::int64_t vector_stride = 1;  // of scale vectors and bias

  std::string Describe() const;
};

// Every pair of operand types that a GEMM takes, and every layout.
inline constexpr std::array<std::pair<DType, DType>, 8> kGemmPairs = {{{DType::kBf16, DType::kBf16},
                                                                       {DType::kE4m3, DType::kE4m3},
                                                                       {DType::kE4m3, DType::kE5m2},
                                                                       {DType::kE5m2, DType::kE4m3},
                                                                       {DType::kE5m2, DType::kE5m2},
                                                                       {DType::kS8, DType::kS8},
                                                                       {DType::kBf16, DType::kS8},
                                                                       {DType::kS8, DType::kBf16}}};
inline constexpr std::array<const char*, 4> kGemmLayouts = {"NT", "NN", "TN", "TT"};

// Scale modes that a GEMM takes for an operand of that type: s8 requires a scale, fp8 takes one, others none.
std::vector<ScaleMode> LegalScales(DType operand);

// Small cases for conformance tests: edges, primes, empty sizes, batches with broadcast, padding, misalignment, every
// legal combination of scales, each bias and each fill. batch * M * N * K < 10^6 each.
std::vector<GemmCase> StandardCases(DType a, DType b, DType d, std::string_view layout);

// A case drawn from the whole space, batch * M * N * K < 10^6.
GemmCase RandomCase(Random& random, DType a, DType b, DType d, std::string_view layout);

// Host memory of one operand: bytes of one pattern, guards in front and behind, the first element `offset` elements
// after a 256-byte boundary.
class GuardedStorage {
 public:
  GuardedStorage() = default;
  GuardedStorage(DType dtype, std::int64_t elements, std::int64_t offset, std::uint8_t pattern);

  std::byte* first();  // element 0
  std::byte* bytes();  // the whole of it, guards included
  const std::byte* bytes() const;
  std::size_t size() const { return lines_.size() * sizeof(Line); }
  std::size_t first_byte() const { return first_byte_; }  // where element 0 lies in bytes()
  std::uint64_t Hash() const;

 private:
  static constexpr std::size_t kLineBytes = 256;
  struct alignas(kLineBytes) Line {
    std::array<std::uint8_t, kLineBytes> bytes;
  };

  std::vector<Line> lines_;
  std::size_t first_byte_ = 0;
};

// Operands of a case, filled; D holds a pattern that no result has. Bytes of A and B outside their views decode as NaN
// (s8: 123), so that a stray read shows in the result. Move-only: the parameters point into the storages.
class GemmProblem {
 public:
  GemmProblem(const GemmCase& problem_case, std::uint64_t seed);
  GemmProblem(GemmProblem&&) = default;
  GemmProblem& operator=(GemmProblem&&) = default;
  GemmProblem(const GemmProblem&) = delete;
  GemmProblem& operator=(const GemmProblem&) = delete;

  const kernels::GemmParams& params() const { return params_; }
  const GemmTypes& types() const { return types_; }

  // Overwrites D, its padding and its guards with the pattern, as after construction.
  void PoisonOutput();

  // Whether every byte of D's storage outside the view still holds the pattern and every input is unchanged. Else
  // `where` names the first difference.
  bool GuardsIntact(std::string* where) const;

 private:
  struct Input {
    std::string name;
    GuardedStorage storage;
    std::uint64_t hash = 0;
  };

  std::byte* AddInput(std::string_view name, GuardedStorage storage);
  kernels::GemmScale MakeScale(std::string_view name, const GemmCase& problem_case, ScaleMode mode, std::int64_t values,
                               Random& random);
  kernels::GemmBias MakeBias(const GemmCase& problem_case, Random& random);
  std::vector<bool> OutputBytes() const;

  kernels::GemmParams params_;
  GemmTypes types_;
  std::vector<Input> inputs_;
  GuardedStorage output_;
};

}  // namespace tessera::oracle
