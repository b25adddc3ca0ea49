// cuBLASLt as the GEMM benchmark's peer: one product, with all that the library's heuristics propose for it.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/launch/launch.h"
#include "tests/gpu/bench_gemm_grid.h"

namespace tessera::gpu_test {

// Twice what the library advises for Hopper.
inline constexpr std::size_t kPeerWorkspaceBytes = std::size_t{64} << 20;

struct PeerSpec {
  BenchCell cell;
  DType out = DType::kBf16;  // of the library's product: for int8 s32, or s8
  // Device memory, as many values as the cell's scales say; an int8 product has none of them.
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
  float s8_factor = 1.0F;  // of the sums, before they are rounded to s8
};

// Operands lie packed, as the cell's layout says.
class PeerProduct {
 public:
  // UNIMPLEMENTED if the library has no such product, UNAVAILABLE if it is not there.
  static absl::StatusOr<PeerProduct> Make(const PeerSpec& spec);

  int proposals() const { return static_cast<int>(proposals_.size()); }
  absl::Status Enqueue(int proposal, const void* a, const void* b, void* d, const kernels::Workspace& workspace,
                       cudaStream_t stream) const;

 private:
  template <typename Handle>
  using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

  explicit PeerProduct(const PeerSpec& spec) : spec_(spec) {}
  bool Int8() const { return spec_.cell.gemm_class.a == DType::kS8; }
  absl::Status DescribeProduct();
  absl::Status DescribeScales();
  absl::Status DescribeMatrices();
  absl::Status Propose();

  PeerSpec spec_;
  cublasLtHandle_t handle_ = nullptr;
  Owned<cublasLtMatmulDesc_t> product_{nullptr, nullptr};
  Owned<cublasLtMatrixLayout_t> x_{nullptr, nullptr};
  Owned<cublasLtMatrixLayout_t> y_{nullptr, nullptr};
  Owned<cublasLtMatrixLayout_t> d_{nullptr, nullptr};
  std::vector<cublasLtMatmulAlgo_t> proposals_;
};

}  // namespace tessera::gpu_test
