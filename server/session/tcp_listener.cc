#include "server/session/tcp_listener.h"

#include <sys/socket.h>

#include <boost/asio/ip/tcp.hpp>
#include <utility>

#include <spdlog/fmt/fmt.h>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::server {
namespace {

namespace ip = boost::asio::ip;

constexpr int kBacklog = 128;

// The endpoint that `ask` (getsockname, getpeername) tells of a socket.
boost::system::error_code Endpoint(int fd, int (*ask)(int, sockaddr*, socklen_t*), ip::tcp::endpoint& endpoint) {
  auto length = static_cast<socklen_t>(endpoint.capacity());
  if (ask(fd, endpoint.data(), &length) != 0) return {errno, boost::system::system_category()};
  endpoint.resize(length);
  return {};
}

}  // namespace

absl::StatusOr<TcpListener> TcpListener::Open(const std::string& host, std::uint16_t port) {
  boost::system::error_code error;
  ip::tcp::endpoint endpoint(ip::make_address(host, error), port);
  if (error) return absl::InvalidArgumentError(absl::StrCat("tcp_address: ", host, " is no numeric address"));
  const auto fail = [&](const char* what) {
    return ErrnoStatus(absl::StatusCode::kUnavailable, absl::StrCat("tcp_address ", host, ":", port, ": ", what));
  };
  UniqueFd socket(::socket(endpoint.protocol().family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return fail("socket");
  const int on = 1;
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0) return fail("SO_REUSEADDR");
  if (::bind(socket.get(), endpoint.data(), static_cast<socklen_t>(endpoint.size())) != 0) return fail("bind");
  if (::listen(socket.get(), kBacklog) != 0) return fail("listen");
  if (Endpoint(socket.get(), ::getsockname, endpoint)) return fail("getsockname");
  const bool v6 = endpoint.address().is_v6();
  return TcpListener(std::move(socket), fmt::format("{}{}{}:{}", v6 ? "[" : "", endpoint.address().to_string(),
                                                    v6 ? "]" : "", endpoint.port()));
}

std::string RemoteHost(int fd) {
  ip::tcp::endpoint endpoint;
  if (Endpoint(fd, ::getpeername, endpoint)) return {};
  return endpoint.address().to_string();
}

}  // namespace tessera::server
