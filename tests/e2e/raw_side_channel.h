// The client's end of a side channel for messages that the client library never sends.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/fd_message.h"
#include "common/paths.h"
#include "common/unique_fd.h"
#include "tessera/v1/side_channel.pb.h"
#include "tests/server/session/posix_fixtures.h"

namespace tessera::e2e {

// Connects as the calling thread's user and takes the Welcome. What goes wrong on this side is a test failure.
class RawSideChannel {
 public:
  explicit RawSideChannel(const std::string& socket) {
    auto connected = ConnectSeqpacket(SideChannelPath(socket));
    EXPECT_TRUE(connected.ok()) << connected.status();
    if (connected.ok()) fd_ = *std::move(connected);
    const timeval patience{.tv_sec = 30, .tv_usec = 0};
    EXPECT_EQ(::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    lease_ = Receive().welcome().lease();
  }

  const std::string& lease() const { return lease_; }

  // The answer to one datagram with any number of descriptors.
  v1::SideReply Ask(const std::string& bytes, const std::vector<int>& fds = {}) {
    EXPECT_EQ(server::SendDatagram(fd_.get(), bytes, fds), static_cast<ssize_t>(bytes.size())) << std::strerror(errno);
    return Receive();
  }

  v1::SideReply Pass(int fd) { return Ask(PassRequest(), {fd}); }

  static std::string PassRequest() {
    v1::SideRequest request;
    request.mutable_pass_descriptor();
    return request.SerializeAsString();
  }
  static std::string FetchRequest(const std::string& buffer_id) {
    v1::SideRequest request;
    request.mutable_fetch_descriptor()->set_buffer_id(buffer_id);
    return request.SerializeAsString();
  }

 private:
  v1::SideReply Receive() {
    v1::SideReply reply;
    auto message = ReceiveFdMessage(fd_.get());
    EXPECT_TRUE(message.ok() && !message->bytes.empty()) << message.status();
    EXPECT_TRUE(message.ok() && reply.ParseFromString(message->bytes));
    return reply;
  }

  UniqueFd fd_;
  std::string lease_;
};

}  // namespace tessera::e2e
