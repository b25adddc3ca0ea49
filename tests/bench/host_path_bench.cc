// The host path without gRPC: what binding, planning and a round trip through the executor cost.
//
//   build/cpu/tests/bench/host_path_bench --benchmark_format=json > docs/perf/host_path.json

#include <benchmark/benchmark.h>

#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "planner/gemm_planner.h"
#include "server/exec/cpu_device.h"
#include "server/exec/executor.h"

namespace tessera::server {
namespace {

constexpr std::int64_t kExtent = 16;  // of M, N and K

TensorRef Ref(std::string_view field, DType dtype, TensorRef::Storage storage, const std::string* data) {
  TensorRef ref{.field = field, .storage = storage, .buffer = {}, .inline_data = data, .dtype = dtype, .rank = 2};
  ref.shape = {kExtent, kExtent};
  ref.stride = {kExtent, 1};
  return ref;
}

// A 16 x 16 x 16 bf16 product on inline tensors.
class Host {
 public:
  Host()
      : metrics_({.version = "bench", .variants = {}}),
        executor_(Devices(), std::nullopt, {.queue_max = 16, .queue_per_session_max = 16}, metrics_),
        input_(kExtent * kExtent * 2, '\0') {
    call_.a = Ref("op.a", DType::kBf16, TensorRef::Storage::kInlineData, &input_);
    call_.b = Ref("op.b", DType::kBf16, TensorRef::Storage::kInlineData, &input_);
    call_.d = Ref("op.d", DType::kF32, TensorRef::Storage::kInlineResult, nullptr);
  }

  BoundGemm Bind() {
    auto bound = BindGemm(call_, {.inline_result = &output_, .inline_bytes_max = 1 << 20, .metrics = &metrics_});
    return *std::move(bound);
  }

  Executor& executor() { return executor_; }

 private:
  static std::vector<std::unique_ptr<Device>> Devices() {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeCpuDevice({.threads = 0, .workspace_bytes_max = 1 << 28}));
    return devices;
  }

  Metrics metrics_;
  Executor executor_;
  std::string input_;
  std::string output_;
  GemmCall call_;
};

void BM_Bind(benchmark::State& state) {
  Host host;
  for (auto _ : state) benchmark::DoNotOptimize(host.Bind());
}
BENCHMARK(BM_Bind);

void BM_Plan(benchmark::State& state) {
  const planner::GemmPlanner planner(kernels::GemmVariants());
  const planner::GemmProblem problem{
      .gemm_class = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16}, .m = 512, .n = 512, .k = 512};
  const planner::DeviceFacts facts{.processors = 8, .workspace_bytes_max = 1 << 28};
  for (auto _ : state) benchmark::DoNotOptimize(planner.Decide(problem, facts));
}
BENCHMARK(BM_Plan);

void BM_SubmitRoundTrip(benchmark::State& state) {
  Host host;
  for (auto _ : state) {
    std::promise<void> finished;
    Submission operation;
    operation.ops.push_back(host.Bind());
    operation.still_wanted = [] { return absl::OkStatus(); };
    operation.done = [&finished](const absl::Status&, std::span<const OperationReport>) { finished.set_value(); };
    host.executor().Submit(std::move(operation));
    finished.get_future().wait();
  }
}
BENCHMARK(BM_SubmitRoundTrip)->UseRealTime();

}  // namespace
}  // namespace tessera::server

BENCHMARK_MAIN();
