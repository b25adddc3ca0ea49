#include "planner/tuned_rows.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::planner {
namespace {

constexpr std::string_view kMark = "#! ";
constexpr std::string_view kEnd = "#! end";
constexpr std::string_view kArrow = " -> ";
constexpr std::string_view kBetween = " #! ";  // row text from what was measured
constexpr char kTimeFormat[] = "%Y-%m-%dT%H:%M:%E3SZ";
constexpr double kMicrosecondsMax = 1e12;              // eleven days
constexpr std::int64_t kLastSecond = 253'402'300'799;  // 9999-12-31T23:59:59Z

std::string FirstLine() {
  return absl::StrCat(Av(kMark), "tessera tuned rows ", kTunedRowsFormat);
}

bool IsPrintable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// One word of printable characters that separates nothing in the file.
bool IsWord(std::string_view text) {
  return !text.empty() && IsPrintable(text) && text.find_first_of(" #=") == std::string_view::npos;
}

bool IsHash(std::string_view text) {
  return text.size() >= 8 && text.size() <= 64 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// The shortest text that reads back as the same number.
std::string NumberText(double value) {
  std::array<char, 32> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return error == std::errc() ? std::string(buffer.data(), end) : std::string();
}

std::string LineOf(const TunedRow& row) {
  return absl::StrCat(row.text, Av(kBetween), "variant=", row.variant, " hash=", row.source_hash,
                      " us=", NumberText(row.us),
                      " when=", absl::FormatTime(kTimeFormat, row.when, absl::UTCTimeZone()));
}

absl::StatusOr<double> ParseNumber(absl::string_view text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return absl::InvalidArgumentError(absl::StrCat("us: '", text, "' is no number"));
  }
  return value;
}

absl::StatusOr<absl::Time> ParseWhen(absl::string_view text) {
  absl::Time when;
  std::string error;
  if (!absl::ParseTime(kTimeFormat, text, absl::UTCTimeZone(), &when, &error)) {
    return absl::InvalidArgumentError(absl::StrCat("when: '", text, "' is no time: ", error));
  }
  return when;
}

// Takes "`name`=value" off the front of `rest`, up to a blank.
absl::StatusOr<absl::string_view> TakeField(std::string_view name, absl::string_view* rest) {
  const std::pair<absl::string_view, absl::string_view> split = absl::StrSplit(*rest, absl::MaxSplits(' ', 1));
  const std::pair<absl::string_view, absl::string_view> field = absl::StrSplit(split.first, absl::MaxSplits('=', 1));
  if (field.first != Av(name)) {
    return absl::InvalidArgumentError(absl::StrCat("expected ", Av(name), "=..., found '", split.first, "'"));
  }
  *rest = split.second;
  return field.second;
}

absl::StatusOr<TunedRow> ParseRow(std::string_view line) {
  const std::size_t between = line.find(kBetween);
  if (between == std::string_view::npos) {
    return absl::InvalidArgumentError("expected a row, '#!' and what was measured");
  }
  TunedRow row;
  row.text = NormalizedRowText(line.substr(0, between));
  absl::string_view rest = Av(line.substr(between + kBetween.size()));
  ASSIGN_OR_RETURN(const absl::string_view variant, TakeField("variant", &rest));
  ASSIGN_OR_RETURN(const absl::string_view hash, TakeField("hash", &rest));
  ASSIGN_OR_RETURN(const absl::string_view us, TakeField("us", &rest));
  ASSIGN_OR_RETURN(const absl::string_view when, TakeField("when", &rest));
  if (!rest.empty()) return absl::InvalidArgumentError(absl::StrCat("unexpected '", rest, "'"));
  row.variant = std::string(variant);
  row.source_hash = std::string(hash);
  ASSIGN_OR_RETURN(row.us, ParseNumber(us));
  ASSIGN_OR_RETURN(row.when, ParseWhen(when));
  RETURN_IF_ERROR(CheckTunedRow(row));
  return row;
}

// Lines one by one, each ended by a newline, printable and of bounded length.
class Lines {
 public:
  explicit Lines(std::string_view text) : rest_(text) {}

  int number() const { return number_; }
  bool AtEnd() const { return rest_.empty(); }

  absl::StatusOr<std::string_view> Next() {
    ++number_;
    const std::size_t end = rest_.substr(0, kTunedLineLimit + 1).find('\n');
    if (end == std::string_view::npos) {
      return absl::InvalidArgumentError(rest_.size() > kTunedLineLimit ? "the line is too long"
                                                                       : "the file ends in mid-line");
    }
    const std::string_view line = rest_.substr(0, end);
    if (!IsPrintable(line)) return absl::InvalidArgumentError("the line has other characters than printable ASCII");
    rest_.remove_prefix(end + 1);
    return line;
  }

 private:
  std::string_view rest_;
  int number_ = 0;
};

absl::StatusOr<DeviceSignature> ParseHeader(Lines& lines) {
  ASSIGN_OR_RETURN(const std::string_view first, lines.Next());
  if (first != FirstLine()) return absl::InvalidArgumentError(absl::StrCat("expected '", FirstLine(), "'"));
  std::array<std::string, std::tuple_size_v<SignatureFields>> values;
  const DeviceSignature blank;
  const SignatureFields names = FieldsOf(blank);
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string start = absl::StrCat(Av(kMark), Av(names[i].first), " = ");
    ASSIGN_OR_RETURN(const std::string_view line, lines.Next());
    if (!line.starts_with(start)) return absl::InvalidArgumentError(absl::StrCat("expected '", start, "...'"));
    values[i] = std::string(line.substr(start.size()));
  }
  return CheckedSignature(
      {.device = values[0], .capability = values[1], .processors = values[2], .driver = values[3], .cuda = values[4]});
}

absl::Status ParseBody(Lines& lines, std::vector<TunedRow>& rows) {
  while (!lines.AtEnd()) {
    ASSIGN_OR_RETURN(const std::string_view line, lines.Next());
    if (line == kEnd) {
      if (!lines.AtEnd()) return absl::InvalidArgumentError("something follows the end");
      return absl::OkStatus();
    }
    if (line.find_first_not_of(' ') == std::string_view::npos || line.starts_with("# ")) continue;
    ASSIGN_OR_RETURN(TunedRow row, ParseRow(line));
    if (rows.size() == kTunedRowsLimit) {
      return absl::InvalidArgumentError(absl::StrCat("more than ", kTunedRowsLimit, " rows"));
    }
    rows.push_back(std::move(row));
  }
  return absl::InvalidArgumentError(absl::StrCat("'", Av(kEnd), "' is missing: the file was cut"));
}

}  // namespace

absl::Status CheckTunedRow(const TunedRow& row) {
  const auto refused = [](std::string_view field, std::string_view reason) {
    return InField(field, absl::InvalidArgumentError(Av(reason)));
  };
  if (!IsPrintable(row.text) || row.text.find('#') != std::string::npos) {
    return refused("text", "must be printable ASCII without '#'");
  }
  const std::size_t arrow = row.text.find(kArrow);
  if (row.text != NormalizedRowText(row.text) || arrow == std::string::npos || arrow == 0) {
    return refused("text", "must be 'class bands -> recipe launch' with one blank between words");
  }
  if (!IsWord(row.variant)) return refused("variant", "must be a variant's id");
  if (!IsHash(row.source_hash)) return refused("hash", "must be 8 to 64 hexadecimal digits");
  if (!(row.us >= 0.0 && row.us <= kMicrosecondsMax)) return refused("us", "must be a time of at most 1e12 us");
  if (row.when < absl::UnixEpoch() || row.when > absl::FromUnixSeconds(kLastSecond))
    return refused("when", "must be of the years 1970 to 9999");
  if (row.when != absl::FromUnixMillis(absl::ToUnixMillis(row.when))) return refused("when", "must be whole ms");
  if (LineOf(row).size() > kTunedLineLimit) return refused("text", "is too long");
  return absl::OkStatus();
}

std::string NormalizedRowText(std::string_view text) {
  std::string normal(text);
  absl::RemoveExtraAsciiWhitespace(&normal);
  return normal;
}

std::string ToText(const DeviceSignature& signature, std::span<const TunedRow> rows) {
  std::string text = FirstLine() + "\n";
  for (const auto& [name, value] : FieldsOf(signature)) {
    absl::StrAppend(&text, Av(kMark), Av(name), " = ", Av(value), "\n");
  }
  for (const TunedRow& row : rows) absl::StrAppend(&text, LineOf(row), "\n");
  return absl::StrCat(text, Av(kEnd), "\n");
}

absl::StatusOr<TunedFile> ParseTunedRows(std::string_view text) {
  Lines lines(text);
  const auto at_line = [&](const absl::Status& status) {
    return absl::InvalidArgumentError(absl::StrCat("line ", lines.number(), ": ", status.message()));
  };
  absl::StatusOr<DeviceSignature> signature = ParseHeader(lines);
  if (!signature.ok()) return at_line(signature.status());
  TunedFile file{.signature = *std::move(signature)};
  if (const absl::Status body = ParseBody(lines, file.rows); !body.ok()) return at_line(body);
  return file;
}

}  // namespace tessera::planner
