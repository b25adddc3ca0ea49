#include "client/core.h"

#include <sys/socket.h>
#include <sys/time.h>

#include <fstream>
#include <future>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/fd_message.h"
#include "common/paths.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client {
namespace {

constexpr char kSessionMetadata[] = "tessera-session-bin";

ConnectOptions WithDefaults(ConnectOptions options) {
  if (options.socket.empty()) options.socket = DefaultSocketPath();
  if (options.side_channel.empty()) options.side_channel = SideChannelPath(options.socket);
  return options;
}

absl::StatusOr<std::string> ReadPem(const char* what, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!path.empty() && file && text << file.rdbuf()) return text.str();
  return absl::InvalidArgumentError(
      absl::StrCat("TLS: cannot read the ", what, " file ", path.empty() ? "(none named)" : path));
}

// Sets the name to expect in the daemon's certificate, too.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const ConnectOptions& options,
                                                                          grpc::ChannelArguments& arguments) {
  if (options.address.empty() || !options.tls.has_value()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions ssl;
  ASSIGN_OR_RETURN(ssl.pem_root_certs, ReadPem("CA", options.tls->ca));
  ASSIGN_OR_RETURN(ssl.pem_cert_chain, ReadPem("certificate", options.tls->certificate));
  ASSIGN_OR_RETURN(ssl.pem_private_key, ReadPem("key", options.tls->key));
  if (!options.tls->server_name.empty()) arguments.SetSslTargetNameOverride(options.tls->server_name);
  return grpc::SslCredentials(ssl);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // the daemon bounds its messages
  // Clients of one process do not share a connection: each has its own flow control and its own end.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  ASSIGN_OR_RETURN(const auto credentials, MakeCredentials(options, arguments));
  const std::string target = options.address.empty() ? "unix:" + options.socket : options.address;
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

void SetTimeout(grpc::ClientContext& context, std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) context.set_deadline(std::chrono::system_clock::now() + timeout);
}

thread_local bool on_callback_thread = false;

// The last owner may be the callback of a call that outlived its session and client.
void Destroy(ClientCore* core) {
  if (on_callback_thread) {
    std::thread([core] { delete core; }).detach();
  } else {
    delete core;
  }
}

}  // namespace

void EnteredCallbackThread() {
  on_callback_thread = true;  // for good: gRPC's callback threads do nothing else
}

bool OnCallbackThread() {
  return on_callback_thread;
}

absl::StatusOr<std::shared_ptr<ClientCore>> ClientCore::Make(ConnectOptions connect_options) {
  ConnectOptions with_defaults = WithDefaults(std::move(connect_options));
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> to_daemon, MakeChannel(with_defaults));
  return std::shared_ptr<ClientCore>(new ClientCore(std::move(with_defaults), std::move(to_daemon)), &Destroy);
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status FromUnaryCall(const grpc::Status& status) {
  const bool came_too_late =
      status.error_code() == grpc::StatusCode::CANCELLED && status.error_message() == "CANCELLED";
  return came_too_late ? absl::UnavailableError("the daemon has ended") : FromGrpc(status);
}

ClientCore::ClientCore(ConnectOptions connect_options, std::shared_ptr<grpc::Channel> to_daemon)
    : options(std::move(connect_options)),
      channel(std::move(to_daemon)),
      admin(v1::Admin::NewStub(channel)),
      memory(v1::Memory::NewStub(channel)),
      compute(v1::Compute::NewStub(channel)),
      planner(v1::Planner::NewStub(channel)) {}

void ClientCore::Prepare(grpc::ClientContext& context) const {
  context.set_deadline(std::chrono::system_clock::now() + options.timeout);
}

absl::StatusOr<std::unique_ptr<SideChannel>> SideChannel::Connect(const std::string& path,
                                                                  std::chrono::milliseconds timeout) {
  ASSIGN_OR_RETURN(UniqueFd socket, ConnectSeqpacket(path));
  timeval wait{};
  wait.tv_sec = static_cast<time_t>(timeout.count() / 1000);
  wait.tv_usec = static_cast<suseconds_t>(timeout.count() % 1000 * 1000);
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) != 0 ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait)) != 0) {
    return ErrnoStatus(absl::StatusCode::kInternal, "side channel: timeouts");
  }
  std::unique_ptr<SideChannel> channel(new SideChannel(std::move(socket)));
  ASSIGN_OR_RETURN(Reply welcome, channel->Receive());
  if (!welcome.message.has_welcome()) return absl::InternalError("side channel: the daemon did not begin with Welcome");
  channel->lease_ = welcome.message.welcome().lease();
  return channel;
}

absl::StatusOr<SideChannel::Reply> SideChannel::Call(const v1::SideRequest& request, int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(SendFdMessage(socket_.get(), request.SerializeAsString(), fd));
  return Receive();
}

absl::StatusOr<SideChannel::Reply> SideChannel::Receive() {
  ASSIGN_OR_RETURN(FdMessage message, ReceiveFdMessage(socket_.get()));
  if (message.bytes.empty()) return absl::UnavailableError("side channel: the daemon closed the connection");
  Reply reply;
  if (!reply.message.ParseFromString(message.bytes)) return absl::InternalError("side channel: malformed reply");
  if (!message.fds.empty()) reply.fd = std::move(message.fds.front());
  if (reply.message.has_error()) {
    return absl::Status(static_cast<absl::StatusCode>(reply.message.error().code()), reply.message.error().message());
  }
  return reply;
}

class AttachCall::Reactor final : public grpc::ClientReadReactor<v1::AttachReply> {
 public:
  explicit Reactor(v1::Memory::Stub& stub) {
    stub.async()->Attach(&context_, &request_, this);
    StartRead(&reply_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (ok) first_.set_value(reply_);  // else OnDone tells
    answered_ = ok;
  }

  void OnDone(const grpc::Status& status) override {
    EnteredCallbackThread();
    if (!answered_) first_.set_value(FromGrpc(status));
    done_.set_value();
  }

  absl::StatusOr<v1::AttachReply> First(std::chrono::milliseconds timeout) {
    std::future<absl::StatusOr<v1::AttachReply>> first = first_.get_future();
    if (first.wait_for(timeout) == std::future_status::ready) return first.get();
    return absl::DeadlineExceededError("Attach: the daemon did not answer");
  }

  void End() {
    context_.TryCancel();
    done_.get_future().wait();
  }

 private:
  grpc::ClientContext context_;
  const v1::AttachRequest request_;
  v1::AttachReply reply_;
  bool answered_ = false;  // of gRPC's callbacks, which run one at a time
  std::promise<absl::StatusOr<v1::AttachReply>> first_;
  std::promise<void> done_;
};

AttachCall::AttachCall(std::unique_ptr<Reactor> reactor) : reactor_(std::move(reactor)) {}

absl::StatusOr<std::unique_ptr<AttachCall>> AttachCall::Start(const ClientCore& client) {
  std::unique_ptr<AttachCall> call(new AttachCall(std::make_unique<Reactor>(*client.memory)));
  ASSIGN_OR_RETURN(const v1::AttachReply reply, call->reactor_->First(client.options.timeout));
  call->lease_ = reply.lease();
  return call;
}

AttachCall::~AttachCall() {
  if (on_callback_thread) {  // the end of the call needs the very thread that this is
    std::thread([reactor = std::move(reactor_)] { reactor->End(); }).detach();
  } else {
    reactor_->End();
  }
}

absl::StatusOr<std::string> SessionCore::TakeLease(const SessionOptions& options) {
  switch (options.lease) {
    case Lease::kSideChannel: {
      ASSIGN_OR_RETURN(side_channel_, SideChannel::Connect(client->options.side_channel, client->options.timeout));
      return side_channel_->lease();
    }
    case Lease::kAttach: {
      ASSIGN_OR_RETURN(attach_, AttachCall::Start(*client));
      return attach_->lease();
    }
    case Lease::kTtl:
      break;
  }
  return std::string();
}

absl::StatusOr<std::shared_ptr<SessionCore>> SessionCore::Open(std::shared_ptr<ClientCore> client,
                                                               const SessionOptions& options) {
  auto core = std::make_shared<SessionCore>();
  core->client = std::move(client);
  ASSIGN_OR_RETURN(const std::string lease, core->TakeLease(options));
  v1::OpenSessionRequest request;
  request.set_lease(lease);
  request.set_label(options.label);
  if (options.lease == Lease::kTtl) {
    if (options.ttl.count() <= 0) return absl::InvalidArgumentError("ttl: must be more than 0");
    request.set_ttl_ms(static_cast<std::uint64_t>(options.ttl.count()));
  }
  v1::OpenSessionReply reply;
  grpc::ClientContext context;
  core->client->Prepare(context);
  RETURN_IF_ERROR(FromUnaryCall(core->client->memory->OpenSession(&context, request, &reply)));
  core->token = reply.token();
  return core;
}

absl::Status SessionCore::CheckSideChannel() const {
  if (side_channel_ != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "passing descriptors needs a session whose lease is the side channel, which is the default");
}

absl::StatusOr<SideChannel::Reply> SessionCore::CallSideChannel(const v1::SideRequest& request, int fd) {
  RETURN_IF_ERROR(CheckSideChannel());
  return side_channel_->Call(request, fd);
}

void SessionCore::Prepare(grpc::ClientContext& context, std::chrono::milliseconds timeout) const {
  context.AddMetadata(kSessionMetadata, token);
  SetTimeout(context, timeout);
}

void PrepareCompute(const SessionCore* session, grpc::ClientContext& context, std::chrono::milliseconds timeout) {
  if (session != nullptr) return session->Prepare(context, timeout);
  SetTimeout(context, timeout);
}

}  // namespace tessera::client
