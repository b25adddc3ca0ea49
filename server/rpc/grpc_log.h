// gRPC's own messages in the daemon's log.
#pragma once

namespace tessera::server {

// Errors of gRPC become warnings, at most one a second: a stranger who fails a TLS handshake causes one each. All else
// is dropped. Process-wide; calling it again does nothing more.
void LogGrpcMessages();

}  // namespace tessera::server
