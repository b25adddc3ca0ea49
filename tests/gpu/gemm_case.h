// The GEMM problems of the GPU conformance program: which shapes, how their operands lie in memory, and the bytes. One
// case is one set of numbers; a layout only places the same numbers elsewhere, so that one truth serves all variants of
// a pair of types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_params.h"
#include "tests/oracle/test_data.h"

namespace tessera::gpu_test {

enum class Fill {
  kUniform,   // floats in [-1, 1), s8 over its whole range
  kSpecial,   // kUniform, with NaN or infinity (s8: its extremes) in about a quarter of the rows of A and B
  kIntegers,  // -3..3: every intermediate is exact in float32
  kOneHot,    // A counts, a row of B selects one K: D is a gather of A, bit for bit
  kLargest,   // s8: -128 throughout, the largest products there are; floats as kUniform
};

// How an operand lies in memory. `fine` is the stride of the contiguous dimension that its layout names; the other
// dimension's stride is what that takes, plus `padding`, rounded up to a multiple of `pitch`. In elements.
struct View {
  std::int64_t fine = 1;
  std::int64_t pitch = 1;
  std::int64_t padding = 0;
  std::int64_t offset = 0;  // of the first element from a 256-byte boundary
  bool one_row = false;     // row stride 0: every row is the same memory
};

inline constexpr View kPacked = {};
inline constexpr View kAligned = {.pitch = 16};  // every stride but the contiguous one is a multiple of 16 bytes

struct GpuCase {
  std::string name;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  View a = kAligned;
  View b = kAligned;
  View d = kAligned;
  bool d_by_columns = false;                                               // D's rows have stride 1
  std::array<std::int64_t, kernels::kGemmBatchDimsMax> batch = {1, 1, 1};  // slowest first
  std::array<bool, kernels::kGemmBatchDimsMax> a_broadcast = {};
  std::array<bool, kernels::kGemmBatchDimsMax> b_broadcast = {};
  oracle::BiasMode bias = oracle::BiasMode::kNone;
  std::int64_t bias_stride = 1;
  std::int64_t bias_offset = 0;
  bool vector_scales = true;  // for types that take scales: one a row and channel, else one for all
  Fill fill = Fill::kUniform;
  bool raster = false;   // also launched with other walks over the tiles, which must not change a bit
  bool reduced = false;  // small enough for compute-sanitizer

  std::int64_t Matrices() const { return batch[0] * batch[1] * batch[2]; }
  std::int64_t Elements() const { return Matrices() * m * n; }
  std::int64_t Products() const { return Elements() * k; }
};

std::vector<GpuCase> ConformanceCases();

// What damaged launches are compared on: several K tiles of every variant, aligned for all of them, padded rows of D.
GpuCase ControlCase(Fill fill);

// The numbers of one operand without a place: packed [batch.., rows, cols], broadcast dimensions once.
struct Numbers {
  DType dtype = DType::kUnspecified;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::array<std::int64_t, kernels::kGemmBatchDimsMax> batch = {1, 1, 1};
  std::vector<std::byte> bytes;
};

struct CaseData {
  GpuCase problem;
  Numbers a;
  Numbers b;
  std::vector<float> a_scales;  // empty = none: scalar 1
  std::vector<float> b_scales;
  std::vector<double> bias;  // exact in the bias's type; one a column, empty = none
};

// The same case, pair and seed give the same numbers on every machine.
CaseData MakeCaseData(const GpuCase& problem, DType a, DType b, std::uint64_t seed);

// Memory of one operand as it is copied to the device: a guard, the view and what lies between its elements, a guard.
// The first element's address modulo 256 is the view's offset.
struct Placed {
  kernels::GemmMatrix matrix;  // strides; data is null
  DType dtype = DType::kUnspecified;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::array<std::int64_t, kernels::kGemmBatchDimsMax> batch = {1, 1, 1};  // matrices of its own in each dimension
  std::size_t first_byte = 0;
  std::vector<std::byte> bytes;
};

// Bytes outside the view decode as NaN (s8: 123), so that a stray read shows. `tight`: no guard behind the last
// element, so that a tool which knows the allocation sees a read beyond it.
Placed PlaceInput(const Numbers& numbers, const View& view, bool cols_contiguous, bool tight);

// D's memory; its bytes are whatever the run is poisoned with.
Placed PlaceOutput(const GpuCase& problem, DType dtype, bool tight);

// f(byte offset of the element in the placed bytes) in the order [batch.., row, col].
template <typename Visit>
void ForEachElement(const Placed& placed, const Visit& visit) {
  const auto size = static_cast<std::int64_t>(DTypeBytes(placed.dtype));
  const kernels::GemmMatrix& matrix = placed.matrix;
  for (std::int64_t i = 0; i < placed.batch[0]; ++i) {
    for (std::int64_t j = 0; j < placed.batch[1]; ++j) {
      for (std::int64_t l = 0; l < placed.batch[2]; ++l) {
        const std::int64_t start = i * matrix.batch_stride[0] + j * matrix.batch_stride[1] + l * matrix.batch_stride[2];
        for (std::int64_t row = 0; row < placed.rows; ++row) {
          std::int64_t element = start + row * matrix.row_stride;
          for (std::int64_t col = 0; col < placed.cols; ++col, element += matrix.col_stride) {
            visit(placed.first_byte + static_cast<std::size_t>(element * size));
          }
        }
      }
    }
  }
}

}  // namespace tessera::gpu_test
