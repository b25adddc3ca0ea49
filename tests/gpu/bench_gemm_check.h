// Whether products of the GEMM benchmark are right, for a wrong one is measured in vain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gemm/gemm_params.h"
#include "tests/gpu/bench_gemm.h"
#include "tests/gpu/bench_gemm_grid.h"

namespace tessera::gpu_test {

// Knows some elements of one product in float64, rows and columns at odd distances up to the last, so that they lie
// everywhere in the tiles of a kernel. Waits for the stream in each call.
class Referee {
 public:
  // Of the product of `params`, whose D is not looked at.
  static absl::StatusOr<Referee> Make(const BenchCell& cell, const kernels::GemmParams& params,
                                      const BenchStream& stream);

  // DATA_LOSS if `d`, packed and in device memory, is not that product.
  absl::Status CheckOurs(const std::byte* d) const { return CheckSamples(d, OursAllowed()); }
  absl::Status CheckPeer(const std::byte* d) const { return CheckSamples(d, PeerAllowed()); }
  // DATA_LOSS if any element of the two differs by more than both may be wrong; for this product and others like it.
  absl::Status CheckAlike(const std::byte* ours, const std::byte* peer) const;

 private:
  // Indices of an extent: first, first + step, ..., the last one.
  struct Walk {
    std::int64_t first = 0;
    std::int64_t step = 1;
    std::int64_t count = 0;
  };
  static Walk WalkOver(std::int64_t extent);
  // `matrix` from the walk's first row on, in its steps; likewise for the scale of those rows.
  static void Narrow(const Walk& walk, DType dtype, kernels::GemmMatrix& matrix, kernels::GemmScale& scale);

  Referee(const BenchCell& cell, const BenchStream& stream)
      : cell_(cell), stream_(stream), rows_(WalkOver(cell.m)), cols_(WalkOver(cell.n)) {}
  absl::Status ComputeTruth(kernels::GemmParams params);
  absl::Status CheckSamples(const std::byte* d, double allowed) const;
  // Of an error, in units of sum_k |a b| / sqrt(K): what the sum's own size is to within a small factor.
  double OursAllowed() const;
  double PeerAllowed() const;

  const BenchCell cell_;
  const BenchStream& stream_;
  const Walk rows_;
  const Walk cols_;
  std::vector<double> value_;  // of the samples, by rows
  std::vector<double> unit_;   // of errors, for each
};

}  // namespace tessera::gpu_test
