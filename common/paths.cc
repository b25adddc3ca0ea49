#include "common/paths.h"

#include <unistd.h>

#include <cstdlib>

namespace tessera {

std::string DefaultSocketPath() {
  if (const char* socket = std::getenv("TESSERA_SOCKET"); socket != nullptr && *socket != '\0') return socket;
  if (::geteuid() == 0) return "/run/tessera/tessera.sock";
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    return std::string(runtime) + "/tessera/tessera.sock";
  }
  return "/tmp/tessera-" + std::to_string(::geteuid()) + "/tessera.sock";
}

std::string SideChannelPath(std::string_view socket_path) {
  return std::string(socket_path) + ".side";
}

}  // namespace tessera
