// bf16 NT products on device memory for the benchmarks, with random numbers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"
#include "planner/gemm_planner.h"
#include "planner/plan.h"
#include "tests/gpu/e2e_memory.h"

namespace tessera::gpu_test {

struct GemmShape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  double Flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
  std::int64_t Bytes() const { return 2 * (m * k + n * k + m * n); }
};

// One set of operands.
class BenchGemm {
 public:
  static absl::StatusOr<BenchGemm> Make(const GemmShape& shape);

  const kernels::GemmParams& params() const { return params_; }
  planner::GemmProblem Problem() const;  // without `addressable`

 private:
  GemmShape shape_;
  std::unique_ptr<DeviceAllocation> a_;
  std::unique_ptr<DeviceAllocation> b_;
  std::unique_ptr<DeviceAllocation> d_;
  kernels::GemmParams params_;
};

// What `facts` plans for the product.
absl::StatusOr<planner::Plan> PlanOf(const kernels::GemmClass& gemm_class, const kernels::GemmParams& params,
                                     const planner::DeviceFacts& facts);
absl::StatusOr<planner::Plan> PlanOf(const BenchGemm& gemm, const planner::DeviceFacts& facts);

// LaunchGemm as planned, with the caller's workspace.
absl::Status Launch(const kernels::GemmParams& params, const planner::Plan& plan, const kernels::Workspace& workspace,
                    cudaStream_t stream);
absl::Status Launch(const BenchGemm& gemm, const planner::Plan& plan, const kernels::Workspace& workspace,
                    cudaStream_t stream);

// A stream with a workspace of `bytes`.
class BenchStream {
 public:
  static absl::StatusOr<BenchStream> Make(std::size_t bytes);
  BenchStream(BenchStream&& other) noexcept;
  BenchStream& operator=(BenchStream&&) = delete;
  ~BenchStream();

  cudaStream_t get() const { return stream_; }
  kernels::Workspace workspace() const { return workspace_; }
  absl::Status Wait() const;

 private:
  BenchStream() = default;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<DeviceAllocation> memory_;
  kernels::Workspace workspace_;
};

// Launches recorded once, replayed without the host's cost of each.
class Graph {
 public:
  // One launch for each of `gemms`, `rounds` times.
  static absl::StatusOr<Graph> Record(const std::vector<BenchGemm>& gemms, const planner::Plan& plan, int rounds,
                                      const BenchStream& stream);
  // `launches` calls of `launch`, which is given their numbers and enqueues on `stream`. What a first launch sets up
  // cannot be recorded: there has been one before.
  static absl::StatusOr<Graph> Record(const std::function<absl::Status(int)>& launch, int launches,
                                      const BenchStream& stream);
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&&) = delete;
  ~Graph();

  int launches() const { return launches_; }
  absl::Status Replay(cudaStream_t stream) const;

 private:
  Graph() = default;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  int launches_ = 0;
};

// Time between two points of a stream, as the GPU sees it.
class StreamTimer {
 public:
  static absl::StatusOr<StreamTimer> Make();
  StreamTimer(StreamTimer&& other) noexcept;
  StreamTimer& operator=(StreamTimer&&) = delete;
  ~StreamTimer();

  // Microseconds that `replays` of the graph take, from their first kernel to their last, right behind one more.
  absl::StatusOr<double> Time(const Graph& graph, int replays, const BenchStream& stream) const;

 private:
  StreamTimer() = default;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace tessera::gpu_test
