// A connection's number is its identity: a call that is still under way when its connection has closed, or that is only
// then looked at, never acts as the client that connects next. The registry has a handful of numbers here, so that they
// are used again at once.

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/unique_fd.h"
#include "server/rpc/rpc_server.h"
#include "server/session/peer.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using server::Peer;
using server::PeerRegistry;

constexpr char kClaim[] = "claimed-uid";

// Answers ServerInfo after a while, on a thread of its own, and compares the caller that the registry tells at that
// time with the one that the call claims to be.
class ClaimService final : public v1::Admin::CallbackService {
 public:
  explicit ClaimService(PeerRegistry& peers) : peers_(peers) {}

  ~ClaimService() override {
    Release();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::thread& thread : threads_) thread.join();
  }

  grpc::ServerUnaryReactor* ServerInfo(grpc::CallbackServerContext* context, const v1::ServerInfoRequest* /*request*/,
                                       v1::ServerInfoReply* /*reply*/) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived_.push_back(context->peer());
    threads_.emplace_back([this, context, reactor] {
      AwaitRelease();
      Compare(*context);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  // Calls wait for Release from now on, instead of a random while.
  void Hold() {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = true;
  }
  void Release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = false;
    released_.notify_all();
  }
  // What gRPC calls the connections of the calls so far.
  std::vector<std::string> arrived() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrived_;
  }

  std::atomic<int> right{0};    // calls whose caller was the one they claimed
  std::atomic<int> late{0};     // of those, looked at after their connection had ended
  std::atomic<int> unknown{0};  // no caller was found
  std::atomic<int> wrong{0};    // another caller was found

 private:
  void AwaitRelease() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (held_) {
      released_.wait(lock, [this] { return !held_; });
      return;
    }
    const auto pause = std::chrono::microseconds(std::uniform_int_distribution<int>(0, 3000)(random_));
    lock.unlock();
    std::this_thread::sleep_for(pause);
  }

  void Compare(const grpc::CallbackServerContext& context) {
    const auto claim = context.client_metadata().find(kClaim);
    const absl::StatusOr<Peer> peer = peers_.Find(context.peer());
    if (!peer.ok()) {
      ++unknown;
    } else if (std::to_string(peer->uid) == std::string(claim->second.data(), claim->second.size())) {
      ++right;
      if (context.IsCancelled()) ++late;
    } else {
      ++wrong;
    }
  }

  PeerRegistry& peers_;
  std::mutex mutex_;
  std::condition_variable released_;
  bool held_ = false;
  std::minstd_rand random_{7};
  std::vector<std::string> arrived_;
  std::vector<std::thread> threads_;
};

// One client with a uid of its own.
class Connection {
 public:
  Connection(server::RpcServer& server, uid_t uid) : uid_(uid) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    server.Serve(UniqueFd(ends[0]), Peer{.pid = 1, .uid = uid, .gid = 0});
    channel_ = grpc::CreateInsecureChannelFromFd("connection", ends[1]);
    stub_ = v1::Admin::NewStub(channel_);
  }

  // A call that nobody waits for.
  void Start() {
    auto call = std::make_unique<Call>();
    call->context.AddMetadata(kClaim, std::to_string(uid_));
    Call& started = *call;
    calls_.push_back(std::move(call));
    stub_->async()->ServerInfo(&started.context, &started.request, &started.reply, [&started](const grpc::Status&) {
      const std::lock_guard<std::mutex> lock(started.mutex);
      started.done = true;
      started.changed.notify_all();
    });
  }

  // The connection ends under its calls.
  ~Connection() {
    for (const auto& call : calls_) call->context.TryCancel();
    for (const auto& call : calls_) {
      std::unique_lock<std::mutex> lock(call->mutex);
      EXPECT_TRUE(call->changed.wait_for(lock, 30s, [&] { return call->done; }));
    }
  }

 private:
  struct Call {
    grpc::ClientContext context;
    v1::ServerInfoRequest request;
    v1::ServerInfoReply reply;
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };

  const uid_t uid_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Admin::Stub> stub_;
  std::vector<std::unique_ptr<Call>> calls_;
};

class ConnectionIdentityTest : public ::testing::Test {
 protected:
  static constexpr int kFirst = 700;
  static constexpr int kNumbers = 4;

  void SetUp() override {
    auto server = server::RpcServer::Start({.services = {&service_},
                                            .message_bytes_max = 1 << 20,
                                            .calls_per_connection_max = 100,
                                            .memory_bytes_max = 64 << 20,
                                            .tls = nullptr,
                                            .metrics = &metrics_},
                                           peers_);
    ASSERT_TRUE(server.ok()) << Text(server.status());
    server_ = *std::move(server);
  }

  void TearDown() override {
    service_.Release();
    server_.reset();
  }

  server::Metrics metrics_{server::MetricsOptions{.version = "test", .variants = {}}};
  PeerRegistry peers_{{.connections_max = 1000, .connections_per_principal_max = 1000},
                      metrics_,
                      PeerRegistry::Range{.first = kFirst, .end = kFirst + kNumbers}};
  ClaimService service_{peers_};
  std::unique_ptr<server::RpcServer> server_;
};

TEST_F(ConnectionIdentityTest, ANumberIsTakenWhileACallOfItsConnectionLives) {
  service_.Hold();
  auto held = std::make_unique<Connection>(*server_, 1);
  held->Start();
  ASSERT_TRUE(Eventually(30s, [&] { return !service_.arrived().empty(); }));
  const std::string name = service_.arrived().front();
  held.reset();

  // Many others come and go, more than there are numbers.
  for (uid_t uid = 2; uid < 2 + 3 * kNumbers; ++uid) {
    ASSERT_TRUE(Eventually(30s, [&] { return peers_.CountOpen() < kNumbers; }));
    const Connection other(*server_, uid);
    const absl::StatusOr<Peer> owner = peers_.Find(name);
    ASSERT_TRUE(owner.ok()) << Text(owner.status());
    ASSERT_EQ(owner->uid, 1U) << "the number of a connection with a living call was given again";
  }
  service_.Release();
  EXPECT_TRUE(Eventually(30s, [&] { return service_.right == 1; }));
  EXPECT_EQ(service_.late, 1);

  // With its call gone the number serves again: the loop above could have met it.
  EXPECT_TRUE(Eventually(30s, [&] { return peers_.CountOpen() == 0; }));
  std::vector<std::unique_ptr<Connection>> all;
  for (int i = 0; i < kNumbers; ++i) all.push_back(std::make_unique<Connection>(*server_, 100 + i));
  const absl::StatusOr<Peer> owner = peers_.Find(name);
  ASSERT_TRUE(owner.ok());
  EXPECT_GE(owner->uid, 100U);
}

TEST_F(ConnectionIdentityTest, LateCallsNeverActAsTheNextClient) {
  constexpr int kRounds = 400;
  for (uid_t uid = 1; uid <= kRounds; ++uid) {
    ASSERT_TRUE(Eventually(30s, [&] { return peers_.CountOpen() < kNumbers; }));
    Connection connection(*server_, uid);
    for (int i = 0; i < 5; ++i) connection.Start();
    // Sometimes the calls arrive, sometimes the connection is gone before they do.
    std::this_thread::sleep_for(std::chrono::microseconds(uid % 8 * 200));
  }
  EXPECT_TRUE(Eventually(30s, [&] { return peers_.CountOpen() == 0; }));
  EXPECT_EQ(service_.wrong, 0);
  EXPECT_EQ(service_.unknown, 0);
  EXPECT_GT(service_.right, kRounds / 4);
  EXPECT_GT(service_.late, kRounds / 10) << "calls outlived their connections";
}

}  // namespace
}  // namespace tessera::e2e
