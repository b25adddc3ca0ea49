#include "server/rpc/tls.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {
namespace {

constexpr unsigned kReloadSeconds = 10;

template <typename T, void (*kFree)(T*)>
struct Freed {
  void operator()(T* object) const { kFree(object); }
};
using Certificate = std::unique_ptr<X509, Freed<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY, EVP_PKEY_free>>;

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

// Reads the first PEM object that `read` understands.
template <typename Object, typename Read>
absl::StatusOr<Object> ReadPem(const char* setting, const std::string& path, const char* what, Read read) {
  const std::unique_ptr<std::FILE, FileCloser> file(std::fopen(path.c_str(), "re"));
  if (file == nullptr) return ErrnoStatus(absl::StatusCode::kInvalidArgument, absl::StrCat(setting, ": ", path));
  // No passphrase: without a terminal OpenSSL would wait for one.
  Object object(read(
      file.get(), nullptr, [](char*, int, int, void*) { return 0; }, nullptr));
  ERR_clear_error();
  if (object == nullptr) return absl::InvalidArgumentError(absl::StrCat(setting, ": ", path, " holds no ", what));
  return object;
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) {
  ASSIGN_OR_RETURN(const Certificate certificate,
                   ReadPem<Certificate>("tls_certificate", files.certificate, "PEM certificate", PEM_read_X509));
  ASSIGN_OR_RETURN(const Key key,
                   ReadPem<Key>("tls_key", files.key, "PEM private key without a passphrase", PEM_read_PrivateKey));
  RETURN_IF_ERROR(ReadPem<Certificate>("tls_client_ca", files.client_ca, "PEM certificate", PEM_read_X509).status());
  const bool pair = X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (pair) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tls_key: ", files.key, " is not the key of the certificate in ", files.certificate));
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeTlsCredentials(const TlsFiles& files) {
  RETURN_IF_ERROR(CheckTlsFiles(files));
  namespace tls = grpc::experimental;
  tls::TlsServerCredentialsOptions options(std::make_shared<tls::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.client_ca, kReloadSeconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  std::shared_ptr<grpc::ServerCredentials> credentials = tls::TlsServerCredentials(options);
  if (credentials == nullptr) return absl::InternalError("gRPC made no TLS credentials of the files");
  return credentials;
}

std::optional<Peer> PeerOfCertificate(const grpc::AuthContext& auth) {
  if (!auth.IsPeerAuthenticated()) return std::nullopt;
  const std::vector<grpc::string_ref> subjects = auth.FindPropertyValues(GRPC_X509_SUBJECT_PROPERTY_NAME);
  if (subjects.size() != 1 || subjects.front().empty()) return std::nullopt;
  Peer peer{.kind = PeerKind::kCertificate};
  peer.subject.assign(subjects.front().data(), subjects.front().size());
  return peer;
}

}  // namespace tessera::server
