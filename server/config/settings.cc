// The loader in order: text of values and rules, text to values, the YAML file, and merging the sources; then the
// command line. Exceptions of yaml-cpp and CLI11 end here, in ReadYaml and ParseFlags.
#include "server/config/settings.h"

#include <arpa/inet.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <sstream>
#include <unordered_map>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/paths.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/config/environment_seeds.h"
#include "yaml-cpp/eventhandler.h"
#include "yaml-cpp/exceptions.h"
#include "yaml-cpp/mark.h"
#include "yaml-cpp/parser.h"

namespace tessera::server {
namespace {

constexpr std::string_view kConfigVariable = "TESSERA_CONFIG";
constexpr std::string_view kVariablePrefix = "TESSERA_";
constexpr std::size_t kFileBytesMax = 1024 * 1024;
constexpr std::uint32_t kUidMax = 0xFFFFFFFE;  // the largest 32-bit value means "no user" in system calls

constexpr SettingRule AnyValue() {
  return {};
}
constexpr SettingRule SocketPath() {
  return {.kind = SettingRule::Kind::kSocketPath};
}
constexpr SettingRule CudaDeviceName() {
  return {.kind = SettingRule::Kind::kCudaDevice};
}
constexpr SettingRule FilePath() {
  return {.kind = SettingRule::Kind::kFilePath};
}
constexpr SettingRule HostPortOrOff() {
  return {.kind = SettingRule::Kind::kHostPortOrOff};
}
constexpr SettingRule Range(std::int64_t min, std::int64_t max) {
  return {.kind = SettingRule::Kind::kRange, .min = min, .max = max};
}
template <typename... Choices>
constexpr SettingRule OneOf(Choices... choices) {
  return {.kind = SettingRule::Kind::kOneOf, .choices = {choices...}};
}

constexpr auto kRows = std::to_array<SettingRow>({
#define TESSERA_SETTING(name, type, default_value, unit, rule, help) {#name, &Settings::name, unit, rule, help},
#include "server/config/settings.def"
});

// ---- Text of values, rules and names.

// User text for a message: printable ASCII, bounded, in quotes.
std::string Quote(std::string_view text) {
  constexpr std::size_t kShown = 80;
  const std::string shown = absl::CEscape(Av(text.substr(0, kShown)));
  return absl::StrCat("'", shown, text.size() > kShown ? "...'" : "'");
}

bool IsBytes(const SettingRow& row) {
  return row.unit == "bytes";
}

std::string FormatInteger(const SettingRow& row, std::int64_t value) {
  return IsBytes(row) ? FormatBytes(value) : std::to_string(value);
}

// What the row accepts, to end "cpu_threads takes ...".
std::string Accepts(const SettingRow& row) {
  switch (row.rule.kind) {
    case SettingRule::Kind::kSocketPath:
      return "a path";
    case SettingRule::Kind::kFilePath:
      return "a path or nothing";
    case SettingRule::Kind::kHostPortOrOff:
      return "IPv4:port, [IPv6]:port, localhost:port or nothing";
    case SettingRule::Kind::kCudaDevice:
      return "auto, off, an ordinal or a UUID";
    case SettingRule::Kind::kOneOf: {
      const auto end = std::find(row.rule.choices.begin(), row.rule.choices.end(), "");
      return absl::StrJoin(row.rule.choices.begin(), end, ", ",
                           [](std::string* out, std::string_view choice) { out->append(choice); });
    }
    case SettingRule::Kind::kRange:
      return absl::StrCat(FormatInteger(row, row.rule.min), " to ", FormatInteger(row, row.rule.max));
    case SettingRule::Kind::kAnyValue:
      break;
  }
  if (std::holds_alternative<bool Settings::*>(row.member)) return "true or false";
  return std::holds_alternative<UidList Settings::*>(row.member) ? "uids, comma separated" : "texts, separated by ;";
}

// "auto", "off", "0", "GPU-8a5f...", "MIG-...".
bool IsCudaDeviceName(std::string_view text) {
  if (text == "auto" || text == "off") return true;
  if (text.starts_with("GPU-") || text.starts_with("MIG-")) return text.size() > 4;
  return !text.empty() && text.size() <= 3 && text.find_first_not_of("0123456789") == std::string_view::npos;
}

std::string ToText(const std::string& value) {
  return value;
}
std::string ToText(bool value) {
  return value ? "true" : "false";
}
std::string ToText(std::int64_t value) {
  return std::to_string(value);
}
std::string ToText(const UidList& value) {
  return absl::StrJoin(value, ",");
}
std::string ToText(const TextList& value) {
  return absl::StrJoin(value, ";");
}

// The default for people: bytes with their suffix, "empty" for nothing.
std::string DefaultForPeople(const SettingRow& row) {
  const Settings defaults;
  if (const auto* member = std::get_if<std::int64_t Settings::*>(&row.member)) {
    return FormatInteger(row, defaults.**member);
  }
  const std::string text = SettingText(row, defaults);
  return text.empty() ? "empty" : text;
}

// Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

// "; did you mean 'socket'?" if one of `names` is close enough, else `otherwise`.
std::string DidYouMean(std::string_view text, std::span<const std::string> names, std::string_view otherwise) {
  const std::string* best = nullptr;
  std::size_t best_distance = 0;
  for (const std::string& name : names) {
    const std::size_t limit = std::max<std::size_t>(1, name.size() / 3);
    if (text.size() > name.size() + limit) continue;  // also bounds the work for a huge `text`
    const std::size_t distance = EditDistance(text, name);
    if (distance <= limit && (best == nullptr || distance < best_distance)) {
      best = &name;
      best_distance = distance;
    }
  }
  return best == nullptr ? std::string(otherwise) : absl::StrCat("; did you mean '", *best, "'?");
}

std::vector<std::string> AllNames(const std::function<std::string(std::string_view)>& spelling) {
  std::vector<std::string> names;
  for (const SettingRow& row : kRows) names.push_back(spelling(row.name));
  return names;
}

const SettingRow* FindRow(std::string_view name) {
  const auto row = std::find_if(kRows.begin(), kRows.end(), [&](const SettingRow& r) { return r.name == name; });
  return row == kRows.end() ? nullptr : &*row;
}

// ---- From text to values.

// A value as a source gives it: one text, or the items of a YAML list.
struct RawValue {
  bool is_list = false;
  std::vector<std::string> items;  // exactly one unless is_list
};

absl::Status Refused(const SettingRow& row, std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat(Av(row.name), ": ", Quote(text), " ", Av(why), "; ", Av(row.name), " takes ", Accepts(row)));
}

template <typename Integer>
absl::StatusOr<Integer> ParseNumber(std::string_view text) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range && end == text.data() + text.size()) {
    return absl::OutOfRangeError("is out of range");
  }
  if (error != std::errc() || end != text.data() + text.size()) return absl::InvalidArgumentError("is not an integer");
  return value;
}

std::string_view Strip(std::string_view text) {
  return Sv(absl::StripAsciiWhitespace(Av(text)));
}

absl::Status CheckPath(const SettingRow& row, const std::string& path) {
  const auto is_control = [](unsigned char c) { return absl::ascii_iscntrl(c); };
  if (std::any_of(path.begin(), path.end(), is_control)) return Refused(row, path, "contains control characters");
  return absl::OkStatus();
}

absl::Status CheckSocketPath(const SettingRow& row, const std::string& path) {
  RETURN_IF_ERROR(CheckPath(row, path));
  if (SideChannelPath(path).size() >= sizeof(sockaddr_un{}.sun_path)) {
    const std::size_t longest = sizeof(sockaddr_un{}.sun_path) - 1 - SideChannelPath("").size();
    return Refused(row, path, absl::StrCat("is longer than the ", longest, " bytes that a socket's path may have"));
  }
  return absl::OkStatus();
}

absl::Status Parse(const SettingRow& row, const RawValue& raw, std::string& value) {
  const std::string& text = raw.items.front();
  switch (row.rule.kind) {
    case SettingRule::Kind::kSocketPath:
      RETURN_IF_ERROR(CheckSocketPath(row, text));
      break;
    case SettingRule::Kind::kFilePath:
      RETURN_IF_ERROR(CheckPath(row, text));
      break;
    case SettingRule::Kind::kHostPortOrOff:
      if (text.empty()) break;
      if (const auto address = ParseHostPort(text); !address.ok()) {
        return Refused(row, text, MessageOf(address.status()));
      }
      break;
    case SettingRule::Kind::kCudaDevice:
      if (!IsCudaDeviceName(text)) return Refused(row, text, "is no GPU's ordinal or UUID, and neither auto nor off");
      break;
    case SettingRule::Kind::kOneOf: {
      const auto& choices = row.rule.choices;
      const bool known = !text.empty() && std::find(choices.begin(), choices.end(), text) != choices.end();
      if (!known) return Refused(row, text, "is not one of its values");
      break;
    }
    case SettingRule::Kind::kRange:
    case SettingRule::Kind::kAnyValue:
      break;
  }
  value = text;
  return absl::OkStatus();
}

absl::Status Parse(const SettingRow& row, const RawValue& raw, bool& value) {
  const absl::StatusOr<bool> parsed = ParseBool(raw.items.front());
  if (!parsed.ok()) return Refused(row, raw.items.front(), MessageOf(parsed.status()));
  value = *parsed;
  return absl::OkStatus();
}

absl::Status Parse(const SettingRow& row, const RawValue& raw, std::int64_t& value) {
  const std::string& text = raw.items.front();
  const absl::StatusOr<std::int64_t> parsed = IsBytes(row) ? ParseBytes(text) : ParseNumber<std::int64_t>(Strip(text));
  if (!parsed.ok()) return Refused(row, text, MessageOf(parsed.status()));
  if (*parsed < row.rule.min || *parsed > row.rule.max) return Refused(row, text, "is out of range");
  value = *parsed;
  return absl::OkStatus();
}

// The items of a YAML list, or of one text that a separator divides.
std::vector<std::string> ItemsOf(const RawValue& raw, char separator) {
  if (raw.is_list) return raw.items;
  const std::string& text = raw.items.front();
  std::vector<std::string> items;
  if (!Strip(text).empty()) items = CLI::detail::split(text, separator);
  // CLI11 gives no item for the nothing behind a last separator.
  if (text.ends_with(separator)) items.emplace_back();
  return items;
}

absl::Status Parse(const SettingRow& row, const RawValue& raw, UidList& value) {
  UidList uids;
  for (const std::string& item : ItemsOf(raw, ',')) {
    const absl::StatusOr<std::uint32_t> uid = ParseNumber<std::uint32_t>(Strip(item));
    if (!uid.ok()) return Refused(row, item, MessageOf(uid.status()));
    if (*uid > kUidMax) return Refused(row, item, "is not a user");
    uids.push_back(*uid);
  }
  value = std::move(uids);
  return absl::OkStatus();
}

absl::Status Parse(const SettingRow& row, const RawValue& raw, TextList& value) {
  TextList texts;
  for (const std::string& item : ItemsOf(raw, ';')) {
    const std::string_view text = Strip(item);
    if (text.empty()) return Refused(row, item, "is empty");
    texts.emplace_back(text);
  }
  value = std::move(texts);
  return absl::OkStatus();
}

bool IsList(const SettingRow& row) {
  return std::holds_alternative<UidList Settings::*>(row.member) ||
         std::holds_alternative<TextList Settings::*>(row.member);
}

absl::Status SetValue(const SettingRow& row, const RawValue& raw, Settings& settings) {
  if (raw.is_list && !IsList(row)) {
    return absl::InvalidArgumentError(absl::StrCat(Av(row.name), ": is a list; give one value: ", Accepts(row)));
  }
  return std::visit([&](auto member) { return Parse(row, raw, settings.*member); }, row.member);
}

// ---- The YAML file.

struct FileEntry {
  const SettingRow* row;
  RawValue value;
  int line = 0;       // of the name, for messages
  std::string where;  // "file.yaml:3:9", of the value, or of the name until there is one
};

// Collects `name: value` lines from the parser's events. Working on events rather than on yaml-cpp's nodes keeps
// aliases unexpanded, so that a small file cannot grow. Keeps the first error and ignores everything after it.
class FileReader : public YAML::EventHandler {
 public:
  explicit FileReader(std::string path) : path_(std::move(path)) {}

  const absl::Status& status() const { return status_; }
  const std::vector<FileEntry>& entries() const { return entries_; }

  std::string Where(const YAML::Mark& mark) const {
    if (mark.is_null()) return path_;
    return absl::StrCat(path_, ":", mark.line + 1, ":", mark.column + 1);
  }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) Fail(mark, "a second document; a configuration file holds one");
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override {
    if (state_ == State::kTop) return;  // a file of comments
    if (state_ == State::kValue) {      // yaml-cpp marks a missing value where the next name stands
      return Fail(entries_.back().where, absl::StrCat(Av(name()), " has no value; give one or remove it"));
    }
    Fail(mark, state_ == State::kName ? "a setting without a name" : "an empty list item");
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { Fail(mark, "aliases (*name) are not supported"); }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    if (!Admit(mark, tag, anchor)) return;
    switch (state_) {
      case State::kTop:
        return FailTop(mark);
      case State::kName:
        return BeginEntry(mark, value);
      case State::kValue:
        entries_.back().value.items = {value};
        entries_.back().where = Where(mark);
        state_ = State::kName;
        return;
      case State::kItem:
        entries_.back().value.items.push_back(value);
        return;
    }
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    if (!Admit(mark, tag, anchor)) return;
    if (state_ == State::kTop) return FailTop(mark);
    if (state_ != State::kValue) return Fail(mark, "a list where a plain value must stand");
    entries_.back().value.is_list = true;
    entries_.back().where = Where(mark);
    state_ = State::kItem;
  }
  void OnSequenceEnd() override { state_ = State::kName; }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    if (!Admit(mark, tag, anchor)) return;
    if (state_ == State::kValue) return Fail(mark, absl::StrCat(Av(name()), " is a map; settings are flat"));
    if (state_ != State::kTop) return Fail(mark, "a map where a plain value must stand");
    state_ = State::kName;
  }
  void OnMapEnd() override {}

 private:
  enum class State { kTop, kName, kValue, kItem };

  std::string_view name() const { return entries_.back().row->name; }

  void Fail(const std::string& where, std::string_view message) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(where, ": ", Av(message)));
  }
  void Fail(const YAML::Mark& mark, std::string_view message) { Fail(Where(mark), message); }
  void FailTop(const YAML::Mark& mark) { Fail(mark, "a configuration file consists of lines 'setting: value'"); }

  // Whether the event is to be looked at. After an error the states no longer follow the document.
  bool Admit(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    const bool plain = tag.empty() || tag == "?" || tag == "!";  // "?" = untagged, "!" = in quotes
    if (anchor != YAML::NullAnchor) Fail(mark, "anchors (&name) are not supported");
    if (!plain) Fail(mark, absl::StrCat("tags (", Quote(tag), ") are not supported"));
    return status_.ok();
  }

  void BeginEntry(const YAML::Mark& mark, const std::string& key) {
    const SettingRow* row = FindRow(key);
    if (row == nullptr) {
      const std::vector<std::string> names = AllNames([](std::string_view setting) { return std::string(setting); });
      return Fail(mark, absl::StrCat("unknown setting ", Quote(key),
                                     DidYouMean(key, names, "; tesserad --settings-markdown lists all")));
    }
    for (const FileEntry& entry : entries_) {
      if (entry.row != row) continue;
      return Fail(mark, absl::StrCat("'", key, "' is already set on line ", entry.line, "; remove one of them"));
    }
    entries_.push_back({.row = row, .value = {}, .line = mark.line + 1, .where = Where(mark)});
    state_ = State::kValue;
  }

  std::string path_;
  State state_ = State::kTop;
  int documents_ = 0;
  std::vector<FileEntry> entries_;
  absl::Status status_;
};

// `what` names the file in messages: "configuration file x.yaml (named by --config)".
absl::StatusOr<std::string> ReadFile(const std::string& path, const std::string& what) {
  const auto fail = [&](int error) {
    const absl::Status status = ErrnoStatus(absl::StatusCode::kInvalidArgument, what, error);
    return absl::InvalidArgumentError(absl::StrCat(status.message(), "; name a readable YAML file or none"));
  };
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return fail(errno);
  std::string text(kFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return fail(errno);
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kFileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": is larger than ", FormatBytes(kFileBytesMax)));
  }
  return text;
}

absl::StatusOr<std::vector<FileEntry>> ReadYaml(const std::string& path, const std::string& what) {
  ASSIGN_OR_RETURN(std::string text, ReadFile(path, what));
  FileReader reader(path);
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    while (reader.status().ok() && parser.HandleNextDocument(reader)) continue;
  } catch (const YAML::Exception& error) {
    RETURN_IF_ERROR(reader.status());  // it stands further up in the file
    return absl::InvalidArgumentError(absl::StrCat(reader.Where(error.mark), ": not valid YAML: ", error.msg));
  }
  RETURN_IF_ERROR(reader.status());
  return reader.entries();
}

// ---- Merging the sources.

class Loader {
 public:
  absl::Status AddFile(const std::string& path, const std::string& named_by) {
    std::string what = absl::StrCat("configuration file ", path);
    if (!named_by.empty()) absl::StrAppend(&what, " (named by ", named_by, ")");
    ASSIGN_OR_RETURN(const std::vector<FileEntry> entries, ReadYaml(path, what));
    for (const FileEntry& entry : entries) RETURN_IF_ERROR(Set(*entry.row, entry.value, "file", entry.where));
    return absl::OkStatus();
  }

  absl::Status AddEnvironment(const GetEnvironment& getenv) {
    RETURN_IF_ERROR(AddSeeds(getenv));  // before the settings' own variables, which win
    for (const SettingRow& row : kRows) {
      const std::string variable = EnvironmentName(row.name);
      std::optional<std::string> text = getenv(variable);
      if (!text.has_value()) continue;
      RETURN_IF_ERROR(Set(row, {.items = {*std::move(text)}}, "environment", absl::StrCat("environment ", variable)));
    }
    return absl::OkStatus();
  }

  absl::Status AddFlags(const std::vector<std::pair<std::string, std::string>>& flags) {
    for (const auto& [name, text] : flags) {
      const SettingRow* row = FindRow(name);
      if (row == nullptr) return absl::InvalidArgumentError(absl::StrCat("flag: unknown setting ", Quote(name)));
      RETURN_IF_ERROR(Set(*row, {.items = {text}}, "flag", absl::StrCat("flag ", FlagName(name))));
    }
    return absl::OkStatus();
  }

  // Unknown variables are no error: other programs share the prefix, and Kubernetes sets TESSERA_PORT and the like for
  // a Service named tessera.
  void WarnOfUnknown(std::span<const std::string> variables) {
    std::vector<std::string> known = AllNames(EnvironmentName);
    known.emplace_back(kConfigVariable);
    for (const EnvironmentSeed& seed : EnvironmentSeeds()) known.emplace_back(seed.variable);
    for (const std::string& variable : variables) {
      if (!variable.starts_with(kVariablePrefix)) continue;
      if (std::find(known.begin(), known.end(), variable) != known.end()) continue;
      loaded_.warnings.push_back(absl::StrCat("environment variable ", Quote(variable), " is not a setting",
                                              DidYouMean(variable, known, " and is ignored")));
    }
  }

  absl::Status CheckTogether() const {
    RETURN_IF_ERROR(CheckMessageSizes());
    return CheckTcp();
  }

  LoadedSettings Finish() && {
    const Settings defaults;
    for (const SettingRow& row : kRows) {
      const auto origin = origins_.find(row.name);
      loaded_.report.push_back({.name = std::string(row.name),
                                .value = SettingText(row, loaded_.values),
                                .default_value = SettingText(row, defaults),
                                .unit = std::string(row.unit),
                                .source = origin == origins_.end() ? "default" : origin->second.source,
                                .help = std::string(row.help)});
    }
    return std::move(loaded_);
  }

 private:
  struct Origin {
    std::string source;
    std::string where;  // for messages
  };

  absl::Status AddSeeds(const GetEnvironment& getenv) {
    for (const EnvironmentSeed& seed : EnvironmentSeeds()) {
      const std::optional<std::string> text = getenv(std::string(seed.variable));
      if (!text.has_value() || text->empty()) continue;
      if (seed.setting.empty()) {
        loaded_.warnings.push_back(absl::StrCat("environment variable ", Av(seed.variable), ": ", Av(seed.help)));
        continue;
      }
      const std::string where = absl::StrCat("environment ", Av(seed.variable));
      const absl::StatusOr<std::string> value = SeedText(seed, *text);
      if (!value.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": ", Quote(*text), " ", value.status().message()));
      }
      RETURN_IF_ERROR(Set(*FindRow(seed.setting), {.items = {*value}}, "environment", where));
      loaded_.warnings.push_back(absl::StrCat("environment variable ", Av(seed.variable), " is deprecated; ",
                                              EnvironmentName(seed.setting), "=", *value, " says the same"));
    }
    return absl::OkStatus();
  }

  absl::Status Set(const SettingRow& row, const RawValue& raw, std::string_view source, std::string where) {
    if (const absl::Status set = SetValue(row, raw, loaded_.values); !set.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": ", set.message()));
    }
    origins_[row.name] = {.source = std::string(source), .where = std::move(where)};
    return absl::OkStatus();
  }

  absl::Status CheckMessageSizes() const {
    const Settings& values = loaded_.values;
    const std::int64_t room = values.message_bytes_max - kMessageOverheadBytes;
    if (values.inline_bytes_max < room) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("inline_bytes_max = ", FormatBytes(values.inline_bytes_max), " (", WhereOf("inline_bytes_max"),
                     ") must be smaller than message_bytes_max = ", FormatBytes(values.message_bytes_max), " (",
                     WhereOf("message_bytes_max"), ") less ", FormatBytes(kMessageOverheadBytes),
                     "; lower the first or raise the second"));
  }

  // TCP is served with all of the TLS files or, on loopback and by an explicit setting, with none.
  absl::Status CheckTcp() const {
    const Settings& values = loaded_.values;
    if (values.tcp_address.empty()) return absl::OkStatus();
    constexpr std::pair<std::string_view, std::string Settings::*> kTlsFiles[] = {
        {"tls_certificate", &Settings::tls_certificate},
        {"tls_key", &Settings::tls_key},
        {"tls_client_ca", &Settings::tls_client_ca}};
    for (const auto& [name, member] : kTlsFiles) {
      const bool given = !(values.*member).empty();
      if (given && values.tcp_plaintext) {
        return absl::InvalidArgumentError(absl::StrCat(Av(name), " (", WhereOf(name), ") and tcp_plaintext (",
                                                       WhereOf("tcp_plaintext"),
                                                       ") exclude each other; remove one of them"));
      }
      if (!given && !values.tcp_plaintext) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tcp_address (", WhereOf("tcp_address"), ") needs ", Av(name),
            ": TCP is served with tls_certificate, tls_key and tls_client_ca, or on loopback with tcp_plaintext"));
      }
    }
    const absl::StatusOr<HostPort> address = ParseHostPort(values.tcp_address);
    if (!values.tcp_plaintext || !address.ok() || IsLoopback(*address)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("tcp_address = ", values.tcp_address, " (", WhereOf("tcp_address"),
                                                   ") is no loopback address; tcp_plaintext serves 127.0.0.0/8 and "
                                                   "::1 only, TLS any address"));
  }

  std::string WhereOf(std::string_view name) const {
    const auto origin = origins_.find(name);
    return origin == origins_.end() ? "default" : origin->second.where;
  }

  LoadedSettings loaded_;
  std::unordered_map<std::string_view, Origin> origins_;  // settings that are not at their default source
};

// ---- The command line.

// Breaks `text` at spaces into lines of at most `width` bytes.
std::string Wrap(std::string_view text, std::size_t width) {
  std::string wrapped;
  std::size_t column = 0;
  for (const std::string& word : CLI::detail::split(std::string(text), ' ')) {
    if (column > 0 && column + 1 + word.size() > width) {
      wrapped += '\n';
      column = 0;
    }
    if (column > 0) wrapped += ' ';
    column += word.size() + (column > 0 ? 1 : 0);
    wrapped += word;
  }
  return wrapped;
}

std::string FlagHelp(const SettingRow& row) {
  constexpr std::size_t kWidth = 70;
  const std::string unit = row.unit.empty() ? "" : absl::StrCat(" [", Av(row.unit), "]");
  return absl::StrCat(Wrap(row.help, kWidth), "\nTakes ", Accepts(row), unit, "\nDefault ", DefaultForPeople(row),
                      "; env ", EnvironmentName(row.name));
}

struct ParsedFlags {
  bool help = false, version = false, markdown = false, check = false;
  std::optional<std::string> config;
  std::vector<std::pair<std::string, std::string>> settings;
  std::string help_text;
};

bool IsSwitch(std::string_view flag) {
  return std::any_of(kRows.begin(), kRows.end(), [&](const SettingRow& row) {
    return std::holds_alternative<bool Settings::*>(row.member) && FlagName(row.name) == flag;
  });
}

// Every value as an argument of its own. CLI11 reads the empty value of `--name=` from the next argument; as two
// arguments both readings agree. A switch that stands alone is true.
std::vector<std::string> SplitValues(std::span<const std::string> args) {
  std::vector<std::string> split;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    const bool empty_value = arg.starts_with("--") && arg.find('=') == arg.size() - 1;
    split.push_back(empty_value ? arg.substr(0, arg.size() - 1) : arg);
    if (empty_value) split.emplace_back();
    const bool alone = i + 1 == args.size() || args[i + 1].starts_with("-");
    if (alone && IsSwitch(arg)) split.emplace_back("true");
  }
  return split;
}

absl::Status UnexpectedArgument(const std::string& argument) {
  const std::string name = argument.substr(0, argument.find('='));
  std::vector<std::string> known = AllNames(FlagName);
  for (const char* option : {"--config", "--help", "--version", "--settings-markdown", "--check"}) {
    known.emplace_back(option);
  }
  const std::string_view kind = name.starts_with('-') ? "unknown option " : "unexpected argument ";
  return absl::InvalidArgumentError(
      absl::StrCat("command line: ", Av(kind), Quote(name), DidYouMean(name, known, "; tesserad --help lists all")));
}

// The text given for `option`, which may be given once and must not swallow the option that follows it.
absl::StatusOr<std::string> ValueOf(const CLI::Option& option) {
  const std::string name = option.get_name();
  if (option.count() > 1) return absl::InvalidArgumentError(absl::StrCat(name, ": given twice; give it once"));
  const std::string& text = option.results().front();
  if (text.starts_with("--")) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": needs a value, but ", Quote(text), " follows"));
  }
  return text;
}

absl::StatusOr<ParsedFlags> ParseFlags(std::span<const std::string> args) {
  ParsedFlags parsed;
  CLI::App app(
      "tesserad serves GPU kernels to the processes of this node.\n"
      "A flag wins over the environment, the environment over the file, the file over the default.",
      "tesserad");
  app.get_formatter()->column_width(32);
  app.allow_extras();
  app.set_help_flag();
  app.add_flag("-h,--help", parsed.help, "Print this help and exit");
  app.add_flag("--version", parsed.version, "Print the version and exit");
  app.add_flag("--settings-markdown", parsed.markdown, "Print all settings as a Markdown table and exit");
  app.add_flag("--check", parsed.check, "Check the configuration and exit: 0 = valid, 1 = not");
  std::string config_text;
  const CLI::Option* config =
      app.add_option("--config", config_text, absl::StrCat("YAML file with settings; env ", Av(kConfigVariable)))
          ->type_name("PATH")
          ->take_last();
  std::array<std::string, kRows.size()> texts;
  std::array<const CLI::Option*, kRows.size()> options = {};
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    options[i] = app.add_option(FlagName(kRows[i].name), texts[i], FlagHelp(kRows[i]))
                     ->type_name("VALUE")
                     ->take_last()
                     ->group("Settings");
  }

  try {
    std::vector<std::string> reversed = SplitValues(args);
    std::reverse(reversed.begin(), reversed.end());
    app.parse(std::move(reversed));
    if (parsed.help) parsed.help_text = app.help();
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(absl::StrCat("command line: ", error.what(), "; see tesserad --help"));
  }
  if (parsed.help) return parsed;

  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (options[i]->count() == 0) continue;
    ASSIGN_OR_RETURN(std::string text, ValueOf(*options[i]));
    parsed.settings.emplace_back(kRows[i].name, std::move(text));
  }
  if (config->count() > 0) {
    ASSIGN_OR_RETURN(parsed.config, ValueOf(*config));
    if (parsed.config->empty()) return absl::InvalidArgumentError("--config: the path is empty; name a YAML file");
  }
  if (const std::vector<std::string> extras = app.remaining(); !extras.empty()) {
    return UnexpectedArgument(extras.front());
  }
  return parsed;
}

CommandLine Exit(int exit_code, std::string output) {
  return {.action = CommandLine::Action::kExit, .exit_code = exit_code, .output = std::move(output), .settings = {}};
}

CommandLine ReportCheck(const absl::StatusOr<LoadedSettings>& loaded) {
  if (!loaded.ok()) return Exit(1, absl::StrCat(loaded.status().message(), "\n"));
  std::string output;
  for (const std::string& warning : loaded->warnings) absl::StrAppend(&output, "warning: ", warning, "\n");
  absl::StrAppend(&output, "the configuration is valid\n");
  return Exit(0, std::move(output));
}

}  // namespace

std::span<const SettingRow> SettingRows() {
  return kRows;
}

std::string FlagName(std::string_view setting) {
  return absl::StrCat("--", absl::StrReplaceAll(Av(setting), {{"_", "-"}}));
}

std::string EnvironmentName(std::string_view setting) {
  return absl::StrCat(Av(kVariablePrefix), absl::AsciiStrToUpper(Av(setting)));
}

std::string SettingText(const SettingRow& row, const Settings& settings) {
  return std::visit([&](auto member) { return ToText(settings.*member); }, row.member);
}

absl::StatusOr<LoadedSettings> LoadSettings(const SettingSources& sources) {
  Loader loader;
  if (!sources.file.empty()) RETURN_IF_ERROR(loader.AddFile(sources.file, sources.file_named_by));
  if (sources.getenv) RETURN_IF_ERROR(loader.AddEnvironment(sources.getenv));
  RETURN_IF_ERROR(loader.AddFlags(sources.flags));
  RETURN_IF_ERROR(loader.CheckTogether());
  loader.WarnOfUnknown(sources.environment_names);
  return std::move(loader).Finish();
}

absl::StatusOr<CommandLine> ParseCommandLine(std::span<const std::string> args, const GetEnvironment& getenv,
                                             std::span<const std::string> environment_names) {
  ASSIGN_OR_RETURN(ParsedFlags flags, ParseFlags(args));
  if (flags.help) return Exit(0, std::move(flags.help_text));
  if (flags.version) return Exit(0, absl::StrCat("tesserad ", Av(Version()), "\n"));
  if (flags.markdown) return Exit(0, SettingsMarkdown());

  const std::string named_by = flags.config.has_value() ? "--config" : std::string(kConfigVariable);
  if (!flags.config.has_value() && getenv) flags.config = getenv(std::string(kConfigVariable));
  absl::StatusOr<LoadedSettings> loaded =
      LoadSettings({.file = flags.config.value_or(""),
                    .file_named_by = named_by,
                    .getenv = getenv,
                    .environment_names = {environment_names.begin(), environment_names.end()},
                    .flags = std::move(flags.settings)});
  if (flags.check) return ReportCheck(loaded);
  RETURN_IF_ERROR(loaded.status());
  return CommandLine{
      .action = CommandLine::Action::kServe, .exit_code = 0, .output = {}, .settings = *std::move(loaded)};
}

std::optional<std::string> ProcessEnvironment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

std::vector<std::string> ProcessEnvironmentNames() {
  std::vector<std::string> names;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    names.emplace_back(text.substr(0, text.find('=')));
  }
  return names;
}

std::string SettingsMarkdown() {
  std::string text =
      "# Settings\n"
      "\n"
      "A setting has one name everywhere: `cpu_threads` in the YAML file (`--config PATH` or `TESSERA_CONFIG`),\n"
      "`TESSERA_CPU_THREADS` in the environment, `--cpu-threads VALUE` as a flag. A flag wins over the environment, "
      "the\n"
      "environment over the file, the file over the default. Values in bytes accept the suffixes KiB, MiB and GiB.\n"
      "\n"
      "| Setting | Default | Unit | Accepts | Meaning |\n"
      "|---|---|---|---|---|\n";
  for (const SettingRow& row : kRows) {
    absl::StrAppend(&text, "| `", Av(row.name), "` | ", DefaultForPeople(row), " | ", Av(row.unit), " | ", Accepts(row),
                    " | ", Av(row.help), " |\n");
  }
  return text + EnvironmentSeedsMarkdown();
}

std::string_view Version() {
  return TESSERA_VERSION;
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return absl::InvalidArgumentError("has no port");
  const absl::StatusOr<std::uint16_t> port = ParseNumber<std::uint16_t>(text.substr(colon + 1));
  if (!port.ok()) return absl::InvalidArgumentError("has no port from 0 to 65535");
  std::string host(text.substr(0, colon));
  int family = AF_INET;
  if (host == "localhost") {
    host = "127.0.0.1";
  } else if (host.size() > 2 && host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
    family = AF_INET6;
  }
  in6_addr address;  // large enough for both families
  const bool numeric = host.find('\0') == std::string::npos && ::inet_pton(family, host.c_str(), &address) == 1;
  if (!numeric) return absl::InvalidArgumentError("names no numeric address");
  return HostPort{.host = std::move(host), .port = *port};
}

bool IsLoopback(const HostPort& address) {
  return address.host == "::1" || address.host.starts_with("127.");
}

absl::StatusOr<bool> ParseBool(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return absl::InvalidArgumentError("is neither true nor false");
}

absl::StatusOr<std::int64_t> ParseBytes(std::string_view text) {
  std::string_view digits = Strip(text);
  std::int64_t unit = 1;
  for (const auto& [suffix, bytes] :
       {std::pair<std::string_view, std::int64_t>{"KiB", kKiB}, {"MiB", kMiB}, {"GiB", kGiB}}) {
    if (!digits.ends_with(suffix)) continue;
    digits = Strip(digits.substr(0, digits.size() - suffix.size()));
    unit = bytes;
    break;
  }
  const absl::StatusOr<std::int64_t> count = ParseNumber<std::int64_t>(digits);
  if (absl::IsInvalidArgument(count.status())) {
    return absl::InvalidArgumentError("is not a whole number of bytes (suffixes: KiB, MiB, GiB)");
  }
  std::int64_t bytes = 0;
  if (!count.ok() || __builtin_mul_overflow(*count, unit, &bytes)) return absl::OutOfRangeError("is out of range");
  return bytes;
}

std::string FormatBytes(std::int64_t bytes) {
  for (const auto& [suffix, unit] :
       {std::pair<const char*, std::int64_t>{" GiB", kGiB}, {" MiB", kMiB}, {" KiB", kKiB}}) {
    if (bytes != 0 && bytes % unit == 0) return absl::StrCat(bytes / unit, suffix);
  }
  return std::to_string(bytes);
}

}  // namespace tessera::server
