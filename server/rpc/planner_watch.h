// Planner.WatchDecisions: a call that shows decisions until the client ends it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "planner/planner.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/planner.pb.h"

namespace tessera::server {

// The thread that writes to all watchers: whoever decides only fills a buffer, and never meets a socket. It runs while
// there are calls. Outlives the gRPC server. Thread-safe.
class WatchPump {
 public:
  // Of a call. Asked by the pump's thread, now and then.
  class Target {
   public:
    virtual ~Target() = default;
    virtual void Pump() = 0;  // writes what there is, unless a write is under way
  };

  WatchPump() = default;
  ~WatchPump();
  WatchPump(const WatchPump&) = delete;
  WatchPump& operator=(const WatchPump&) = delete;

  // False: there are `most` already.
  bool Add(const std::shared_ptr<Target>& target, std::size_t most);
  void Remove(const std::shared_ptr<Target>& target);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Target>> targets_;
  bool stop_ = false;
  std::thread thread_;  // started with the first call
};

// Owned by gRPC from here on. All that it is given outlives the gRPC server.
grpc::ServerWriteReactor<v1::WatchDecisionsReply>* ServeWatch(grpc::CallbackServerContext& context,
                                                              const v1::WatchDecisionsRequest& request, RpcScope& scope,
                                                              planner::Planner& planner, WatchPump& pump);

}  // namespace tessera::server
