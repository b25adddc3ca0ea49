// The 16-byte identity of a session, lease or buffer: daemon epoch, slot index, slot generation, random. A reader
// learns from it whether it belongs to this daemon process, and a re-used slot never answers to an old id.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tessera::server {

struct Id {
  std::uint32_t epoch = 0;
  std::uint32_t index = 0;
  std::uint32_t generation = 0;
  std::uint32_t nonce = 0;

  static constexpr std::size_t kBytes = 16;

  friend constexpr bool operator==(const Id&, const Id&) = default;

  std::string Bytes() const {
    std::string bytes(kBytes, '\0');
    std::memcpy(bytes.data(), this, kBytes);
    return bytes;
  }

  // False unless `bytes` has the right length.
  static bool Parse(std::string_view bytes, Id& id) {
    if (bytes.size() != kBytes) return false;
    std::memcpy(&id, bytes.data(), kBytes);
    return true;
  }
};
static_assert(sizeof(Id) == Id::kBytes, "the wire form is the struct itself");

// A random number that another process cannot guess.
std::uint32_t RandomNonce();

}  // namespace tessera::server
