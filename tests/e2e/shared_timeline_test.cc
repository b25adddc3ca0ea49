// Timelines in shared memory, and events, as clients of a daemon without a GPU see them.
#include <gmock/gmock.h>

#include <thread>

#include "common/sync_slot.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/exact_product.h"
#include "tests/e2e/raw_order.h"
#include "tests/e2e/raw_side_channel.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::uint64_t kNumber = 5;

class SharedTimelineTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({});
    client_.emplace(Connect());
    session_.emplace(client_->OpenSession("shared").value());
    memory_.emplace(session_->Allocate(1U << 20U).value());
  }
  void TearDown() override {
    memory_.reset();
    session_.reset();
    client_.reset();
    DaemonFixture::TearDown();
  }

  ExactProduct Product(std::uint64_t slot) {
    ExactProduct product(*memory_, 4, 4, 8, slot << 16U);
    product.Fill(kNumber);
    return product;
  }
  static client::GemmSpec Ordered(client::GemmSpec spec, client::OrderSpec order) {
    spec.order = std::move(order);
    return spec;
  }

  std::optional<client::Client> client_;
  std::optional<client::Session> session_;
  std::optional<client::Buffer> memory_;
};

TEST_F(SharedTimelineTest, ASignalInMemoryOpensAGateAndTheDaemonsShowsThere) {
  client::SharedTimeline timeline = session_->CreateSharedTimeline(5).value();
  EXPECT_EQ(timeline.value(), 5);
  EXPECT_TRUE(timeline.Reached(5)->ok());
  for (const bool gpu_waits : {false, true}) {  // without a GPU they are the same
    const std::uint64_t from = timeline.value();
    client::WorkStream stream = session_->OpenWorkStream(v1::STREAM_PRIORITY_NORMAL, gpu_waits).value();
    ExactProduct product = Product(gpu_waits ? 1 : 0);
    auto answer = session_->GemmAsync(Ordered(
        product.spec(), {.stream = stream.id(), .wait = {timeline.At(from + 1)}, .signal = {timeline.At(from + 2)}}));
    EXPECT_EQ(answer.wait_for(50ms), std::future_status::timeout);
    EXPECT_FALSE(timeline.Reached(from + 1).has_value());
    timeline.Signal(from + 1);
    const auto result = answer.get();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(product.Right(kNumber));
    EXPECT_EQ(timeline.value(), from + 2);
    EXPECT_EQ(timeline.Wait(from + 2, 10s).value(), from + 2);
  }
}

TEST_F(SharedTimelineTest, WaitSeesMemoryAndTimesOut) {
  client::SharedTimeline timeline = session_->CreateSharedTimeline().value();
  EXPECT_EQ(timeline.Wait(1, 50ms).status().code(), StatusCode::kDeadlineExceeded);
  std::thread later([&] {
    std::this_thread::sleep_for(50ms);
    timeline.Signal(9);
  });
  EXPECT_EQ(timeline.Wait(1, 20s).value(), 9);
  later.join();
}

TEST_F(SharedTimelineTest, AnErrorIsSeenInMemory) {
  client::SharedTimeline timeline = session_->CreateSharedTimeline().value();
  client::Timeline never = session_->CreateTimeline().value();
  ExactProduct product = Product(0);
  const auto result = session_->Gemm(
      Ordered(product.spec(), {.wait = {never.At(1)}, .signal = {timeline.At(4)}, .launch_timeout = 50ms}));
  EXPECT_EQ(result.status().code(), StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(timeline.Reached(4).has_value());
  EXPECT_EQ(timeline.Reached(4)->code(), StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(timeline.Reached(3)->ok());
  EXPECT_EQ(timeline.Wait(4, 10s).status().code(), StatusCode::kDeadlineExceeded);
}

TEST_F(SharedTimelineTest, TheEndOfTheSessionFreesWhoWaitsInMemory) {
  client::SharedTimeline timeline = session_->CreateSharedTimeline(3).value();
  memory_.reset();
  ASSERT_TRUE(session_->Close().ok());
  ASSERT_TRUE(Eventually(20s, [&] { return timeline.value() == kSyncValueMax; }));
  EXPECT_TRUE(timeline.Reached(3)->ok());
  EXPECT_EQ(timeline.Reached(4)->code(), StatusCode::kAborted);
}

TEST_F(SharedTimelineTest, ReleasingOneLeavesTheOthersAlone) {
  client::SharedTimeline kept = session_->CreateSharedTimeline(7).value();
  for (int round = 0; round < 200; ++round) {  // more than a page has places
    client::SharedTimeline timeline = session_->CreateSharedTimeline(1).value();
    EXPECT_EQ(timeline.value(), 1);
    timeline.Signal(100);
  }
  EXPECT_EQ(kept.value(), 7);
}

TEST_F(SharedTimelineTest, PointsHaveALimit) {
  client::SharedTimeline timeline = session_->CreateSharedTimeline().value();
  ExactProduct product = Product(0);
  const absl::Status waits = session_->Gemm(Ordered(product.spec(), {.wait = {timeline.At(kSyncValueMax)}})).status();
  EXPECT_EQ(waits.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(waits.message()), StartsWith("options.wait[0].value: "));
  const absl::Status signals =
      session_->Gemm(Ordered(product.spec(), {.signal = {timeline.At(1), timeline.At(~std::uint64_t{0})}})).status();
  EXPECT_EQ(signals.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(signals.message()), StartsWith("options.signal[1].value: "));
  EXPECT_EQ(timeline.Wait(kSyncValueMax, 10s).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(session_->CreateSharedTimeline(kSyncValueMax).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(SharedTimelineTest, MemoryIsForTheOwnersConnection) {
  const RawClient raw(socket());
  RawSideChannel channel(socket());
  const auto fetch = [&](const std::string& id) {
    v1::SideRequest request;
    request.mutable_fetch_timeline()->set_timeline_id(id);
    return channel.Ask(request.SerializeAsString());
  };
  const client::SharedTimeline timeline = session_->CreateSharedTimeline().value();
  EXPECT_EQ(fetch(timeline.id()).error().code(), static_cast<int>(StatusCode::kFailedPrecondition));  // no session yet
  const std::string token = raw.OpenOn(channel.lease()).value();
  EXPECT_EQ(fetch(timeline.id()).error().code(), static_cast<int>(StatusCode::kPermissionDenied));
  EXPECT_EQ(fetch("short").error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  const RawOrder order(raw, token);
  const std::string plain = order.CreateTimeline().value();
  EXPECT_EQ(fetch(plain).error().code(), static_cast<int>(StatusCode::kFailedPrecondition));
  EXPECT_THAT(fetch(plain).error().message(), HasSubstr("exported"));
  EXPECT_EQ(fetch(order.OpenStream().value()).error().code(), static_cast<int>(StatusCode::kInvalidArgument));

  v1::CreateTimelineRequest request;
  request.set_exported(true);
  const auto made = RawClient::Call(raw.memory(), &v1::Memory::Stub::CreateTimeline, request, token);
  ASSERT_TRUE(made.ok()) << made.status();
  const v1::SideReply passed = fetch(made->timeline_id());
  ASSERT_TRUE(passed.has_descriptor_passed()) << passed.ShortDebugString();
  EXPECT_EQ(passed.descriptor_passed().bytes(), 64);
  EXPECT_EQ(passed.descriptor_passed().space(), "host");
}

TEST_F(SharedTimelineTest, WhatAClientWritesHarmsOnlyItself) {
  client::SharedTimeline timeline = session_->CreateSharedTimeline().value();
  timeline.Signal(~std::uint64_t{0});  // beyond any point: it counts as nothing
  EXPECT_EQ(timeline.Wait(1, 50ms).status().code(), StatusCode::kDeadlineExceeded);
  timeline.Signal(12);
  ExactProduct product = Product(0);
  EXPECT_TRUE(session_->Gemm(Ordered(product.spec(), {.wait = {timeline.At(12)}, .signal = {timeline.At(13)}})).ok());
  EXPECT_TRUE(product.Right(kNumber));
  EXPECT_TRUE(client_->OpenSession("another").ok());
}

TEST_F(SharedTimelineTest, NeedsTheSideChannel) {
  client::Session attached = client_->OpenSession({.lease = client::Lease::kAttach}).value();
  EXPECT_EQ(attached.CreateSharedTimeline().status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(SharedTimelineTest, EventsAreCheckedBeforeAnythingIsOpened) {
  const RawClient raw(socket());
  v1::ImportEventRequest request;
  request.set_handle(std::string(64, 'h'));
  request.set_device_uuid("GPU-11111111-2222-3333-4444-555555555555");
  request.set_exporter_pid(::getpid());
  const auto import = [&] {
    return RawClient::Call(raw.memory(), &v1::Memory::Stub::ImportEvent, request, session_->token()).status();
  };
  // Of all processes, the daemon's own cannot pass handles, wherever the GPU is.
  EXPECT_EQ(import().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(import().message()), HasSubstr("exported timeline"));
  request.set_handle("short");
  EXPECT_EQ(import().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(import().message()), StartsWith("handle: "));
  request.set_handle(std::string(64, 'h'));
  request.set_exporter_pid(0);
  EXPECT_THAT(std::string(import().message()), StartsWith("exporter_pid: "));
  EXPECT_EQ(session_->ImportEvent(nullptr).status().code(), StatusCode::kUnimplemented);  // no driver here either
}

}  // namespace
}  // namespace tessera::e2e
