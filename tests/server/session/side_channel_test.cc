// The side channel over a real socket: Acceptor and ServeSideConnection on one thread, clients on the test's.
#include "server/session/side_channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <array>
#include <boost/asio/executor_work_guard.hpp>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "common/fd_message.h"
#include "common/text.h"
#include "server/session/acceptor.h"
#include "server/session/unix_listener.h"
#include "tessera/v1/side_channel.pb.h"
#include "tests/server/session/fake_device_memory.h"
#include "tests/server/session/posix_fixtures.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

constexpr std::uint32_t kEpoch = 0xabc;
constexpr timeval kPatience{.tv_sec = 10, .tv_usec = 0};  // of a socket call; only a broken daemon waits for it

std::string PassRequest() {
  v1::SideRequest request;
  request.mutable_pass_descriptor();
  return request.SerializeAsString();
}

std::string FetchRequest(const std::string& buffer_id) {
  v1::SideRequest request;
  request.mutable_fetch_descriptor()->set_buffer_id(buffer_id);
  return request.SerializeAsString();
}

struct Reply {
  v1::SideReply message;
  std::vector<UniqueFd> fds;
};

// One client. Failures to send or receive are test failures unless the method says otherwise.
class Client {
 public:
  explicit Client(UniqueFd socket) : socket_(std::move(socket)) {
    EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience)), 0);
    EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience)), 0);
  }

  int fd() const { return socket_.get(); }
  void Close() { socket_.Reset(); }

  // One datagram with any number of descriptors; what the system said.
  ssize_t TrySend(const std::string& bytes, const std::vector<int>& fds = {}) const {
    return SendDatagram(socket_.get(), bytes, fds);
  }

  // The next reply; nullopt at the end of the connection.
  std::optional<Reply> Receive() const {
    auto message = ReceiveFdMessage(socket_.get());
    if (!message.ok()) {
      ADD_FAILURE() << message.status();
      return std::nullopt;
    }
    if (message->bytes.empty()) return std::nullopt;
    Reply reply;
    EXPECT_TRUE(reply.message.ParseFromString(message->bytes));
    reply.fds = std::move(message->fds);
    return reply;
  }

  Reply Ask(const std::string& bytes, const std::vector<int>& fds = {}) const {
    EXPECT_EQ(TrySend(bytes, fds), static_cast<ssize_t>(bytes.size())) << std::strerror(errno);
    std::optional<Reply> reply = Receive();
    EXPECT_TRUE(reply.has_value()) << "the connection ended";
    return reply.has_value() ? *std::move(reply) : Reply{};
  }

  void ExpectError(StatusCode code, const std::string& text, const std::string& bytes,
                   const std::vector<int>& fds = {}) const {
    const Reply reply = Ask(bytes, fds);
    EXPECT_EQ(reply.message.error().code(), static_cast<int>(code)) << reply.message.ShortDebugString();
    EXPECT_THAT(reply.message.error().message(), HasSubstr(text));
    EXPECT_TRUE(reply.fds.empty());
  }

  // The daemon has finished with everything sent before, and the connection works.
  void ExpectAlive() const {
    ExpectError(StatusCode::kInvalidArgument, "fetch_descriptor.buffer_id", FetchRequest("short"));
  }

 private:
  UniqueFd socket_;
};

class SideChannelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto listener = UnixListener::Open((directory_.path() / "side").string(), SOCK_SEQPACKET);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_.emplace(*std::move(listener));
    io_ = std::make_unique<boost::asio::io_context>(1);
    acceptor_ = std::make_unique<Acceptor>(*io_, listener_->fd(), [this](UniqueFd connection) {
      const absl::StatusOr<Peer> peer = PeerOfSocket(connection.get());
      ASSERT_TRUE(peer.ok()) << peer.status();
      ServeSideConnection(*io_, std::move(connection), *peer, table_, metrics_);
    });
    thread_ = std::thread([this] {
      const auto work = boost::asio::make_work_guard(*io_);
      io_->run();
    });
  }

  void TearDown() override { Stop(); }

  void Stop() {
    if (!thread_.joinable()) return;
    io_->stop();
    thread_.join();
    acceptor_.reset();
    io_.reset();
  }

  Client Connect() {
    auto socket = ConnectSeqpacket(listener_->path());
    EXPECT_TRUE(socket.ok()) << socket.status();
    return Client(socket.ok() ? *std::move(socket) : UniqueFd());
  }

  // A client that has read its welcome; `lease` receives what it said.
  Client ConnectWelcomed(Id& lease) {
    Client client = Connect();
    const std::optional<Reply> reply = client.Receive();
    EXPECT_TRUE(reply.has_value() && reply->message.has_welcome());
    EXPECT_TRUE(reply.has_value() && Id::Parse(reply->message.welcome().lease(), lease));
    return client;
  }

  std::shared_ptr<Session> OpenSession(const Id& lease) {
    auto token = table_.OpenSession(self_, lease, "");
    EXPECT_TRUE(token.ok()) << token.status();
    auto session = table_.FindSession(self_, token.value_or(Id{}));
    return session.ok() ? *session : nullptr;
  }

  static bool Eventually(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  bool Shows(const std::string& line) const {
    return ("\n" + metrics_.Serialize()).find("\n" + line + "\n") != std::string::npos;
  }
  bool NoConnections() const { return Shows("tessera_side_connections 0"); }

  const TemporaryDirectory directory_;
  const Peer self_{.pid = ::getpid(), .uid = ::geteuid(), .gid = ::getegid()};
  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  FakeDeviceMemory gpu_;
  Reaper reaper_{std::chrono::seconds(10), metrics_};
  SessionTable table_{kEpoch,
                      {.sessions_max = 8,
                       .leases_max = 3,
                       .buffers_per_session_max = 32,
                       .buffer_bytes_max = 1U << 26U,
                       .session_buffer_bytes_max = 1U << 26U},
                      metrics_,
                      reaper_,
                      MakeIdleLane,
                      {&gpu_}};
  std::optional<UnixListener> listener_;
  std::unique_ptr<boost::asio::io_context> io_;
  std::unique_ptr<Acceptor> acceptor_;
  std::thread thread_;
};

TEST_F(SideChannelTest, WelcomeComesFirstAndNamesALease) {
  const Client client = Connect();
  const std::optional<Reply> reply = client.Receive();
  ASSERT_TRUE(reply.has_value());
  ASSERT_TRUE(reply->message.has_welcome()) << reply->message.ShortDebugString();
  EXPECT_EQ(reply->message.welcome().epoch(), "00000abc");
  EXPECT_TRUE(reply->fds.empty());
  Id lease;
  ASSERT_TRUE(Id::Parse(reply->message.welcome().lease(), lease));
  EXPECT_NE(OpenSession(lease), nullptr);
  EXPECT_TRUE(Shows("tessera_side_connections 1"));
}

TEST_F(SideChannelTest, LeasesDiffer) {
  Id first, second;
  const Client a = ConnectWelcomed(first);
  const Client b = ConnectWelcomed(second);
  EXPECT_FALSE(first == second);
}

TEST_F(SideChannelTest, PassedDescriptorCanBeImported) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  ASSERT_NE(session, nullptr);
  const UniqueFd memory = MakeMemfd(4096);
  const Reply reply = client.Ask(PassRequest(), {memory.get()});
  ASSERT_TRUE(reply.message.has_descriptor_accepted()) << reply.message.ShortDebugString();
  const auto buffer = table_.ImportBuffer(*session, reply.message.descriptor_accepted().ticket(), 0, 0);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  const auto pin = table_.PinBuffer(*session, buffer->id, BufferAccess::kReadWrite);
  ASSERT_TRUE(pin.ok());
  ASSERT_EQ(::pwrite(memory.get(), "x", 1, 17), 1);
  EXPECT_EQ((*pin)->data()[17], std::byte{'x'});
  EXPECT_TRUE(Shows("tessera_side_messages_total{kind=\"pass\"} 1"));
}

TEST_F(SideChannelTest, FetchedDescriptorShowsTheDaemonsMemory) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  ASSERT_NE(session, nullptr);
  constexpr std::uint64_t kBytes = 5'000;
  const auto buffer = table_.AllocateBuffer(*session, kBytes);
  ASSERT_TRUE(buffer.ok());
  const Reply reply = client.Ask(FetchRequest(buffer->id.Bytes()));
  ASSERT_TRUE(reply.message.has_descriptor_passed()) << reply.message.ShortDebugString();
  EXPECT_EQ(reply.message.descriptor_passed().byte_offset(), 0U);
  EXPECT_EQ(reply.message.descriptor_passed().bytes(), kBytes);
  EXPECT_EQ(reply.message.descriptor_passed().space(), "host");
  EXPECT_EQ(reply.message.descriptor_passed().allocation_bytes(), kBytes);
  ASSERT_EQ(reply.fds.size(), 1U);
  void* const mapping = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, reply.fds[0].get(), 0);
  ASSERT_NE(mapping, MAP_FAILED);
  auto* const mine = static_cast<volatile unsigned char*>(mapping);
  const auto pin = table_.PinBuffer(*session, buffer->id, BufferAccess::kReadWrite);
  ASSERT_TRUE(pin.ok());
  (*pin)->data()[kBytes - 1] = std::byte{77};
  EXPECT_EQ(mine[kBytes - 1], 77);
  mine[0] = 55;
  EXPECT_EQ((*pin)->data()[0], std::byte{55});
  ASSERT_EQ(::munmap(mapping, kBytes), 0);
  client.ExpectAlive();
  EXPECT_EQ((*pin)->users(), 1U) << "the fetch keeps its pin";
  EXPECT_TRUE(Shows("tessera_side_messages_total{kind=\"fetch\"} 2"));
}

TEST_F(SideChannelTest, FetchedDescriptorOfAGpusBufferTellsItsAllocation) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  ASSERT_NE(session, nullptr);
  const auto buffer = table_.AllocateBuffer(*session, 100, "cuda");
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  const Reply reply = client.Ask(FetchRequest(buffer->id.Bytes()));
  ASSERT_TRUE(reply.message.has_descriptor_passed()) << reply.message.ShortDebugString();
  EXPECT_EQ(reply.message.descriptor_passed().byte_offset(), 0U);
  EXPECT_EQ(reply.message.descriptor_passed().bytes(), 100U);
  EXPECT_EQ(reply.message.descriptor_passed().space(), kFakeGpu);
  EXPECT_EQ(reply.message.descriptor_passed().allocation_bytes(), kFakeGranularity);
  EXPECT_EQ(reply.fds.size(), 1U);
}

TEST_F(SideChannelTest, ErrorsKeepTheConnection) {
  Id lease, other_lease;
  const Client client = ConnectWelcomed(lease);
  const Client other = ConnectWelcomed(other_lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  const std::shared_ptr<Session> other_session = OpenSession(other_lease);
  ASSERT_TRUE(session && other_session);
  const auto foreign = table_.AllocateBuffer(*other_session, 10);
  ASSERT_TRUE(foreign.ok());
  Id former = foreign->id;
  former.epoch += 1;
  Id unknown = foreign->id;
  unknown.nonce += 1;
  client.ExpectError(StatusCode::kInvalidArgument, "pass_descriptor", PassRequest());
  client.ExpectError(StatusCode::kInvalidArgument, "fetch_descriptor.buffer_id", FetchRequest(""));
  client.ExpectError(StatusCode::kInvalidArgument, "fetch_descriptor.buffer_id", FetchRequest(std::string(17, 'x')));
  client.ExpectError(StatusCode::kPermissionDenied, "another session", FetchRequest(foreign->id.Bytes()));
  client.ExpectError(StatusCode::kFailedPrecondition, "former", FetchRequest(former.Bytes()));
  client.ExpectError(StatusCode::kNotFound, "buffer", FetchRequest(unknown.Bytes()));
  const Reply passed = client.Ask(PassRequest(), {MakeMemfd(10).get()});
  EXPECT_TRUE(passed.message.has_descriptor_accepted());
  const auto imported = table_.ImportBuffer(*session, passed.message.descriptor_accepted().ticket(), 0, 0);
  ASSERT_TRUE(imported.ok());
  client.ExpectError(StatusCode::kFailedPrecondition, "imported", FetchRequest(imported->id.Bytes()));
  client.ExpectAlive();
  EXPECT_FALSE(session->ended());
}

TEST_F(SideChannelTest, GarbageIsAnsweredAndKeepsTheConnection) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const std::string garbage[] = {"\xff\xff\xff\xff", std::string(1, '\0'), std::string(4096, 'z'),
                                 std::string("\x22\x00", 2),            // a kind of a later version
                                 PassRequest() + std::string("\xff")};  // begins well
  for (const std::string& bytes : garbage) {
    const UniqueFd memory = MakeMemfd(10);
    client.ExpectError(StatusCode::kInvalidArgument, "side channel", bytes);
    client.ExpectError(StatusCode::kInvalidArgument, "side channel", bytes, {memory.get()});
  }
  client.ExpectAlive();
  EXPECT_TRUE(Shows("tessera_side_messages_total{kind=\"invalid\"} 10"));
}

TEST_F(SideChannelTest, UnwantedDescriptorsAreClosed) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const UniqueFd memory = MakeMemfd(10);
  client.ExpectAlive();
  const std::size_t descriptors = OpenDescriptors();
  // 16 still fit the daemon's receive buffer; more are cut off by the kernel.
  for (const std::size_t count : {2U, 3U, 16U, 17U, 253U}) {
    client.ExpectError(StatusCode::kInvalidArgument, "descriptor", PassRequest(),
                       std::vector<int>(count, memory.get()));
    client.ExpectAlive();
    EXPECT_EQ(OpenDescriptors(), descriptors) << count << " descriptors";
  }
  client.ExpectError(StatusCode::kInvalidArgument, "buffer_id", FetchRequest("short"), {memory.get()});
  client.ExpectError(StatusCode::kInvalidArgument, "side channel", "\xff\xff", {memory.get()});
  client.ExpectAlive();
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(SideChannelTest, TooLongMessagesAreAnsweredAndTheirDescriptorsClosed) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const UniqueFd memory = MakeMemfd(10);
  const std::size_t descriptors = OpenDescriptors();
  for (const std::size_t bytes : {4097U, 10'000U, 60'000U}) {
    client.ExpectError(StatusCode::kInvalidArgument, "4096", std::string(bytes, 'x'), {memory.get()});
  }
  client.ExpectAlive();
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(SideChannelTest, SixteenDescriptorsWait) {
  Id lease;
  Client client = ConnectWelcomed(lease);
  const UniqueFd memory = MakeMemfd(10);
  const std::size_t descriptors = OpenDescriptors();
  for (int i = 0; i < 16; ++i) {
    ASSERT_TRUE(client.Ask(PassRequest(), {memory.get()}).message.has_descriptor_accepted()) << i;
  }
  client.ExpectError(StatusCode::kResourceExhausted, "16", PassRequest(), {memory.get()});
  client.ExpectAlive();
  EXPECT_EQ(OpenDescriptors(), descriptors + 16);
  client.Close();
  EXPECT_TRUE(Eventually([&] { return NoConnections(); }));
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors - 2; }))
      << "both ends and all that waited must be closed";
}

TEST_F(SideChannelTest, RequestsInARowAreAnsweredInOrder) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  ASSERT_NE(session, nullptr);
  std::vector<std::uint64_t> sizes = {10, 20, 30, 40, 50};
  for (const std::uint64_t bytes : sizes) {
    const auto buffer = table_.AllocateBuffer(*session, bytes);
    ASSERT_TRUE(buffer.ok());
    const std::string request = FetchRequest(buffer->id.Bytes());
    ASSERT_EQ(client.TrySend(request), static_cast<ssize_t>(request.size()));
  }
  for (const std::uint64_t bytes : sizes) {
    const std::optional<Reply> reply = client.Receive();
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(reply->message.descriptor_passed().bytes(), bytes);
    EXPECT_EQ(reply->fds.size(), 1U);
  }
}

TEST_F(SideChannelTest, ClosingEndsTheSession) {
  Id lease, other_lease;
  Client client = ConnectWelcomed(lease);
  const Client other = ConnectWelcomed(other_lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  const std::shared_ptr<Session> other_session = OpenSession(other_lease);
  ASSERT_TRUE(session && other_session);
  ASSERT_TRUE(table_.AllocateBuffer(*session, 100).ok());
  client.Close();
  EXPECT_TRUE(Eventually([&] { return session->ended() && Shows("tessera_side_connections 1"); }));
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(table_.Counts().bytes_held, 0U);
  EXPECT_TRUE(Shows("tessera_session_ends_total{reason=\"lease_lost\"} 1"));
  EXPECT_FALSE(other_session->ended());
  other.ExpectAlive();
}

TEST_F(SideChannelTest, RequestsSentBeforeClosingDoNoHarm) {
  Id lease;
  Client client = ConnectWelcomed(lease);
  const UniqueFd memory = MakeMemfd(10);
  const std::size_t descriptors = OpenDescriptors();
  for (int i = 0; i < 5; ++i) EXPECT_GT(client.TrySend(PassRequest(), {memory.get()}), 0);
  client.Close();
  EXPECT_TRUE(Eventually([&] { return NoConnections(); }));
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors - 2; }));
  EXPECT_EQ(table_.OpenSession(self_, lease, "").status().code(), StatusCode::kNotFound);
}

TEST_F(SideChannelTest, EmptyDatagramIsTheEnd) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const UniqueFd memory = MakeMemfd(10);
  const std::size_t descriptors = OpenDescriptors();
  ASSERT_EQ(client.TrySend("", {memory.get()}), 0);
  EXPECT_FALSE(client.Receive().has_value());
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors - 1; }));  // the daemon's end of the connection
  EXPECT_TRUE(NoConnections());
}

TEST_F(SideChannelTest, ClientThatNeverReadsIsCutOff) {
  Id lease, other_lease;
  const Client client = ConnectWelcomed(lease);
  const Client other = ConnectWelcomed(other_lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  ASSERT_NE(session, nullptr);
  const std::string request = FetchRequest("short");
  int sent = 0;
  while (sent < 100'000 && client.TrySend(request) > 0) ++sent;
  EXPECT_TRUE(errno == EPIPE || errno == ECONNRESET) << std::strerror(errno);
  EXPECT_LT(sent, 100'000) << "the daemon keeps replies for a client that never reads";
  EXPECT_TRUE(Eventually([&] { return session->ended(); }));
  other.ExpectAlive();
}

TEST_F(SideChannelTest, LimitOfConnectionsIsAnsweredThenClosed) {
  std::vector<Client> clients;
  Id lease;
  for (int i = 0; i < 3; ++i) clients.push_back(ConnectWelcomed(lease));
  const Client refused = Connect();
  const std::optional<Reply> reply = refused.Receive();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->message.error().code(), static_cast<int>(StatusCode::kResourceExhausted));
  EXPECT_THAT(reply->message.error().message(), HasSubstr("side_connections_max"));
  EXPECT_FALSE(refused.Receive().has_value());
  clients.pop_back();
  EXPECT_TRUE(Eventually([&] { return Shows("tessera_side_connections 2"); }));
  clients.push_back(ConnectWelcomed(lease));
  EXPECT_TRUE(Shows("tessera_side_connections 3"));
}

TEST_F(SideChannelTest, StoppingClosesConnectionsAndLeavesSessionsAlone) {
  Id lease;
  const Client client = ConnectWelcomed(lease);
  const std::shared_ptr<Session> session = OpenSession(lease);
  ASSERT_NE(session, nullptr);
  Stop();
  EXPECT_FALSE(client.Receive().has_value());
  EXPECT_FALSE(session->ended());
  EXPECT_TRUE(NoConnections());
}

TEST_F(SideChannelTest, AcceptedConnectionsAreNonBlockingAndKnowTheirPeer) {
  auto listener = UnixListener::Open((directory_.path() / "other").string(), SOCK_STREAM);
  ASSERT_TRUE(listener.ok()) << listener.status();
  boost::asio::io_context io(1);
  std::vector<Peer> peers;
  int flags = 0;
  int descriptor_flags = 0;
  const Acceptor acceptor(io, listener->fd(), [&](UniqueFd connection) {
    const absl::StatusOr<Peer> peer = PeerOfSocket(connection.get());
    ASSERT_TRUE(peer.ok()) << peer.status();
    peers.push_back(*peer);
    flags = ::fcntl(connection.get(), F_GETFL);
    descriptor_flags = ::fcntl(connection.get(), F_GETFD);
    if (peers.size() == 2) io.stop();
  });
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, listener->path().data(), listener->path().size());
  std::array<UniqueFd, 2> clients;
  for (UniqueFd& client : clients) {
    client.Reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  io.run_for(std::chrono::seconds(10));
  ASSERT_EQ(peers.size(), 2U);
  EXPECT_EQ(peers[0].pid, ::getpid());
  EXPECT_EQ(peers[0].uid, ::geteuid());
  EXPECT_NE(flags & O_NONBLOCK, 0);
  EXPECT_NE(descriptor_flags & FD_CLOEXEC, 0);
}

}  // namespace
}  // namespace tessera::server
