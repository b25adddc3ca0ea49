// The bare stubs over a connection of its own, as any user of the node: for calls that the client library does not
// make, and for tests of two users in one process.
#pragma once

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "client/core.h"
#include "common/unique_fd.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/product_in_buffers.h"

namespace tessera::e2e {

inline constexpr uid_t kAliceUid = 12'345;
inline constexpr uid_t kBobUid = 12'346;

inline std::string PrincipalOf(uid_t uid) {
  return "uid:" + std::to_string(uid);
}

// Runs `work` as another user: the kernel keeps credentials for each thread, and a socket those of the thread that
// connected it. The group stays, so that the directory of the socket lets it in. Only root can.
inline void AsUser(uid_t uid, const std::function<void()>& work) {
  std::thread([&] {
    ASSERT_EQ(::syscall(SYS_setresuid, uid, uid, uid), 0) << std::strerror(errno);
    work();
  }).join();
  EXPECT_EQ(::prctl(PR_SET_DUMPABLE, 1), 0);  // the change took it from the whole process; leak checkers need it
}

class RawClient {
 public:
  explicit RawClient(const std::string& socket, uid_t uid = ::geteuid()) {
    UniqueFd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto connect = [&] {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      socket.copy(address.sun_path, sizeof(address.sun_path) - 1);
      EXPECT_EQ(::connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
          << std::strerror(errno);
    };
    uid == ::geteuid() ? connect() : AsUser(uid, connect);
    EXPECT_EQ(::fcntl(connection.get(), F_SETFL, O_NONBLOCK), 0);
    same_connection_ = UniqueFd(::fcntl(connection.get(), F_DUPFD_CLOEXEC, 0));
    channel_ = grpc::CreateInsecureChannelFromFd("raw", connection.Release());
    admin_ = v1::Admin::NewStub(channel_);
    memory_ = v1::Memory::NewStub(channel_);
    compute_ = v1::Compute::NewStub(channel_);
  }

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  v1::Admin::Stub& admin() const { return *admin_; }
  v1::Memory::Stub& memory() const { return *memory_; }
  v1::Compute::Stub& compute() const { return *compute_; }

  // The connection ends under whatever is on it, as when its process dies.
  void HangUp() const { EXPECT_EQ(::shutdown(same_connection_.get(), SHUT_RDWR), 0) << std::strerror(errno); }

  static std::unique_ptr<grpc::ClientContext> Context(const std::optional<std::string>& token,
                                                      std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + timeout);
    if (token.has_value()) context->AddMetadata("tessera-session-bin", *token);
    return context;
  }

  // A unary call of any of the stubs.
  template <typename Stub, typename Request, typename Reply>
  static absl::StatusOr<Reply> Call(Stub& stub,
                                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                                    const Request& request, const std::optional<std::string>& token = std::nullopt,
                                    std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    Reply reply;
    const absl::Status status = client::FromGrpc((stub.*method)(Context(token, timeout).get(), request, &reply));
    if (!status.ok()) return status;
    return reply;
  }

  // The token of a new session.
  absl::StatusOr<std::string> OpenOn(const std::string& lease, const std::string& label = "") const {
    v1::OpenSessionRequest request;
    request.set_lease(lease);
    request.set_label(label);
    return Token(request);
  }
  absl::StatusOr<std::string> OpenFor(std::uint64_t ttl_ms, const std::string& label = "") const {
    v1::OpenSessionRequest request;
    request.set_ttl_ms(ttl_ms);
    request.set_label(label);
    return Token(request);
  }
  absl::StatusOr<std::string> Token(const v1::OpenSessionRequest& request) const {
    auto reply = Call(*memory_, &v1::Memory::Stub::OpenSession, request);
    if (!reply.ok()) return reply.status();
    return reply->token();
  }

  absl::StatusOr<v1::KeepAliveReply> KeepAlive(const std::string& token) const {
    return Call(*memory_, &v1::Memory::Stub::KeepAlive, v1::KeepAliveRequest(), token);
  }
  absl::StatusOr<v1::CloseSessionReply> Close(const std::string& token,
                                              std::chrono::milliseconds timeout = std::chrono::seconds(60)) const {
    return Call(*memory_, &v1::Memory::Stub::CloseSession, v1::CloseSessionRequest(), token, timeout);
  }
  // The id of a new buffer.
  absl::StatusOr<std::string> Allocate(const std::string& token, std::uint64_t bytes) const {
    v1::AllocateBufferRequest request;
    request.set_bytes(bytes);
    auto reply = Call(*memory_, &v1::Memory::Stub::AllocateBuffer, request, token);
    if (!reply.ok()) return reply.status();
    return reply->buffer_id();
  }
  absl::Status Release(const std::string& token, const std::string& buffer) const {
    v1::ReleaseBufferRequest request;
    request.set_buffer_id(buffer);
    return Call(*memory_, &v1::Memory::Stub::ReleaseBuffer, request, token).status();
  }
  absl::StatusOr<v1::ShareBufferReply> Share(const std::string& token, const std::string& buffer,
                                             const std::string& principal, v1::BufferAccess access) const {
    v1::ShareBufferRequest request;
    request.set_buffer_id(buffer);
    request.set_principal(principal);
    request.set_access(access);
    return Call(*memory_, &v1::Memory::Stub::ShareBuffer, request, token);
  }
  absl::StatusOr<v1::ListBuffersReply> ListBuffers(const std::string& after = "", std::uint32_t limit = 0,
                                                   bool all = false) const {
    v1::ListBuffersRequest request;
    request.set_after(after);
    request.set_limit(limit);
    request.set_all_principals(all);
    return Call(*memory_, &v1::Memory::Stub::ListBuffers, request);
  }
  absl::StatusOr<v1::ListSessionsReply> ListSessions(const std::string& after = "", std::uint32_t limit = 0,
                                                     bool all = false) const {
    v1::ListSessionsRequest request;
    request.set_after(after);
    request.set_limit(limit);
    request.set_all_principals(all);
    return Call(*memory_, &v1::Memory::Stub::ListSessions, request);
  }
  absl::StatusOr<v1::EndSessionReply> EndSession(const std::string& name) const {
    v1::EndSessionRequest request;
    request.set_name(name);
    return Call(*admin_, &v1::Admin::Stub::EndSession, request);
  }
  v1::ServerInfoReply ServerInfo() const {
    return Call(*admin_, &v1::Admin::Stub::ServerInfo, v1::ServerInfoRequest()).value();
  }

  absl::Status Gemm(const std::optional<std::string>& token, const v1::GemmRequest& request) const {
    return Call(*compute_, &v1::Compute::Stub::Gemm, request, token).status();
  }
  // The same on a thread; destroying the future waits for the answer.
  std::future<absl::Status> Send(const std::optional<std::string>& token, const v1::GemmRequest& request) const {
    return std::async(std::launch::async, [this, token, request] { return Gemm(token, request); });
  }

 private:
  UniqueFd same_connection_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  std::unique_ptr<v1::Memory::Stub> memory_;
  std::unique_ptr<v1::Compute::Stub> compute_;
};

// A call of Attach by the bare stub.
class RawAttach {
 public:
  explicit RawAttach(const RawClient& client) : call_(client.memory().Attach(&context_, {})) {}
  ~RawAttach() { Cancel(); }
  RawAttach(const RawAttach&) = delete;
  RawAttach& operator=(const RawAttach&) = delete;

  // The first message; nullopt if the call ended instead.
  std::optional<v1::AttachReply> First() {
    v1::AttachReply reply;
    if (!call_->Read(&reply)) return std::nullopt;
    return reply;
  }
  // Waits for the end of the call, which must come without another message.
  absl::Status AwaitEnd() {
    v1::AttachReply more;
    EXPECT_FALSE(call_->Read(&more)) << "a second message";
    ended_ = true;
    return client::FromGrpc(call_->Finish());
  }
  void Cancel() {
    if (ended_) return;
    context_.TryCancel();
    v1::AttachReply more;
    while (call_->Read(&more)) {
    }
    call_->Finish();
    ended_ = true;
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::AttachReply>> call_;
  bool ended_ = false;
};

inline bool IsReady(const std::future<absl::Status>& answer) {
  return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace tessera::e2e
