// The HTTP port over real sockets: its pages, and that no client, however rude, hurts the others or the daemon.
#include "server/telemetry/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <string_view>
#include <thread>
#include <vector>

#include "common/text.h"
#include "common/unique_fd.h"
#include "server/config/settings.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::HasSubstr;
using testing::StartsWith;

constexpr milliseconds kPatience = seconds(5);  // beyond it a test has failed

struct Reply {
  std::string head;  // with the empty line
  std::string body;
};

// A TCP client that sends what it is told and reads with a time-out.
class Client {
 public:
  explicit Client(const std::string& address) {
    const HostPort target = ParseHostPort(address).value();
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_port = htons(target.port);
    EXPECT_EQ(::inet_pton(AF_INET, target.host.c_str(), &name.sin_addr), 1);
    fd_.Reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0) << address;
  }

  // A peer that has already hung up is no error here: the reply tells.
  void Send(std::string_view bytes) { (void)::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }

  // One reply, of as many body bytes as it declares unless to a HEAD; whatever came if the server closes before.
  Reply Receive(bool head_request = false) {
    while (received_.find("\r\n\r\n") == std::string::npos && ReadSome()) {
    }
    const std::size_t end = received_.find("\r\n\r\n");
    if (end == std::string::npos) return {.head = std::exchange(received_, ""), .body = ""};
    Reply reply = {.head = received_.substr(0, end + 4), .body = ""};
    received_.erase(0, end + 4);
    const std::size_t length = reply.head.find("Content-Length: ");
    const std::size_t body_bytes =
        head_request || length == std::string::npos ? 0 : std::stoul(reply.head.substr(length + 16));
    while (received_.size() < body_bytes && ReadSome()) {
    }
    reply.body = received_.substr(0, body_bytes);
    received_.erase(0, body_bytes);
    return reply;
  }

  // Whether the server closes the connection within `time`; what it sends until then is dropped.
  bool ClosesWithin(milliseconds time) {
    const auto deadline = steady_clock::now() + time;
    while (steady_clock::now() < deadline) {
      if (!ReadSome(std::chrono::ceil<milliseconds>(deadline - steady_clock::now()))) return closed_;
    }
    return false;
  }

 private:
  // False at the end of the stream, an error or after `time`.
  bool ReadSome(milliseconds time = kPatience) {
    pollfd readable = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&readable, 1, static_cast<int>(time.count())) != 1) return false;
    char chunk[4096];
    const ssize_t bytes = ::recv(fd_.get(), chunk, sizeof(chunk), 0);
    closed_ = bytes <= 0;
    if (!closed_) received_.append(chunk, static_cast<std::size_t>(bytes));
    return !closed_;
  }

  UniqueFd fd_;
  std::string received_;
  bool closed_ = false;
};

class HttpServerTest : public testing::Test {
 protected:
  HttpOptions Options() {
    return {.address = "127.0.0.1:0",
            .metrics = [this] { return metrics_.Serialize(); },
            .alive = [this] { return alive_.load(); },
            .not_ready_reason = [this] { return std::string(ready_ ? "" : "draining"); }};
  }

  void Start(HttpOptions options) {
    auto server = HttpServer::Start(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
  }

  void SetUp() override { Start(Options()); }

  Reply Get(const std::string& target) {
    Client client(server_->address());
    client.Send("GET " + target + " HTTP/1.1\r\nHost: t\r\n\r\n");
    return client.Receive();
  }

  // Asks until a connection is served: a slot comes free only once the server sees that its client is gone.
  bool ServesSoon() {
    const auto deadline = steady_clock::now() + kPatience;
    while (steady_clock::now() < deadline) {
      if (Get("/healthz").body == "ok\n") return true;
    }
    return false;
  }

  // Sends `bytes` on a connection of its own and expects a reply with `status_line` and then the end.
  void ExpectRefusal(const std::string& bytes, const std::string& status_line) {
    Client client(server_->address());
    client.Send(bytes);
    EXPECT_THAT(client.Receive().head, StartsWith(status_line));
    EXPECT_TRUE(client.ClosesWithin(kPatience));
  }

  Metrics metrics_{{.version = "1", .variants = {}}};
  std::atomic<bool> alive_ = true;
  std::atomic<bool> ready_ = false;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, ServesMetrics) {
  metrics_.SessionOpened();
  const Reply reply = Get("/metrics");
  EXPECT_THAT(reply.head, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(reply.head, HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(reply.body, HasSubstr("\ntessera_sessions 1\n"));
  EXPECT_THAT(Get("/metrics?name[]=x").head, StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpServerTest, ReadinessAndLivenessFollowTheirCallbacks) {
  Reply reply = Get("/readyz");
  EXPECT_THAT(reply.head, StartsWith("HTTP/1.1 503 "));
  EXPECT_EQ(reply.body, "draining\n");
  ready_ = true;
  reply = Get("/readyz");
  EXPECT_THAT(reply.head, StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(reply.body, "ok\n");
  EXPECT_EQ(Get("/healthz").body, "ok\n");
  alive_ = false;
  EXPECT_THAT(Get("/healthz").head, StartsWith("HTTP/1.1 503 "));
}

TEST_F(HttpServerTest, IndexNamesThePages) {
  EXPECT_THAT(Get("/").body, testing::AllOf(HasSubstr("/metrics\n"), HasSubstr("/healthz\n"), HasSubstr("/readyz\n")));
}

TEST_F(HttpServerTest, OtherPagesAndMethodsAreRefused) {
  EXPECT_THAT(Get("/metricsx").head, StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(Get("/../etc/passwd").head, StartsWith("HTTP/1.1 404 "));
  Client client(server_->address());
  client.Send("POST /metrics HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\nabc");
  const Reply reply = client.Receive();
  EXPECT_THAT(reply.head, StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(reply.head, HasSubstr("Allow: GET, HEAD\r\n"));
}

TEST_F(HttpServerTest, HeadSendsTheLengthWithoutTheBody) {
  Client client(server_->address());
  client.Send("HEAD /healthz HTTP/1.1\r\nHost: t\r\n\r\n");
  EXPECT_THAT(client.Receive(true).head, HasSubstr("Content-Length: 3\r\n"));
  client.Send("GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n");
  const Reply next = client.Receive();  // begins at once where the first ended
  EXPECT_THAT(next.head, StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(next.body, "ok\n");
}

TEST_F(HttpServerTest, KeepsTheConnectionAsAsked) {
  Client client(server_->address());
  for (int i = 0; i < 3; ++i) {
    client.Send("GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n");
    EXPECT_EQ(client.Receive().body, "ok\n");
  }
  client.Send("GET /healthz HTTP/1.1\r\nHost: t\r\n\r\nGET /readyz HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(client.Receive().body, "ok\n");
  EXPECT_EQ(client.Receive().body, "draining\n");
  EXPECT_TRUE(client.ClosesWithin(kPatience));

  Client old_client(server_->address());
  old_client.Send("GET /healthz HTTP/1.0\r\n\r\n");
  EXPECT_EQ(old_client.Receive().body, "ok\n");
  EXPECT_TRUE(old_client.ClosesWithin(kPatience));
}

TEST_F(HttpServerTest, MalformedAndOversizedRequestsAreRefused) {
  ExpectRefusal("\x16\x03\x01\x02\x00\x01\x00 TLS, perhaps\r\n\r\n", "HTTP/1.1 400 ");
  ExpectRefusal("GET /\r\n\r\n", "HTTP/1.1 400 ");
  ExpectRefusal("GET / HTTP/9.9\r\n\r\n", "HTTP/1.1 400 ");
  ExpectRefusal("GET / HTTP/1.1\r\nNo colon\r\n\r\n", "HTTP/1.1 400 ");
  ExpectRefusal("GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 400 ");
  ExpectRefusal("GET / HTTP/1.1\r\nX: " + std::string(100'000, 'x') + "\r\n\r\n", "HTTP/1.1 431 ");
  ExpectRefusal("GET /" + std::string(100'000, 'x') + " HTTP/1.1\r\n\r\n", "HTTP/1.1 431 ");
  ExpectRefusal("GET / HTTP/1.1\r\nContent-Length: 1025\r\n\r\n", "HTTP/1.1 413 ");
  ExpectRefusal("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n" + std::string(4096, 'x') + "\r\n",
                "HTTP/1.1 413 ");
  EXPECT_EQ(Get("/healthz").body, "ok\n");
}

TEST_F(HttpServerTest, ASlowClientIsDroppedWhileOthersAreServed) {
  HttpOptions options = Options();
  options.timeout = milliseconds(400);
  Start(std::move(options));
  Client idle(server_->address());
  Client slow(server_->address());
  const auto start = steady_clock::now();
  while (!slow.ClosesWithin(milliseconds(50)) && steady_clock::now() - start < kPatience) {
    slow.Send("G");  // bytes do not extend the time
    EXPECT_EQ(Get("/healthz").body, "ok\n");
  }
  const auto elapsed = steady_clock::now() - start;
  EXPECT_GE(elapsed, milliseconds(300));
  EXPECT_LT(elapsed, kPatience);
  EXPECT_TRUE(idle.ClosesWithin(kPatience));
}

TEST_F(HttpServerTest, ClientsThatHangUpGiveTheirSlotsBack) {
  for (int i = 0; i < 200; ++i) Client(server_->address()).Send("GET /met");
  EXPECT_TRUE(ServesSoon());
}

TEST_F(HttpServerTest, BeyondSixtyFourConnectionsAreClosedAtOnce) {
  std::vector<Client> clients;
  for (int i = 0; i < 100; ++i) clients.emplace_back(server_->address());
  for (int i = 64; i < 100; ++i) EXPECT_TRUE(clients[i].ClosesWithin(kPatience)) << i;
  for (int i = 0; i < 64; ++i) {
    clients[i].Send("GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n");
    EXPECT_EQ(clients[i].Receive().body, "ok\n") << i;
  }
  clients.erase(clients.begin());
  EXPECT_TRUE(ServesSoon());  // the slot is free again
}

TEST_F(HttpServerTest, StopsWithinASecondWhileClientsAreConnected) {
  Client idle(server_->address());
  Client half(server_->address());
  half.Send("GET /metrics HTT");
  Client lingering(server_->address());
  lingering.Send("GET / HTTP/1.0\r\n\r\n");
  EXPECT_THAT(lingering.Receive().head, StartsWith("HTTP/1."));
  const std::string address = server_->address();
  const auto start = steady_clock::now();
  server_.reset();
  EXPECT_LT(steady_clock::now() - start, seconds(1));
  EXPECT_TRUE(idle.ClosesWithin(kPatience));
  EXPECT_TRUE(half.ClosesWithin(kPatience));

  HttpOptions options = Options();
  options.address = address;
  Start(std::move(options));  // the port is free again at once
  EXPECT_EQ(server_->address(), address);
}

TEST_F(HttpServerTest, APortInUseIsAnError) {
  HttpOptions options = Options();
  options.address = server_->address();
  const auto second = HttpServer::Start(std::move(options));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(MessageOf(second.status()), "cannot listen on " + server_->address() + ": Address already in use");
}

TEST_F(HttpServerTest, AnAddressThatIsNoneIsAnError) {
  for (const char* address : {"", "9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "no.such.host:80", "::1:80"}) {
    HttpOptions options = Options();
    options.address = address;
    const auto server = HttpServer::Start(std::move(options));
    EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(MessageOf(server.status()), StartsWith("HTTP address '" + std::string(address) + "' "));
  }
  HttpOptions options = Options();
  options.address = "192.0.2.1:0";  // reserved for documentation: no address of this machine
  EXPECT_EQ(HttpServer::Start(std::move(options)).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tessera::server
