// The daemon over TCP: who a caller is, what callers may do there, and that nothing else gets in.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "common/text.h"
#include "common/unique_fd.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tests/e2e/certificates.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/inline_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A connected TCP socket to 127.0.0.1:port.
UniqueFd ConnectTcp(const std::string& address) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  return socket;
}

void ExpectRefusal(const absl::Status& status, StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << Text(status);
  EXPECT_THAT(MessageOf(status), HasSubstr(text));
}

class TcpTest : public DaemonFixture {
 protected:
  absl::StatusOr<client::Client> ConnectOverTcp(std::optional<client::TlsOptions> tls,
                                                std::chrono::milliseconds timeout = 10s) {
    client::ConnectOptions options{.timeout = timeout};
    options.address = daemon().tcp_address();
    options.tls = std::move(tls);
    return client::Client::Connect(std::move(options));
  }
};

class PlainTcpTest : public TcpTest {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon(kSettings);
  }

  const SettingTexts kSettings = {{"tcp_address", "127.0.0.1:0"}, {"tcp_plaintext", "true"}};
};

TEST_F(PlainTcpTest, AnonymousCallersComputeOnInlineTensors) {
  absl::StatusOr<client::Client> client = ConnectOverTcp(std::nullopt);
  ASSERT_TRUE(client.ok()) << Text(client.status());
  const v1::ServerInfoReply info = client->ServerInfo().value();
  EXPECT_EQ(info.principal(), "anonymous");
  EXPECT_FALSE(info.administrator());
  EXPECT_EQ(info.tcp_address(), daemon().tcp_address());
  InlineProblem problem(24, 40, 72);
  ASSERT_TRUE(client->Gemm(problem.spec()).ok());
  problem.ExpectRight();
}

TEST_F(PlainTcpTest, AnonymousCallersHaveNoSessionsBuffersOrSay) {
  client::Client client = ConnectOverTcp(std::nullopt).value();
  ExpectRefusal(client.OpenSession("x").status(), StatusCode::kFailedPrecondition, "Unix socket");
  ExpectRefusal(client.ListBuffers().status(), StatusCode::kPermissionDenied, "Memory.ListBuffers: anonymous");
  ExpectRefusal(client.ListBuffers(true).status(), StatusCode::kPermissionDenied, "anonymous");
  ExpectRefusal(client.GetConfig().status(), StatusCode::kPermissionDenied, "anonymous is no administrator");
  ExpectRefusal(client.SetLogLevel("off").status(), StatusCode::kPermissionDenied, "anonymous is no administrator");
  ExpectRefusal(client.Drain().status(), StatusCode::kPermissionDenied, "anonymous is no administrator");
  EXPECT_EQ(client.ServerInfo().value().state(), "serving");
}

// The token of a session is not enough: it must come from its owner.
TEST_F(PlainTcpTest, AStolenTokenIsOfNoUse) {
  client::Client owner = Connect();
  client::Session session = owner.OpenSession("owner").value();
  client::Buffer buffer = session.Allocate(4096).value();
  client::Client thief = ConnectOverTcp(std::nullopt).value();
  const auto stub = v1::Compute::NewStub(thief.channel());
  v1::GemmRequest request;
  for (v1::Tensor* tensor :
       {request.mutable_op()->mutable_a(), request.mutable_op()->mutable_b(), request.mutable_op()->mutable_d()}) {
    tensor->set_buffer_id(buffer.id());
    tensor->set_dtype(v1::DTYPE_BF16);
    tensor->add_shape(4);
    tensor->add_shape(4);
  }
  v1::GemmReply reply;
  grpc::ClientContext with_token;
  with_token.AddMetadata("tessera-session-bin", session.token());
  EXPECT_EQ(stub->Gemm(&with_token, request, &reply).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  grpc::ClientContext without;
  const grpc::Status refused = stub->Gemm(&without, request, &reply);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), StartsWith("op.a.buffer_id: "));
}

TEST_F(PlainTcpTest, ConnectionsOfOnePrincipalAreLimited) {
  SettingTexts settings = kSettings;
  settings.emplace_back("connections_per_principal_max", "2");
  StartDaemon(settings);
  std::optional<client::Client> first = ConnectOverTcp(std::nullopt).value();
  const client::Client second = ConnectOverTcp(std::nullopt).value();
  ExpectRefusal(ConnectOverTcp(std::nullopt).status(), StatusCode::kResourceExhausted,
                "connections_per_principal_max: anonymous has 2 connections open");
  EXPECT_TRUE(Connect().ServerInfo().ok()) << "others have their own";
  EXPECT_GE(MetricSum(Metrics(), "tessera_refused_total", {"limit=\"connections_per_principal_max\""}), 1);
  first.reset();
  EXPECT_TRUE(Eventually(10s, [&] { return ConnectOverTcp(std::nullopt).ok(); }));
}

TEST_F(PlainTcpTest, AllConnectionsAreLimited) {
  SettingTexts settings = kSettings;
  settings.emplace_back("connections_max", "2");
  StartDaemon(settings);
  const client::Client local = Connect();
  std::optional<client::Client> remote = ConnectOverTcp(std::nullopt).value();
  const auto over = client::Client::Connect({.socket = socket()});
  ExpectRefusal(over.status(), StatusCode::kResourceExhausted, "connections_max: all 2 connections are taken");
  EXPECT_TRUE(local.ServerInfo().ok());
  remote.reset();
  EXPECT_TRUE(Eventually(10s, [&] { return client::Client::Connect({.socket = socket()}).ok(); }));
}

TEST_F(PlainTcpTest, GarbageGetsNowhere) {
  for (const std::string& garbage : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, '\xff')}) {
    const UniqueFd socket = ConnectTcp(daemon().tcp_address());
    // The daemon may hang up before all is sent.
    EXPECT_NE(::send(socket.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
  }
  const UniqueFd silent = ConnectTcp(daemon().tcp_address());
  EXPECT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_rpc_connections") == 1; }))
      << "only the silent one is left";
  EXPECT_TRUE(ConnectOverTcp(std::nullopt).value().ServerInfo().ok());
}

TEST_F(PlainTcpTest, AnAddressInUseIsAClearError) {
  server::SettingSources sources{.flags = {{"socket", directory().File("other.sock")},
                                           {"http_address", ""},
                                           {"tcp_address", daemon().tcp_address()},
                                           {"tcp_plaintext", "true"}}};
  const auto other = server::Daemon::Start(server::LoadSettings(sources).value());
  ExpectRefusal(other.status(), StatusCode::kUnavailable, "tcp_address 127.0.0.1:");
  EXPECT_FALSE(std::filesystem::exists(directory().File("other.sock")));
}

class TlsTest : public TcpTest {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    server_files_ = ca_.Issue("server", "/CN=tesserad");
    StartDaemon(Settings());
  }

  SettingTexts Settings() const {
    return {{"tcp_address", "127.0.0.1:0"},
            {"tls_certificate", server_files_.certificate},
            {"tls_key", server_files_.key},
            {"tls_client_ca", ca_.file()},
            {"admin_subjects", "CN=operator,O=Example;CN=other"}};
  }

  absl::StatusOr<client::Client> ConnectAs(const std::string& subject) {
    return ConnectOverTcp(ClientTls(ca_, ca_.Issue("client", subject)));
  }

  CertificateAuthority ca_;
  CertificateFiles server_files_;
};

TEST_F(TlsTest, TheSubjectIsThePrincipal) {
  absl::StatusOr<client::Client> client = ConnectAs("/O=Example/CN=trainer");
  ASSERT_TRUE(client.ok()) << Text(client.status());
  const v1::ServerInfoReply info = client->ServerInfo().value();
  EXPECT_EQ(info.principal(), "subject:CN=trainer,O=Example");
  EXPECT_FALSE(info.administrator());
  InlineProblem problem(8, 16, 32);
  ASSERT_TRUE(client->Gemm(problem.spec()).ok());
  problem.ExpectRight();
  ExpectRefusal(client->GetConfig().status(), StatusCode::kPermissionDenied,
                "subject:CN=trainer,O=Example is no administrator");
  ExpectRefusal(client->Drain().status(), StatusCode::kPermissionDenied, "admin_subjects");
  ExpectRefusal(client->ListBuffers().status(), StatusCode::kPermissionDenied, "inline tensors");
}

TEST_F(TlsTest, NamedSubjectsAdminister) {
  client::Client client = ConnectAs("/O=Example/CN=operator").value();
  EXPECT_TRUE(client.ServerInfo().value().administrator());
  EXPECT_TRUE(client.GetConfig().ok());
  ExpectRefusal(client.ListBuffers(true).status(), StatusCode::kPermissionDenied, "Unix socket");
  // The whole subject counts, not a part of it.
  for (const char* subject : {"/CN=operator", "/O=Example/OU=x/CN=operator", "/CN=other/CN=x"}) {
    EXPECT_FALSE(ConnectAs(subject).value().ServerInfo().value().administrator()) << subject;
  }
  EXPECT_TRUE(ConnectAs("/CN=other").value().ServerInfo().value().administrator());
}

TEST_F(TlsTest, OnlyClientsWithACertificateOfTheAuthorityGetIn) {
  const CertificateAuthority stranger;
  const CertificateFiles files = stranger.Issue("client", "/O=Example/CN=operator");
  client::TlsOptions forged = ClientTls(ca_, files);  // trusts the daemon, is not trusted
  EXPECT_EQ(ConnectOverTcp(forged, 2s).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(ConnectOverTcp(std::nullopt, 2s).status().code(), StatusCode::kUnavailable) << "plain text";

  // A daemon that the client does not trust.
  client::TlsOptions wary = ClientTls(stranger, ca_.Issue("client", "/CN=trainer"));
  EXPECT_EQ(ConnectOverTcp(wary, 2s).status().code(), StatusCode::kUnavailable);

  grpc::SslCredentialsOptions no_certificate;
  std::ifstream ca(ca_.file());
  no_certificate.pem_root_certs.assign(std::istreambuf_iterator<char>(ca), {});
  const auto channel = grpc::CreateChannel(daemon().tcp_address(), grpc::SslCredentials(no_certificate));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 5s);
  v1::GemmReply reply;
  EXPECT_EQ(v1::Compute::NewStub(channel)->Gemm(&context, v1::GemmRequest(), &reply).error_code(),
            grpc::StatusCode::UNAVAILABLE);

  const UniqueFd garbage = ConnectTcp(daemon().tcp_address());
  EXPECT_EQ(::send(garbage.get(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24, MSG_NOSIGNAL), 24);
  EXPECT_TRUE(ConnectAs("/CN=trainer").ok()) << "the daemon goes on";
}

TEST_F(TlsTest, ConnectionsOfOneAddressAreLimited) {
  SettingTexts settings = Settings();
  settings.emplace_back("connections_per_principal_max", "2");
  StartDaemon(settings);
  const client::TlsOptions tls = ClientTls(ca_, ca_.Issue("client", "/CN=trainer"));
  std::vector<UniqueFd> silent;  // connections that never begin to talk count, too
  for (int i = 0; i < 2; ++i) silent.push_back(ConnectTcp(daemon().tcp_address()));
  ASSERT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_rpc_connections") == 2; }));
  EXPECT_EQ(ConnectOverTcp(tls, 1s).status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(Connect().ServerInfo().ok());
  silent.clear();
  EXPECT_TRUE(Eventually(20s, [&] { return ConnectOverTcp(tls).ok(); }));
}

TEST_F(TlsTest, FilesThatCannotServeAreNamed) {
  const std::string garbage = directory().File("garbage.pem");
  std::ofstream(garbage) << "-----BEGIN CERTIFICATE-----\nnot base64!\n-----END CERTIFICATE-----\n";
  const CertificateFiles other = ca_.Issue("other", "/CN=other");
  const struct {
    std::string setting, path, text;
  } rows[] = {{"tls_certificate", directory().File("none.pem"), "tls_certificate: "},
              {"tls_certificate", garbage, "holds no PEM certificate"},
              {"tls_certificate", server_files_.key, "holds no PEM certificate"},
              {"tls_key", "/dev/null", "tls_key: /dev/null holds no PEM private key"},
              {"tls_key", server_files_.certificate, "holds no PEM private key"},
              {"tls_key", other.key, "is not the key of the certificate in"},
              {"tls_client_ca", directory().File(""), "tls_client_ca: "},
              {"tls_client_ca", garbage, "holds no PEM certificate"}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.setting + " " + row.path);
    server::SettingSources sources{.flags = Settings()};
    std::erase_if(sources.flags, [&](const auto& flag) { return flag.first == row.setting; });
    sources.flags.insert(sources.flags.end(),
                         {{"socket", directory().File("other.sock")}, {"http_address", ""}, {row.setting, row.path}});
    const auto daemon = server::Daemon::Start(server::LoadSettings(sources).value());
    ExpectRefusal(daemon.status(), StatusCode::kInvalidArgument, row.text);
    EXPECT_THAT(MessageOf(daemon.status()), HasSubstr(row.path));
  }
}

// Certificates are short-lived; a daemon is not restarted for new ones.
TEST_F(TlsTest, NewFilesAreTakenUpWithoutARestart) {
  client::Client before = ConnectAs("/CN=trainer").value();
  const CertificateAuthority next;
  const CertificateFiles fresh = next.Issue("server", "/CN=tesserad");
  const auto replace = [](const std::string& with, const std::string& file) {
    std::filesystem::copy_file(with, file + ".new");
    std::filesystem::rename(file + ".new", file);
  };
  replace(fresh.key, server_files_.key);
  replace(fresh.certificate, server_files_.certificate);
  replace(next.file(), ca_.file());
  const client::TlsOptions tls = ClientTls(next, next.Issue("client", "/CN=trainer"));
  EXPECT_TRUE(Eventually(60s, [&] { return ConnectOverTcp(tls, 2s).ok(); }));
  EXPECT_TRUE(before.ServerInfo().ok()) << "connections that are open go on";
}

}  // namespace
}  // namespace tessera::e2e
