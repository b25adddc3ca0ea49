#include "server/session/acceptor.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

namespace tessera::server {

namespace asio = boost::asio;
using boost::system::error_code;

// A stream descriptor serves SOCK_SEQPACKET listeners as well, which Asio's own acceptors do not cover.
class Acceptor::Loop : public std::enable_shared_from_this<Acceptor::Loop> {
 public:
  Loop(asio::io_context& io, int listener, Handler handler)
      : listener_(io, ::fcntl(listener, F_DUPFD_CLOEXEC, 0)), pause_(io), handler_(std::move(handler)) {}

  void Wait() {
    listener_.async_wait(asio::posix::stream_descriptor::wait_read,
                         [self = shared_from_this()](const error_code& error) {
                           if (!error) self->AcceptAll();
                         });
  }

 private:
  void AcceptAll() {
    while (true) {
      UniqueFd connection(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (connection) {
        handler_(std::move(connection));
        continue;
      }
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return Wait();
      spdlog::error("accept failed: {}; pausing", std::strerror(errno));  // out of descriptors, most likely
      return Pause();
    }
  }

  void Pause() {
    pause_.expires_after(std::chrono::milliseconds(100));
    pause_.async_wait([self = shared_from_this()](const error_code& error) {
      if (!error) self->Wait();
    });
  }

  asio::posix::stream_descriptor listener_;
  asio::steady_timer pause_;
  const Handler handler_;
};

Acceptor::Acceptor(asio::io_context& io, int listener, Handler handler)
    : loop_(std::make_shared<Loop>(io, listener, std::move(handler))) {
  loop_->Wait();
}

Acceptor::~Acceptor() = default;

}  // namespace tessera::server
