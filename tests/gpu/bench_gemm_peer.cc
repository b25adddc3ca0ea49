// The library is column-major: D[M, N] by rows is its N x M matrix, the first operand X is our B and the second, Y, our
// A.
#include "tests/gpu/bench_gemm_peer.h"

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/gemm/vendor/library.h"

namespace tessera::gpu_test {
namespace {

using kernels::GemmLayout;
using kernels::vendor::TheLibrary;

constexpr int kProposalsMax = 8;

absl::Status PeerStatus(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string text = absl::StrCat(Av(what), ": cuBLASLt status ", static_cast<int>(status));
  const bool refused = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
                       status == CUBLAS_STATUS_ARCH_MISMATCH;
  return refused ? absl::UnimplementedError(text) : absl::InternalError(text);
}

cudaDataType_t DataType(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return CUDA_R_16BF;
    case DType::kE4m3:
      return CUDA_R_8F_E4M3;
    case DType::kE5m2:
      return CUDA_R_8F_E5M2;
    case DType::kS8:
      return CUDA_R_8I;
    case DType::kS32:
      return CUDA_R_32I;
    default:
      return CUDA_R_32F;
  }
}

// Column-major; `contiguous` is the extent whose elements are neighbours.
absl::StatusOr<cublasLtMatrixLayout_t> Layout(DType dtype, std::int64_t contiguous, std::int64_t other) {
  cublasLtMatrixLayout_t layout = nullptr;
  RETURN_IF_ERROR(
      PeerStatus(TheLibrary().layout_create(&layout, DataType(dtype), static_cast<std::uint64_t>(contiguous),
                                            static_cast<std::uint64_t>(other), contiguous),
                 "cublasLtMatrixLayoutCreate"));
  return layout;
}

bool AByK(GemmLayout layout) {
  return layout == GemmLayout::kNT || layout == GemmLayout::kNN;
}

bool BByK(GemmLayout layout) {
  return layout == GemmLayout::kNT || layout == GemmLayout::kTT;
}

template <typename Value>
absl::Status PutProduct(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  return PeerStatus(TheLibrary().desc_set(product, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
}

}  // namespace

absl::StatusOr<PeerProduct> PeerProduct::Make(const PeerSpec& spec) {
  if (!TheLibrary().unavailable.empty()) return absl::UnavailableError(TheLibrary().unavailable);
  PeerProduct made(spec);
  RETURN_IF_ERROR(PeerStatus(kernels::vendor::HandleOf(TheLibrary(), 0, made.handle_), "cublasLtCreate"));
  RETURN_IF_ERROR(made.DescribeProduct());
  RETURN_IF_ERROR(made.DescribeScales());
  RETURN_IF_ERROR(made.DescribeMatrices());
  RETURN_IF_ERROR(made.Propose());
  return made;
}

absl::Status PeerProduct::DescribeProduct() {
  const kernels::GemmClass& gemm_class = spec_.cell.gemm_class;
  cublasLtMatmulDesc_t raw = nullptr;
  RETURN_IF_ERROR(PeerStatus(TheLibrary().desc_create(&raw, Int8() ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F,
                                                      spec_.out == DType::kS32 ? CUDA_R_32I : CUDA_R_32F),
                             "cublasLtMatmulDescCreate"));
  product_ = Owned<cublasLtMatmulDesc_t>(raw, TheLibrary().desc_destroy);
  RETURN_IF_ERROR(
      PutProduct(raw, CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{BByK(gemm_class.layout) ? CUBLAS_OP_T : CUBLAS_OP_N}));
  RETURN_IF_ERROR(
      PutProduct(raw, CUBLASLT_MATMUL_DESC_TRANSB, std::int32_t{AByK(gemm_class.layout) ? CUBLAS_OP_N : CUBLAS_OP_T}));
  if (!IsFp8(gemm_class.a)) return absl::OkStatus();
  return PutProduct(raw, CUBLASLT_MATMUL_DESC_FAST_ACCUM,
                    static_cast<std::int8_t>(gemm_class.accumulation == kernels::Accumulation::kFast));
}

absl::Status PeerProduct::DescribeScales() {
  if (Int8() || spec_.cell.scales == BenchScales::kNone) return absl::OkStatus();
  cublasLtMatmulDesc_t product = product_.get();
  RETURN_IF_ERROR(PutProduct(product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, spec_.b_scale));
  RETURN_IF_ERROR(PutProduct(product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, spec_.a_scale));
  if (spec_.cell.scales == BenchScales::kTensor) return absl::OkStatus();
  const std::int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
  RETURN_IF_ERROR(PutProduct(product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode));
  return PutProduct(product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode);
}

absl::Status PeerProduct::DescribeMatrices() {
  const BenchCell& cell = spec_.cell;
  const bool a_by_k = AByK(cell.gemm_class.layout);
  const bool b_by_k = BByK(cell.gemm_class.layout);
  const auto own = [](absl::StatusOr<cublasLtMatrixLayout_t> layout, Owned<cublasLtMatrixLayout_t>& owned) {
    if (layout.ok()) owned = Owned<cublasLtMatrixLayout_t>(*layout, TheLibrary().layout_destroy);
    return layout.status();
  };
  RETURN_IF_ERROR(own(Layout(cell.gemm_class.b, b_by_k ? cell.k : cell.n, b_by_k ? cell.n : cell.k), x_));
  RETURN_IF_ERROR(own(Layout(cell.gemm_class.a, a_by_k ? cell.k : cell.m, a_by_k ? cell.m : cell.k), y_));
  return own(Layout(spec_.out, cell.n, cell.m), d_);
}

// All that it does with its defaults, so sums that are reduced in the output's type, too: the strongest peer. Operands
// are aligned as the library takes for granted, to 256 bytes.
absl::Status PeerProduct::Propose() {
  cublasLtMatmulPreference_t raw = nullptr;
  RETURN_IF_ERROR(PeerStatus(TheLibrary().preference_create(&raw), "cublasLtMatmulPreferenceCreate"));
  const Owned<cublasLtMatmulPreference_t> preference(raw, TheLibrary().preference_destroy);
  RETURN_IF_ERROR(PeerStatus(TheLibrary().preference_set(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                         &kPeerWorkspaceBytes, sizeof(kPeerWorkspaceBytes)),
                             "cublasLtMatmulPreferenceSetAttribute"));
  std::array<cublasLtMatmulHeuristicResult_t, kProposalsMax> results{};
  int count = 0;
  RETURN_IF_ERROR(PeerStatus(TheLibrary().get_heuristic(handle_, product_.get(), x_.get(), y_.get(), d_.get(), d_.get(),
                                                        raw, kProposalsMax, results.data(), &count),
                             "cublasLtMatmulAlgoGetHeuristic"));
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<std::size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) proposals_.push_back(result.algo);
  }
  return proposals_.empty() ? absl::UnimplementedError("cuBLASLt proposes nothing") : absl::OkStatus();
}

absl::Status PeerProduct::Enqueue(int proposal, const void* a, const void* b, void* d,
                                  const kernels::Workspace& workspace, cudaStream_t stream) const {
  constexpr float kOne = 1.0F;
  constexpr float kZero = 0.0F;
  constexpr std::int32_t kIntegerOne = 1;
  constexpr std::int32_t kIntegerZero = 0;
  const void* alpha = spec_.out == DType::kS8 ? &spec_.s8_factor : &kOne;
  const void* beta = &kZero;
  if (spec_.out == DType::kS32) {
    alpha = &kIntegerOne;
    beta = &kIntegerZero;
  }
  return PeerStatus(
      TheLibrary().matmul(handle_, product_.get(), alpha, b, x_.get(), a, y_.get(), beta, d, d_.get(), d, d_.get(),
                          &proposals_[static_cast<std::size_t>(proposal)], workspace.scratch, workspace.bytes, stream),
      "cublasLtMatmul");
}

}  // namespace tessera::gpu_test
