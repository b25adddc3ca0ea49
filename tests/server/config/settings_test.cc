// The settings loader: every row of settings.def through every source, precedence, and each way to be refused.
#include "server/config/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

using Environment = std::map<std::string, std::string>;

class SettingsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "settings_test.XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path() const { return (folder_ / "file.yaml").string(); }

  std::string Write(const std::string& text) const {
    std::ofstream file(Path(), std::ios::binary);
    file << text;
    file.close();
    EXPECT_TRUE(file.good());
    return Path();
  }

  static absl::StatusOr<CommandLine> ParseArgs(const std::vector<std::string>& args, const Environment& environment) {
    std::vector<std::string> names;
    for (const auto& [name, value] : environment) names.push_back(name);
    const auto getenv = [&](const std::string& name) -> std::optional<std::string> {
      const auto found = environment.find(name);
      if (found == environment.end()) return std::nullopt;
      return found->second;
    };
    return ParseCommandLine(args, getenv, names);
  }

  static Settings Loaded(const std::vector<std::string>& args, const Environment& environment = {}) {
    const absl::StatusOr<CommandLine> line = ParseArgs(args, environment);
    EXPECT_TRUE(line.ok()) << line.status();
    if (!line.ok()) return {};
    EXPECT_EQ(line->action, CommandLine::Action::kServe);
    return line->settings.values;
  }
  Settings LoadedFile(const std::string& yaml) const { return Loaded({"--config", Write(yaml)}); }

  // The message of the error, which must be INVALID_ARGUMENT.
  static std::string Refusal(const std::vector<std::string>& args, const Environment& environment = {}) {
    const absl::StatusOr<CommandLine> line = ParseArgs(args, environment);
    EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument);
    return MessageOf(line.status());
  }
  // The same for a file, with its path shortened to "file.yaml".
  std::string FileRefusal(const std::string& yaml) const {
    std::string message = Refusal({"--config", Write(yaml)});
    const std::size_t at = message.find(Path());
    if (at != std::string::npos) message.replace(at, Path().size(), "file.yaml");
    return message;
  }

 private:
  std::filesystem::path folder_;
};

const SettingValue& ReportRow(const LoadedSettings& loaded, std::string_view name) {
  static const SettingValue kNone;
  for (const SettingValue& row : loaded.report) {
    if (row.name == name) return row;
  }
  ADD_FAILURE() << "no row " << name;
  return kNone;
}

// A legal value of the row that is not its default.
std::string OtherValue(const SettingRow& row) {
  const Settings defaults;
  switch (row.rule.kind) {
    case SettingRule::Kind::kSocketPath:
      return "/run/other/other.sock";
    case SettingRule::Kind::kFilePath:
      return "/etc/tessera/some.pem";
    case SettingRule::Kind::kHostPortOrOff:
      return "[::1]:0";
    case SettingRule::Kind::kCudaDevice:
      return "GPU-9a2c1f00-0000-4000-8000-0123456789ab";
    case SettingRule::Kind::kOneOf:
      return std::string(row.rule.choices[0] == SettingText(row, defaults) ? row.rule.choices[1] : row.rule.choices[0]);
    case SettingRule::Kind::kRange: {
      const std::int64_t value = defaults.*std::get<std::int64_t Settings::*>(row.member);
      return std::to_string(value < row.rule.max ? value + 1 : value - 1);
    }
    case SettingRule::Kind::kAnyValue:
      break;
  }
  if (std::holds_alternative<bool Settings::*>(row.member)) {
    return SettingText(row, defaults) == "true" ? "false" : "true";
  }
  return std::holds_alternative<UidList Settings::*>(row.member) ? "7,1000" : "CN=a,O=b;CN=c";
}

TEST_F(SettingsTest, DefaultsAreValidAndReported) {
  const absl::StatusOr<CommandLine> line = ParseArgs({}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->settings.values, Settings{});
  EXPECT_THAT(line->settings.warnings, IsEmpty());
  ASSERT_EQ(line->settings.report.size(), SettingRows().size());
  for (std::size_t i = 0; i < SettingRows().size(); ++i) {
    const SettingValue& row = line->settings.report[i];
    EXPECT_EQ(row.name, SettingRows()[i].name);
    EXPECT_EQ(row.value, row.default_value);
    EXPECT_EQ(row.source, "default");
    EXPECT_EQ(row.help, SettingRows()[i].help);
  }
}

TEST_F(SettingsTest, EveryDefaultIsAcceptedAsAValue) {
  for (const SettingRow& row : SettingRows()) {
    EXPECT_EQ(Loaded({FlagName(row.name), SettingText(row, {})}), Settings{}) << row.name;
  }
}

TEST_F(SettingsTest, NamesAreUniqueAndHelpFitsATable) {
  std::set<std::string_view> names;
  for (const SettingRow& row : SettingRows()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_EQ(row.help.find_first_of("|\n"), std::string_view::npos) << row.name;
    EXPECT_TRUE(row.help.ends_with('.')) << row.name;
  }
}

TEST_F(SettingsTest, EverySettingThroughEverySource) {
  for (const SettingRow& row : SettingRows()) {
    SCOPED_TRACE(row.name);
    const std::string value = OtherValue(row);
    const std::string yaml = std::string(row.name) + ": \"" + value + "\"\n";
    const std::string flag = FlagName(row.name);
    // TCP wants to be told how it is protected.
    std::map<std::string, std::string> environment;
    if (row.name == "tcp_address") environment["TESSERA_TCP_PLAINTEXT"] = "true";
    std::map<std::string, std::string> with_value = environment;
    with_value[EnvironmentName(row.name)] = value;
    const std::map<std::string, absl::StatusOr<CommandLine>> lines = {
        {"file", ParseArgs({"--config", Write(yaml)}, environment)},
        {"environment", ParseArgs({}, with_value)},
        {"flag", ParseArgs({flag, value}, environment)},
    };
    for (const auto& [source, line] : lines) {
      SCOPED_TRACE(source);
      ASSERT_TRUE(line.ok()) << line.status();
      EXPECT_EQ(SettingText(row, line->settings.values), value);
      EXPECT_EQ(ReportRow(line->settings, row.name).value, value);
      EXPECT_EQ(ReportRow(line->settings, row.name).source, source);
      EXPECT_NE(line->settings.values, Settings{});
      EXPECT_THAT(line->settings.warnings, IsEmpty());
    }
    const absl::StatusOr<CommandLine> joined = ParseArgs({absl::StrCat(flag, "=", value)}, environment);
    ASSERT_TRUE(joined.ok()) << joined.status();
    EXPECT_EQ(joined->settings.values, lines.at("flag")->settings.values);
  }
}

TEST_F(SettingsTest, Precedence) {
  const std::string file = Write("queue_max: 10\nsessions_max: 11\ncpu_threads: 12\n");
  const Environment environment = {
      {"TESSERA_CONFIG", file}, {"TESSERA_QUEUE_MAX", "20"}, {"TESSERA_SESSIONS_MAX", "21"}};
  const absl::StatusOr<CommandLine> line = ParseArgs({"--queue-max", "30"}, environment);
  ASSERT_TRUE(line.ok()) << line.status();
  const LoadedSettings& loaded = line->settings;
  EXPECT_EQ(loaded.values.queue_max, 30);
  EXPECT_EQ(loaded.values.sessions_max, 21);
  EXPECT_EQ(loaded.values.cpu_threads, 12);
  EXPECT_EQ(loaded.values.queue_per_session_max, 256);
  EXPECT_EQ(ReportRow(loaded, "queue_max").source, "flag");
  EXPECT_EQ(ReportRow(loaded, "sessions_max").source, "environment");
  EXPECT_EQ(ReportRow(loaded, "cpu_threads").source, "file");
  EXPECT_EQ(ReportRow(loaded, "queue_per_session_max").source, "default");
}

TEST_F(SettingsTest, ConfigFlagWinsOverItsVariable) {
  const std::string file = Write("cpu_threads: 3");
  EXPECT_EQ(Loaded({"--config", file}, {{"TESSERA_CONFIG", "/nowhere"}}).cpu_threads, 3);
  EXPECT_EQ(Loaded({}, {{"TESSERA_CONFIG", ""}}), Settings{});
}

TEST_F(SettingsTest, OverriddenValuesMustBeValidToo) {
  EXPECT_THAT(Refusal({"--cpu-threads", "1"}, {{"TESSERA_CPU_THREADS", "many"}}),
              StartsWith("environment TESSERA_CPU_THREADS: "));
}

TEST_F(SettingsTest, EmptyTextTurnsTheHttpPortOff) {
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"--http-address="}, {"--http-address", ""}, {"--http-address=", "--cpu-threads=2"}}) {
    EXPECT_EQ(Loaded(args).http_address, "");
  }
  EXPECT_EQ(Loaded({}, {{"TESSERA_HTTP_ADDRESS", ""}}).http_address, "");
  EXPECT_EQ(LoadedFile("http_address: ''").http_address, "");
}

TEST_F(SettingsTest, Bytes) {
  EXPECT_EQ(Loaded({"--inline-bytes-max", "64KiB"}).inline_bytes_max, 65536);
  EXPECT_EQ(LoadedFile("buffer_bytes_max: 3 GiB").buffer_bytes_max, 3 * kGiB);
  EXPECT_EQ(Loaded({}, {{"TESSERA_WORKSPACE_BYTES_MAX", " 5MiB "}}).workspace_bytes_max, 5 * kMiB);
  for (const char* text : {"1.5GiB", "1GB", "KiB", "", "1 KiBKiB", "0x10", "1k", "--1", "+1"}) {
    EXPECT_EQ(ParseBytes(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  for (const char* text : {"9223372036854775808", "9223372036854775807KiB", "99999999999999999999GiB"}) {
    EXPECT_EQ(ParseBytes(text).status().code(), absl::StatusCode::kOutOfRange) << text;
  }
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1000}, 64 * kKiB, 1536 * kKiB, 8 * kMiB, 3 * kGiB}) {
    EXPECT_EQ(ParseBytes(FormatBytes(bytes)).value(), bytes);
  }
  EXPECT_EQ(FormatBytes(kMiB), "1 MiB");
  EXPECT_EQ(FormatBytes(1536 * kKiB), "1536 KiB");
  EXPECT_EQ(FormatBytes(0), "0");
}

TEST_F(SettingsTest, Bools) {
  EXPECT_TRUE(ParseBool("true").value());
  EXPECT_FALSE(ParseBool("false").value());
  for (const char* text : {"", "1", "yes", "True"}) EXPECT_FALSE(ParseBool(text).ok()) << text;
}

TEST_F(SettingsTest, Uids) {
  EXPECT_THAT(LoadedFile("admin_uids: [1000, 1001]").admin_uids, ElementsAre(1000, 1001));
  EXPECT_THAT(LoadedFile("admin_uids:\n- 1\n- 2\n").admin_uids, ElementsAre(1, 2));
  EXPECT_THAT(LoadedFile("admin_uids: 5").admin_uids, ElementsAre(5));
  EXPECT_THAT(LoadedFile("admin_uids: []").admin_uids, IsEmpty());
  EXPECT_THAT(Loaded({"--admin-uids", "1, 2,4294967294"}).admin_uids, ElementsAre(1, 2, 4294967294));
  for (const char* text : {"1,,2", "1,", ",1", ",", "root", "-1", "4294967295", "4294967296", "1 2"}) {
    EXPECT_THAT(Refusal({"--admin-uids", text}), HasSubstr("admin_uids takes uids, comma separated")) << text;
  }
  EXPECT_THAT(FileRefusal("admin_uids: [1, '2,3']"), StartsWith("file.yaml:1:13: admin_uids: '2,3' is not an integer"));
}

TEST_F(SettingsTest, Addresses) {
  for (const char* text : {"127.0.0.1:0", "0.0.0.0:65535", "[::1]:80", "[::]:1", "localhost:9464"}) {
    EXPECT_EQ(Loaded({"--http-address", text}).http_address, text);
  }
  for (const char* text : {"9464", ":9464", "localhost", "localhost:", "localhost:65536", "localhost:-1", "node1:80",
                           "::1:80", "[::1]", "[]:1", "[127.0.0.1]:1", "1.2.3:4", "127.0.0.1:80x", "[::1:80"}) {
    EXPECT_THAT(Refusal({"--http-address", text}), HasSubstr("takes IPv4:port, [IPv6]:port, localhost:port")) << text;
  }
  EXPECT_EQ(ParseHostPort("localhost:1")->host, "127.0.0.1");
  EXPECT_EQ(ParseHostPort("[::1]:2")->host, "::1");
  EXPECT_EQ(ParseHostPort("[::1]:2")->port, 2);
}

TEST_F(SettingsTest, SocketPaths) {
  EXPECT_EQ(Loaded({"--socket", std::string(102, 's')}).socket.size(), 102U);
  EXPECT_THAT(Refusal({"--socket", std::string(103, 's')}), HasSubstr("longer than the 102 bytes"));
  EXPECT_THAT(FileRefusal("socket: \"/tmp/a\\0b\""), HasSubstr("'/tmp/a\\000b' contains control characters"));
}

TEST_F(SettingsTest, RangesAndTypes) {
  EXPECT_EQ(Refusal({"--cpu-threads", "1025"}),
            "flag --cpu-threads: cpu_threads: '1025' is out of range; cpu_threads takes 0 to 1024");
  EXPECT_EQ(
      Refusal({}, {{"TESSERA_MESSAGE_BYTES_MAX", "65MiB"}}),
      "environment TESSERA_MESSAGE_BYTES_MAX: message_bytes_max: '65MiB' is out of range; message_bytes_max takes "
      "64 KiB to 64 MiB");
  EXPECT_EQ(FileRefusal("queue_max: 1\nlog_level: loud\n"),
            "file.yaml:2:12: log_level: 'loud' is not one of its values; log_level takes trace, debug, info, warn, "
            "error, off");
  for (const SettingRow& row : SettingRows()) {
    if (row.rule.kind != SettingRule::Kind::kRange) continue;
    SCOPED_TRACE(row.name);
    for (const std::string& text :
         {std::to_string(row.rule.max + 1), std::to_string(row.rule.min - 1), std::string("99999999999999999999")}) {
      EXPECT_THAT(Refusal({FlagName(row.name), text}), HasSubstr("is out of range"));
    }
    for (const char* text : {"", "x", "1x", "0x1", "1.5", "1 2"}) {
      EXPECT_THAT(Refusal({FlagName(row.name), text}), HasSubstr("is not a")) << text;
    }
  }
  EXPECT_THAT(Refusal({"--log-format", ""}), HasSubstr("takes text, json"));
}

TEST_F(SettingsTest, InlineBytesLeaveRoomInAMessage) {
  EXPECT_THAT(Refusal({"--inline-bytes-max=8MiB"}, {}),
              AllOf(HasSubstr("inline_bytes_max = 8 MiB (flag --inline-bytes-max) must be smaller"),
                    HasSubstr("message_bytes_max = 8 MiB (default) less 64 KiB")));
  const std::int64_t room = 8 * kMiB - kMessageOverheadBytes;
  EXPECT_THAT(Refusal({"--inline-bytes-max", std::to_string(room)}), HasSubstr("must be smaller"));
  EXPECT_EQ(Loaded({"--inline-bytes-max", std::to_string(room - 1)}).inline_bytes_max, room - 1);
}

TEST_F(SettingsTest, TcpIsProtectedOrLocal) {
  const std::vector<std::string> tls = {"--tls-certificate=c.pem", "--tls-key=k.pem", "--tls-client-ca=a.pem"};
  const auto with = [&](std::vector<std::string> args, std::size_t tls_files) {
    args.insert(args.end(), tls.begin(), tls.begin() + static_cast<std::ptrdiff_t>(tls_files));
    return args;
  };
  EXPECT_EQ(Loaded(with({"--tcp-address=0.0.0.0:1"}, 3)).tls_client_ca, "a.pem");
  EXPECT_THAT(Refusal(with({"--tcp-address=0.0.0.0:1"}, 0)), HasSubstr("needs tls_certificate"));
  EXPECT_THAT(Refusal(with({"--tcp-address=0.0.0.0:1"}, 1)), HasSubstr("needs tls_key"));
  EXPECT_THAT(Refusal(with({"--tcp-address=0.0.0.0:1"}, 2)), HasSubstr("needs tls_client_ca"));

  for (const char* loopback : {"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"}) {
    EXPECT_TRUE(Loaded({"--tcp-plaintext=true", "--tcp-address", loopback}).tcp_plaintext) << loopback;
  }
  for (const char* reachable : {"0.0.0.0:1", "10.0.0.1:1", "[::]:1", "[::ffff:10.0.0.1]:1"}) {
    EXPECT_THAT(Refusal({"--tcp-plaintext=true", "--tcp-address", reachable}), HasSubstr("is no loopback address"))
        << reachable;
  }
  EXPECT_THAT(Refusal(with({"--tcp-plaintext=true", "--tcp-address=127.0.0.1:1"}, 1)),
              HasSubstr("tls_certificate (flag --tls-certificate) and tcp_plaintext (flag --tcp-plaintext) exclude"));
  EXPECT_TRUE(Loaded({"--tls-key=k.pem"}).tcp_address.empty()) << "nothing to protect";
}

TEST_F(SettingsTest, SubjectsMayHoldCommas) {
  EXPECT_THAT(Loaded({"--admin-subjects", "CN=a,O=b; CN=c"}).admin_subjects, ElementsAre("CN=a,O=b", "CN=c"));
  EXPECT_THAT(Loaded({"--config", Write("admin_subjects: [\"CN=a,O=b\", 'CN=c;d']\n")}).admin_subjects,
              ElementsAre("CN=a,O=b", "CN=c;d"));
  EXPECT_THAT(Loaded({"--admin-subjects="}).admin_subjects, IsEmpty());
  EXPECT_THAT(Refusal({"--admin-subjects", "CN=a;"}), HasSubstr("'' is empty; admin_subjects takes texts"));
}

TEST_F(SettingsTest, FileErrorsNameThePlace) {
  EXPECT_EQ(FileRefusal("# comment\n\nsokcet: /x\n"),
            "file.yaml:3:1: unknown setting 'sokcet'; did you mean 'socket'?");
  EXPECT_EQ(FileRefusal("colour: red"),
            "file.yaml:1:1: unknown setting 'colour'; tesserad --settings-markdown lists all");
  EXPECT_EQ(FileRefusal("queue_max: 1\nsocket: a\nqueue_max: 1\n"),
            "file.yaml:3:1: 'queue_max' is already set on line 1; remove one of them");
  EXPECT_EQ(FileRefusal("socket: [a, b]"), "file.yaml:1:9: socket: is a list; give one value: a path");
  EXPECT_EQ(FileRefusal("log_level: {a: b}"), "file.yaml:1:12: log_level is a map; settings are flat");
  EXPECT_EQ(FileRefusal("socket:\nqueue_max: 1\n"), "file.yaml:1:1: socket has no value; give one or remove it");
  EXPECT_THAT(FileRefusal("socket: ~"), HasSubstr("socket has no value"));
  EXPECT_THAT(FileRefusal("admin_uids: [[1]]"), HasSubstr("a list where a plain value must stand"));
  EXPECT_THAT(FileRefusal("admin_uids: [{a: 1}]"), HasSubstr("a map where a plain value must stand"));
  EXPECT_THAT(FileRefusal("admin_uids: [1, ~]"), HasSubstr("an empty list item"));
  EXPECT_THAT(FileRefusal("[a]: 1"), HasSubstr("file.yaml:1:1: a list where"));
  EXPECT_THAT(FileRefusal("{a: 1}: 1"), HasSubstr("a map where"));
  EXPECT_THAT(FileRefusal("~: 1"), HasSubstr("a setting without a name"));
  EXPECT_THAT(FileRefusal("just words"), HasSubstr("file.yaml:1:1: a configuration file consists of lines"));
  EXPECT_THAT(FileRefusal("- a\n- b\n"), HasSubstr("file.yaml:1:1: a configuration file consists of lines"));
  EXPECT_THAT(FileRefusal("socket: a\n---\nsocket: b\n"), HasSubstr("a second document"));
  EXPECT_THAT(FileRefusal("socket: !!binary aGk="), HasSubstr("tags ('tag:yaml.org,2002:binary') are not supported"));
  EXPECT_THAT(FileRefusal("socket: \"open"), AllOf(StartsWith("file.yaml:1:"), HasSubstr("not valid YAML")));
  EXPECT_THAT(FileRefusal("socket: b: c"), AllOf(StartsWith("file.yaml:1:"), HasSubstr("not valid YAML")));
}

TEST_F(SettingsTest, FilesThatCannotBeRead) {
  EXPECT_EQ(Refusal({"--config", "/nowhere/t.yaml"}),
            "configuration file /nowhere/t.yaml (named by --config): No such file or directory; name a readable YAML "
            "file or none");
  EXPECT_THAT(Refusal({}, {{"TESSERA_CONFIG", "/nowhere/t.yaml"}}), HasSubstr("(named by TESSERA_CONFIG)"));
  EXPECT_THAT(Refusal({"--config", "/"}), HasSubstr("Is a directory"));
  EXPECT_THAT(Refusal({"--config", "/dev/zero"}), HasSubstr("is larger than 1 MiB"));
  EXPECT_THAT(Refusal({"--config", ""}), HasSubstr("--config: the path is empty"));
}

TEST_F(SettingsTest, EmptyFilesHoldTheDefaults) {
  for (const char* text : {"", "\n\n", "# only a comment\n", "---\n", "---\n...\n", "{}"}) {
    EXPECT_EQ(LoadedFile(text), Settings{}) << text;
  }
}

TEST_F(SettingsTest, AliasesAreNotExpanded) {
  std::string bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n";
  for (char name = 'b'; name <= 'z'; ++name) {
    const std::string before(1, static_cast<char>(name - 1));
    bomb += std::string(1, name) + ": &" + name + " [";
    for (int i = 0; i < 9; ++i) bomb += (i > 0 ? ",*" : "*") + before;
    bomb += "]\n";
  }
  EXPECT_THAT(FileRefusal(bomb), HasSubstr("unknown setting 'a'"));
  EXPECT_THAT(FileRefusal("admin_uids: &a [1]\n"), HasSubstr("anchors (&name) are not supported"));
  EXPECT_THAT(FileRefusal("admin_uids: &a [1, *a]\n"), HasSubstr("are not supported"));
  EXPECT_THAT(FileRefusal("socket: *a\n"), HasSubstr("file.yaml:1:"));
  EXPECT_THAT(FileRefusal("<<: {a: 1}\n"), HasSubstr("unknown setting '<<'"));
}

TEST_F(SettingsTest, DeepNestingIsRefused) {
  for (const char* opening : {"[", "{", "- ", "? ", "{a: ", "[a, "}) {
    std::string text = "admin_uids:\n  ";
    while (text.size() < 100'000) text += opening;
    EXPECT_THAT(FileRefusal(text), StartsWith("file.yaml:")) << opening;
  }
}

// Random bytes, and valid files with random damage: any answer but a crash or another code will do.
TEST_F(SettingsTest, GarbageIsRefusedOrRead) {
  const std::string valid =
      "%YAML 1.2\n--- # head\nsocket: \"/run/\\x41.sock\"\nadmin_uids: [1, 2]\nlog_level: 'info'\nhttp_address: |\n  "
      "x\n"
      "queue_max: 12\nmessage_bytes_max: 8 MiB\n? cpu_threads\n: 4\n";
  const std::string_view syntax = "\n\t :-?[]{},&*!|>'\"%@`#~<=\\\0\x80\xff\xfe\xef\xbb\xbf";
  constexpr unsigned kSeed = 20240229;
  std::mt19937 random(kSeed);
  const auto below = [&](std::size_t limit) { return random() % limit; };
  for (int round = 0; round < 3000; ++round) {
    std::string text = round % 3 == 0 ? std::string(below(200), 'x') : valid;
    const std::size_t edits = round % 3 == 0 ? text.size() : 1 + below(8);
    for (std::size_t i = 0; i < edits && !text.empty(); ++i) {
      const char byte = below(4) == 0 ? static_cast<char>(below(256)) : syntax[below(syntax.size())];
      const std::size_t at = round % 3 == 0 ? i : below(text.size());
      if (below(3) == 0 && round % 3 != 0) {
        text.erase(at, below(10));
      } else {
        text[at] = byte;
      }
    }
    const absl::StatusOr<CommandLine> line = ParseArgs({"--config", Write(text)}, {});
    if (!line.ok()) {
      EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument) << "seed " << kSeed << " round " << round;
    }
  }
}

TEST_F(SettingsTest, ASwitchAloneIsTrue) {
  EXPECT_FALSE(Loaded({}).supervise);
  EXPECT_TRUE(Loaded({"--supervise"}).supervise);
  EXPECT_TRUE(Loaded({"--supervise", "--queue-max", "7"}).supervise);
  EXPECT_EQ(Loaded({"--supervise", "--queue-max", "7"}).queue_max, 7);
  EXPECT_FALSE(Loaded({"--supervise", "false"}).supervise);
  EXPECT_FALSE(Loaded({"--supervise=false"}).supervise);
  EXPECT_THAT(Refusal({"--supervise", "maybe"}), HasSubstr("true or false"));
  EXPECT_THAT(Refusal({"--supervise="}), HasSubstr("true or false"));
  EXPECT_THAT(Refusal({"--supervise", "--supervise"}), HasSubstr("given twice"));
}

TEST_F(SettingsTest, CommandLineErrors) {
  EXPECT_EQ(Refusal({"--sokcet", "/x"}), "command line: unknown option '--sokcet'; did you mean '--socket'?");
  EXPECT_EQ(Refusal({"--confg=/x"}), "command line: unknown option '--confg'; did you mean '--config'?");
  EXPECT_EQ(Refusal({"--colour"}), "command line: unknown option '--colour'; tesserad --help lists all");
  EXPECT_THAT(Refusal({"serve"}), HasSubstr("unexpected argument 'serve'"));
  EXPECT_THAT(Refusal({"-x"}), HasSubstr("unknown option '-x'"));
  EXPECT_THAT(Refusal({"--", "x"}), HasSubstr("unknown option '--'"));
  EXPECT_THAT(Refusal({"--socket"}), AllOf(StartsWith("command line: --socket"), HasSubstr("see tesserad --help")));
  EXPECT_EQ(Refusal({"--socket", "--check"}), "--socket: needs a value, but '--check' follows");
  EXPECT_EQ(Refusal({"--queue-max", "1", "--queue-max", "2"}), "--queue-max: given twice; give it once");
  EXPECT_THAT(Refusal({"--check=maybe"}), StartsWith("command line: "));
  EXPECT_THAT(Refusal({std::string(100'000, 'a')}), HasSubstr("..."));
  EXPECT_EQ(Loaded({"--socket", "[a]"}).socket, "[a]");
}

TEST_F(SettingsTest, UnknownVariablesAreWarnings) {
  const absl::StatusOr<CommandLine> line =
      ParseArgs({}, {{"TESSERA_SOKET", "x"}, {"TESSERA_PORT_9464_TCP", "x"}, {"TESSERA_SOCKET", "/s"}, {"HOME", "/"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(line->settings.warnings,
              ElementsAre("environment variable 'TESSERA_PORT_9464_TCP' is not a setting and is ignored",
                          "environment variable 'TESSERA_SOKET' is not a setting; did you mean 'TESSERA_SOCKET'?"));
  EXPECT_EQ(line->settings.values.socket, "/s");
}

TEST_F(SettingsTest, SeedsOfTheEnvironmentAreSettings) {
  const Settings seeded = Loaded({}, {{"TESSERA_GEMM_TABLE", "/etc/rows.txt"},
                                      {"TESSERA_GEMM_MODEL", "2"},
                                      {"TESSERA_GEMM_PLAN", "1"},
                                      {"TESSERA_GEMM_NO_TMA", "on"},
                                      {"TESSERA_GEMM_TUNE_DIR", "/var/rows"}});
  EXPECT_EQ(seeded.planner_table, "/etc/rows.txt");
  EXPECT_EQ(seeded.planner_mode, "model");
  EXPECT_TRUE(seeded.planner_log);
  EXPECT_FALSE(seeded.planner_tma);
  EXPECT_EQ(seeded.cache_dir, "/var/rows");
  EXPECT_EQ(Loaded({}, {{"TESSERA_GEMM_MODEL", "0"}}).planner_mode, "table");
  EXPECT_EQ(Loaded({}, {{"TESSERA_GEMM_MODEL", "1"}}).planner_mode, "hybrid");
  EXPECT_EQ(Loaded({}, {{"TESSERA_GEMM_MODEL", "model"}}).planner_mode, "model");
  EXPECT_TRUE(Loaded({}, {{"TESSERA_GEMM_NO_TMA", "0"}}).planner_tma);
}

TEST_F(SettingsTest, SeedsAreWeakerThanSettingsAndStrongerThanTheFile) {
  const Environment both = {{"TESSERA_GEMM_MODEL", "2"}, {"TESSERA_PLANNER_MODE", "table"}};
  EXPECT_EQ(Loaded({}, both).planner_mode, "table");
  const std::string file = Write("planner_mode: table\n");
  EXPECT_EQ(Loaded({"--config", file}, {{"TESSERA_GEMM_MODEL", "2"}}).planner_mode, "model");
  EXPECT_EQ(Loaded({"--planner-mode", "hybrid"}, {{"TESSERA_GEMM_MODEL", "2"}}).planner_mode, "hybrid");
  EXPECT_EQ(Loaded({}, {{"TESSERA_GEMM_MODEL", ""}, {"TESSERA_GEMM_PLAN", ""}}), Settings{});
}

TEST_F(SettingsTest, SeedsAreCheckedAndWarnedOf) {
  EXPECT_THAT(Refusal({}, {{"TESSERA_GEMM_MODEL", "3"}}),
              AllOf(HasSubstr("environment TESSERA_GEMM_MODEL: '3'"), HasSubstr("takes 0 (table)")));
  EXPECT_THAT(Refusal({}, {{"TESSERA_GEMM_PLAN", "perhaps"}}), HasSubstr("takes 1 or 0"));
  const auto warnings = [](const Environment& environment) {
    const auto line = ParseArgs({}, environment);
    return line.ok() ? line->settings.warnings : std::vector<std::string>{"not loaded"};
  };
  EXPECT_THAT(warnings({{"TESSERA_GEMM_MODEL", "2"}}), ElementsAre(HasSubstr("TESSERA_PLANNER_MODE=model")));
  EXPECT_THAT(warnings({{"TESSERA_GEMM_NO_MX", "1"}}), ElementsAre(HasSubstr("No effect")));
  EXPECT_THAT(warnings({{"TESSERA_GEMM_AUTOTUNE", "1"}}), ElementsAre(HasSubstr("no tuner")));
}

TEST_F(SettingsTest, LoadSettingsWithoutACommandLine) {
  EXPECT_EQ(LoadSettings({})->values, Settings{});
  EXPECT_EQ(LoadSettings({.flags = {{"queue_max", "7"}}})->values.queue_max, 7);
  EXPECT_EQ(LoadSettings({.flags = {{"nothing", "7"}}}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SettingsTest, HelpListsEverySetting) {
  const absl::StatusOr<CommandLine> line = ParseArgs({"--help"}, {{"TESSERA_CPU_THREADS", "many"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->action, CommandLine::Action::kExit);
  EXPECT_EQ(line->exit_code, 0);
  for (const SettingRow& row : SettingRows()) {
    EXPECT_THAT(line->output, HasSubstr("  " + FlagName(row.name) + " VALUE"));
    EXPECT_THAT(line->output, HasSubstr(EnvironmentName(row.name)));
  }
  for (const char* text :
       {"--config PATH", "TESSERA_CONFIG", "--check", "--version", "--settings-markdown",
        "Takes 64 KiB to 64 MiB [bytes]\n", "Default 8 MiB; env TESSERA_MESSAGE_BYTES_MAX", "Default 127.0.0.1:9464"}) {
    EXPECT_THAT(line->output, HasSubstr(text));
  }
  std::istringstream lines(line->output);
  for (std::string text; std::getline(lines, text);) EXPECT_LE(text.size(), 110U) << text;
}

TEST_F(SettingsTest, VersionNeedsNoValidConfiguration) {
  const absl::StatusOr<CommandLine> line = ParseArgs({"--version"}, {{"TESSERA_CONFIG", "/nowhere"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->action, CommandLine::Action::kExit);
  EXPECT_EQ(line->output, "tesserad " + std::string(Version()) + "\n");
}

TEST_F(SettingsTest, MarkdownListsEachSettingOnce) {
  const absl::StatusOr<CommandLine> line = ParseArgs({"--settings-markdown"}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->output, SettingsMarkdown());
  std::map<std::string, int> rows;
  std::istringstream lines(line->output);
  for (std::string text;
       std::getline(lines, text) && !text.starts_with("## ");) {  // the variables behind it are others
    if (!text.starts_with("| `")) continue;
    ++rows[text.substr(3, text.find('`', 3) - 3)];
    EXPECT_EQ(std::count(text.begin(), text.end(), '|'), 6) << text;
  }
  EXPECT_EQ(rows.size(), SettingRows().size());
  for (const SettingRow& row : SettingRows()) EXPECT_EQ(rows[std::string(row.name)], 1) << row.name;
  EXPECT_THAT(line->output, HasSubstr("| `inline_bytes_max` | 1 MiB | bytes | 0 to 64 MiB |"));
}

TEST_F(SettingsTest, CheckReportsByExitCode) {
  const absl::StatusOr<CommandLine> valid = ParseArgs({"--check"}, {{"TESSERA_SOKET", "x"}});
  ASSERT_TRUE(valid.ok()) << valid.status();
  EXPECT_EQ(valid->action, CommandLine::Action::kExit);
  EXPECT_EQ(valid->exit_code, 0);
  EXPECT_THAT(valid->output, AllOf(HasSubstr("warning: "), HasSubstr("the configuration is valid\n")));
  const absl::StatusOr<CommandLine> invalid = ParseArgs({"--check", "--config", Write("x: 1\n")}, {});
  ASSERT_TRUE(invalid.ok()) << invalid.status();
  EXPECT_EQ(invalid->action, CommandLine::Action::kExit);
  EXPECT_EQ(invalid->exit_code, 1);
  EXPECT_THAT(invalid->output, HasSubstr("file.yaml:1:1: unknown setting 'x'"));
}

TEST_F(SettingsTest, ProcessEnvironmentIsThisProcess) {
  ASSERT_EQ(::setenv("TESSERA_QUEUE_MAX", "9", 1), 0);
  EXPECT_EQ(ProcessEnvironment("TESSERA_QUEUE_MAX"), "9");
  EXPECT_THAT(ProcessEnvironmentNames(), ::testing::Contains("TESSERA_QUEUE_MAX"));
  ASSERT_EQ(::unsetenv("TESSERA_QUEUE_MAX"), 0);
  EXPECT_EQ(ProcessEnvironment("TESSERA_QUEUE_MAX"), std::nullopt);
}

}  // namespace
}  // namespace tessera::server
