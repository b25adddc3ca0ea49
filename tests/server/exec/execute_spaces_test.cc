// Submissions whose operations are in different memory: one device cannot do them all, so none is done, and nothing of
// the submission stays; operations without elements have no say in where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/text.h"
#include "server/exec/bind.h"
#include "server/exec/cpu_device.h"
#include "server/exec/executor.h"
#include "server/session/session_table.h"
#include "tests/server/exec/bound_memory.h"
#include "tests/server/exec/lifecycle_world.h"
#include "tests/server/session/fake_device_memory.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using kernels::Backend;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kSecondGpu[] = "GPU-22222222-2222-3333-4444-555555555555";
const ExecutorOptions kRoomy{.queue_max = 100, .queue_per_session_max = 100};
const SessionLimits kLimits{
    .sessions_max = 9, .leases_max = 9, .buffers_per_session_max = 99, .buffer_bytes_max = 1U << 24U};

// Completes each job at once, and computes nothing.
class InstantGpu final : public Device {
 public:
  InstantGpu(const std::string& uuid, std::atomic<int>& jobs) : space_(MemorySpace::Gpu(uuid)), jobs_(jobs) {}

  std::span<const planner::DeviceFacts> facts() const override { return facts_; }
  const MemorySpace& space() const override { return space_; }
  std::string Describe() const override { return "fake"; }
  std::shared_ptr<Stream> OpenStream(StreamPriority /*priority*/) override {
    return std::make_shared<InstantStream>(jobs_);
  }

 private:
  class InstantStream final : public Stream {
   public:
    explicit InstantStream(std::atomic<int>& jobs) : jobs_(jobs) {}
    void Enqueue(Job job) override {
      const absl::Status status = job.admit();
      if (status.ok()) ++jobs_;
      job.done(JobResult{.status = status, .launched = status.ok()});
    }
    void DropUnwanted() override {}

   private:
    std::atomic<int>& jobs_;
  };

  const std::array<planner::DeviceFacts, 1> facts_ = {
      {{.backend = Backend::kCuda, .archs = {kernels::Arch::kSm80}, .processors = 4, .workspace_bytes_max = 0}}};
  const MemorySpace space_;
  std::atomic<int>& jobs_;
};

// Operands and result of one product, in memory of one space; their addresses are the host's wherever they are.
struct Operands {
  std::array<Id, 3> buffers;
  std::array<std::byte*, 3> data{};

  bool untouched() const { return IsSpoiled(data[2]); }
  bool right(std::int64_t extent) const { return IsProduct(1, 2, extent, data[2]); }
};

class ExecuteSpacesTest : public ::testing::Test {
 public:
  ~ExecuteSpacesTest() override {
    table_.EndAllSessions(SessionEnd::kDrained);
    EXPECT_TRUE(AwaitIdle(reaper_));
    executor_.reset();
  }
  ExecuteSpacesTest(const ExecuteSpacesTest&) = delete;
  ExecuteSpacesTest& operator=(const ExecuteSpacesTest&) = delete;

 protected:
  ExecuteSpacesTest() : ExecuteSpacesTest(std::vector<std::string>{kFakeGpu}) {}
  // GPUs before the CPU, as in the daemon.
  explicit ExecuteSpacesTest(const std::vector<std::string>& gpus)
      : executor_(std::make_unique<Executor>(Devices(gpus), std::nullopt, kRoomy, metrics_)) {}

  std::vector<std::unique_ptr<Device>> Devices(const std::vector<std::string>& gpus) {
    std::vector<std::unique_ptr<Device>> devices;
    for (const std::string& uuid : gpus) devices.push_back(std::make_unique<InstantGpu>(uuid, gpu_jobs_));
    devices.push_back(MakeCpuDevice({.threads = 2, .workspace_bytes_max = 1 << 24}));
    return devices;
  }

  Operands MakeOperands(const std::string& space) {
    Operands made;
    for (std::size_t i = 0; i < 3; ++i) {
      const auto buffer = table_.AllocateBuffer(*session_, kOutputBytes, space);
      EXPECT_TRUE(buffer.ok()) << buffer.status();
      made.buffers[i] = buffer->id;
      made.data[i] = (*table_.PinBuffer(*session_, buffer->id, BufferAccess::kReadWrite))->data();
    }
    FillOperand(1, made.data[0]);
    FillOperand(2, made.data[1]);
    SpoilOutput(made.data[2]);
    return made;
  }

  // `extent` 0: nothing to compute.
  BoundGemm Bind(const Operands& operands, std::int64_t extent = kSmallExtent) {
    auto bound = BindGemm(ProductOf(operands.buffers, extent), {.sessions = &table_,
                                                                .session = session_.get(),
                                                                .inline_result = nullptr,
                                                                .inline_bytes_max = 0,
                                                                .metrics = &metrics_});
    EXPECT_TRUE(bound.ok()) << bound.status();
    return *std::move(bound);
  }

  // With everything that an accepted submission would have had an effect on: a timeline, one in memory, an event.
  Submission Make(std::vector<BoundGemm> ops) {
    Submission made{.session = session_};
    for (BoundGemm& op : ops) made.ops.push_back(std::move(op));
    made.signal = {{.timeline = plain_, .value = 1}, {.timeline = exported_, .value = 1}};
    made.record = {event_};
    made.still_wanted = [] { return absl::OkStatus(); };
    answer_ = std::make_shared<Answer>();
    made.done = [this, answer = answer_](const absl::Status& status, std::span<const OperationReport> reports) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        reports_.assign(reports.begin(), reports.end());
      }
      answer->Give(status);
    };
    return made;
  }
  template <typename... Ops>
  Submission Of(Ops... ops) {
    std::vector<BoundGemm> bound;
    (bound.push_back(std::move(ops)), ...);
    return Make(std::move(bound));
  }

  absl::Status Await(Submission submission) {
    executor_->Submit(std::move(submission));
    return answer_->Await();
  }

  void ExpectNothingInFlight() {
    EXPECT_EQ(executor_->in_flight(), 0U);
    EXPECT_EQ(session_->in_flight, 0);
    EXPECT_EQ(session_->account()->in_flight, 0);
    EXPECT_EQ(session_->lane()->in_flight(), 0);
    EXPECT_EQ(session_->lane()->gated(), 0);
    for (const char* const gauge : {"tessera_in_flight", "tessera_queue_depth", "tessera_gated"}) {
      EXPECT_EQ(MetricValue(metrics_, gauge), 0) << gauge;
    }
    for (const BufferRow& row : table_.ListBuffers([](const Peer&) { return true; }).rows) EXPECT_EQ(row.users, 0U);
  }

  // Refused at once for operation `op`, naming where it is and where the device would be, and as if it had never been.
  void ExpectRefused(Submission submission, int op, const std::string& here, const std::string& there) {
    executor_->Submit(std::move(submission));
    ASSERT_EQ(answer_->calls(), 1) << "it waits for something";
    const absl::Status status = answer_->Await();
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << status;
    EXPECT_THAT(MessageOf(status), StartsWith("ops[" + std::to_string(op) + "]: "));
    EXPECT_THAT(MessageOf(status), HasSubstr("of " + here + ";"));
    EXPECT_THAT(MessageOf(status), HasSubstr("in memory of " + there));
    EXPECT_EQ(gpu_jobs_, 0);
    EXPECT_EQ(plain_->value(), 0U);
    EXPECT_FALSE(plain_->Reached(1).has_value());
    EXPECT_FALSE(exported_->Reached(1).has_value());
    EXPECT_EQ(exported_->word()->Load(), 0U);
    EXPECT_EQ(gpu_.event_records, 0);
    ExpectNothingInFlight();
  }

  // What the submissions that were refused do not hold back.
  void ExpectTheStreamGoesOn() {
    const Operands host = MakeOperands("host");
    EXPECT_TRUE(Await(Of(Bind(host))).ok());
    EXPECT_TRUE(host.right(kSmallExtent));
    EXPECT_EQ(answer_->calls(), 1);
    EXPECT_EQ(plain_->value(), 1U);
    EXPECT_EQ(exported_->word()->Load(), 1U);
    EXPECT_EQ(gpu_.event_records, 1);
    ExpectNothingInFlight();
  }

  std::vector<OperationReport> reports() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reports_;
  }

  std::shared_ptr<Timeline> MakeTimeline(bool exported) {
    const auto made = table_.CreateTimeline(*session_, {.exported = exported});
    EXPECT_TRUE(made.ok()) << made.status();
    return table_.FindPoint(*session_, *made)->timeline;
  }
  std::shared_ptr<DeviceEvent> ImportEvent() {
    const LegacyHandle& handle = FakeDeviceMemory::kEventHandle;
    const auto made = table_.ImportEvent(
        *session_,
        {.handle = std::string(handle.begin(), handle.end()), .device_uuid = kFakeGpu, .exporter_pid = ::getpid() + 1});
    EXPECT_TRUE(made.ok()) << made.status();
    return table_.FindPoint(*session_, *made)->event;
  }

  FakeDeviceMemory gpu_;
  FakeDeviceMemory second_gpu_{kSecondGpu};
  std::atomic<int> gpu_jobs_{0};
  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper_{std::chrono::hours(1), metrics_};
  std::unique_ptr<Executor> executor_;
  SessionTable table_{1,
                      kLimits,
                      metrics_,
                      reaper_,
                      [this](const StreamSpec& spec) { return executor_->MakeLane(spec); },
                      {&gpu_, &second_gpu_}};
  std::mutex mutex_;
  std::vector<OperationReport> reports_;
  std::shared_ptr<Answer> answer_;  // of the submission made last
  const std::shared_ptr<Session> session_ = OpenTestSession(table_);
  const std::shared_ptr<Timeline> plain_ = MakeTimeline(/*exported=*/false);
  const std::shared_ptr<Timeline> exported_ = MakeTimeline(/*exported=*/true);
  const std::shared_ptr<DeviceEvent> event_ = ImportEvent();
};

TEST_F(ExecuteSpacesTest, EachSpaceAloneIsServedByItsDevice) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda");
  EXPECT_TRUE(Await(Of(Bind(host), Bind(host, kLargeExtent))).ok());
  EXPECT_TRUE(host.right(kLargeExtent));
  EXPECT_EQ(gpu_jobs_, 0);
  EXPECT_TRUE(Await(Of(Bind(gpu), Bind(gpu))).ok());
  EXPECT_EQ(gpu_jobs_, 1);
  ASSERT_EQ(reports().size(), 2U);
  for (const OperationReport& report : reports()) EXPECT_EQ(report.backend, Backend::kCuda);
  EXPECT_EQ(gpu_.event_records, 2);
  ExpectNothingInFlight();
}

TEST_F(ExecuteSpacesTest, TwoSpacesInOneSubmissionAreRefused) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda");
  for (const std::int64_t extent : {kSmallExtent, kLargeExtent}) {
    ExpectRefused(Of(Bind(host, extent), Bind(gpu, extent)), 1, "host", kFakeGpu);
    ExpectRefused(Of(Bind(gpu, extent), Bind(host, extent)), 1, kFakeGpu, "host");
    ExpectRefused(Of(Bind(host, extent), Bind(host, extent), Bind(host, extent), Bind(gpu, extent)), 3, "host",
                  kFakeGpu);
    ExpectRefused(Of(Bind(gpu, extent), Bind(gpu, extent), Bind(host, extent), Bind(gpu, extent)), 2, kFakeGpu, "host");
  }
  EXPECT_TRUE(host.untouched());
  EXPECT_TRUE(gpu.untouched());
  EXPECT_EQ(MetricValue(metrics_, R"(tessera_planner_refusals_total{op="gemm"})"), 8);
  ExpectTheStreamGoesOn();
}

TEST_F(ExecuteSpacesTest, ANamedBackendIsToldOfTheFirstThatIsElsewhere) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda");
  const auto on = [](Backend backend, Submission submission) {
    submission.backend = backend;
    return submission;
  };
  ExpectRefused(on(Backend::kCpu, Of(Bind(host), Bind(gpu))), 1, "host", kFakeGpu);
  ExpectRefused(on(Backend::kCpu, Of(Bind(gpu), Bind(host))), 0, "host", kFakeGpu);
  ExpectRefused(on(Backend::kCuda, Of(Bind(host), Bind(gpu))), 0, kFakeGpu, "host");
  ExpectRefused(on(Backend::kCuda, Of(Bind(gpu), Bind(host))), 1, kFakeGpu, "host");
  EXPECT_TRUE(host.untouched());
  EXPECT_TRUE(gpu.untouched());
  ExpectTheStreamGoesOn();
}

// What is refused neither waits for its turn nor for what it would wait for.
TEST_F(ExecuteSpacesTest, RefusedBeforeItWaits) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda"), held = MakeOperands("host");
  const std::shared_ptr<Timeline> gate = MakeTimeline(/*exported=*/false);
  const auto waiting = [&](Submission submission) {
    submission.wait = {{.timeline = gate, .value = 1}};
    return submission;
  };
  ExpectRefused(waiting(Of(Bind(host), Bind(gpu))), 1, "host", kFakeGpu);
  Submission timed = waiting(Of(Bind(gpu), Bind(host)));
  timed.launch_by = std::chrono::steady_clock::now() + std::chrono::hours(1);
  timed.answer_when_launched = true;
  ExpectRefused(std::move(timed), 1, kFakeGpu, "host");
  executor_->Tick();

  executor_->Submit(waiting(Of(Bind(held))));
  const std::shared_ptr<Answer> of_held = answer_;
  EXPECT_EQ(executor_->in_flight(), 1U);
  executor_->Submit(Of(Bind(host), Bind(gpu)));
  EXPECT_EQ(answer_->calls(), 1);
  EXPECT_EQ(answer_->Await().code(), StatusCode::kUnimplemented);
  EXPECT_EQ(executor_->in_flight(), 1U);
  EXPECT_EQ(of_held->calls(), 0);
  gate->Signal(1, absl::OkStatus());
  EXPECT_TRUE(of_held->Await().ok());
  EXPECT_TRUE(held.right(kSmallExtent));
  EXPECT_TRUE(host.untouched());
  ExpectNothingInFlight();
}

// A refused one will never signal, so errors of others must not wait for it to.
TEST_F(ExecuteSpacesTest, ARefusedSubmissionIsNotExpectedToSignal) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda");
  ExpectRefused(Of(Bind(host), Bind(gpu)), 1, "host", kFakeGpu);
  exported_->Signal(5, absl::InternalError("of another"));
  EXPECT_EQ(exported_->word()->Load(), 5U);
}

TEST_F(ExecuteSpacesTest, OperationsWithoutElementsMayBeAnywhere) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda");
  const auto backends = [this] {
    std::vector<Backend> seen;
    for (const OperationReport& report : reports()) seen.push_back(report.backend);
    return seen;
  };
  EXPECT_TRUE(Await(Of(Bind(gpu, 0), Bind(host), Bind(gpu, 0), Bind(host, kLargeExtent), Bind(gpu, 0))).ok());
  EXPECT_TRUE(host.right(kLargeExtent));
  EXPECT_EQ(backends(), std::vector<Backend>(5, Backend::kCpu));
  for (const std::size_t empty : {0U, 2U, 4U}) EXPECT_EQ(reports()[empty].variant, "");
  for (const std::size_t full : {1U, 3U}) EXPECT_THAT(std::string(reports()[full].variant), StartsWith("gemm.cpu."));
  EXPECT_EQ(gpu_jobs_, 0);
  ExpectNothingInFlight();

  EXPECT_TRUE(Await(Of(Bind(host, 0), Bind(gpu), Bind(host, 0), Bind(gpu))).ok());
  EXPECT_EQ(backends(), std::vector<Backend>(4, Backend::kCuda));
  EXPECT_EQ(gpu_jobs_, 1);
  ExpectNothingInFlight();

  EXPECT_TRUE(Await(Of(Bind(host, 0), Bind(gpu, 0))).ok());
  EXPECT_TRUE(gpu.untouched());
  EXPECT_EQ(plain_->value(), 1U);
  EXPECT_EQ(gpu_.event_records, 3) << "an event is recorded for each, whatever it had to compute";
  ExpectNothingInFlight();
}

TEST_F(ExecuteSpacesTest, ThoseWithElementsAreStillApart) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda");
  ExpectRefused(Of(Bind(host), Bind(gpu, 0), Bind(gpu)), 2, "host", kFakeGpu);
  ExpectRefused(Of(Bind(gpu), Bind(host, 0), Bind(host)), 2, kFakeGpu, "host");
  EXPECT_TRUE(host.untouched());
  EXPECT_TRUE(gpu.untouched());
}

class TwoGpusTest : public ExecuteSpacesTest {
 protected:
  TwoGpusTest() : ExecuteSpacesTest(std::vector<std::string>{kFakeGpu, kSecondGpu}) {}
};

TEST_F(TwoGpusTest, AreTwoSpaces) {
  const Operands first = MakeOperands(kFakeGpu), second = MakeOperands(kSecondGpu), host = MakeOperands("host");
  ExpectRefused(Of(Bind(first), Bind(second)), 1, kFakeGpu, kSecondGpu);
  ExpectRefused(Of(Bind(second), Bind(first)), 1, kSecondGpu, kFakeGpu);
  ExpectRefused(Of(Bind(host), Bind(second)), 1, "host", kSecondGpu);
  ExpectRefused(Of(Bind(second), Bind(second), Bind(host)), 2, kSecondGpu, "host");
  for (const Operands* operands : {&first, &second, &host}) EXPECT_TRUE(operands->untouched());
  EXPECT_TRUE(Await(Of(Bind(second), Bind(first, 0), Bind(second))).ok());
  EXPECT_EQ(gpu_jobs_, 1);
  ExpectNothingInFlight();
}

class NoGpuTest : public ExecuteSpacesTest {
 protected:
  NoGpuTest() : ExecuteSpacesTest(std::vector<std::string>{}) {}
};

TEST_F(NoGpuTest, TheCpuSaysWhatItCannotReach) {
  const Operands host = MakeOperands("host"), gpu = MakeOperands("cuda");
  ExpectRefused(Of(Bind(host), Bind(gpu)), 1, "host", kFakeGpu);
  ExpectRefused(Of(Bind(gpu), Bind(host)), 0, "host", kFakeGpu);
  EXPECT_TRUE(host.untouched());
  EXPECT_TRUE(Await(Of(Bind(gpu, 0), Bind(host))).ok());
  EXPECT_TRUE(host.right(kSmallExtent));
}

}  // namespace
}  // namespace tessera::server
