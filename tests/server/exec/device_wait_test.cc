// Waits that are left to a device: what it is given, what becomes of errors that it does not see, and what happens to a
// session whose wait does not end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "common/sync_slot.h"
#include "tests/server/exec/fake_gpu.h"
#include "tests/server/exec/order_world.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

class DeviceWaitTest : public ::testing::Test {
 public:
  ~DeviceWaitTest() override {
    table_.EndAllSessions(SessionEnd::kDrained);
    EXPECT_TRUE(executor_->AwaitIdle(kTestPatience));
    stop_ = true;
    ticks_.join();
    EXPECT_TRUE(AwaitIdle(reaper_));
    lane_.reset();
    plain_.reset();
    session_.reset();
    executor_.reset();
  }
  DeviceWaitTest(const DeviceWaitTest&) = delete;
  DeviceWaitTest& operator=(const DeviceWaitTest&) = delete;

 protected:
  explicit DeviceWaitTest(milliseconds gpu_wait_timeout = std::chrono::hours(1))
      : executor_(std::make_unique<Executor>(Devices(), std::nullopt,
                                             ExecutorOptions{.queue_max = 1000,
                                                             .queue_per_session_max = 1000,
                                                             .gpu_wait_timeout = gpu_wait_timeout,
                                                             .end_session = [this](Session& session) { End(session); }},
                                             metrics_)),
        ticks_([this] {
          while (!stop_) {
            executor_->Tick();
            std::this_thread::sleep_for(milliseconds(5));
          }
        }) {}

  static std::vector<std::unique_ptr<Device>> Devices() {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<FakeGpu>());
    return devices;
  }

  void End(const Session& session) {
    ++ended_;  // first: what waits goes on from here
    EXPECT_TRUE(table_.EndSession(session.id(), SessionEnd::kStuckWait).ok());
  }

  std::shared_ptr<SessionLane> Open(Session& session, bool gpu_waits) {
    return *table_.FindStream(session, *table_.OpenStream(session, {.gpu_waits = gpu_waits}));
  }

  SyncTarget Exported(Session& session, std::uint64_t value) {
    const absl::StatusOr<Id> id = table_.CreateTimeline(session, {.exported = true});
    EXPECT_TRUE(id.ok()) << id.status();
    return {.timeline = table_.FindPoint(session, *id)->timeline, .value = value, .own = true};
  }

  // The fake GPU's one event.
  std::shared_ptr<DeviceEvent> ImportEvent() {
    const absl::StatusOr<Id> id = table_.ImportEvent(
        *session_, {.handle = std::string(FakeDeviceMemory::kEventHandle.begin(), FakeDeviceMemory::kEventHandle.end()),
                    .device_uuid = kFakeGpu,
                    .exporter_pid = 1});
    EXPECT_TRUE(id.ok()) << id.status();
    return id.ok() ? table_.FindPoint(*session_, *id)->event : nullptr;
  }

  // On the fake GPU's memory.
  Submission Make(Work& work, const std::shared_ptr<SessionLane>& lane) {
    Submission made = work.Make(session_, lane);
    for (BoundGemm& gemm : made.ops) gemm.space = MemorySpace::Gpu(kFakeGpu);
    return made;
  }
  double GpuWaits() const { return MetricValue(metrics_, "tessera_device_waits_total"); }
  // What a client, or its GPU, does. The word is raised in memory only.
  static void Write(const SyncTarget& target, std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(
        *reinterpret_cast<std::uint64_t*>(*target.timeline->word()->AddressOn(MemorySpace::Gpu(kFakeGpu))))
        .store(value);
  }

  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper_{std::chrono::hours(1), metrics_};
  FakeDeviceMemory gpu_;
  std::unique_ptr<Executor> executor_;
  SessionTable table_{1,
                      {.sessions_max = 9, .leases_max = 9, .buffers_per_session_max = 9, .buffer_bytes_max = 1U << 20U},
                      metrics_,
                      reaper_,
                      [this](const StreamSpec& spec) { return executor_->MakeLane(spec); },
                      {&gpu_}};
  std::shared_ptr<Session> session_ = OpenTestSession(table_);
  std::shared_ptr<SessionLane> lane_ = Open(*session_, /*gpu_waits=*/true);
  std::shared_ptr<SessionLane> plain_ = Open(*session_, /*gpu_waits=*/false);
  std::atomic<int> ended_{0};
  std::atomic<bool> stop_{false};
  std::thread ticks_;
};

TEST_F(DeviceWaitTest, IsLaunchedAtOnceAndRunsWhenTheWordIsThere) {
  const SyncTarget ready = Exported(*session_, 3);
  const SyncTarget done = Exported(*session_, 8);
  Work work;
  Submission made = Make(work, lane_);
  made.wait = {ready};
  made.signal = {done};
  executor_->Submit(std::move(made));
  EXPECT_EQ(GpuWaits(), 1);
  EXPECT_EQ(lane_->gated(), 0);
  Write(ready, 2);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_TRUE(work.untouched());
  EXPECT_EQ(done.timeline->word()->Load(), 0);
  Write(ready, 3);
  EXPECT_TRUE(work.Await().ok());
  EXPECT_TRUE(work.right());
  EXPECT_EQ(done.timeline->word()->Load(), 8);
  EXPECT_EQ(done.timeline->value(), 8);
  EXPECT_EQ(ended_, 0);
}

TEST_F(DeviceWaitTest, IsKeptByTheHostElsewhere) {
  const SyncTarget exported = Exported(*session_, 1);
  const SyncTarget plain{.timeline = table_.FindPoint(*session_, *table_.CreateTimeline(*session_, {}))->timeline,
                         .value = 1,
                         .own = true};
  SyncTarget others = exported;  // of a session that its own end does not raise
  others.own = false;
  struct Case {
    SyncTarget target;
    bool gpu_waits;
  };
  for (const Case& each : {Case{exported, false}, Case{plain, true}, Case{others, true}}) {
    Work work;
    Submission made = Make(work, each.gpu_waits ? lane_ : plain_);
    made.wait = {each.target};
    made.launch_by = steady_clock::now() + milliseconds(30);
    executor_->Submit(std::move(made));
    EXPECT_EQ(work.Await().code(), StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(work.untouched());
  }
  EXPECT_EQ(GpuWaits(), 0);
  EXPECT_FALSE(session_->ended());
}

TEST_F(DeviceWaitTest, TheHostSeesWhatMemoryShows) {
  const SyncTarget ready = Exported(*session_, 5);
  Work work;
  Submission made = Make(work, plain_);
  made.wait = {ready};
  executor_->Submit(std::move(made));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(work.calls(), 0);
  Write(ready, 7);
  EXPECT_TRUE(work.Await().ok());
  EXPECT_TRUE(work.right());
}

TEST_F(DeviceWaitTest, AnErrorReleasesTheDeviceAndIsTold) {
  const SyncTarget ready = Exported(*session_, 1);
  const SyncTarget done = Exported(*session_, 1);
  Work cause;
  Work effect;
  Submission first = Make(cause, plain_);
  const auto never = table_.FindPoint(*session_, *table_.CreateTimeline(*session_, {}))->timeline;
  first.wait = {{.timeline = never, .value = 1, .own = true}};
  first.signal = {ready};
  first.launch_by = steady_clock::now() + milliseconds(50);
  executor_->Submit(std::move(first));
  Submission second = Make(effect, lane_);
  second.wait = {ready};
  second.signal = {done};
  executor_->Submit(std::move(second));
  EXPECT_EQ(GpuWaits(), 1);
  EXPECT_EQ(cause.Await().code(), StatusCode::kDeadlineExceeded);
  const absl::Status status = effect.Await();
  EXPECT_EQ(status.code(), StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("what it waited for has failed"));
  EXPECT_EQ(done.timeline->Reached(1)->code(), StatusCode::kAborted);
  EXPECT_FALSE(session_->ended());
  // Known before the launch, it keeps the work from the device.
  Work late;
  Submission third = Make(late, lane_);
  third.wait = {ready};
  executor_->Submit(std::move(third));
  EXPECT_EQ(late.Await().code(), StatusCode::kAborted);
  EXPECT_TRUE(late.untouched());
}

TEST_F(DeviceWaitTest, ATimeoutEndsTheSessionAndFreesTheDevice) {
  const SyncTarget never = Exported(*session_, 1);
  const SyncTarget done = Exported(*session_, 1);
  Work stuck;
  Work behind;
  Submission first = Make(stuck, lane_);
  first.wait = {never};
  first.signal = {done};
  first.launch_by = steady_clock::now() + milliseconds(50);
  executor_->Submit(std::move(first));
  executor_->Submit(Make(behind, lane_));
  const absl::Status status = stuck.Await();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the session has ended"));
  EXPECT_TRUE(behind.Await().ok());  // it was launched, and the truth is told
  EXPECT_EQ(ended_, 1);
  EXPECT_TRUE(session_->ended());
  EXPECT_EQ(never.timeline->word()->Load(), kSyncValueMax);
  EXPECT_FALSE(done.timeline->Reached(1)->ok());
}

TEST_F(DeviceWaitTest, TheEndOfASessionFreesTheDeviceEvenFromAClientThatWritesOn) {
  const SyncTarget never = Exported(*session_, 1);
  Work work;
  Submission made = Make(work, lane_);
  made.wait = {never};
  executor_->Submit(std::move(made));
  std::atomic<bool> stop{false};
  std::thread client([&] {
    while (!stop) Write(never, 0);
  });
  ASSERT_TRUE(table_.EndSession(session_->id(), SessionEnd::kLeaseLost).ok());
  const absl::Status status = work.Await();
  stop = true;
  client.join();
  EXPECT_EQ(status.code(), StatusCode::kAborted) << status;
  EXPECT_EQ(ended_, 0);
}

class BoundedWaitTest : public DeviceWaitTest {
 protected:
  BoundedWaitTest() : DeviceWaitTest(milliseconds(200)) {}
};

TEST_F(BoundedWaitTest, AWaitWithoutATimeoutHasTheDaemons) {
  const SyncTarget never = Exported(*session_, 1);
  Work work;
  Submission made = Make(work, lane_);
  made.wait = {never};
  made.answer_when_launched = true;
  const auto start = steady_clock::now();
  executor_->Submit(std::move(made));
  EXPECT_TRUE(work.Await().ok());  // launched
  while (ended_ == 0 && steady_clock::now() - start < kTestPatience) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(ended_, 1);
  EXPECT_GE(steady_clock::now() - start, milliseconds(200));
  EXPECT_TRUE(executor_->AwaitIdle(kTestPatience));  // it runs on the operands
}

// What the host takes for reached or failed, the device must get to see.
TEST_F(BoundedWaitTest, AnEarlierErrorReleasesTheDeviceThoughNobodySignalsThePoint) {
  const SyncTarget target = Exported(*session_, 9);
  Work work;
  Submission made = Make(work, lane_);
  made.wait = {target};
  executor_->Submit(std::move(made));
  target.timeline->Signal(5, absl::InternalError("failed"));
  EXPECT_EQ(work.Await().code(), StatusCode::kAborted);
  EXPECT_EQ(ended_, 0);
}

TEST_F(BoundedWaitTest, APointThatIsReachedIsShownAgain) {
  const SyncTarget target = Exported(*session_, 6);
  target.timeline->Signal(7, absl::OkStatus());
  Write(target, 2);
  Work work;
  Submission made = Make(work, lane_);
  made.wait = {target};
  executor_->Submit(std::move(made));
  EXPECT_TRUE(work.Await().ok());
  EXPECT_EQ(ended_, 0);
}

TEST_F(BoundedWaitTest, SignalsOutOfOrderDoNotLowerTheValue) {
  const SyncTarget target = Exported(*session_, 6);
  for (const std::uint64_t value : {7, 5}) {
    Work signals;
    Submission made = Make(signals, plain_);
    made.signal = {{.timeline = target.timeline, .value = value, .own = true}};
    executor_->Submit(std::move(made));
    EXPECT_TRUE(signals.Await().ok());
  }
  EXPECT_EQ(target.timeline->word()->Load(), 7);
}

TEST_F(BoundedWaitTest, AValueBeyondTheGreatestIsAWaitThatIsStuck) {
  const SyncTarget target = Exported(*session_, 5);
  Work work;
  Submission made = Make(work, lane_);
  made.wait = {target};
  executor_->Submit(std::move(made));
  Write(target, ~std::uint64_t{0});
  EXPECT_EQ(work.Await().code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ended_, 1);
}

TEST_F(BoundedWaitTest, AReleasedTimelineIsRaisedAgain) {
  const SyncTarget first = Exported(*session_, 1);
  const absl::StatusOr<Id> id = table_.CreateTimeline(*session_, {.exported = true});
  const SyncTarget released{.timeline = table_.FindPoint(*session_, *id)->timeline, .value = 9, .own = true};
  Work before, work;
  Submission made = Make(before, lane_);
  made.wait = {first};
  executor_->Submit(std::move(made));
  Submission second = Make(work, lane_);
  second.wait = {released};
  executor_->Submit(std::move(second));
  EXPECT_TRUE(table_.ReleaseSync(*session_, *id).ok());
  Write(released, 5);  // as work that was under way
  Write(first, 1);
  EXPECT_TRUE(before.Await().ok());
  EXPECT_EQ(work.Await().code(), StatusCode::kAborted);
  EXPECT_EQ(ended_, 0);
}

TEST_F(BoundedWaitTest, TheTimeOfAWaitBeginsWhenTheStreamHasComeToIt) {
  const SyncTarget ready = Exported(*session_, 0);
  std::vector<std::unique_ptr<Work>> works;
  for (std::uint64_t i = 1; i <= 6; ++i) {
    Submission made = Make(*works.emplace_back(std::make_unique<Work>()), lane_);
    made.wait = {{.timeline = ready.timeline, .value = i, .own = true}};
    executor_->Submit(std::move(made));
  }
  for (std::uint64_t i = 1; i <= 6; ++i) {  // together three times as long as one may wait
    std::this_thread::sleep_for(milliseconds(100));
    Write(ready, i);
    EXPECT_TRUE(works[i - 1]->Await().ok());
  }
  EXPECT_EQ(ended_, 0);
}

TEST_F(DeviceWaitTest, EventsAreRecordedOnceWhateverBecomesOfTheWork) {
  const std::shared_ptr<DeviceEvent> event = ImportEvent();
  Work good;
  Submission first = Make(good, lane_);
  first.record = {event};
  executor_->Submit(std::move(first));
  EXPECT_TRUE(good.Await().ok());
  EXPECT_EQ(gpu_.event_records, 1);

  Work dropped;
  Submission second = Make(dropped, lane_);
  second.record = {event};
  second.still_wanted = [] { return absl::CancelledError("by its client"); };
  executor_->Submit(std::move(second));
  EXPECT_EQ(dropped.Await().code(), StatusCode::kCancelled);
  EXPECT_EQ(gpu_.event_records, 2);
}

TEST_F(DeviceWaitTest, AnEventIsWaitedForByTheHost) {
  Work work;
  Submission made = Make(work, lane_);
  made.wait = {{.timeline = table_.Await(ImportEvent()), .value = 1}};
  executor_->Submit(std::move(made));
  EXPECT_EQ(lane_->gated(), 1);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(work.calls(), 0);
  gpu_.event_done = true;
  EXPECT_TRUE(work.Await().ok());
  EXPECT_TRUE(work.right());
}

}  // namespace
}  // namespace tessera::server
