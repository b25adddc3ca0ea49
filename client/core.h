// What Client, Session and Buffer share behind their handles: stubs, the side channel, status conversion.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "common/unique_fd.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tessera/v1/planner.grpc.pb.h"
#include "tessera/v1/side_channel.pb.h"

namespace tessera::client {

absl::Status FromGrpc(const grpc::Status& status);
// Of a unary call, which nobody here cancels: gRPC answers one that arrives in the instant of its server's end with a
// bare CANCELLED, and that becomes UNAVAILABLE, as the daemon itself would have said.
absl::Status FromUnaryCall(const grpc::Status& status);

// Marks the calling thread as one on which gRPC runs callbacks. A channel may not be destroyed there: gRPC would wait
// for the very thread that it is on. Objects that own one are then destroyed on a thread of their own.
void EnteredCallbackThread();
bool OnCallbackThread();

class ClientCore {
 public:
  // INVALID_ARGUMENT if a TLS file cannot be read. Does not connect yet.
  static absl::StatusOr<std::shared_ptr<ClientCore>> Make(ConnectOptions connect_options);

  // A context that gives up after the client's timeout.
  void Prepare(grpc::ClientContext& context) const;

  const ConnectOptions options;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::Admin::Stub> admin;
  const std::unique_ptr<v1::Memory::Stub> memory;
  const std::unique_ptr<v1::Compute::Stub> compute;
  const std::unique_ptr<v1::Planner::Stub> planner;

 private:
  ClientCore(ConnectOptions connect_options, std::shared_ptr<grpc::Channel> to_daemon);
};

// The client's end of the side channel; one request at a time.
class SideChannel {
 public:
  struct Reply {
    v1::SideReply message;
    UniqueFd fd;
  };

  // Connects and takes the Welcome.
  static absl::StatusOr<std::unique_ptr<SideChannel>> Connect(const std::string& path,
                                                              std::chrono::milliseconds timeout);

  const std::string& lease() const { return lease_; }
  // Sends, waits for the answer; an Error reply becomes its status.
  absl::StatusOr<Reply> Call(const v1::SideRequest& request, int fd = -1);

 private:
  explicit SideChannel(UniqueFd socket) : socket_(std::move(socket)) {}
  absl::StatusOr<Reply> Receive();

  const UniqueFd socket_;
  std::mutex mutex_;
  std::string lease_;
};

// A call of Attach, which is a lease until this object goes.
class AttachCall {
 public:
  static absl::StatusOr<std::unique_ptr<AttachCall>> Start(const ClientCore& client);
  ~AttachCall();  // ends the call, and waits for that

  const std::string& lease() const { return lease_; }

 private:
  class Reactor;
  explicit AttachCall(std::unique_ptr<Reactor> reactor);
  std::unique_ptr<Reactor> reactor_;
  std::string lease_;
};

class SessionCore {
 public:
  static absl::StatusOr<std::shared_ptr<SessionCore>> Open(std::shared_ptr<ClientCore> client,
                                                           const SessionOptions& options);

  // Adds the session's token; a timeout too, if it is not zero.
  void Prepare(grpc::ClientContext& context, std::chrono::milliseconds timeout) const;

  std::shared_ptr<ClientCore> client;
  absl::Status CheckSideChannel() const;  // FAILED_PRECONDITION without one
  absl::StatusOr<SideChannel::Reply> CallSideChannel(const v1::SideRequest& request, int fd = -1);
  std::string token;

 private:
  absl::StatusOr<std::string> TakeLease(const SessionOptions& options);  // for OpenSession; empty: a time to live

  // What is the lease, or neither; gone before the client.
  std::unique_ptr<SideChannel> side_channel_;
  std::unique_ptr<AttachCall> attach_;
};

// The same for a call of Compute, which needs no session: null is none.
void PrepareCompute(const SessionCore* session, grpc::ClientContext& context, std::chrono::milliseconds timeout);

// Of order.cc, for all kinds of timelines. A null session was moved from.
void ReleaseSync(const SessionCore* session, const std::string& id);
absl::StatusOr<std::string> CreateTimelineId(const SessionCore& session, std::uint64_t initial_value,
                                             const std::vector<std::string>& shared_with, bool exported);
absl::StatusOr<std::uint64_t> AwaitPoint(const SessionCore& session, const SyncPoint& point,
                                         std::chrono::milliseconds timeout);

}  // namespace tessera::client
