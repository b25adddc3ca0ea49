// The daemon's log: spdlog's default logger, set up once at start to write one line a message to stderr. Code that logs
// calls spdlog::info and its like; this file owns level and format.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera::server {

// Levels are trace, debug, info, warn, error and off. Formats are text and json; in both, a message is one line of
// valid UTF-8 whatever it holds: control characters are escaped and broken sequences replaced. Times are UTC.
// INVALID_ARGUMENT on anything else, and then nothing has changed.
absl::Status InitLogging(std::string_view level, std::string_view format);

// Returns the level before. INVALID_ARGUMENT if `level` is none. Thread-safe.
absl::StatusOr<std::string> SetLogLevel(std::string_view level);

std::string LogLevel();

}  // namespace tessera::server
