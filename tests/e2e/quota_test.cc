// Limits of one user: each named and counted when it refuses, of no concern to others, and given back.

#include <gmock/gmock.h>
#include <signal.h>

#include <list>
#include <vector>

#include "tests/e2e/child_process.h"
#include "tests/e2e/raw_client.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::chrono::milliseconds kSoon = 5s;

// Two users, neither of which is root, nor the daemon's.
class QuotaTest : public DaemonFixture {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    DaemonFixture::SetUp();
  }

  void TearDown() override {
    alice_.reset();
    bob_.reset();
    DaemonFixture::TearDown();
  }

  void Start(const SettingTexts& settings) {
    alice_.reset();
    bob_.reset();
    StartDaemon(settings);
    alice_.emplace(socket(), kAliceUid);
    bob_.emplace(socket(), kBobUid);
    alice_token_ = alice_->OpenFor(60'000, "alice").value();
    bob_token_ = bob_->OpenFor(60'000, "bob").value();
  }

  double Refused(const std::string& limit) const {
    return MetricSum(Metrics(), "tessera_refused_total", {"limit=\"" + limit + "\""});
  }

  // Refused by name, and counted once.
  void ExpectLimit(const std::string& limit, const std::string& number, const std::function<absl::Status()>& call) {
    const double before = Refused(limit);
    const absl::Status status = call();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith(limit + ": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(number));
    EXPECT_EQ(Refused(limit), before + 1);
  }

  std::uint64_t BytesHeld() const { return alice_->ServerInfo().buffer_bytes(); }

  std::optional<RawClient> alice_, bob_;
  std::string alice_token_, bob_token_;
};

TEST_F(QuotaTest, Bytes) {
  Start({{"buffer_bytes_per_principal_max", "100KiB"}});
  const std::string limit = "buffer_bytes_per_principal_max";
  const std::string second = alice_->OpenFor(60'000).value();
  const std::string large = alice_->Allocate(alice_token_, 60U << 10U).value();
  ASSERT_TRUE(alice_->Allocate(second, 40U << 10U).ok());  // all of it, in two sessions
  for (const std::string& token : {alice_token_, second}) {
    for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{1} << 63U, ~std::uint64_t{0}}) {
      ExpectLimit(limit, std::to_string(100U << 10U), [&] { return alice_->Allocate(token, bytes).status(); });
    }
  }
  ASSERT_TRUE(bob_->Allocate(bob_token_, 100U << 10U).ok()) << "others have their own";
  ExpectLimit(limit, "", [&] { return bob_->Allocate(bob_token_, 1).status(); });
  EXPECT_EQ(BytesHeld(), 200U << 10U);

  ASSERT_TRUE(alice_->Release(alice_token_, large).ok());
  EXPECT_TRUE(alice_->Allocate(alice_token_, 60U << 10U).ok()) << "at once, after the answer to the release";
  ExpectLimit(limit, "", [&] { return alice_->Allocate(alice_token_, 1).status(); });
  ASSERT_TRUE(alice_->Close(second).ok());
  EXPECT_TRUE(alice_->Allocate(alice_token_, 40U << 10U).ok()) << "and after that to the close";
}

TEST_F(QuotaTest, Buffers) {
  Start({{"buffers_per_principal_max", "5"}, {"buffers_per_session_max", "4"}});
  const std::string second = alice_->OpenFor(60'000).value();
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(alice_->Allocate(alice_token_, 1).ok());
  ExpectLimit("buffers_per_session_max", "4", [&] { return alice_->Allocate(alice_token_, 1).status(); });
  const std::string fifth = alice_->Allocate(second, 1).value();
  ExpectLimit("buffers_per_principal_max", "5", [&] { return alice_->Allocate(second, 1).status(); });
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(bob_->Allocate(bob_token_, 1).ok());
  ASSERT_TRUE(alice_->Release(second, fifth).ok());
  EXPECT_TRUE(alice_->Allocate(second, 1).ok());
  // What was refused counts for nothing: neither the request's bytes nor its buffer.
  EXPECT_EQ(alice_->ServerInfo().buffers(), 9U);
  EXPECT_EQ(BytesHeld(), 9U);
}

TEST_F(QuotaTest, BuffersOfAll) {
  Start({{"buffers_max", "3"}});
  ASSERT_TRUE(alice_->Allocate(alice_token_, 1).ok());
  ASSERT_TRUE(alice_->Allocate(alice_token_, 1).ok());
  const std::string third = bob_->Allocate(bob_token_, 1).value();
  ExpectLimit("buffers_max", "3", [&] { return alice_->Allocate(alice_token_, 1).status(); });
  ASSERT_TRUE(bob_->Release(bob_token_, third).ok());
  EXPECT_TRUE(alice_->Allocate(alice_token_, 1).ok());
}

TEST_F(QuotaTest, Sessions) {
  Start({{"sessions_per_principal_max", "3"}});
  RawAttach attach(*alice_);
  const std::string attached = alice_->OpenOn(attach.First()->lease()).value();
  const std::string timed = alice_->OpenFor(60'000).value();
  RawAttach more(*alice_);
  const std::string lease = more.First()->lease();
  const auto limit = [&](const std::function<absl::Status()>& call) {
    ExpectLimit("sessions_per_principal_max", "3", call);
  };
  limit([&] { return alice_->OpenFor(60'000).status(); });
  limit([&] { return alice_->OpenOn(lease).status(); });
  EXPECT_TRUE(bob_->OpenFor(60'000).ok()) << "others have their own";
  ASSERT_TRUE(alice_->Close(timed).ok());
  EXPECT_TRUE(alice_->OpenOn(lease).ok()) << "the refusal has not used up the lease";
  limit([&] { return alice_->OpenFor(60'000).status(); });
  attach.Cancel();
  EXPECT_TRUE(Eventually(kSoon, [&] { return alice_->OpenFor(60'000).ok(); }));
  const RawClient root(socket());
  ASSERT_TRUE(root.EndSession(alice_->ListSessions()->sessions(0).name()).ok());
  EXPECT_TRUE(alice_->OpenFor(60'000).ok()) << "an evicted session counts no more";
}

// Memory that another user's call keeps in use is the owner's until it is gone, though the owner has nothing else left.
TEST_F(QuotaTest, MemoryInUseCountsForItsOwnerWhoLeft) {
  const std::uint64_t bytes = kSlowProduct.BufferBytes();
  Start({{"cpu_threads", "1"}, {"buffer_bytes_per_principal_max", std::to_string(bytes)}});
  const std::string theirs = bob_->Allocate(bob_token_, bytes).value();
  const std::string shared = alice_->Allocate(alice_token_, bytes).value();
  ASSERT_TRUE(alice_->Share(alice_token_, shared, PrincipalOf(kBobUid), v1::BUFFER_ACCESS_READ).ok());
  std::future<absl::Status> running = bob_->Send(bob_token_, ProductOf(kSlowProduct, shared, theirs));
  ASSERT_TRUE(Eventually(20s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > 0; }));
  EXPECT_EQ(alice_->Close(alice_token_, 50ms).status().code(), StatusCode::kDeadlineExceeded);
  const std::string token = alice_->OpenFor(60'000).value();
  ExpectLimit("buffer_bytes_per_principal_max", " 0 of ", [&] { return alice_->Allocate(token, 1).status(); });
  EXPECT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  EXPECT_EQ(Text(running.get()), "OK");
  EXPECT_TRUE(Eventually(kSoon, [&] { return alice_->Allocate(token, bytes).ok(); }));
}

// Of a client that is killed, while its calls wait and run.
TEST_F(QuotaTest, EverythingComesBackFromAKilledClient) {
  const std::string bytes = std::to_string(3 * kSlowProduct.BufferBytes());
  Start({{"cpu_threads", "1"},
         {"buffer_bytes_per_principal_max", bytes},
         {"buffers_per_principal_max", "3"},
         {"queue_per_principal_max", "3"},
         {"sessions_per_principal_max", "2"}});
  for (const char* lease : {"side", "attach", "ttl"}) {
    SCOPED_TRACE(lease);
    ChildProcess child({SESSION_HOLDER, "--socket", socket(), "--uid", std::to_string(kAliceUid), "--lease", lease,
                        "--ttl-ms", "2000", "--buffers", "3", "--calls", "3"});
    // It is the same user that is at its limits now.
    ASSERT_TRUE(Eventually(20s, [&] { return child.Out() == "holding\n" && alice_->ServerInfo().in_flight() == 3; }))
        << child.Err();
    EXPECT_EQ(alice_->ListSessions()->sessions_size(), 2);
    ExpectLimit("buffers_per_principal_max", "3", [&] { return alice_->Allocate(alice_token_, 1).status(); });
    ExpectLimit("sessions_per_principal_max", "2", [&] { return alice_->OpenFor(60'000).status(); });
    child.Signal(SIGKILL);
    EXPECT_EQ(child.Wait(), -SIGKILL);
    EXPECT_TRUE(Eventually(20s, [&] { return BytesHeld() == 0 && alice_->ServerInfo().in_flight() == 0; }));
    const std::string all = alice_->Allocate(alice_token_, 3 * kSlowProduct.BufferBytes()).value();
    ASSERT_TRUE(alice_->Release(alice_token_, all).ok());
    const std::string session = alice_->OpenFor(60'000).value();
    ASSERT_TRUE(alice_->Close(session).ok());
  }
}

// A product whose tensors travel in the messages, and which has a turn in the queue.
v1::GemmRequest InlineProduct() {
  v1::GemmRequest request;
  constexpr std::int64_t kExtent = 16;
  constexpr std::int64_t kTerms = 512;
  v1::GemmOp& op = *request.mutable_op();
  for (v1::Tensor* const operand : {op.mutable_a(), op.mutable_b()}) {
    operand->set_dtype(v1::DTYPE_BF16);
    operand->add_shape(kExtent);
    operand->add_shape(kTerms);
    operand->set_inline_data(std::string(kExtent * kTerms * 2, '\0'));
  }
  op.mutable_d()->set_dtype(v1::DTYPE_F32);
  op.mutable_d()->add_shape(kExtent);
  op.mutable_d()->add_shape(kExtent);
  op.mutable_d()->mutable_inline_result();
  return request;
}

class QueueQuotaTest : public QuotaTest {
 protected:
  // The one thread is busy for as long as the result is not ready.
  std::future<absl::Status> KeepBusy() {
    const std::string buffer = bob_->Allocate(bob_token_, kSlowProduct.BufferBytes()).value();
    std::future<absl::Status> slow = bob_->Send(bob_token_, ProductOf(kSlowProduct, buffer, buffer));
    EXPECT_TRUE(Eventually(20s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > 0; }));
    return slow;
  }

  void AwaitInFlight(std::uint32_t operations) const {
    EXPECT_TRUE(Eventually(20s, [&] { return alice_->ServerInfo().in_flight() == operations; }))
        << alice_->ServerInfo().in_flight();
  }
};

TEST_F(QueueQuotaTest, CallsOfAllSessionsAndOfNoneCountTogether) {
  Start({{"cpu_threads", "1"}, {"queue_per_principal_max", "4"}, {"queue_per_session_max", "3"}});
  const std::string second = alice_->OpenFor(60'000).value();
  const std::string first_buffer = alice_->Allocate(alice_token_, kSmallProduct.BufferBytes()).value();
  const std::string second_buffer = alice_->Allocate(second, kSmallProduct.BufferBytes()).value();
  const v1::GemmRequest of_first = ProductOf(kSmallProduct, first_buffer, first_buffer);
  const v1::GemmRequest of_second = ProductOf(kSmallProduct, second_buffer, second_buffer);
  std::future<absl::Status> slow = KeepBusy();
  std::list<std::future<absl::Status>> accepted;
  accepted.push_back(alice_->Send(std::nullopt, InlineProduct()));
  accepted.push_back(alice_->Send(alice_token_, of_first));
  accepted.push_back(alice_->Send(second, of_second));
  accepted.push_back(alice_->Send(std::nullopt, InlineProduct()));
  AwaitInFlight(5);
  const std::string limit = "queue_per_principal_max";
  ExpectLimit(limit, "4", [&] { return alice_->Gemm(std::nullopt, InlineProduct()); });
  ExpectLimit(limit, "4", [&] { return alice_->Gemm(alice_token_, of_first); });
  const RawClient again(socket(), kAliceUid);
  ExpectLimit(limit, "4", [&] { return again.Gemm(std::nullopt, InlineProduct()); });  // one user, another connection
  for (int i = 0; i < 3; ++i) accepted.push_back(bob_->Send(std::nullopt, InlineProduct()));  // others have their own
  AwaitInFlight(8);
  ExpectLimit(limit, "4", [&] { return bob_->Gemm(std::nullopt, InlineProduct()); });
  EXPECT_FALSE(IsReady(slow)) << "the slow product was over before: use a larger one";
  EXPECT_EQ(Text(slow.get()), "OK");
  for (auto& answer : accepted) EXPECT_EQ(Text(answer.get()), "OK");
  AwaitInFlight(0);
  EXPECT_EQ(Text(alice_->Gemm(std::nullopt, InlineProduct())), "OK") << "there is room again";
}

TEST_F(QueueQuotaTest, PlacesComeBackWithAnEndedSession) {
  Start({{"cpu_threads", "1"}, {"queue_per_principal_max", "3"}});
  const std::string buffer = alice_->Allocate(alice_token_, kSmallProduct.BufferBytes()).value();
  std::future<absl::Status> slow = KeepBusy();
  std::list<std::future<absl::Status>> queued;
  for (int i = 0; i < 3; ++i) {
    queued.push_back(alice_->Send(alice_token_, ProductOf(kSmallProduct, buffer, buffer)));
  }
  AwaitInFlight(4);
  ExpectLimit("queue_per_principal_max", "3", [&] { return alice_->Gemm(std::nullopt, InlineProduct()); });
  ASSERT_TRUE(alice_->Close(alice_token_).ok());
  for (auto& answer : queued) EXPECT_EQ(answer.get().code(), StatusCode::kCancelled);
  AwaitInFlight(1);
  for (int i = 0; i < 3; ++i) queued.push_back(alice_->Send(std::nullopt, InlineProduct()));
  AwaitInFlight(4);
  EXPECT_FALSE(IsReady(slow)) << "the slow product was over before: use a larger one";
  EXPECT_EQ(Text(slow.get()), "OK");
}

TEST_F(QueueQuotaTest, AStreamCountsToo) {
  Start({{"cpu_threads", "1"}, {"queue_per_principal_max", "2"}});
  std::future<absl::Status> slow = KeepBusy();
  const auto context = RawClient::Context(std::nullopt);
  const auto stream = alice_->compute().Stream(context.get());
  v1::StreamRequest request;
  *request.mutable_submission()->add_ops()->mutable_gemm() = InlineProduct().op();
  for (std::uint64_t tag = 1; tag <= 3; ++tag) {
    request.set_tag(tag);
    ASSERT_TRUE(stream->Write(request));
  }
  v1::StreamReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.tag(), 3U) << "refused at once, before the others have run";
  EXPECT_EQ(reply.code(), static_cast<int>(StatusCode::kResourceExhausted));
  EXPECT_THAT(reply.message(), HasSubstr("queue_per_principal_max: "));
  EXPECT_EQ(Refused("queue_per_principal_max"), 1);
  ASSERT_TRUE(stream->WritesDone());
  while (stream->Read(&reply)) EXPECT_EQ(reply.code(), 0) << reply.message();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(Text(slow.get()), "OK");
}

}  // namespace
}  // namespace tessera::e2e
