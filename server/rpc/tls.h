// Mutual TLS of the TCP door: the daemon's certificate, the authorities that vouch for clients, and who a client is.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/session/peer.h"

namespace tessera::server {

struct TlsFiles {
  std::string certificate;  // PEM, the chain from the daemon's own certificate upwards
  std::string key;
  std::string client_ca;
};

// Whether the files can be read, parse, and the key belongs to the certificate. Errors name the setting and the path.
absl::Status CheckTlsFiles(const TlsFiles& files);

// Credentials that ask every client for a certificate of `client_ca`, and read the files again when they change; while
// a change cannot be used, what was read before stays in force.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeTlsCredentials(const TlsFiles& files);

// The subject of the client certificate that gRPC has verified; nullopt for a connection without one.
std::optional<Peer> PeerOfCertificate(const grpc::AuthContext& auth);

}  // namespace tessera::server
