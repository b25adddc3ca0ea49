// Calls that nobody waits for any more: cancelled, past their deadline, cut off with their connection.

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "client/core.h"
#include "common/unique_fd.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/oracle/codec.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;

// ---- Calls that can be given up ----

std::unique_ptr<grpc::ClientContext> ContextOf(const std::string& token) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->AddMetadata("tessera-session-bin", token);
  return context;
}

// A Gemm of the bare stub: unlike the client library's it can be cancelled, and go over any channel.
class Call {
 public:
  Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& token, const v1::GemmRequest& request,
       std::chrono::milliseconds timeout = 0ms)
      : state_(std::make_shared<State>(channel, token, request)), answer_(state_->answer.get_future()) {
    if (timeout > 0ms) state_->context->set_deadline(std::chrono::system_clock::now() + timeout);
    state_->stub->async()->Gemm(state_->context.get(), &state_->request, &state_->reply,
                                [state = state_](grpc::Status status) { state->answer.set_value(std::move(status)); });
  }

  void Cancel() { state_->context->TryCancel(); }
  bool Answered() const { return answer_.wait_for(0s) == std::future_status::ready; }
  grpc::Status Await() { return answer_.get(); }

 private:
  struct State {
    State(const std::shared_ptr<grpc::Channel>& channel, const std::string& token, v1::GemmRequest gemm)
        : stub(v1::Compute::NewStub(channel)), context(ContextOf(token)), request(std::move(gemm)) {}
    const std::unique_ptr<v1::Compute::Stub> stub;
    const std::unique_ptr<grpc::ClientContext> context;
    const v1::GemmRequest request;
    v1::GemmReply reply;
    std::promise<grpc::Status> answer;
  };

  const std::shared_ptr<State> state_;  // the callback's too: it may still run when the answer is there
  std::future<grpc::Status> answer_;
};

// K of a product that one thread works on for about a second; a sanitizer makes kernels slower by far.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kSlowTerms = 2048;
#else
constexpr std::int64_t kSlowTerms = 65536;
#endif

// One buffer of a client's own memory: a row of ones, the D of a slow product, and the D of many small ones. All rows
// of A, and all of B, are the row of ones, so that each element of a D is K.
class Ground {
 public:
  Ground() : memfd_(::memfd_create("cancellation-test", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    EXPECT_EQ(::ftruncate(memfd_.get(), kBytes), 0);
    EXPECT_EQ(::fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd_.get(), 0);
    EXPECT_NE(memory, MAP_FAILED);
    memory_ = static_cast<std::byte*>(memory);
    std::memset(memory_, kPattern, kBytes);
    for (std::int64_t i = 0; i < kSlowTerms; ++i) oracle::Encode(DType::kBf16, 1, memory_ + i * 2);
  }
  ~Ground() { ::munmap(memory_, kBytes); }
  Ground(const Ground&) = delete;
  Ground& operator=(const Ground&) = delete;

  int memfd() const { return memfd_.get(); }

  static v1::GemmRequest Slow(const std::string& buffer) { return Request(buffer, kSlowExtent, kSlowTerms, kSlowAt); }
  static v1::GemmRequest Small(const std::string& buffer, std::uint64_t number) {
    return Request(buffer, kSmallExtent, kSmallTerms, SmallAt(number));
  }

  bool SlowIsRight() const { return Holds(kSlowAt, kSlowExtent * kSlowExtent, kSlowTerms); }
  bool SmallIsRight(std::uint64_t number) const {
    return Holds(SmallAt(number), kSmallExtent * kSmallExtent, kSmallTerms);
  }
  bool SmallIsUntouched(std::uint64_t number) const {
    const std::string pattern(kSmallBytes, kPattern);
    return std::memcmp(memory_ + SmallAt(number), pattern.data(), pattern.size()) == 0;
  }

  static constexpr std::uint64_t kBytes = 4 << 20;

 private:
  static constexpr char kPattern = 0x7b;
  static constexpr std::uint64_t kSlowExtent = 768;
  static constexpr std::uint64_t kSlowAt = std::uint64_t{kSlowTerms} * 2;
  static constexpr std::uint64_t kSmallExtent = 4;
  static constexpr std::uint64_t kSmallTerms = 8;
  static constexpr std::uint64_t kSmallBytes = kSmallExtent * kSmallExtent * 4;

  static std::uint64_t SmallAt(std::uint64_t number) {
    return kSlowAt + kSlowExtent * kSlowExtent * 4 + number * kSmallBytes;
  }

  static v1::GemmRequest Request(const std::string& buffer, std::uint64_t extent, std::uint64_t terms,
                                 std::uint64_t d_at) {
    v1::GemmRequest request;
    const auto set = [&](v1::Tensor& tensor, v1::DType dtype, std::uint64_t columns, std::uint64_t row_stride) {
      tensor.set_buffer_id(buffer);
      tensor.set_dtype(dtype);
      for (const std::uint64_t rows : {extent, columns}) tensor.add_shape(static_cast<std::int64_t>(rows));
      for (const std::uint64_t stride : {row_stride, std::uint64_t{1}}) {
        tensor.add_strides(static_cast<std::int64_t>(stride));
      }
    };
    set(*request.mutable_op()->mutable_a(), v1::DTYPE_BF16, terms, 0);
    set(*request.mutable_op()->mutable_b(), v1::DTYPE_BF16, terms, 0);
    set(*request.mutable_op()->mutable_d(), v1::DTYPE_F32, extent, extent);
    request.mutable_op()->mutable_d()->set_byte_offset(d_at);
    return request;
  }

  bool Holds(std::uint64_t at, std::uint64_t elements, std::uint64_t value) const {
    for (std::uint64_t i = 0; i < elements; ++i) {
      if (oracle::Decode(DType::kF32, memory_ + at + i * 4) != static_cast<double>(value)) return false;
    }
    return true;
  }

  const UniqueFd memfd_;
  std::byte* memory_ = nullptr;
};

class CancellationTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cpu_threads", "1"}});
    client_.emplace(Connect());
    session_.emplace(client_->OpenSession("giving up").value());
    buffer_.emplace(session_->Import(ground_.memfd()).value());
  }

  void TearDown() override {
    buffer_.reset();
    session_.reset();
    client_.reset();
    DaemonFixture::TearDown();
  }

  double Outcome(const std::string& outcome) const {
    return MetricSum(Metrics(), "tessera_operations_total", {"outcome=\"" + outcome + "\""});
  }
  double Answers(const std::string& code) const {
    return MetricSum(Metrics(), "tessera_rpcs_total", {"method=\"Compute.Gemm\"", "code=\"" + code + "\""});
  }
  double Launches() const { return MetricSum(Metrics(), "tessera_kernel_launches_total"); }
  std::uint32_t InFlight() const { return client_->ServerInfo().value().in_flight(); }

  // The slow product, running on the daemon's only thread when this returns.
  std::unique_ptr<Call> StartSlow() {
    auto call = std::make_unique<Call>(client_->channel(), session_->token(), Ground::Slow(buffer_->id()));
    EXPECT_TRUE(Eventually(20s, [this] { return Launches() == 1; }));
    return call;
  }

  // Small products 0 to `count` - 1; the daemon has them all when this returns.
  std::list<Call> QueueSmall(std::uint64_t count, std::chrono::milliseconds timeout = 0ms) {
    std::list<Call> calls;
    for (std::uint64_t i = 0; i < count; ++i) {
      calls.emplace_back(client_->channel(), session_->token(), Ground::Small(buffer_->id(), i), timeout);
    }
    EXPECT_TRUE(Eventually(20s, [&] { return InFlight() == count + 1; })) << InFlight();
    return calls;
  }

  void ExpectGoodCallIsRight(std::uint64_t number) {
    Call call(client_->channel(), session_->token(), Ground::Small(buffer_->id(), number));
    const grpc::Status status = call.Await();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(ground_.SmallIsRight(number));
  }

  // Only the slow product ran: `dropped` others ended as `outcome` and left their D alone.
  void ExpectOnlySlowRan(std::uint64_t dropped, const std::string& outcome, const std::string& code) {
    EXPECT_TRUE(Eventually(20s, [&] { return Answers("OK") == 1 && Answers(code) == dropped; })) << Metrics();
    EXPECT_EQ(Outcome("ok"), 1);
    EXPECT_EQ(Outcome(outcome), dropped);
    EXPECT_EQ(MetricSum(Metrics(), "tessera_operations_total"), 1 + dropped);
    EXPECT_EQ(Launches(), 1);
    EXPECT_EQ(MetricSum(Metrics(), "tessera_in_flight"), 0);
    EXPECT_EQ(MetricSum(Metrics(), "tessera_queue_depth"), 0);
    EXPECT_TRUE(ground_.SlowIsRight());
    for (std::uint64_t i = 0; i < dropped; ++i) EXPECT_TRUE(ground_.SmallIsUntouched(i)) << i;
  }

  Ground ground_;
  std::optional<client::Client> client_;
  std::optional<client::Session> session_;
  std::optional<client::Buffer> buffer_;
};

TEST_F(CancellationTest, CancelledCallsThatWaitNeverLaunch) {
  const auto running = StartSlow();
  std::list<Call> waiting = QueueSmall(9);
  for (Call& call : waiting) call.Cancel();
  for (Call& call : waiting) EXPECT_EQ(call.Await().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(running->Await().ok());
  ExpectOnlySlowRan(9, "cancelled", "CANCELLED");
  ExpectGoodCallIsRight(0);
}

TEST_F(CancellationTest, CallsPastTheirDeadlineNeverLaunch) {
  const auto running = StartSlow();
  std::list<Call> waiting = QueueSmall(50, 200ms);
  for (Call& call : waiting) EXPECT_EQ(call.Await().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_FALSE(running->Answered()) << "the slow product was over before the deadlines: use a larger one";
  EXPECT_TRUE(running->Await().ok());
  ExpectOnlySlowRan(50, "expired", "DEADLINE_EXCEEDED");
  ExpectGoodCallIsRight(0);
}

TEST_F(CancellationTest, GaugesReturnWhenAllCallsAreCancelledAtOnce) {
  const auto gauges = [this] {
    const std::string metrics = Metrics();
    std::vector<double> values;
    for (const char* name : {"tessera_in_flight", "tessera_queue_depth", "tessera_buffers", "tessera_buffer_bytes",
                             "tessera_sessions", "tessera_side_connections"}) {
      values.push_back(MetricSum(metrics, name));
    }
    return values;
  };
  const std::vector<double> before = gauges();
  ASSERT_EQ(before, (std::vector<double>{0, 0, 1, static_cast<double>(Ground::kBytes), 1, 1}));
  const auto running = StartSlow();
  std::list<Call> waiting = QueueSmall(49);
  EXPECT_EQ(gauges()[0], 50);
  EXPECT_EQ(gauges()[1], 49);
  running->Cancel();
  for (Call& call : waiting) call.Cancel();
  EXPECT_TRUE(Eventually(10s, [&] { return gauges() == before; })) << Metrics();
  EXPECT_EQ(running->Await().error_code(), grpc::StatusCode::CANCELLED);
  for (Call& call : waiting) EXPECT_EQ(call.Await().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(client_->ListBuffers().value().buffers(0).references(), 0U);
  ExpectOnlySlowRan(49, "cancelled", "CANCELLED");  // what runs cannot be stopped, and counts as what it is
  ExpectGoodCallIsRight(0);
}

// ---- Connections that go ----

UniqueFd ConnectStream(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(::fcntl(socket.get(), F_SETFL, O_NONBLOCK), 0);  // as gRPC wants it
  return socket;
}

// Both connections of a client, made by hand so that each can be cut. Owns a session with the ground as its buffer.
class CutClient {
 public:
  CutClient(const std::string& socket, const Ground& ground) : rpc_(ConnectStream(socket)) {
    const int copy = ::fcntl(rpc_.get(), F_DUPFD_CLOEXEC, 0);
    channel_ = grpc::CreateInsecureChannelFromFd("cut", copy);  // owns `copy`
    side_ = client::SideChannel::Connect(socket + ".side", 5s).value();
    const auto memory = v1::Memory::NewStub(channel_);
    v1::OpenSessionRequest open;
    open.set_lease(side_->lease());
    v1::OpenSessionReply opened;
    grpc::ClientContext context;
    EXPECT_TRUE(memory->OpenSession(&context, open, &opened).ok());
    token_ = opened.token();
    v1::SideRequest pass;
    pass.mutable_pass_descriptor();
    v1::ImportBufferRequest import;
    import.set_descriptor_ticket(side_->Call(pass, ground.memfd()).value().message.descriptor_accepted().ticket());
    v1::ImportBufferReply imported;
    EXPECT_TRUE(memory->ImportBuffer(ContextOf(token_).get(), import, &imported).ok());
    buffer_ = imported.buffer_id();
  }

  Call Send(const v1::GemmRequest& request) const { return Call(channel_, token_, request); }
  const std::string& buffer() const { return buffer_; }

  // As the kernel does to a process that is killed.
  void CutRpc() { EXPECT_EQ(::shutdown(rpc_.get(), SHUT_RDWR), 0); }
  void CutSide() { side_.reset(); }

 private:
  const UniqueFd rpc_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<client::SideChannel> side_;
  std::string token_;
  std::string buffer_;
};

class CutTest : public CancellationTest, public ::testing::WithParamInterface<std::pair<bool, bool>> {
 protected:
  void SetUp() override {
    CancellationTest::SetUp();
    buffer_.reset();  // so that the buffer of the client that is cut is the only one
    session_.reset();
  }
};

TEST_P(CutTest, WhatRunsFinishesInMappedMemoryAndTheRestNeverLaunches) {
  const auto [cut_rpc, cut_side] = GetParam();
  std::optional<CutClient> client(std::in_place, socket(), ground_);
  Call running = client->Send(Ground::Slow(client->buffer()));
  ASSERT_TRUE(Eventually(20s, [this] { return Launches() == 1; }));
  std::list<Call> waiting;
  for (std::uint64_t i = 0; i < 5; ++i) waiting.push_back(client->Send(Ground::Small(client->buffer(), i)));
  ASSERT_TRUE(Eventually(20s, [this] { return InFlight() == 6; }));
  if (cut_rpc) client->CutRpc();
  if (cut_side) client->CutSide();
  if (cut_side) {
    EXPECT_TRUE(Eventually(20s, [this] { return client_->ServerInfo().value().sessions() == 0; }));
  }
  const v1::ServerInfoReply info = client_->ServerInfo().value();
  EXPECT_EQ(info.buffers(), cut_side ? 0U : 1U);
  EXPECT_EQ(info.buffer_bytes(), Ground::kBytes) << "a running product keeps its memory mapped";
  EXPECT_GT(info.in_flight(), 0U) << "the slow product was over before the cut: use a larger one";

  const grpc::Status status = running.Await();
  EXPECT_EQ(status.error_code(), cut_rpc ? grpc::StatusCode::UNAVAILABLE : grpc::StatusCode::OK)
      << status.error_message();
  for (Call& call : waiting) {
    EXPECT_EQ(call.Await().error_code(), cut_rpc ? grpc::StatusCode::UNAVAILABLE : grpc::StatusCode::CANCELLED);
  }
  ExpectOnlySlowRan(5, "cancelled", "CANCELLED");
  client.reset();
  EXPECT_TRUE(Eventually(20s, [this] { return client_->ServerInfo().value().buffer_bytes() == 0; }));
  EXPECT_EQ(MetricSum(Metrics(), "tessera_buffers"), 0);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_buffer_bytes"), 0);
}

INSTANTIATE_TEST_SUITE_P(Connections, CutTest,
                         ::testing::Values(std::pair(true, false), std::pair(false, true), std::pair(true, true)),
                         [](const auto& test) {
                           return std::string(test.param.first ? "Rpc" : "") + (test.param.second ? "Side" : "");
                         });

}  // namespace
}  // namespace tessera::e2e
