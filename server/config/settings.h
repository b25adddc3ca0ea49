// Configuration of the daemon: the table settings.def as a struct, and its loader from a YAML file, the environment and
// the command line. Knows nothing of the rest of the daemon.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::server {

inline constexpr std::int64_t kKiB = 1024;
inline constexpr std::int64_t kMiB = 1024 * kKiB;
inline constexpr std::int64_t kGiB = 1024 * kMiB;
inline constexpr std::int64_t kBufferBytesMax = 1024 * 1024 * kGiB;  // beyond any node's memory
// Room that a message needs besides its inline tensors.
inline constexpr std::int64_t kMessageOverheadBytes = 64 * kKiB;

using UidList = std::vector<std::uint32_t>;
using TextList = std::vector<std::string>;

// The values, named as in settings.def. A default-constructed one holds the defaults.
struct Settings {
#define TESSERA_SETTING(name, type, default_value, unit, rule, help) type name = default_value;
#include "server/config/settings.def"
  bool operator==(const Settings&) const = default;
};

// What a setting accepts beyond its type.
struct SettingRule {
  enum class Kind { kAnyValue, kSocketPath, kFilePath, kHostPortOrOff, kCudaDevice, kOneOf, kRange };
  Kind kind = Kind::kAnyValue;
  std::int64_t min = 0;  // kRange, inclusive
  std::int64_t max = 0;
  std::array<std::string_view, 8> choices = {};  // kOneOf; the unused ones are empty
};

using SettingMember = std::variant<std::string Settings::*, bool Settings::*, std::int64_t Settings::*,
                                   UidList Settings::*, TextList Settings::*>;

// One row of settings.def.
struct SettingRow {
  std::string_view name;
  SettingMember member;
  std::string_view unit;
  SettingRule rule;
  std::string_view help;
};

std::span<const SettingRow> SettingRows();
std::string FlagName(std::string_view setting);         // "--cpu-threads"
std::string EnvironmentName(std::string_view setting);  // "TESSERA_CPU_THREADS"

// The row's value as text that every source accepts and reads back as the same value: bytes as a plain number.
std::string SettingText(const SettingRow& row, const Settings& settings);

// A row of the GetConfig RPC.
struct SettingValue {
  std::string name, value, default_value, unit;
  std::string source;  // default, file, environment or flag
  std::string help;
};

struct LoadedSettings {
  Settings values;
  std::vector<SettingValue> report;   // every setting, in the order of settings.def
  std::vector<std::string> warnings;  // for the log; none stops the daemon
};

// Looks up an environment variable; nullopt = not set.
using GetEnvironment = std::function<std::optional<std::string>(const std::string& name)>;

struct SettingSources {
  std::string file = {};           // path of a YAML file; empty = none
  std::string file_named_by = {};  // for messages: "--config" or the like
  GetEnvironment getenv = {};
  std::vector<std::string> environment_names = {};              // to warn about unknown TESSERA_* variables
  std::vector<std::pair<std::string, std::string>> flags = {};  // {setting name, text}
};

// Precedence: flag, environment, file, default. What a stronger source overrides must be valid all the same.
// Errors are INVALID_ARGUMENT and say where the value stands and what is accepted.
absl::StatusOr<LoadedSettings> LoadSettings(const SettingSources& sources);

struct CommandLine {
  enum class Action { kServe, kExit };
  Action action = Action::kServe;
  int exit_code = 0;        // kExit: what the process returns
  std::string output;       // kExit: to be printed, ends with a newline
  LoadedSettings settings;  // kServe
};

// Reads the command line (`args` without the program's name) and, unless it asks for help or the like, the settings.
// `environment_names` is only for warnings. An error is INVALID_ARGUMENT: print its message and exit with 1. With
// --check, an invalid configuration is not an error but kExit with exit_code 1 and the reason in `output`.
absl::StatusOr<CommandLine> ParseCommandLine(std::span<const std::string> args, const GetEnvironment& getenv,
                                             std::span<const std::string> environment_names = {});

// The environment of this process, for ParseCommandLine.
std::optional<std::string> ProcessEnvironment(const std::string& name);
std::vector<std::string> ProcessEnvironmentNames();

// All settings as a Markdown document with one table row each.
std::string SettingsMarkdown();

// The release that this binary was built as, such as "0.1.0".
std::string_view Version();

struct HostPort {
  std::string host;  // numeric IPv4 or IPv6 address, without brackets; localhost is 127.0.0.1
  std::uint16_t port = 0;
};

// "127.0.0.1:9464", "[::1]:9464" or "localhost:9464"; anything else is INVALID_ARGUMENT.
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);

// Whether only this machine can reach the address.
bool IsLoopback(const HostPort& address);

// "true" or "false".
absl::StatusOr<bool> ParseBool(std::string_view text);

// A decimal number of bytes, optionally followed by KiB, MiB or GiB. OUT_OF_RANGE if it does not fit 64 bits.
absl::StatusOr<std::int64_t> ParseBytes(std::string_view text);

// The shortest exact form: "64 KiB", "1 MiB", "1000".
std::string FormatBytes(std::int64_t bytes);

}  // namespace tessera::server
