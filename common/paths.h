// Where a node's daemon listens when nobody says otherwise; the daemon and its clients agree through this file.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// $TESSERA_SOCKET if set; else /run/tessera/tessera.sock for root; else $XDG_RUNTIME_DIR/tessera/tessera.sock; else
// /tmp/tessera-<uid>/tessera.sock.
std::string DefaultSocketPath();

// The side channel of the daemon that serves gRPC at `socket_path`.
std::string SideChannelPath(std::string_view socket_path);

}  // namespace tessera
