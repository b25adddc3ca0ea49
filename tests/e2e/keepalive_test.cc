// Clients that keep their connection alive with pings, on an idle channel and during a call that takes long: the daemon
// takes them. Seconds in the normal run; the full length runs under the label soak.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <future>
#include <list>
#include <vector>

#include "tessera/v1/compute.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

struct Extent {
  std::chrono::seconds duration;
  std::vector<milliseconds> intervals;  // between pings
};

// The daemon grants one ping in 5 s. Three too early ones end a connection, so that the normal run sends four.
Extent ExtentOfRun() {
  if (std::getenv("TESSERA_SOAK") == nullptr) return {.duration = 26s, .intervals = {6s}};
  return {.duration = 360s, .intervals = {10s, 30s}};
}

// A connection of its own that pings whether there are calls and data or not.
std::shared_ptr<grpc::Channel> PingingChannel(const std::string& socket, milliseconds interval) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(interval.count()));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto channel = grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
  EXPECT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + 10s));
  return channel;
}

// Whether the channel loses its connection before `deadline`.
std::future<bool> LosesConnection(const std::shared_ptr<grpc::Channel>& channel,
                                  std::chrono::system_clock::time_point deadline) {
  return std::async(std::launch::async, [=] { return channel->WaitForStateChange(GRPC_CHANNEL_READY, deadline); });
}

// Rows of A and B that are all one row of zeros, so that much work needs little memory.
class LongWork {
 public:
  explicit LongWork(client::Session& session) : session_(session), buffer_(session.Share(kBytes).value()) {}

  // Keeps the daemon's one thread busy until `duration` has passed, however fast it is: the products that are left
  // then are past their deadline and dropped.
  void Occupy(milliseconds duration) {
    const client::TensorView rows = buffer_.Tensor(DType::kBf16, {kExtent, kTerms}, 0, {0, 1});
    const client::GemmSpec spec{
        .a = rows, .b = rows, .d = buffer_.Tensor(DType::kF32, {kExtent, kExtent}, kTerms * 2), .timeout = duration};
    for (std::int64_t i = 0; i < 20 * duration / 1s; ++i) pending_.push_back(session_.GemmAsync(spec));
  }

  // One product more, behind all of them, over another connection. Must succeed, and last `least` or longer.
  void ExpectCallBehind(const std::shared_ptr<grpc::Channel>& channel, milliseconds least) const {
    v1::GemmRequest request;
    const auto set = [&](v1::Tensor& tensor, std::uint64_t at) {
      tensor.set_buffer_id(buffer_.id());
      tensor.set_dtype(v1::DTYPE_BF16);
      tensor.set_byte_offset(at);
      for (int i = 0; i < 2; ++i) tensor.add_shape(4);
    };
    set(*request.mutable_op()->mutable_a(), 0);
    set(*request.mutable_op()->mutable_b(), 32);
    set(*request.mutable_op()->mutable_d(), kBytes - 32);
    grpc::ClientContext context;
    context.AddMetadata("tessera-session-bin", session_.token());
    v1::GemmReply reply;
    const auto start = std::chrono::steady_clock::now();
    const grpc::Status status = v1::Compute::NewStub(channel)->Gemm(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_GE(std::chrono::steady_clock::now() - start, least) << "too short to show anything: use more work";
  }

  void AwaitOccupation() {
    for (auto& result : pending_) {
      const absl::Status status = result.get().status();
      EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kDeadlineExceeded) << status;
    }
  }

  std::size_t Sent() const { return pending_.size(); }

 private:
  static constexpr std::int64_t kExtent = 768;
  static constexpr std::int64_t kTerms = 16384;
  static constexpr std::uint64_t kBytes = kTerms * 2 + kExtent * kExtent * 4 + 32;

  client::Session& session_;
  client::Buffer buffer_;
  std::list<std::future<absl::StatusOr<client::GemmResult>>> pending_;
};

class KeepaliveTest : public DaemonFixture {};

TEST_F(KeepaliveTest, PingsOfAnIdleChannelAndDuringALongCallAreTaken) {
  const Extent extent = ExtentOfRun();
  StartDaemon({{"cpu_threads", "1"}, {"queue_per_session_max", "100000"}, {"queue_max", "100000"}});
  client::Client client = Connect();
  client::Session session = client.OpenSession("long").value();
  LongWork work(session);
  work.Occupy(extent.duration);
  ASSERT_TRUE(Eventually(20s, [&] { return client.ServerInfo().value().in_flight() == work.Sent(); }));

  const auto end = std::chrono::system_clock::now() + extent.duration;
  std::vector<std::shared_ptr<grpc::Channel>> channels;  // outlive what waits for them
  std::list<std::future<bool>> lost;
  std::list<std::future<void>> calls;
  for (const milliseconds interval : extent.intervals) {
    for (const bool calling : {false, true}) {
      channels.push_back(PingingChannel(socket(), interval));
      lost.push_back(LosesConnection(channels.back(), end));
      if (!calling) continue;
      calls.push_back(std::async(std::launch::async, [&work, &extent, channel = channels.back()] {
        work.ExpectCallBehind(channel, extent.duration - 2s);
      }));
    }
  }
  // The control: such pings are sent, and a connection that sends too many of them is seen to end.
  channels.push_back(PingingChannel(socket(), 1s));
  std::future<bool> control = LosesConnection(channels.back(), end);

  for (std::future<bool>& one : lost) EXPECT_FALSE(one.get()) << "the daemon ended the connection";
  EXPECT_TRUE(control.get()) << "no ping was sent, or none counted";
  for (std::future<void>& call : calls) call.get();
  work.AwaitOccupation();
}

}  // namespace
}  // namespace tessera::e2e
