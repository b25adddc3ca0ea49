// The daemon's HTTP port: /metrics, /healthz and /readyz for Prometheus and Kubernetes. A small bounded HTTP/1.1 server
// on a thread of its own; it knows nothing of the rest of the daemon but three callbacks.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace tessera::server {

struct HttpOptions {
  std::string address;  // "127.0.0.1:9464", "[::1]:9464"; port 0 picks a free port

  // Called on the server's thread, one at a time; a slow one delays every other request. All three are needed.
  std::function<std::string()> metrics;           // in the Prometheus text format
  std::function<bool()> alive;                    // false: /healthz answers 503
  std::function<std::string()> not_ready_reason;  // one line; empty = ready

  // To receive one request (the idle time before it included), or to send one reply.
  std::chrono::milliseconds timeout = std::chrono::seconds(10);
};

class HttpServer {
 public:
  // INVALID_ARGUMENT: the address; UNAVAILABLE: it cannot be listened on. The message names the address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpOptions options);

  // Drops all connections and waits for the thread, which takes no longer than a running callback.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::string address() const;  // with the port that was picked

 private:
  class Listener;
  explicit HttpServer(std::unique_ptr<Listener> listener);

  const std::unique_ptr<Listener> listener_;
};

}  // namespace tessera::server
