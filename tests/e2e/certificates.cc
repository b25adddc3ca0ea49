#include "tests/e2e/certificates.h"

#include <fstream>

#include "tests/e2e/child_process.h"

namespace tessera::e2e {
namespace {

void OpenSsl(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "/usr/bin/openssl");
  const Finished finished = RunProgram(arguments);
  ASSERT_EQ(finished.code, 0) << arguments[1] << ": " << finished.err;
}

}  // namespace

CertificateAuthority::CertificateAuthority()
    : self_{.certificate = directory_.File("ca.pem"), .key = directory_.File("ca.key")} {
  OpenSsl({"req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=ca",
           "-days", "2", "-keyout", self_.key, "-out", self_.certificate});
}

CertificateFiles CertificateAuthority::Issue(const std::string& name, const std::string& subject) const {
  CertificateFiles files{.certificate = directory_.File(name + ".pem"), .key = directory_.File(name + ".key")};
  const std::string request = directory_.File(name + ".csr");
  const std::string extensions = directory_.File("extensions");
  std::ofstream(extensions) << "subjectAltName=DNS:localhost,IP:127.0.0.1\n";
  OpenSsl({"req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", subject, "-keyout",
           files.key, "-out", request});
  OpenSsl({"x509", "-req", "-in", request, "-CA", self_.certificate, "-CAkey", self_.key, "-CAcreateserial", "-days",
           "2", "-extfile", extensions, "-out", files.certificate});
  return files;
}

client::TlsOptions ClientTls(const CertificateAuthority& ca, const CertificateFiles& files) {
  return {.ca = ca.file(), .certificate = files.certificate, .key = files.key, .server_name = {}};
}

}  // namespace tessera::e2e
