#include "server/telemetry/log.h"

#include <spdlog/formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::server {
namespace {

constexpr std::size_t kShownMax = 32;  // bytes of a caller's text in a message

enum class LineFormat { kText, kJson };

struct LevelRow {
  std::string_view name;
  spdlog::level::level_enum level;
};

constexpr std::array<LevelRow, 6> kLevels = {{
    {"trace", spdlog::level::trace},
    {"debug", spdlog::level::debug},
    {"info", spdlog::level::info},
    {"warn", spdlog::level::warn},
    {"error", spdlog::level::err},
    {"off", spdlog::level::off},
}};

std::string_view LevelName(spdlog::level::level_enum level) {
  for (const LevelRow& row : kLevels) {
    if (row.level == level) return row.name;
  }
  return "critical";
}

absl::StatusOr<spdlog::level::level_enum> ParseLevel(std::string_view name) {
  for (const LevelRow& row : kLevels) {
    if (row.name == name) return row.level;
  }
  return absl::InvalidArgumentError(absl::StrCat("log level '", absl::CEscape(Av(name.substr(0, kShownMax))),
                                                 "' is none of trace, debug, info, warn, error and off"));
}

std::optional<LineFormat> ParseFormat(std::string_view name) {
  if (name == "text") return LineFormat::kText;
  if (name == "json") return LineFormat::kJson;
  return std::nullopt;
}

// Bytes of the valid UTF-8 sequence that `text` begins with; 0 if it begins with none (also if overlong, a surrogate or
// beyond U+10FFFF).
std::size_t SequenceBytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<std::uint8_t>(text[i]) : 0; };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const int lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool bad = (lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) > 0x9F);
    return !bad && continues(1) && continues(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool bad = (lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) > 0x8F);
    return !bad && continues(1) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

// Appends `text` so that it stays on one line and is valid UTF-8; as the inside of a JSON string for kJson.
void AppendEscaped(std::string_view text, LineFormat format, spdlog::memory_buf_t& out) {
  while (!text.empty()) {
    const char c = text.front();
    std::size_t taken = SequenceBytes(text);
    if (taken == 0) {
      fmt::format_to(std::back_inserter(out), "\xEF\xBF\xBD");  // U+FFFD
      taken = 1;
    } else if (c == '\n') {
      fmt::format_to(std::back_inserter(out), "\\n");
    } else if (static_cast<std::uint8_t>(c) < 0x20 || c == 0x7F) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(c));
    } else {
      if (format == LineFormat::kJson && (c == '"' || c == '\\')) out.push_back('\\');
      out.append(text.data(), text.data() + taken);
    }
    text.remove_prefix(taken);
  }
}

// ISO 8601 in UTC with milliseconds.
void AppendTime(spdlog::log_clock::time_point time, spdlog::memory_buf_t& out) {
  const auto since_epoch = std::chrono::floor<std::chrono::milliseconds>(time.time_since_epoch()).count();
  const std::time_t seconds = spdlog::log_clock::to_time_t(time);
  std::tm utc = {};
  ::gmtime_r(&seconds, &utc);
  fmt::format_to(std::back_inserter(out), "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900,
                 utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, since_epoch % 1000);
}

// Our own rather than spdlog's pattern formatter, which escapes nothing.
class LineFormatter : public spdlog::formatter {
 public:
  explicit LineFormatter(LineFormat format) : format_(format) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const std::string_view level = LevelName(message.level);
    const std::string_view payload(message.payload.data(), message.payload.size());
    const auto append = [&](std::string_view literal) { out.append(literal.data(), literal.data() + literal.size()); };
    const bool json = format_ == LineFormat::kJson;
    append(json ? R"({"time":")" : "");
    AppendTime(message.time, out);
    append(json ? R"(","level":")" : " ");
    append(level);
    append(json ? R"(","thread":)" : " [");
    fmt::format_to(std::back_inserter(out), "{}", message.thread_id);
    append(json ? R"(,"message":")" : "] ");
    AppendEscaped(payload, format_, out);
    append(json ? "\"}\n" : "\n");
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<LineFormatter>(format_); }

 private:
  const LineFormat format_;
};

}  // namespace

absl::Status InitLogging(std::string_view level, std::string_view format) {
  const absl::StatusOr<spdlog::level::level_enum> parsed_level = ParseLevel(level);
  if (!parsed_level.ok()) return parsed_level.status();
  const std::optional<LineFormat> parsed_format = ParseFormat(format);
  if (!parsed_format) {
    return absl::InvalidArgumentError(absl::StrCat("log format '", Av(format), "' is neither text nor json"));
  }
  auto logger = std::make_shared<spdlog::logger>("tessera", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::make_unique<LineFormatter>(*parsed_format));
  logger->set_level(*parsed_level);
  spdlog::set_default_logger(std::move(logger));
  return absl::OkStatus();
}

absl::StatusOr<std::string> SetLogLevel(std::string_view level) {
  const absl::StatusOr<spdlog::level::level_enum> parsed = ParseLevel(level);
  if (!parsed.ok()) return parsed.status();
  std::string previous = LogLevel();
  spdlog::default_logger_raw()->set_level(*parsed);
  return previous;
}

std::string LogLevel() {
  return std::string(LevelName(spdlog::default_logger_raw()->level()));
}

}  // namespace tessera::server
