// `tessera metrics`: what Prometheus would see, without Prometheus.

#include <boost/asio/ip/tcp.hpp>
#include <cstdio>
#include <memory>
#include <sstream>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client::cli {
namespace {

struct Sample {
  std::string name;  // with labels: tessera_rpcs_total{method="Compute.Gemm",code="OK"}
  std::string value;
};

// An address to connect to: a daemon that listens on every address is reached on loopback.
std::string Reachable(std::string host) {
  if (host == "0.0.0.0") return "127.0.0.1";
  if (host == "[::]") return "::1";
  if (host.size() > 2 && host.front() == '[') return host.substr(1, host.size() - 2);
  return host;
}

// The body of GET /metrics.
absl::StatusOr<std::string> Scrape(const std::string& address, std::chrono::milliseconds timeout) {
  const std::size_t colon = address.rfind(':');
  boost::asio::ip::tcp::iostream http;
  http.expires_after(timeout);
  http.connect(Reachable(address.substr(0, colon)), address.substr(colon + 1));
  http << "GET /metrics HTTP/1.0\r\nHost: " << address << "\r\n\r\n" << std::flush;
  std::string status_line;
  std::getline(http, status_line);
  if (status_line.find(" 200 ") == std::string::npos) {
    return absl::UnavailableError(
        absl::StrCat("no metrics at http://", address, ": ", http ? status_line : http.error().message()));
  }
  for (std::string header; std::getline(http, header) && header != "\r";) {
  }
  std::ostringstream body;
  body << http.rdbuf();
  return body.str();
}

std::vector<Sample> Parse(const std::string& text, const std::string& prefix, bool all) {
  std::vector<Sample> samples;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#' || line.compare(0, prefix.size(), prefix) != 0) continue;
    const std::size_t space = line.rfind(' ');
    if (space == std::string::npos) continue;
    Sample sample{line.substr(0, space), line.substr(space + 1)};
    const bool bucket = sample.name.find("_bucket{") != std::string::npos;
    if (!all && (bucket || sample.value == "0")) continue;
    samples.push_back(std::move(sample));
  }
  return samples;
}

int Run(const GlobalOptions& options, const std::string& prefix, bool all) {
  auto client = Connect(options);
  if (!client.ok()) return Fail(options, client.status());
  auto info = client->ServerInfo();
  if (!info.ok()) return Fail(options, info.status());
  if (info->http_address().empty()) {
    return Fail(options, absl::FailedPreconditionError("the daemon's HTTP port is off; set http_address"));
  }
  auto text = Scrape(info->http_address(), std::chrono::milliseconds(options.timeout_ms));
  if (!text.ok()) return Fail(options, text.status());
  const std::vector<Sample> samples = Parse(*text, prefix, all);
  if (options.json) {
    nlohmann::json document = nlohmann::json::object();
    for (const Sample& sample : samples) document[sample.name] = sample.value;
    std::printf("%s\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    return kExitOk;
  }
  if (samples.empty() && Parse(*text, prefix, /*all=*/true).empty()) {
    return Fail(options, absl::NotFoundError(absl::StrCat("no metric begins with ", prefix)));
  }
  Table table({"metric", "value"});
  for (const Sample& sample : samples) table.Add({sample.name, sample.value});
  std::fputs(table.ToString().c_str(), stdout);
  if (!all) std::fputs("(zeros and histogram buckets left out; --all shows them)\n", stderr);
  return kExitOk;
}

}  // namespace

Command AddMetrics(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("metrics", "The daemon's metrics that are not zero");
  auto prefix = std::make_shared<std::string>();
  auto all = std::make_shared<bool>(false);
  command->add_option("prefix", *prefix, "Only metrics whose name begins so, such as tessera_planner");
  command->add_flag("--all", *all, "Zeros and histogram buckets, too");
  return {command, [&options, prefix, all] { return Run(options, *prefix, *all); }};
}

}  // namespace tessera::client::cli
