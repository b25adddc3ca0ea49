// Accepts connections on a UnixListener with Asio, asks the kernel who connected, and hands each on.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>

#include "common/unique_fd.h"
#include "server/session/peer.h"
#include "server/session/unix_listener.h"

namespace tessera::server {

class Acceptor {
 public:
  // Called on the io_context's thread. The descriptor is non-blocking and close-on-exec.
  using Handler = std::function<void(UniqueFd connection, const Peer& peer)>;

  Acceptor(boost::asio::io_context& io, const UnixListener& listener, Handler handler);
  ~Acceptor();  // after the io_context has stopped

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;
};

}  // namespace tessera::server
