// What operators call a session, such as 3.1: slot and generation of its id. The whole id is the token, its owner's
// secret.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/text.h"
#include "server/session/id.h"

namespace tessera::server {

struct SessionName {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;

  static SessionName Of(const Id& session) { return {.index = session.index, .generation = session.generation}; }
};

inline std::string ToString(const SessionName& name) {
  return absl::StrCat(name.index, ".", name.generation);
}

// INVALID_ARGUMENT naming the field, also for other spellings of the numbers.
inline absl::StatusOr<SessionName> ParseSessionName(std::string_view text, std::string_view field) {
  SessionName name;
  const std::vector<std::string> parts = absl::StrSplit(Av(text), '.');
  if (parts.size() == 2 && absl::SimpleAtoi(parts[0], &name.index) && absl::SimpleAtoi(parts[1], &name.generation) &&
      ToString(name) == text) {
    return name;
  }
  return absl::InvalidArgumentError(absl::StrCat(Av(field), ": must be a session's name, such as 3.1"));
}

}  // namespace tessera::server
