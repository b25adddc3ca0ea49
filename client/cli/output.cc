#include "client/cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::client::cli {
namespace {

using namespace std::chrono_literals;

constexpr char kUnreachable[] = "tessera/unreachable";  // marks the errors of Connect

bool IsNumber(const std::string& cell) {
  return !cell.empty() && std::isdigit(static_cast<unsigned char>(cell[0])) != 0;
}

struct Column {
  std::size_t width = 0;
  bool numeric = true;
};

void AppendRow(const std::vector<std::string>& row, const std::vector<Column>& columns, std::string& text) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::string padding(columns[i].width - row[i].size(), ' ');
    text += columns[i].numeric ? padding + row[i] : row[i] + padding;
    text += i + 1 < row.size() ? "  " : "";
  }
  text.erase(text.find_last_not_of(' ') + 1);
  text += '\n';
}

}  // namespace

absl::StatusOr<Client> Connect(const GlobalOptions& options) {
  ConnectOptions connect{.socket = options.socket, .timeout = std::chrono::milliseconds(options.timeout_ms)};
  connect.address = options.address;
  if (!options.plaintext) connect.tls = options.tls;
  auto client = Client::Connect(std::move(connect));
  if (client.ok()) return client;
  absl::Status status = client.status();
  if (status.code() != absl::StatusCode::kUnavailable) return status;
  status.SetPayload(kUnreachable, absl::Cord());
  return status;
}

int Fail(const GlobalOptions& options, const absl::Status& status) {
  const std::string code = absl::StatusCodeToString(status.code());
  if (options.json) {
    const nlohmann::json error = {{"error", {{"code", code}, {"message", MessageOf(status)}}}};
    std::printf("%s\n", error.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    std::fprintf(stderr, "tessera: %s: %s\n", code.c_str(), MessageOf(status).c_str());
  }
  return status.GetPayload(kUnreachable).has_value() ? kExitUnreachable : kExitFailed;
}

std::string Table::ToString() const {
  std::vector<Column> columns(header_.size());
  for (std::size_t i = 0; i < header_.size(); ++i) columns[i].width = header_[i].size();
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      columns[i].width = std::max(columns[i].width, row[i].size());
      columns[i].numeric = columns[i].numeric && IsNumber(row[i]);
    }
  }
  std::string text;
  AppendRow(header_, columns, text);
  for (const auto& row : rows_) AppendRow(row, columns, text);
  return text;
}

Progress::Progress(std::string_view what, std::uint64_t total)
    : what_(what), total_(std::max<std::uint64_t>(1, total)), enabled_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (visible_) std::fprintf(stderr, "\r\033[K");
}

void Progress::Update(std::uint64_t done) {
  const auto now = std::chrono::steady_clock::now();
  if (!enabled_ || now - start_ < 2s || now - drawn_ < 100ms) return;
  constexpr int kWidth = 40;
  const double share = static_cast<double>(std::min(done, total_)) / static_cast<double>(total_);
  const int filled = static_cast<int>(share * kWidth);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::fprintf(stderr, "\r%s [%s%s] %3.0f%%  %.0f s\033[K", what_.c_str(), std::string(filled, '#').c_str(),
               std::string(kWidth - filled, '.').c_str(), 100 * share, elapsed);
  std::fflush(stderr);
  drawn_ = now;
  visible_ = true;
}

std::string Hex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    text += kDigits[static_cast<unsigned char>(c) >> 4U];
    text += kDigits[static_cast<unsigned char>(c) & 15U];
  }
  return text;
}

std::string Fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string Counted(std::uint64_t count, std::string_view noun) {
  return absl::StrCat(count, " ", Av(noun), count == 1 ? "" : "s");
}

std::string HumanBytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return Fixed(value, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

std::string HumanDuration(std::uint64_t milliseconds) {
  const std::uint64_t seconds = milliseconds / 1000;
  if (seconds < 60) return Fixed(static_cast<double>(milliseconds) / 1000, 1) + "s";
  if (seconds < 3600) return std::to_string(seconds / 60) + "m " + std::to_string(seconds % 60) + "s";
  if (seconds < 86400) return std::to_string(seconds / 3600) + "h " + std::to_string(seconds / 60 % 60) + "m";
  return std::to_string(seconds / 86400) + "d " + std::to_string(seconds / 3600 % 24) + "h";
}

}  // namespace tessera::client::cli
