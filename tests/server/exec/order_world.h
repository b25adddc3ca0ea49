// What the tests of order share: an executor and a session table, products of signed permutations, whose results stay
// exact however many follow each other, and submissions whose fate can be waited for.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/exec/cpu_device.h"
#include "server/exec/executor.h"
#include "server/session/session_table.h"
#include "tests/server/exec/bound_memory.h"
#include "tests/server/exec/lifecycle_world.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {

inline constexpr int kSmallSquare = 8;   // done by whoever submits it
inline constexpr int kLargeSquare = 32;  // taken to the device's threads

// A square matrix of bf16. Each row and column of a signed permutation has one element, 1 or -1, and so have products.
struct Matrix {
  static constexpr std::uint16_t kOne = 0x3f80, kMinusOne = 0xbf80, kMinusZero = 0x8000, kSpoiled = 0x4040;

  explicit Matrix(int the_extent)
      : extent(the_extent),
        data(static_cast<std::size_t>(the_extent) * static_cast<std::size_t>(the_extent), kSpoiled) {}

  static Matrix Random(int extent, std::mt19937_64& random) {
    Matrix made(extent);
    std::vector<int> columns(static_cast<std::size_t>(extent));
    std::iota(columns.begin(), columns.end(), 0);
    std::shuffle(columns.begin(), columns.end(), random);
    std::fill(made.data.begin(), made.data.end(), std::uint16_t{0});
    for (int row = 0; row < extent; ++row) {
      made.data[made.At(row, columns[static_cast<std::size_t>(row)])] = random() % 2 == 0 ? kOne : kMinusOne;
    }
    return made;
  }

  std::size_t At(int row, int column) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(extent) + static_cast<std::size_t>(column);
  }
  std::vector<int> Values() const {
    std::vector<int> values;
    for (const std::uint16_t bits : data) {
      const int other = bits == 0 || bits == kMinusZero ? 0 : 99;
      values.push_back(bits == kOne ? 1 : bits == kMinusOne ? -1 : other);
    }
    return values;
  }
  bool spoiled() const {
    return std::all_of(data.begin(), data.end(), [](std::uint16_t bits) { return bits == kSpoiled; });
  }

  int extent;
  std::vector<std::uint16_t> data;
};

// What A B^T must be.
inline std::vector<int> TrueProduct(const std::vector<int>& a, const std::vector<int>& b, int extent) {
  std::vector<int> d(a.size());
  const auto side = static_cast<std::size_t>(extent);
  for (std::size_t m = 0; m < side; ++m) {
    for (std::size_t n = 0; n < side; ++n) {
      int sum = 0;
      for (std::size_t k = 0; k < side; ++k) sum += a[m * side + k] * b[n * side + k];
      d[m * side + n] = sum;
    }
  }
  return d;
}

// D = A B^T; of `rows` of them only.
inline BoundGemm BindProduct(Matrix& a, Matrix& b, Matrix& d, std::optional<int> rows = std::nullopt) {
  BoundGemm gemm;
  const auto view = [](Matrix& matrix) {
    return kernels::GemmMatrix{.data = matrix.data.data(), .row_stride = matrix.extent, .col_stride = 1};
  };
  gemm.params.m = rows.value_or(a.extent);
  gemm.params.n = gemm.params.k = a.extent;
  gemm.params.a = view(a);
  gemm.params.b = view(b);
  gemm.params.d = view(d);
  gemm.problem = {.gemm_class = {.a = DType::kBf16,
                                 .b = DType::kBf16,
                                 .out = DType::kBf16,
                                 .layout = kernels::GemmLayoutOf(/*a_k_contiguous=*/true, /*b_k_contiguous=*/true)},
                  .batch = 1,
                  .m = gemm.params.m,
                  .n = gemm.params.n,
                  .k = gemm.params.k};
  return gemm;
}

// A product of its own and what became of it.
class Work {
 public:
  explicit Work(int extent = kSmallSquare) : random_(7), a_(Matrix::Random(extent, random_)), b_(a_), d_(extent) {
    b_ = Matrix::Random(extent, random_);
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // `rows` 0: there is nothing to compute.
  Submission Make(const std::shared_ptr<Session>& session, std::shared_ptr<SessionLane> lane = nullptr,
                  std::optional<int> rows = std::nullopt) {
    Submission made{.session = session, .lane = std::move(lane)};
    made.ops.push_back(BindProduct(a_, b_, d_, rows));
    made.still_wanted = [] { return absl::OkStatus(); };
    made.done = [this](const absl::Status& status, std::span<const OperationReport> reports) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        reports_.assign(reports.begin(), reports.end());
      }
      answer_.Give(status);
    };
    return made;
  }

  absl::Status Await() { return answer_.Await(); }
  int calls() { return answer_.calls(); }
  std::vector<OperationReport> reports() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reports_;
  }
  bool right() const { return d_.Values() == TrueProduct(a_.Values(), b_.Values(), a_.extent); }
  bool untouched() const { return d_.spoiled(); }
  Matrix& a() { return a_; }
  Matrix& b() { return b_; }
  Matrix& d() { return d_; }

 private:
  std::mt19937_64 random_;
  Matrix a_, b_, d_;
  Answer answer_;
  std::mutex mutex_;
  std::vector<OperationReport> reports_;
};

struct OrderWorld {
  explicit OrderWorld(std::unique_ptr<Device> device = nullptr, const ExecutorOptions& options = kRoomy)
      : executor(std::make_unique<Executor>(Devices(std::move(device)), std::nullopt, options, metrics)) {}
  ~OrderWorld() {
    table.EndAllSessions(SessionEnd::kDrained);
    EXPECT_TRUE(AwaitIdle(reaper));
    EXPECT_TRUE(executor->AwaitIdle(kTestPatience));
    EXPECT_EQ(Metric("tessera_in_flight"), 0);
    EXPECT_EQ(Metric("tessera_queue_depth"), 0);
    EXPECT_EQ(Metric("tessera_gated"), 0);
    executor.reset();
  }
  OrderWorld(const OrderWorld&) = delete;
  OrderWorld& operator=(const OrderWorld&) = delete;

  std::shared_ptr<Session> Open() { return OpenTestSession(table); }
  std::shared_ptr<SessionLane> OpenStream(Session& session) {
    const auto stream = table.OpenStream(session, {});
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? table.FindStream(session, *stream).value_or(nullptr) : nullptr;
  }
  std::shared_ptr<Timeline> MakeTimeline(Session& session) {
    const auto made = table.CreateTimeline(session, {});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? table.FindPoint(session, *made)->timeline : nullptr;
  }
  void Submit(Submission submission) { executor->Submit(std::move(submission)); }
  double Metric(const std::string& series) const { return MetricValue(metrics, series); }
  double Outcomes(const std::string& outcome) const {
    return Metric(R"(tessera_operations_total{backend="cpu",op="gemm",outcome=")" + outcome + "\"}");
  }

  inline static const ExecutorOptions kRoomy{.queue_max = 100'000, .queue_per_session_max = 100'000};

  Metrics metrics{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper{std::chrono::hours(1), metrics};
  std::unique_ptr<Executor> executor;
  SessionTable table{
      1,
      {.sessions_max = 99, .leases_max = 99, .buffers_per_session_max = 99, .buffer_bytes_max = 1U << 24U},
      metrics,
      reaper,
      [this](const StreamSpec& spec) { return executor->MakeLane(spec); }};

 private:
  static std::vector<std::unique_ptr<Device>> Devices(std::unique_ptr<Device> device) {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(device != nullptr ? std::move(device)
                                        : MakeCpuDevice({.threads = 3, .workspace_bytes_max = 1 << 24}));
    return devices;
  }
};

}  // namespace tessera::server
