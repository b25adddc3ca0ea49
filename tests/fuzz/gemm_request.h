// One input of the fuzzer: the bytes of a GemmRequest, taken the way that the daemon takes a call up to its launch
// (parse, decode, bind, plan), against a session table that has every kind of buffer. After each stage the promises of
// the contract are checked; a broken one prints what and on which request, and aborts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::fuzz {

enum class Outcome { kUnparsable, kDecodeRefused, kBindRefused, kPlanRefused, kBound };
inline constexpr std::array<std::string_view, 5> kOutcomeNames = {"unparsable", "decode_refused", "bind_refused",
                                                                  "plan_refused", "bound"};

// What a `buffer_id` of one byte stands for, modulo the number of entries: ids are random, so that no input could name
// a buffer otherwise. Ids of any other length reach the daemon's code as they are.
enum class KnownId : std::uint8_t {
  k1Byte,
  k64Bytes,
  k4KiB,
  k64KiB,
  k1MiB,
  kImported,      // 8 KiB of a client's memfd
  kImportedTail,  // the same memfd from byte 1025 on: an odd address, and memory that it shares with kImported
  kReleased,
  kForeign,  // another session's
  kFormer,   // of a former daemon process
};
inline constexpr std::size_t kKnownIds = 10;

inline constexpr std::uint64_t kInlineBytesMax = 512;  // small, so that small inputs reach it

// `refusal`, if given, receives the message of a refused request.
Outcome DriveGemmRequest(std::string_view bytes, std::string* refusal = nullptr);

}  // namespace tessera::fuzz
