#include "kernels/gemm/vendor/cublaslt.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "kernels/gemm/vendor/bounded_cache.h"
#include "kernels/gemm/vendor/library.h"
#include "kernels/gemm/vendor/problem.h"

namespace tessera::kernels {
namespace vendor {
namespace {

constexpr int kProposals = 8;         // of the heuristics; its first choice is up to 1.7 times slower than its best
constexpr int kTimedRuns = 3;         // a proposal, after one that loads the kernel
constexpr float kLongRunMs = 5.0F;    // a run from here on is timed once
constexpr float kTuneLimitMs = 1e3F;  // GPU time for one problem; proposals are ordered, so the best guesses are in it
constexpr std::size_t kCacheEntries = 512;
constexpr std::size_t kWorkspaceUnit = std::size_t{1} << 20U;

cudaDataType_t DataType(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return CUDA_R_16BF;
    case DType::kE4m3:
      return CUDA_R_8F_E4M3;
    case DType::kE5m2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_32F;
  }
}

// The library's verdict as the launch contract has it. An error of CUDA itself says more than the library's.
LaunchError ToLaunchError(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return cudaSuccess;
    // Arguments are checked before the library sees them: what it calls invalid is a combination that it does not have,
    // or an attribute that its version does not know.
    case CUBLAS_STATUS_INVALID_VALUE:
    case CUBLAS_STATUS_NOT_SUPPORTED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return cudaErrorNotSupported;
    default:
      break;
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return cudaErrorMemoryAllocation;
  // An inner failure of the library without one of CUDA: the context is as good as before.
  return status == CUBLAS_STATUS_NOT_INITIALIZED ? cudaErrorInitializationError : cudaErrorNotSupported;
}

// The greatest power of two, 256 at most, that divides the address of every matrix.
std::int64_t AlignmentOf(const void* pointer, std::int64_t step_bytes) {
  const auto bits = reinterpret_cast<std::uintptr_t>(pointer) | static_cast<std::uintptr_t>(step_bytes) | 256U;
  return std::int64_t{1} << std::countr_zero(bits);
}

std::int64_t AlignmentOf(const StoredMatrix& matrix, DType dtype) {
  return AlignmentOf(matrix.data, matrix.batch_stride * static_cast<std::int64_t>(DTypeBytes(dtype)));
}

// Of an operand, what the library is told is no more than divides a column too. Told that columns begin at multiples of
// 16 bytes, it picks kernels that read each column's end in 16 bytes, past the last element of the last one: a fault
// where the allocation ends there (seen with cuBLASLt 13.1 under compute-sanitizer).
std::int64_t OperandAlignment(const StoredMatrix& matrix, DType dtype) {
  const auto bytes = static_cast<std::int64_t>(DTypeBytes(dtype));
  return AlignmentOf(matrix.data, matrix.batch_stride * bytes | matrix.rows * bytes);
}

// A descriptor of the library with the function that frees it.
template <typename Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

// Runs the steps of a description until one fails, and keeps that one's status.
class Steps {
 public:
  bool ok() const { return status_ == CUBLAS_STATUS_SUCCESS; }
  cublasStatus_t status() const { return status_; }
  void Took(cublasStatus_t status) {
    if (ok()) status_ = status;
  }

  template <typename Set, typename Handle, typename Attribute, typename Value>
  void Put(Set set, Handle handle, Attribute attribute, const Value& value) {
    if (ok()) status_ = set(handle, attribute, &value, sizeof(value));
  }

 private:
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
};

// One product with everything that the library wants to be told about it.
class Operation {
 public:
  Operation(const Library& library, cublasLtHandle_t handle, const GemmClass& gemm_class, const Problem& problem,
            const LaunchContext& context)
      : library_(library), handle_(handle), class_(gemm_class), problem_(problem), context_(context) {}

  cublasStatus_t Describe() {
    DescribeProduct();
    if (problem_.bias != nullptr) DescribeBias();
    DescribeScale(problem_.x_scale, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
    DescribeScale(problem_.y_scale, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
    DescribeMatrix(problem_.x, class_.b, x_);
    DescribeMatrix(problem_.y, class_.a, y_);
    DescribeMatrix(problem_.d, class_.out, d_);
    return steps_.status();
  }

  // The library's proposals, best guess first; `count` of them. NOT_SUPPORTED if it has none.
  cublasStatus_t Propose(std::array<cublasLtMatmulHeuristicResult_t, kProposals>& proposals, int& count) const {
    cublasLtMatmulPreference_t raw = nullptr;
    Steps steps;
    steps.Took(library_.preference_create(&raw));
    const Owned<cublasLtMatmulPreference_t> preference(raw, library_.preference_destroy);
    const auto put = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      steps.Put(library_.preference_set, raw, attribute, value);
    };
    put(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WorkspaceBytes());
    // Partial sums stay float32: the other schemes add in the output's type.
    put(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(OperandAlignment(problem_.x, class_.b)));
    put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(OperandAlignment(problem_.y, class_.a)));
    put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(AlignmentOf(problem_.d, class_.out)));
    put(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(AlignmentOf(problem_.d, class_.out)));
    if (!steps.ok()) return steps.status();
    const cublasStatus_t status = library_.get_heuristic(handle_, product_.get(), x_.get(), y_.get(), d_.get(),
                                                         d_.get(), raw, kProposals, proposals.data(), &count);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const auto usable = std::remove_if(proposals.begin(), proposals.begin() + count, [this](const auto& proposal) {
      return proposal.state != CUBLAS_STATUS_SUCCESS || proposal.workspaceSize > WorkspaceBytes();
    });
    count = static_cast<int>(usable - proposals.begin());
    return count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
  }

  // beta is 0, so that the output is only written.
  cublasStatus_t Enqueue(const cublasLtMatmulAlgo_t& algorithm) const {
    constexpr float kBeta = 0.0F;
    return library_.matmul(handle_, product_.get(), &problem_.alpha, problem_.x.data, x_.get(), problem_.y.data,
                           y_.get(), &kBeta, problem_.d.data, d_.get(), problem_.d.data, d_.get(), &algorithm,
                           context_.workspace.scratch, WorkspaceBytes(), Stream());
  }

  cudaStream_t Stream() const { return static_cast<cudaStream_t>(context_.stream); }

  // In whole units, so that arenas of slightly different sizes share their measurements.
  std::size_t WorkspaceBytes() const {
    return context_.workspace.scratch == nullptr ? 0 : context_.workspace.bytes / kWorkspaceUnit * kWorkspaceUnit;
  }

 private:
  template <typename Value>
  void PutProduct(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    steps_.Put(library_.desc_set, product_.get(), attribute, value);
  }

  void DescribeProduct() {
    cublasLtMatmulDesc_t raw = nullptr;
    steps_.Took(library_.desc_create(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    product_ = Owned<cublasLtMatmulDesc_t>(raw, library_.desc_destroy);
    PutProduct(CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{problem_.x_transposed ? CUBLAS_OP_T : CUBLAS_OP_N});
    PutProduct(CUBLASLT_MATMUL_DESC_TRANSB, std::int32_t{problem_.y_transposed ? CUBLAS_OP_T : CUBLAS_OP_N});
    if (IsFp8(class_.a)) {
      PutProduct(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(class_.accumulation == Accumulation::kFast));
    }
  }

  void DescribeBias() {
    PutProduct(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS});
    PutProduct(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, std::int32_t{DataType(problem_.bias_dtype)});
    PutProduct(CUBLASLT_MATMUL_DESC_BIAS_POINTER, problem_.bias);
  }

  void DescribeScale(const OperandScale& scale, cublasLtMatmulDescAttributes_t pointer,
                     cublasLtMatmulDescAttributes_t mode) {
    if (scale.mode == ScaleMode::kNone) return;
    PutProduct(pointer, scale.data);
    if (scale.mode == ScaleMode::kVector) PutProduct(mode, std::int32_t{CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F});
  }

  void DescribeMatrix(const StoredMatrix& matrix, DType dtype, Owned<cublasLtMatrixLayout_t>& layout) {
    cublasLtMatrixLayout_t raw = nullptr;
    steps_.Took(library_.layout_create(&raw, DataType(dtype), static_cast<std::uint64_t>(matrix.rows),
                                       static_cast<std::uint64_t>(matrix.cols), matrix.leading));
    layout = Owned<cublasLtMatrixLayout_t>(raw, library_.layout_destroy);
    if (problem_.batch == 1) return;
    steps_.Put(library_.layout_set, raw, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(problem_.batch));
    steps_.Put(library_.layout_set, raw, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrix.batch_stride);
  }

  const Library& library_;
  cublasLtHandle_t handle_;
  const GemmClass& class_;
  const Problem& problem_;
  const LaunchContext& context_;
  Steps steps_;
  Owned<cublasLtMatmulDesc_t> product_{nullptr, nullptr};
  Owned<cublasLtMatrixLayout_t> x_{nullptr, nullptr};
  Owned<cublasLtMatrixLayout_t> y_{nullptr, nullptr};
  Owned<cublasLtMatrixLayout_t> d_{nullptr, nullptr};
};

// All that the choice of an algorithm can depend on: device, class, extents, strides, alignments, epilogue, workspace.
// alpha and the vectors' contents are not among it.
constexpr std::size_t kKeyWords = 18;
using AlgorithmCache = BoundedCache<kKeyWords, cublasLtMatmulAlgo_t>;

AlgorithmCache& Algorithms() {
  static AlgorithmCache* const kCache = new AlgorithmCache(kCacheEntries);
  return *kCache;
}

AlgorithmCache::Key KeyOf(int device, const GemmClass& gemm_class, const Problem& problem, const Operation& operation) {
  const std::int64_t epilogue = std::int64_t{static_cast<int>(problem.x_scale.mode)} |
                                std::int64_t{static_cast<int>(problem.y_scale.mode)} << 4U |
                                std::int64_t{static_cast<int>(problem.bias_dtype)} << 8U;
  return {device,
          gemm_class.Key(),
          problem.d.rows,
          problem.d.cols,
          problem.x_transposed ? problem.x.rows : problem.x.cols,
          problem.batch,
          problem.x.leading,
          problem.y.leading,
          problem.d.leading,
          problem.x.batch_stride,
          problem.y.batch_stride,
          problem.d.batch_stride,
          OperandAlignment(problem.x, gemm_class.b),
          OperandAlignment(problem.y, gemm_class.a),
          AlignmentOf(problem.d, gemm_class.out),
          AlignmentOf(problem.bias, 0),
          epilogue,
          static_cast<std::int64_t>(operation.WorkspaceBytes())};
}

class Event {
 public:
  Event() : error_(cudaEventCreate(&event_)) {}
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (error_ == cudaSuccess) cudaEventDestroy(event_);
  }
  cudaError_t error() const { return error_; }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
  cudaError_t error_;
};

// Times the proposals one after another on the operation's stream.
class Tuner {
 public:
  explicit Tuner(const Operation& operation) : operation_(operation) {}

  // The index of the fastest in `best`. Proposals that the library then refuses to run drop out; an error of CUDA ends
  // it.
  LaunchError Fastest(const cublasLtMatmulHeuristicResult_t* proposals, int count, int& best) {
    if (begin_.error() != cudaSuccess) return begin_.error();
    if (end_.error() != cudaSuccess) return end_.error();
    LaunchError refused = cudaErrorNotSupported;
    float best_ms = std::numeric_limits<float>::infinity();
    best = -1;
    for (int i = 0; i < count && spent_ms_ < kTuneLimitMs; ++i) {
      float ms = 0.0F;
      const cublasStatus_t status = TimeOne(proposals[i].algo, ms);
      if (error_ != cudaSuccess) return error_;
      if (status != CUBLAS_STATUS_SUCCESS) {
        refused = ToLaunchError(status);
      } else if (ms < best_ms) {
        best_ms = ms;
        best = i;
      }
    }
    return best < 0 ? refused : LaunchError{cudaSuccess};
  }

 private:
  cublasStatus_t TimeOne(const cublasLtMatmulAlgo_t& algorithm, float& ms) {
    const cublasStatus_t status = TimeRuns(algorithm, 1, ms);
    if (status != CUBLAS_STATUS_SUCCESS || error_ != cudaSuccess || ms >= kLongRunMs) return status;
    return TimeRuns(algorithm, kTimedRuns, ms);
  }

  // Milliseconds a run. error_ is set on errors of CUDA, the result is of the library.
  cublasStatus_t TimeRuns(const cublasLtMatmulAlgo_t& algorithm, int runs, float& ms) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    Check(cudaEventRecord(begin_.get(), operation_.Stream()));
    for (int i = 0; i < runs && status == CUBLAS_STATUS_SUCCESS; ++i) status = operation_.Enqueue(algorithm);
    Check(cudaEventRecord(end_.get(), operation_.Stream()));
    Check(cudaEventSynchronize(end_.get()));
    Check(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
    spent_ms_ += ms;
    ms /= static_cast<float>(runs);
    return status;
  }

  void Check(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  const Operation& operation_;
  Event begin_;
  Event end_;
  cudaError_t error_ = cudaSuccess;
  float spent_ms_ = 0.0F;
};

// The algorithm for a problem that the cache does not know, measured if the stream can be waited for; else the
// library's first proposal, which is not kept.
LaunchError Choose(const Operation& operation, const AlgorithmCache::Key& key, bool may_wait,
                   cublasLtMatmulAlgo_t& algorithm) {
  std::array<cublasLtMatmulHeuristicResult_t, kProposals> proposals{};
  int count = 0;
  const cublasStatus_t status = operation.Propose(proposals, count);
  if (status != CUBLAS_STATUS_SUCCESS) return ToLaunchError(status);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(operation.Stream(), &capture);
  if (error != cudaSuccess) return error;
  int best = 0;
  if (may_wait && capture == cudaStreamCaptureStatusNone) {
    const LaunchError tuned = Tuner(operation).Fastest(proposals.data(), count, best);
    if (tuned != cudaSuccess) return tuned;
    Algorithms().Put(key, proposals[static_cast<std::size_t>(best)].algo);
  }
  algorithm = proposals[static_cast<std::size_t>(best)].algo;
  return cudaSuccess;
}

LaunchError CurrentHandle(const Library& library, int& device, cublasLtHandle_t& handle) {
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : ToLaunchError(HandleOf(library, device, handle));
}

}  // namespace

LaunchError CublasLt::Launch(const GemmClass& gemm_class, const GemmParams& params, const LaunchContext& context) {
  const Library& library = TheLibrary();
  if (!library.unavailable.empty()) return cudaErrorNotSupported;
  Problem problem;
  if (!Describe(gemm_class, params, problem).empty()) return cudaErrorNotSupported;
  int device = 0;
  cublasLtHandle_t handle = nullptr;
  const LaunchError no_handle = CurrentHandle(library, device, handle);
  if (no_handle != cudaSuccess) return no_handle;
  Operation operation(library, handle, gemm_class, problem, context);
  const cublasStatus_t described = operation.Describe();
  if (described != CUBLAS_STATUS_SUCCESS) return ToLaunchError(described);

  const AlgorithmCache::Key key = KeyOf(device, gemm_class, problem, operation);
  cublasLtMatmulAlgo_t algorithm{};
  if (const std::optional<cublasLtMatmulAlgo_t> known = Algorithms().Find(key); known.has_value()) {
    algorithm = *known;
  } else {
    const LaunchError undecided = Choose(operation, key, context.may_wait, algorithm);
    if (undecided != cudaSuccess) return undecided;
  }
  return ToLaunchError(operation.Enqueue(algorithm));
}

LaunchError CublasLt::Prepare(KernelFacts& facts) {
  facts = {};
  const Library& library = TheLibrary();
  if (!library.unavailable.empty()) return cudaErrorNotSupported;
  int device = 0;
  cublasLtHandle_t handle = nullptr;
  return CurrentHandle(library, device, handle);
}

}  // namespace vendor

const std::string& VendorUnavailable() {
  return vendor::TheLibrary().unavailable;
}

}  // namespace tessera::kernels
