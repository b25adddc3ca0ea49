// A listening TCP socket at a numeric address.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace tessera::server {

class TcpListener {
 public:
  // `host`: numeric IPv4 or IPv6. Port 0 picks a free one. UNAVAILABLE if the address cannot be had.
  static absl::StatusOr<TcpListener> Open(const std::string& host, std::uint16_t port);

  int fd() const { return socket_.get(); }                 // non-blocking, listening
  const std::string& address() const { return address_; }  // "127.0.0.1:50051" or "[::1]:50051", with the real port

 private:
  TcpListener(UniqueFd socket, std::string address) : socket_(std::move(socket)), address_(std::move(address)) {}

  UniqueFd socket_;
  std::string address_;
};

// The address at the other end of a connected TCP socket, without the port: "10.0.0.7". Empty if it has none any more.
std::string RemoteHost(int fd);

}  // namespace tessera::server
