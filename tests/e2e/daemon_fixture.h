// A daemon inside the test's own process, fresh for each test, and the few ways in which end-to-end tests look at one.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "server/daemon.h"

namespace tessera::e2e {

// A new directory of mode 0750 that goes, with all in it, when the object does.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

struct HttpReply {
  int code = 0;  // 0 = nobody answered
  std::string body;
};

// GET http://`address``path`.
HttpReply HttpGet(const std::string& address, const std::string& path);

// Sum of the samples of `name` that carry all of `labels`, each written as name="value"; -1 if there is none.
double MetricSum(const std::string& metrics, const std::string& name, const std::vector<std::string>& labels = {});

// Asks `condition` every few milliseconds; false if it did not become true within `timeout`.
bool Eventually(std::chrono::milliseconds timeout, const std::function<bool()>& condition);

// The text of a status for test failures: "OK" or the code and message.
std::string Text(const absl::Status& status);

// {name of a setting, its value as text}
using SettingTexts = std::vector<std::pair<std::string, std::string>>;

class DaemonFixture : public ::testing::Test {
 protected:
  void SetUp() override;  // a daemon with the settings below
  void TearDown() override;

  // A daemon on the same socket, after the one before has stopped. HTTP is on a free port of loopback.
  void StartDaemon(const SettingTexts& settings = {});
  void StopDaemon() { daemon_.reset(); }

  server::Daemon& daemon() { return *daemon_; }
  const TemporaryDirectory& directory() const { return directory_; }
  std::string socket() const { return directory_.File("d.sock"); }

  client::Client Connect() const;
  std::string Metrics() const { return HttpGet(daemon_->http_address(), "/metrics").body; }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<server::Daemon> daemon_;
};

}  // namespace tessera::e2e
