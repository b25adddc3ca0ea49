#include "server/session/id.h"

#include <random>

namespace tessera::server {

std::uint32_t RandomNonce() {
  // libstdc++'s random_device reads the processor's or the kernel's generator.
  static thread_local std::random_device device;
  return device();
}

}  // namespace tessera::server
