// Bridges between std::string_view and the distribution's absl::string_view, which is a type of its own there.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {

inline absl::string_view Av(std::string_view text) {
  return absl::string_view(text.data(), text.size());
}
inline std::string_view Sv(absl::string_view text) {
  return std::string_view(text.data(), text.size());
}

// The status's message as a std::string.
inline std::string MessageOf(const absl::Status& status) {
  return std::string(Sv(status.message()));
}

// "what: strerror(error)" under `code`. `error` defaults to errno at the call.
inline absl::Status ErrnoStatus(absl::StatusCode code, std::string_view what, int error = errno) {
  return absl::Status(code, absl::StrCat(Av(what), ": ", std::strerror(error)));
}

// A status that is not OK with the path of the field it is about before its message; OK stays OK.
inline absl::Status InField(std::string_view field, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(Av(field), ": ", status.message()));
}

}  // namespace tessera
