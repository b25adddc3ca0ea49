#include "tests/e2e/daemon_fixture.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <boost/asio/ip/tcp.hpp>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <thread>

#include "common/text.h"
#include "server/config/settings.h"
#include "server/telemetry/log.h"

namespace tessera::e2e {

using namespace std::chrono_literals;

TemporaryDirectory::TemporaryDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "tessera-e2e-XXXXXX").string();
  EXPECT_NE(::mkdtemp(name.data()), nullptr) << name;
  EXPECT_EQ(::chmod(name.c_str(), 0750), 0) << name;
  path_ = name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
  EXPECT_FALSE(error) << path_ << ": " << error.message();
}

HttpReply HttpGet(const std::string& address, const std::string& path) {
  const std::size_t colon = address.rfind(':');
  boost::asio::ip::tcp::iostream http;
  http.expires_after(5s);
  http.connect(address.substr(0, colon), address.substr(colon + 1));
  http << "GET " << path << " HTTP/1.0\r\nHost: " << address << "\r\n\r\n" << std::flush;
  HttpReply reply;
  std::string version;
  http >> version >> reply.code;
  for (std::string header; std::getline(http, header) && header != "\r";) {
  }
  std::ostringstream body;
  body << http.rdbuf();
  reply.body = body.str();
  return reply;
}

double MetricSum(const std::string& metrics, const std::string& name, const std::vector<std::string>& labels) {
  double sum = 0;
  bool found = false;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name) || (line[name.size()] != '{' && line[name.size()] != ' ')) continue;
    bool all = true;
    for (const std::string& label : labels) all = all && line.find(label) != std::string::npos;
    if (!all) continue;
    sum += std::stod(line.substr(line.rfind(' ')));
    found = true;
  }
  return found ? sum : -1;
}

bool Eventually(std::chrono::milliseconds timeout, const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

std::string Text(const absl::Status& status) {
  return std::string(Sv(status.ToString()));
}

void DaemonFixture::SetUp() {
  const absl::Status logging = server::InitLogging("error", "text");
  ASSERT_TRUE(logging.ok()) << logging;
  StartDaemon();
}

void DaemonFixture::TearDown() {
  StopDaemon();
}

void DaemonFixture::StartDaemon(const SettingTexts& settings) {
  StopDaemon();
  server::SettingSources sources{.flags = {{"socket", socket()}, {"http_address", "127.0.0.1:0"}}};
  sources.flags.emplace_back("cuda_device", "off");  // the same tests on every machine
  sources.flags.emplace_back("cache_dir", "off");    // what one test keeps is no other's
  sources.flags.insert(sources.flags.end(), settings.begin(), settings.end());
  const auto loaded = server::LoadSettings(sources);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  auto daemon = server::Daemon::Start(*loaded);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
}

client::Client DaemonFixture::Connect() const {
  return client::Client::Connect({.socket = socket(), .side_channel = {}, .timeout = 5s}).value();
}

}  // namespace tessera::e2e
