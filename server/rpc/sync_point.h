// A SyncPoint of a request -> what it names.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/session/session_table.h"

namespace tessera::server {

// `field` is the point's path in the request, for errors.
absl::StatusOr<SessionTable::FoundPoint> ResolvePoint(SessionTable& sessions, const Session& session, const Id& id,
                                                      std::uint64_t value, std::string_view field);

}  // namespace tessera::server
