// Operands and outputs of one cell of the GEMM benchmark, in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gemm/gemm_params.h"
#include "tests/gpu/bench_gemm.h"
#include "tests/gpu/bench_gemm_grid.h"
#include "tests/gpu/e2e_memory.h"

namespace tessera::gpu_test {

// So many sets of random numbers that no run finds its operands in the L2 cache. All sets share their scales. Outputs
// of ours and of the peer lie apart; they begin as NaN.
class BenchOperands {
 public:
  static absl::StatusOr<BenchOperands> Make(const BenchCell& cell, const BenchStream& stream);

  int sets() const { return static_cast<int>(sets_.size()); }
  // Ours. Any `i` stands for set i % sets(), here and below.
  kernels::GemmParams Params(int i) const;
  const std::byte* a(int i) const { return Set(i).a->data(); }
  const std::byte* b(int i) const { return Set(i).b->data(); }
  std::byte* ours(int i) const { return Set(i).ours->data(); }
  std::byte* peers(int i) const { return Set(i).peers->data(); }
  // Null where the cell has no scales.
  const float* a_scale() const { return Scale(a_scale_); }
  const float* b_scale() const { return Scale(b_scale_); }

 private:
  struct OneSet {
    std::unique_ptr<DeviceAllocation> a;
    std::unique_ptr<DeviceAllocation> b;
    std::unique_ptr<DeviceAllocation> ours;
    std::unique_ptr<DeviceAllocation> peers;
  };

  explicit BenchOperands(const BenchCell& cell) : cell_(cell) {}
  const OneSet& Set(int i) const { return sets_[static_cast<std::size_t>(i) % sets_.size()]; }
  static const float* Scale(const std::unique_ptr<DeviceAllocation>& scale) {
    return scale == nullptr ? nullptr : reinterpret_cast<const float*>(scale->data());
  }
  absl::Status AddSet(const BenchStream& stream);
  absl::Status MakeScales(const BenchStream& stream);

  const BenchCell cell_;
  std::vector<OneSet> sets_;
  std::unique_ptr<DeviceAllocation> a_scale_;
  std::unique_ptr<DeviceAllocation> b_scale_;
};

}  // namespace tessera::gpu_test
