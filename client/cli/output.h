// How the `tessera` command talks: tables for people, one JSON document for machines, a progress bar for long work,
// exit codes that mean something.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"

namespace tessera::client::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;       // the daemon refused, or a check failed
inline constexpr int kExitUsage = 2;        // the command line is wrong
inline constexpr int kExitUnreachable = 3;  // no daemon answers

// Options that every command takes.
struct GlobalOptions {
  std::string socket;   // empty = the node's default
  std::string address;  // host:port over TCP, instead of the socket
  bool plaintext = false;
  TlsOptions tls;
  bool json = false;
  int timeout_ms = 5000;
};

absl::StatusOr<Client> Connect(const GlobalOptions& options);

// Prints "tessera: <message>" to stderr, or {"error": ..} to stdout under --json; returns the exit code, which is
// kExitUnreachable for an error of Connect.
int Fail(const GlobalOptions& options, const absl::Status& status);

// Columns padded to their widest cell; columns of numbers (every cell begins with a digit) are right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string ToString() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// A bar on stderr that appears once the work has taken two seconds; silent unless stderr is a terminal.
class Progress {
 public:
  Progress(std::string_view what, std::uint64_t total);
  ~Progress();
  void Update(std::uint64_t done);

 private:
  const std::string what_;
  const std::uint64_t total_;
  const bool enabled_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point drawn_;
  bool visible_ = false;
};

std::string Hex(std::string_view bytes);
std::string HumanBytes(std::uint64_t bytes);            // "1.5 MiB"
std::string HumanDuration(std::uint64_t milliseconds);  // "1h 02m"
std::string Fixed(double value, int digits);
std::string Counted(std::uint64_t count, std::string_view noun);  // "1 buffer", "2 buffers"

}  // namespace tessera::client::cli
