#include "server/telemetry/http_server.h"

#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/error.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <cstdint>
#include <exception>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/config/settings.h"

namespace tessera::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;

constexpr int kConnectionsMax = 64;  // one more is accepted and closed at once
constexpr std::uint32_t kHeaderBytesMax = 8 * 1024;
constexpr std::uint64_t kBodyBytesMax = 1024;
constexpr auto kAcceptRetry = std::chrono::milliseconds(100);  // after accept failed, as when descriptors run out
constexpr auto kLinger = std::chrono::seconds(1);              // for the client to read the last reply
constexpr std::string_view kPlainText = "text/plain; charset=utf-8";
constexpr std::string_view kMetricsText = "text/plain; version=0.0.4; charset=utf-8";

using Request = http::request<http::string_body>;
using Response = http::response<http::string_body>;

struct Page {
  http::status status;
  std::string body;
  std::string_view content_type = kPlainText;
};

Page Metrics(const HttpOptions& options) {
  return {http::status::ok, options.metrics(), kMetricsText};
}

Page Healthz(const HttpOptions& options) {
  if (options.alive()) return {http::status::ok, "ok\n"};
  return {http::status::service_unavailable, "not alive\n"};
}

Page Readyz(const HttpOptions& options) {
  const std::string reason = options.not_ready_reason();
  if (reason.empty()) return {http::status::ok, "ok\n"};
  return {http::status::service_unavailable, absl::StrCat(reason, "\n")};
}

Page Index(const HttpOptions& options);

struct Route {
  std::string_view path;
  Page (*page)(const HttpOptions& options);
};

constexpr std::array<Route, 4> kRoutes = {{
    {"/", Index},
    {"/metrics", Metrics},
    {"/healthz", Healthz},
    {"/readyz", Readyz},
}};

Page Index(const HttpOptions&) {
  std::string text = "Tessera daemon\n";
  for (const Route& route : kRoutes) absl::StrAppend(&text, Av(route.path), "\n");
  return {http::status::ok, std::move(text)};
}

beast::string_view Bv(std::string_view text) {
  return beast::string_view(text.data(), text.size());
}

Response MakeResponse(Page page, unsigned version, bool keep_alive) {
  Response response(page.status, version);
  response.set(http::field::content_type, Bv(page.content_type));
  response.keep_alive(keep_alive);
  response.body() = std::move(page.body);
  response.prepare_payload();
  return response;
}

Response Answer(const Request& request, const HttpOptions& options) {
  std::string_view path(request.target().data(), request.target().size());
  path = path.substr(0, path.find('?'));
  for (const Route& route : kRoutes) {
    if (route.path != path) continue;
    if (request.method() == http::verb::get || request.method() == http::verb::head) {
      return MakeResponse(route.page(options), request.version(), request.keep_alive());
    }
    Response refused = MakeResponse({http::status::method_not_allowed, "only GET and HEAD\n"}, request.version(),
                                    request.keep_alive());
    refused.set(http::field::allow, "GET, HEAD");
    return refused;
  }
  return MakeResponse({http::status::not_found, "no such page\n"}, request.version(), request.keep_alive());
}

// The reply to what is no acceptable HTTP request.
Response Complain(const beast::error_code& error) {
  constexpr unsigned kHttp11 = 11;
  if (error == http::error::header_limit) {
    return MakeResponse({http::status::request_header_fields_too_large, "header too large\n"}, kHttp11, false);
  }
  if (error == http::error::body_limit) {
    return MakeResponse({http::status::payload_too_large, "body too large\n"}, kHttp11, false);
  }
  return MakeResponse({http::status::bad_request, "bad request\n"}, kHttp11, false);
}

bool IsParseError(const beast::error_code& error) {
  return error.category() == http::make_error_code(http::error::bad_method).category() &&
         error != http::error::end_of_stream && error != http::error::partial_message;
}

// One client, from accept to close; kept alive by its pending operation. Runs on the listener's thread only.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // `open` counts connections and outlives this.
  Connection(tcp::socket socket, const HttpOptions& options, int& open)
      : stream_(std::move(socket)), options_(options), open_(open) {
    ++open_;
  }
  ~Connection() { --open_; }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void Read() {
    parser_.emplace();
    parser_->header_limit(kHeaderBytesMax);
    parser_->body_limit(kBodyBytesMax);
    stream_.expires_after(options_.timeout);
    http::async_read(stream_, buffer_, *parser_, [self = shared_from_this()](beast::error_code error, std::size_t) {
      if (!error) {
        const Request& request = self->parser_->get();
        self->Write(Answer(request, self->options_), request.method() == http::verb::head);
      } else if (IsParseError(error)) {
        self->Write(Complain(error), false);
      }
    });
  }

 private:
  void Write(Response response, bool header_only) {
    response_ = std::move(response);
    serializer_.emplace(response_);
    stream_.expires_after(options_.timeout);
    auto written = [self = shared_from_this()](beast::error_code error, std::size_t) {
      if (error) return;
      if (self->response_.keep_alive()) {
        self->Read();
      } else {
        self->Close();
      }
    };
    if (header_only) {
      http::async_write_header(stream_, *serializer_, std::move(written));
    } else {
      http::async_write(stream_, *serializer_, std::move(written));
    }
  }

  // Says goodbye and reads on for a while: closing with unread input would reset the connection, and the client could
  // lose the reply.
  void Close() {
    beast::error_code error;
    stream_.socket().shutdown(tcp::socket::shutdown_send, error);
    if (error) return;
    stream_.expires_after(kLinger);
    Discard();
  }

  void Discard() {
    stream_.async_read_some(asio::buffer(discarded_),
                            [self = shared_from_this()](beast::error_code error, std::size_t) {
                              if (!error) self->Discard();
                            });
  }

  beast::tcp_stream stream_;
  const HttpOptions& options_;
  int& open_;
  beast::flat_buffer buffer_{kHeaderBytesMax + kBodyBytesMax};
  std::optional<http::request_parser<http::string_body>> parser_;
  Response response_;
  std::optional<http::response_serializer<http::string_body>> serializer_;
  std::array<char, 1024> discarded_;
};

absl::Status CannotListen(const std::string& address, const beast::error_code& error) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", error.message()));
}

}  // namespace

// The acceptor, the connections and the thread that serves them.
class HttpServer::Listener {
 public:
  explicit Listener(HttpOptions options)
      : options_(std::move(options)), context_(1), acceptor_(context_), retry_(context_) {}

  ~Listener() {
    context_.stop();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Listen() {
    const absl::StatusOr<HostPort> parsed = ParseHostPort(options_.address);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("HTTP address '", options_.address, "' ", MessageOf(parsed.status())));
    }
    beast::error_code error;
    const auto host = asio::ip::make_address(parsed->host, error);
    if (error) return CannotListen(options_.address, error);
    const tcp::endpoint endpoint(host, parsed->port);
    acceptor_.open(endpoint.protocol(), error);
    // A restarted daemon gets its port back at once, although old connections linger in TIME_WAIT.
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) local_ = acceptor_.local_endpoint(error);
    if (error) return CannotListen(options_.address, error);
    return absl::OkStatus();
  }

  void Run() {
    Accept();
    thread_ = std::thread([this] { context_.run(); });
  }

  std::string address() const {
    const std::string host = local_.address().to_string();
    return local_.address().is_v6() ? absl::StrCat("[", host, "]:", local_.port())
                                    : absl::StrCat(host, ":", local_.port());
  }

 private:
  void Accept() {
    acceptor_.async_accept([this](beast::error_code error, tcp::socket socket) {
      if (error) return RetryAccept();
      // Beyond the maximum, the socket closes as it goes out of scope.
      if (open_ < kConnectionsMax) std::make_shared<Connection>(std::move(socket), options_, open_)->Read();
      Accept();
    });
  }

  void RetryAccept() {
    retry_.expires_after(kAcceptRetry);
    retry_.async_wait([this](beast::error_code error) {
      if (!error) Accept();
    });
  }

  // Connections live in the handlers that `context_` holds: what they refer to is declared, and so outlives it, before.
  const HttpOptions options_;
  int open_ = 0;
  tcp::endpoint local_;
  asio::io_context context_;
  tcp::acceptor acceptor_;
  asio::steady_timer retry_;
  std::thread thread_;
};

HttpServer::HttpServer(std::unique_ptr<Listener> listener) : listener_(std::move(listener)) {}

HttpServer::~HttpServer() = default;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpOptions options) {
  try {  // io_context and std::thread report a lack of descriptors or threads by exception only
    auto listener = std::make_unique<Listener>(std::move(options));
    RETURN_IF_ERROR(listener->Listen());
    listener->Run();
    return std::unique_ptr<HttpServer>(new HttpServer(std::move(listener)));
  } catch (const std::exception& failure) {
    return absl::UnavailableError(absl::StrCat("cannot start the HTTP server: ", failure.what()));
  }
}

std::string HttpServer::address() const {
  return listener_->address();
}

}  // namespace tessera::server
