#include "server/session/side_channel.h"

#include <boost/asio/posix/stream_descriptor.hpp>
#include <utility>

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include "common/fd_message.h"
#include "common/text.h"
#include "tessera/v1/side_channel.pb.h"

namespace tessera::server {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

// A client that does not read its replies fills its own socket; then it is cut off rather than waited for.
class SideConnection : public std::enable_shared_from_this<SideConnection> {
 public:
  SideConnection(asio::io_context& io, UniqueFd connection, SessionTable& sessions, Metrics& metrics)
      : socket_(io, connection.Release()), sessions_(sessions), metrics_(metrics) {}

  ~SideConnection() { metrics_.SideConnectionClosed(); }

  void Start(const Peer& peer) {
    metrics_.SideConnectionOpened();
    auto lease = sessions_.OpenLease(peer);
    v1::SideReply reply;
    if (!lease.ok()) {
      SetError(lease.status(), reply);
      Send(reply);
      return;
    }
    lease_ = *lease;
    reply.mutable_welcome()->set_lease(lease_.Bytes());
    reply.mutable_welcome()->set_epoch(fmt::format("{:08x}", sessions_.epoch()));
    if (!Send(reply)) return End();
    Wait();
  }

 private:
  void Wait() {
    socket_.async_wait(asio::posix::stream_descriptor::wait_read, [self = shared_from_this()](const error_code& error) {
      if (!error) self->Receive();
    });
  }

  void End() { sessions_.CloseLease(lease_); }

  // One message a turn, so that one busy client does not hold up the others.
  void Receive() {
    auto message = ReceiveFdMessage(socket_.native_handle());
    if (!message.ok()) {
      if (message.status().code() == absl::StatusCode::kUnavailable) return Wait();
      return Answer(message.status()) ? Wait() : End();
    }
    if (message->bytes.empty()) return End();
    v1::SideReply reply;
    Passed passed;
    const absl::Status status = Handle(*message, reply, passed);
    if (!status.ok()) SetError(status, reply);
    if (!Send(reply, passed.fd)) return End();
    Wait();
  }

  // A descriptor for the reply, and what holds it until it is sent.
  struct Passed {
    int fd = -1;
    BufferPin buffer;
    std::shared_ptr<Timeline> timeline;
  };

  absl::Status Handle(FdMessage& message, v1::SideReply& reply, Passed& passed) {
    v1::SideRequest request;
    if (!request.ParseFromString(message.bytes)) request.clear_kind();
    switch (request.kind_case()) {
      case v1::SideRequest::kPassDescriptor:
        metrics_.SideMessageReceived(SideMessage::kPass);
        return PassDescriptor(message, reply);
      case v1::SideRequest::kFetchDescriptor:
        metrics_.SideMessageReceived(SideMessage::kFetch);
        return FetchDescriptor(request.fetch_descriptor().buffer_id(), *reply.mutable_descriptor_passed(), passed);
      case v1::SideRequest::kFetchTimeline:
        metrics_.SideMessageReceived(SideMessage::kFetchTimeline);
        return FetchTimeline(request.fetch_timeline().timeline_id(), *reply.mutable_descriptor_passed(), passed);
      case v1::SideRequest::KIND_NOT_SET:
        break;
    }
    metrics_.SideMessageReceived(SideMessage::kInvalid);
    return absl::InvalidArgumentError("side channel: not a SideRequest with a kind that this daemon knows");
  }

  absl::Status PassDescriptor(FdMessage& message, v1::SideReply& reply) {
    if (message.fds.size() != 1) return absl::InvalidArgumentError("pass_descriptor: carries no descriptor");
    auto ticket = sessions_.KeepDescriptor(lease_, std::move(message.fds.front()));
    if (ticket.ok()) reply.mutable_descriptor_accepted()->set_ticket(*ticket);
    return ticket.status();
  }

  absl::Status FetchDescriptor(const std::string& buffer_id, v1::SideReply::DescriptorPassed& reply, Passed& passed) {
    Id id;
    if (!Id::Parse(buffer_id, id)) return absl::InvalidArgumentError("fetch_descriptor.buffer_id: must be 16 bytes");
    auto exported = sessions_.ExportBuffer(lease_, id);
    if (!exported.ok()) return InField("fetch_descriptor.buffer_id", exported.status());
    passed.buffer = *std::move(exported);
    passed.fd = passed.buffer->fd();
    reply.set_byte_offset(0);
    reply.set_bytes(passed.buffer->bytes());
    reply.set_space(passed.buffer->space().Name());
    reply.set_allocation_bytes(passed.buffer->allocation_bytes());
    return absl::OkStatus();
  }

  absl::Status FetchTimeline(const std::string& timeline_id, v1::SideReply::DescriptorPassed& reply, Passed& passed) {
    Id id;
    if (!Id::Parse(timeline_id, id)) return absl::InvalidArgumentError("fetch_timeline.timeline_id: must be 16 bytes");
    auto exported = sessions_.ExportTimeline(lease_, id);
    if (!exported.ok()) return InField("fetch_timeline.timeline_id", exported.status());
    passed.timeline = *std::move(exported);
    const SharedWord& word = *passed.timeline->word();
    passed.fd = word.page()->fd();
    reply.set_byte_offset(word.byte_offset());
    reply.set_bytes(sizeof(SyncSlot));
    reply.set_space(MemorySpace().Name());
    reply.set_allocation_bytes(SyncPage::kBytes);
    return absl::OkStatus();
  }

  static void SetError(const absl::Status& status, v1::SideReply& reply) {
    reply.mutable_error()->set_code(static_cast<int>(status.code()));
    reply.mutable_error()->set_message(MessageOf(status));
  }

  bool Answer(const absl::Status& status) {
    metrics_.SideMessageReceived(SideMessage::kInvalid);
    v1::SideReply reply;
    SetError(status, reply);
    return Send(reply);
  }

  bool Send(const v1::SideReply& reply, int fd = -1) {
    const absl::Status status = SendFdMessage(socket_.native_handle(), reply.SerializeAsString(), fd);
    if (!status.ok()) spdlog::debug("side connection dropped: {}", MessageOf(status));
    return status.ok();
  }

  asio::posix::stream_descriptor socket_;
  SessionTable& sessions_;
  Metrics& metrics_;
  Id lease_;
};

}  // namespace

void ServeSideConnection(asio::io_context& io, UniqueFd connection, const Peer& peer, SessionTable& sessions,
                         Metrics& metrics) {
  std::make_shared<SideConnection>(io, std::move(connection), sessions, metrics)->Start(peer);
}

}  // namespace tessera::server
