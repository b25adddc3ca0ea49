// Accepts connections on a listening socket with Asio and hands each on.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>

#include "common/unique_fd.h"

namespace tessera::server {

class Acceptor {
 public:
  // Called on the io_context's thread. The descriptor is non-blocking and close-on-exec.
  using Handler = std::function<void(UniqueFd connection)>;

  // `listener`: a listening, non-blocking socket of any kind; stays the caller's.
  Acceptor(boost::asio::io_context& io, int listener, Handler handler);
  ~Acceptor();  // after the io_context has stopped

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;
};

}  // namespace tessera::server
