#include "tests/gpu/bench_gemm.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string_view>
#include <utility>

#include "common/float_codec.h"
#include "common/status_macros.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/launch/gemm_addressable.h"
#include "kernels/launch/gemm_launch.h"
#include "planner/builtin_rows.h"
#include "planner/gemm_planner.h"
#include "tests/oracle/test_data.h"

namespace tessera::gpu_test {
namespace {

// Zeros and repeated numbers let the card draw less power and run faster: every element is drawn, from [-1, 1).
absl::StatusOr<std::unique_ptr<DeviceAllocation>> RandomMatrix(std::int64_t elements, std::uint64_t seed) {
  oracle::Random random(seed);
  std::vector<std::uint16_t> codes(static_cast<std::size_t>(elements));
  for (std::uint16_t& code : codes) code = EncodeBf16(static_cast<float>(random.Uniform(-1, 1)));
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceAllocation> memory, AllocatePlain(codes.size() * sizeof(codes[0])));
  RETURN_IF_ERROR(CopyIn(memory->data(), codes.data(), codes.size() * sizeof(codes[0])));
  return memory;
}

// As the daemon's, with the rows that the build has for this device.
absl::StatusOr<planner::GemmPlanner> DevicePlanner() {
  int device = 0;
  cudaDeviceProp properties = {};
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    return absl::InternalError("the device does not say its name");
  }
  const std::string_view names[] = {properties.name};
  planner::PlannerConfig config;
  ASSIGN_OR_RETURN(config.tier_ptr(planner::Tier::kBuiltin), planner::BuiltinRowsOf(names));
  return planner::GemmPlanner(kernels::GemmVariants(), config);
}

}  // namespace

absl::StatusOr<BenchGemm> BenchGemm::Make(const GemmShape& shape) {
  BenchGemm gemm;
  gemm.shape_ = shape;
  ASSIGN_OR_RETURN(gemm.a_, RandomMatrix(shape.m * shape.k, 1));
  ASSIGN_OR_RETURN(gemm.b_, RandomMatrix(shape.n * shape.k, 2));
  ASSIGN_OR_RETURN(gemm.d_, AllocatePlain(static_cast<std::size_t>(2 * shape.m * shape.n)));
  gemm.params_.m = shape.m;
  gemm.params_.n = shape.n;
  gemm.params_.k = shape.k;
  gemm.params_.a = {.data = gemm.a_->data(), .row_stride = shape.k, .col_stride = 1};
  gemm.params_.b = {.data = gemm.b_->data(), .row_stride = shape.k, .col_stride = 1};
  gemm.params_.d = {.data = gemm.d_->data(), .row_stride = shape.n, .col_stride = 1};
  return gemm;
}

planner::GemmProblem BenchGemm::Problem() const {
  return {.gemm_class = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16},
          .m = shape_.m,
          .n = shape_.n,
          .k = shape_.k};
}

absl::StatusOr<planner::Plan> PlanOf(const kernels::GemmClass& gemm_class, const kernels::GemmParams& params,
                                     const planner::DeviceFacts& facts) {
  const planner::GemmProblem problem = {.gemm_class = gemm_class,
                                        .m = params.m,
                                        .n = params.n,
                                        .k = params.k,
                                        .addressable = kernels::AddressableBy(gemm_class, params)};
  static const absl::StatusOr<planner::GemmPlanner> planner = DevicePlanner();
  RETURN_IF_ERROR(planner.status());
  return planner->Decide(problem, facts);
}

absl::StatusOr<planner::Plan> PlanOf(const BenchGemm& gemm, const planner::DeviceFacts& facts) {
  return PlanOf(gemm.Problem().gemm_class, gemm.params(), facts);
}

absl::Status Launch(const kernels::GemmParams& params, const planner::Plan& plan, const kernels::Workspace& workspace,
                    cudaStream_t stream) {
  const kernels::LaunchError error = kernels::LaunchGemm(
      plan.variant, params, {.split = plan.split, .raster = plan.raster}, {.stream = stream, .workspace = workspace});
  return ToStatus(static_cast<cudaError_t>(error), "LaunchGemm");
}

absl::Status Launch(const BenchGemm& gemm, const planner::Plan& plan, const kernels::Workspace& workspace,
                    cudaStream_t stream) {
  return Launch(gemm.params(), plan, workspace, stream);
}

absl::StatusOr<BenchStream> BenchStream::Make(std::size_t bytes) {
  BenchStream stream;
  RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream.stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
  if (bytes > 0) {
    ASSIGN_OR_RETURN(stream.memory_, AllocatePlain(bytes));
    stream.workspace_ = {.scratch = stream.memory_->data(), .bytes = bytes};
  }
  return stream;
}

BenchStream::BenchStream(BenchStream&& other) noexcept
    : stream_(std::exchange(other.stream_, nullptr)), memory_(std::move(other.memory_)), workspace_(other.workspace_) {}

// Destructors of this file: errors of a context that is lost say nothing new.
BenchStream::~BenchStream() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

absl::Status BenchStream::Wait() const {
  return ToStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

absl::StatusOr<Graph> Graph::Record(const std::vector<BenchGemm>& gemms, const planner::Plan& plan, int rounds,
                                    const BenchStream& stream) {
  const int sets = static_cast<int>(gemms.size());
  const auto launch = [&](int i) {
    return Launch(gemms[static_cast<std::size_t>(i % sets)], plan, stream.workspace(), stream.get());
  };
  for (int i = 0; i < sets; ++i) RETURN_IF_ERROR(launch(i));
  RETURN_IF_ERROR(stream.Wait());
  return Record(launch, rounds * sets, stream);
}

absl::StatusOr<Graph> Graph::Record(const std::function<absl::Status(int)>& launch, int launches,
                                    const BenchStream& stream) {
  Graph graph;
  graph.launches_ = launches;
  RETURN_IF_ERROR(
      ToStatus(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"));
  absl::Status launched;
  for (int i = 0; i < launches && launched.ok(); ++i) launched = launch(i);
  const absl::Status ended = ToStatus(cudaStreamEndCapture(stream.get(), &graph.graph_), "cudaStreamEndCapture");
  RETURN_IF_ERROR(launched);
  RETURN_IF_ERROR(ended);
  RETURN_IF_ERROR(ToStatus(cudaGraphInstantiate(&graph.executable_, graph.graph_, 0), "cudaGraphInstantiate"));
  return graph;
}

Graph::Graph(Graph&& other) noexcept
    : graph_(std::exchange(other.graph_, nullptr)),
      executable_(std::exchange(other.executable_, nullptr)),
      launches_(other.launches_) {}

Graph::~Graph() {
  if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
  if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
}

absl::Status Graph::Replay(cudaStream_t stream) const {
  return ToStatus(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
}

absl::StatusOr<StreamTimer> StreamTimer::Make() {
  StreamTimer timer;
  RETURN_IF_ERROR(ToStatus(cudaEventCreate(&timer.begin_), "cudaEventCreate"));
  RETURN_IF_ERROR(ToStatus(cudaEventCreate(&timer.end_), "cudaEventCreate"));
  return timer;
}

StreamTimer::StreamTimer(StreamTimer&& other) noexcept
    : begin_(std::exchange(other.begin_, nullptr)), end_(std::exchange(other.end_, nullptr)) {}

StreamTimer::~StreamTimer() {
  if (begin_ != nullptr) static_cast<void>(cudaEventDestroy(begin_));
  if (end_ != nullptr) static_cast<void>(cudaEventDestroy(end_));
}

absl::StatusOr<double> StreamTimer::Time(const Graph& graph, int replays, const BenchStream& stream) const {
  // Keeps the GPU busy until the host has enqueued the rest, so that no wait for the host is timed.
  RETURN_IF_ERROR(graph.Replay(stream.get()));
  RETURN_IF_ERROR(ToStatus(cudaEventRecord(begin_, stream.get()), "cudaEventRecord"));
  for (int i = 0; i < replays; ++i) RETURN_IF_ERROR(graph.Replay(stream.get()));
  RETURN_IF_ERROR(ToStatus(cudaEventRecord(end_, stream.get()), "cudaEventRecord"));
  RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(end_), "cudaEventSynchronize"));
  float milliseconds = 0;
  RETURN_IF_ERROR(ToStatus(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime"));
  return static_cast<double>(milliseconds) * 1e3;
}

}  // namespace tessera::gpu_test
