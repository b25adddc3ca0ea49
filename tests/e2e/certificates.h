// Certificates for tests of TLS, made by the openssl program.
#pragma once

#include <string>

#include "client/client.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {

// A private key and its certificate, as PEM files.
struct CertificateFiles {
  std::string certificate;
  std::string key;
};

// An authority of its own; its files go with the object.
class CertificateAuthority {
 public:
  CertificateAuthority();

  const std::string& file() const { return self_.certificate; }
  // `subject` as openssl writes it: "/O=Example/CN=trainer". Valid for localhost and 127.0.0.1.
  CertificateFiles Issue(const std::string& name, const std::string& subject) const;

 private:
  TemporaryDirectory directory_;
  CertificateFiles self_;
};

// How a client with these files talks to a daemon with a certificate of `ca`.
client::TlsOptions ClientTls(const CertificateAuthority& ca, const CertificateFiles& files);

}  // namespace tessera::e2e
