// The daemon's end of the side channel (proto/tessera/v1/side_channel.proto): one object a connection, which is a
// lease.
#pragma once

#include <boost/asio/io_context.hpp>
#include <memory>

#include "common/unique_fd.h"
#include "server/session/peer.h"
#include "server/session/session_table.h"

namespace tessera::server {

// Serves `connection` on `io` until the client closes it, then closes its lease. All calls happen on io's thread.
// Connections that are open when `io` is destroyed close then, without touching the sessions.
void ServeSideConnection(boost::asio::io_context& io, UniqueFd connection, const Peer& peer, SessionTable& sessions,
                         Metrics& metrics);

}  // namespace tessera::server
