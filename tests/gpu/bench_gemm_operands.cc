#include "tests/gpu/bench_gemm_operands.h"

#include <utility>

#include "common/status_macros.h"
#include "tests/gpu/bench_gemm_data.h"

namespace tessera::gpu_test {
namespace {

// Of the operands of all sets together: more than three times the largest L2 cache there is, 60 MB.
constexpr std::int64_t kSetsBytes = std::int64_t{192} << 20;
constexpr int kNaN = 0xff;  // every byte of one, as bf16 and as f32

std::int64_t BytesOf(DType dtype, std::int64_t rows, std::int64_t cols) {
  return static_cast<std::int64_t>(DTypeBytes(dtype)) * rows * cols;
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> Allocate(std::int64_t bytes) {
  return AllocatePlain(static_cast<std::size_t>(bytes));
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> RandomMatrix(DType dtype, std::int64_t rows, std::int64_t cols,
                                                               std::uint64_t seed, const BenchStream& stream) {
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceAllocation> memory, Allocate(BytesOf(dtype, rows, cols)));
  RETURN_IF_ERROR(ToStatus(FillRandom(memory->data(), dtype, rows * cols, seed, stream.get()), "FillRandom"));
  return memory;
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> Output(DType dtype, std::int64_t rows, std::int64_t cols,
                                                         const BenchStream& stream) {
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceAllocation> memory, Allocate(BytesOf(dtype, rows, cols)));
  RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(memory->data(), kNaN, memory->bytes(), stream.get()), "poisoning an output"));
  return memory;
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> RandomScales(std::int64_t count, std::uint64_t seed,
                                                               const BenchStream& stream) {
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceAllocation> memory, Allocate(BytesOf(DType::kF32, 1, count)));
  auto* const scales = reinterpret_cast<float*>(memory->data());
  RETURN_IF_ERROR(ToStatus(FillScales(scales, count, seed, stream.get()), "FillScales"));
  return memory;
}

// An operand of `rows` by K, packed: K-contiguous or its transpose.
kernels::GemmMatrix Packed(std::byte* data, std::int64_t rows, std::int64_t k, bool by_k) {
  return {.data = data, .row_stride = by_k ? k : 1, .col_stride = by_k ? 1 : rows};
}

}  // namespace

absl::StatusOr<BenchOperands> BenchOperands::Make(const BenchCell& cell, const BenchStream& stream) {
  BenchOperands operands(cell);
  const std::int64_t bytes = BytesOf(cell.gemm_class.a, cell.m, cell.k) + BytesOf(cell.gemm_class.b, cell.n, cell.k);
  const std::int64_t sets = (kSetsBytes + bytes - 1) / bytes;
  for (std::int64_t i = 0; i < sets; ++i) RETURN_IF_ERROR(operands.AddSet(stream));
  RETURN_IF_ERROR(operands.MakeScales(stream));
  RETURN_IF_ERROR(stream.Wait());
  return operands;
}

absl::Status BenchOperands::AddSet(const BenchStream& stream) {
  const std::uint64_t seed = 10 + 2 * sets_.size();
  OneSet set;
  ASSIGN_OR_RETURN(set.a, RandomMatrix(cell_.gemm_class.a, cell_.m, cell_.k, seed, stream));
  ASSIGN_OR_RETURN(set.b, RandomMatrix(cell_.gemm_class.b, cell_.n, cell_.k, seed + 1, stream));
  ASSIGN_OR_RETURN(set.ours, Output(cell_.gemm_class.out, cell_.m, cell_.n, stream));
  ASSIGN_OR_RETURN(set.peers, Output(cell_.gemm_class.out, cell_.m, cell_.n, stream));
  sets_.push_back(std::move(set));
  return absl::OkStatus();
}

absl::Status BenchOperands::MakeScales(const BenchStream& stream) {
  if (cell_.scales == BenchScales::kNone) return absl::OkStatus();
  const bool vectors = cell_.scales == BenchScales::kRowCol;
  ASSIGN_OR_RETURN(a_scale_, RandomScales(vectors ? cell_.m : 1, 1, stream));
  ASSIGN_OR_RETURN(b_scale_, RandomScales(vectors ? cell_.n : 1, 2, stream));
  return absl::OkStatus();
}

kernels::GemmParams BenchOperands::Params(int i) const {
  const kernels::GemmLayout layout = cell_.gemm_class.layout;
  const bool a_by_k = layout == kernels::GemmLayout::kNT || layout == kernels::GemmLayout::kNN;
  const bool b_by_k = layout == kernels::GemmLayout::kNT || layout == kernels::GemmLayout::kTT;
  const OneSet& set = Set(i);
  kernels::GemmParams params;
  params.m = cell_.m;
  params.n = cell_.n;
  params.k = cell_.k;
  params.a = Packed(set.a->data(), cell_.m, cell_.k, a_by_k);
  params.b = Packed(set.b->data(), cell_.n, cell_.k, b_by_k);
  params.d = {.data = set.ours->data(), .row_stride = cell_.n, .col_stride = 1};
  const std::int64_t scale_stride = cell_.scales == BenchScales::kRowCol ? 1 : 0;
  if (cell_.scales == BenchScales::kNone) return params;
  params.a_scale = {.vector = a_scale(), .stride = scale_stride};
  params.b_scale = {.vector = b_scale(), .stride = scale_stride};
  return params;
}

}  // namespace tessera::gpu_test
