// `tessera sessions`, `tessera buffers` and what `tessera status` says of sessions: tables, JSON, and looks that
// repeat.

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/e2e/child_process.h"
#include "tests/e2e/raw_client.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class CliSessionsTest : public DaemonFixture {
 protected:
  Finished Tessera(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), TESSERA_CLI);
    arguments.insert(arguments.end(), {"--socket", socket()});
    return RunProgram(arguments);
  }

  // Of a run that must succeed.
  std::string Out(const std::vector<std::string>& arguments) const {
    const Finished run = Tessera(arguments);
    EXPECT_EQ(run.code, 0) << run.out << run.err;
    EXPECT_THAT(run.err, IsEmpty());
    return run.out;
  }

  json Json(std::vector<std::string> arguments) const {
    arguments.emplace_back("--json");
    const std::string out = Out(arguments);
    json document = json::parse(out, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(document.is_discarded()) << out;
    return document;
  }
};

std::set<std::string> KeysOf(const json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The line of a table that has `text`; empty if it is not one.
std::string LineWith(const std::string& table, const std::string& text) {
  std::string found;
  for (const std::string& line : Lines(table)) {
    if (line.find(text) != std::string::npos) found = found.empty() ? line : "more than one line";
  }
  return found;
}

TEST_F(CliSessionsTest, TheTable) {
  EXPECT_THAT(Out({"sessions"}), HasSubstr("0 sessions, 0 B"));
  client::Client client = Connect();
  client::Session side = client.OpenSession("by side channel").value();
  client::Session attached = client.OpenSession({.label = "by call", .lease = client::Lease::kAttach}).value();
  client::Session timed = client.OpenSession({.label = "by time", .lease = client::Lease::kTtl, .ttl = 55s}).value();
  const client::Buffer buffer = side.Allocate(3 << 20).value();
  const std::string table = Out({"sessions"});
  const std::string head = Lines(table).front();
  for (const char* column : {"session", "state", "lease", "buffers", "memory", "in flight", "gated", "streams",
                             "timelines", "age", "idle", "owner", "pid", "label"}) {
    EXPECT_THAT(head, HasSubstr(column));
  }
  EXPECT_THAT(LineWith(table, "by side channel"), ContainsRegex("open +side channel +1 +3.0 MiB +0 "));
  EXPECT_THAT(LineWith(table, "by call"), ContainsRegex("open +attach +0 +0 B +0 "));
  EXPECT_THAT(LineWith(table, "by time"), ContainsRegex("open +ttl 5[0-9].[0-9]s +0 +0 B +0 "));
  EXPECT_THAT(LineWith(table, "by time"), HasSubstr(PrincipalOf(::geteuid())));
  EXPECT_THAT(LineWith(table, "by time"), HasSubstr(std::to_string(::getpid())));
  EXPECT_THAT(table, HasSubstr("3 sessions, 3.0 MiB"));
  for (const std::string& line : Lines(table)) EXPECT_FALSE(line.ends_with(' ')) << "'" << line << "'";
}

TEST_F(CliSessionsTest, Json) {
  EXPECT_EQ(Json({"sessions"}), json::array());
  client::Client client = Connect();
  client::Session session = client.OpenSession({.label = "one", .lease = client::Lease::kTtl, .ttl = 50s}).value();
  const json list = Json({"sessions"});
  ASSERT_EQ(list.size(), 1U);
  EXPECT_EQ(KeysOf(list[0]), (std::set<std::string>{"name", "label", "principal", "owner_pid", "lease", "ttl_ms",
                                                    "state", "end_reason", "age_ms", "idle_ms", "buffers", "bytes",
                                                    "in_flight", "gated", "streams", "timelines"}));
  EXPECT_EQ(list[0]["streams"], 0);
  EXPECT_EQ(list[0]["timelines"], 0);
  EXPECT_EQ(list[0]["gated"], 0);
  EXPECT_EQ(list[0]["label"], "one");
  EXPECT_EQ(list[0]["lease"], "ttl");
  EXPECT_EQ(list[0]["state"], "open");
  EXPECT_EQ(list[0]["end_reason"], "");
  EXPECT_EQ(list[0]["principal"], PrincipalOf(::geteuid()));
  EXPECT_EQ(list[0]["owner_pid"], ::getpid());
  EXPECT_LE(list[0]["ttl_ms"], 50'000);
  EXPECT_GT(list[0]["ttl_ms"], 0);
}

TEST_F(CliSessionsTest, AllShowsEverybodys) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const RawClient alice(socket(), kAliceUid);
  const std::string token = alice.OpenFor(60'000, "of alice").value();
  ASSERT_TRUE(alice.Allocate(token, 100).ok());
  EXPECT_EQ(Json({"sessions"}), json::array());
  EXPECT_EQ(Json({"buffers"}), json::array());
  EXPECT_THAT(LineWith(Out({"sessions", "--all"}), "of alice"), HasSubstr(PrincipalOf(kAliceUid)));
  EXPECT_THAT(LineWith(Out({"buffers", "--all"}), "of alice"), HasSubstr(PrincipalOf(kAliceUid)));
  EXPECT_EQ(Json({"sessions", "--all"}).size(), 1U);
}

TEST_F(CliSessionsTest, EndsOne) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("unlucky").value();
  const client::Buffer one = session.Allocate(1).value();
  const client::Buffer two = session.Allocate(1).value();
  const std::string name = Json({"sessions"})[0]["name"];
  EXPECT_EQ(Out({"sessions", "--end", name}), "session " + name + " ended, 2 buffers released\n");
  EXPECT_EQ(session.Close().code(), absl::StatusCode::kNotFound);
  const Finished again = Tessera({"sessions", "--end", name});
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.err, HasSubstr("NOT_FOUND: name: "));
  EXPECT_THAT(again.out, IsEmpty());
  const Finished wrong = Tessera({"sessions", "--end", "unlucky"});
  EXPECT_EQ(wrong.code, 1);
  EXPECT_THAT(wrong.err, HasSubstr("INVALID_ARGUMENT: name: "));
  client::Session next = client.OpenSession("next").value();
  const std::string next_name = Json({"sessions"})[0]["name"];
  EXPECT_EQ(Json({"sessions", "--end", next_name}), (json{{"buffers_released", 0}}));
}

TEST_F(CliSessionsTest, LooksThatRepeat) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("watched").value();
  const client::Buffer buffer = session.Allocate(1000).value();
  for (const char* command : {"sessions", "buffers"}) {
    SCOPED_TRACE(command);
    const std::vector<std::string> watch = {command, "--watch", "--count", "2", "--interval-ms", "300"};
    const auto start = std::chrono::steady_clock::now();
    const std::string out = Out(watch);
    const auto took = std::chrono::steady_clock::now() - start;
    EXPECT_GE(took, 300ms) << "one pause between two looks";
    int looks = 0;
    for (const std::string& line : Lines(out)) looks += line.find("watched") != std::string::npos ? 1 : 0;
    EXPECT_EQ(looks, 2) << out;
    EXPECT_THAT(out, Not(HasSubstr("\033"))) << "no control characters but on a terminal";

    std::vector<std::string> as_json = watch;
    as_json.emplace_back("--json");
    const std::vector<std::string> lines = Lines(Out(as_json));
    ASSERT_EQ(lines.size(), 2U);
    for (const std::string& line : lines) {
      const json list = json::parse(line, nullptr, /*allow_exceptions=*/false);
      ASSERT_FALSE(list.is_discarded()) << line;
      EXPECT_EQ(list.size(), 1U);
    }
  }
}

TEST_F(CliSessionsTest, AWatchSeesWhatChangesAndTheDaemonsEnd) {
  ChildProcess watch({TESSERA_CLI, "sessions", "--watch", "--interval-ms", "20", "--json", "--socket", socket(),
                      "--timeout-ms", "1000"});
  ASSERT_TRUE(Eventually(20s, [&] { return watch.Out().find("[]\n") != std::string::npos; })) << watch.Err();
  client::Client client = Connect();
  client::Session session = client.OpenSession("appears").value();
  EXPECT_TRUE(Eventually(20s, [&] { return watch.Out().find("appears") != std::string::npos; }));
  StopDaemon();
  const std::optional<int> code = watch.Wait();
  EXPECT_TRUE(code == 1 || code == 3) << code.value_or(-1);
}

TEST_F(CliSessionsTest, WrongWatchesAreRefused) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"sessions", "--count", "2"},
                                             {"sessions", "--interval-ms", "50"},
                                             {"buffers", "--watch", "--interval-ms", "1"},
                                             {"buffers", "--watch", "--count", "-1"},
                                             {"sessions", "--end"},
                                             {"sessions", "--watch", "--count", "many"}}) {
    EXPECT_EQ(Tessera(arguments).code, 2) << ::testing::PrintToString(arguments);
  }
}

TEST_F(CliSessionsTest, BuffersTellWithWhomTheyAreShared) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("sharing").value();
  client::Buffer buffer = session.Allocate(1000).value();
  EXPECT_EQ(Json({"buffers"})[0]["shares"], json::array());
  ASSERT_TRUE(buffer.Share(v1::BUFFER_ACCESS_READ, PrincipalOf(kAliceUid)).ok());
  ASSERT_TRUE(buffer.Share(v1::BUFFER_ACCESS_READ_WRITE, PrincipalOf(kBobUid)).ok());
  const std::string table = Out({"buffers"});
  EXPECT_THAT(Lines(table).front(), HasSubstr("shared with"));
  EXPECT_THAT(LineWith(table, "sharing"), HasSubstr(PrincipalOf(kAliceUid) + " (read), " + PrincipalOf(kBobUid)));
  const json shares = Json({"buffers"})[0]["shares"];
  EXPECT_EQ(shares, (json::array({{{"principal", PrincipalOf(kAliceUid)}, {"access", "read"}},
                                  {{"principal", PrincipalOf(kBobUid)}, {"access", "read_write"}}})));
}

// An ended session is shown until its call is over, by all three commands.
TEST_F(CliSessionsTest, ASessionThatEndsWhileItsCallRuns) {
  StartDaemon({{"cpu_threads", "1"}, {"cleanup_patience_s", "1"}});
  EXPECT_THAT(Out({"status"}), Not(HasSubstr("ending")));
  EXPECT_EQ(Json({"status"})["sessions_ending"], 0);
  EXPECT_EQ(Json({"status"})["quarantined"], 0);
  const RawClient client(socket());
  const std::string token = client.OpenFor(60'000, "closing").value();
  const std::string buffer = client.Allocate(token, kSlowProduct.BufferBytes()).value();
  const std::string holder = client.OpenFor(60'000, "holds it").value();
  ASSERT_TRUE(client.Share(token, buffer, "", v1::BUFFER_ACCESS_READ_WRITE).ok());
  // Of another session's, so that the end of the first does not drop those that wait.
  std::vector<std::future<absl::Status>> calls;
  for (int i = 0; i < 6; ++i) calls.push_back(client.Send(holder, ProductOf(kSlowProduct, buffer, buffer)));
  ASSERT_TRUE(Eventually(20s, [&] { return client.ServerInfo().in_flight() == 6; }));
  auto closed = std::async(std::launch::async, [&] { return client.Close(token).status(); });
  ASSERT_TRUE(Eventually(20s, [&] { return client.ServerInfo().sessions_ending() == 1; }));

  const std::string table = Out({"sessions"});
  EXPECT_THAT(LineWith(table, "closing"), ContainsRegex("ending \\(closed\\) +ttl"));
  EXPECT_THAT(LineWith(table, "closing"), HasSubstr("MiB"));
  const std::string status = Out({"status"});
  EXPECT_THAT(LineWith(status, "sessions"), ContainsRegex("sessions +1, 1 ending"));
  EXPECT_THAT(status, Not(HasSubstr("quarantined")));
  ASSERT_FALSE(IsReady(calls.back())) << "the calls were over: use larger products";

  ASSERT_TRUE(Eventually(20s, [&] { return client.ServerInfo().quarantined() == 1; }));
  EXPECT_THAT(LineWith(Out({"sessions"}), "closing"), ContainsRegex("quarantined \\(closed\\) +ttl"));
  EXPECT_THAT(LineWith(Out({"status"}), "quarantined"), ContainsRegex("quarantined +1; `tessera sessions --all`"));
  EXPECT_EQ(Json({"status"})["quarantined"], 1);
  EXPECT_EQ(Json({"sessions"})[0]["state"], "quarantined");
  EXPECT_EQ(Json({"sessions"})[0]["end_reason"], "closed");
  EXPECT_EQ(MetricSum(Metrics(), "tessera_sessions_quarantined"), 1);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_quarantines_total"), 1);
  ASSERT_FALSE(IsReady(calls.back())) << "the calls were over: use larger products";

  // It was slow, not stuck.
  for (auto& call : calls) EXPECT_EQ(Text(call.get()), "OK");
  EXPECT_EQ(Text(closed.get()), "OK");
  EXPECT_THAT(LineWith(Out({"sessions"}), "closing"), IsEmpty());
  EXPECT_THAT(Out({"status"}), Not(HasSubstr("quarantined")));
  EXPECT_EQ(MetricSum(Metrics(), "tessera_sessions_quarantined"), 0);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_quarantines_total"), 1);
}

// What a client chooses must not steer the terminal of whoever looks.
TEST_F(CliSessionsTest, NothingThatAClientSaysSteersTheTerminal) {
  const RawClient client(socket());
  const std::string token = client.OpenFor(60'000, "plain").value();
  const std::string buffer = client.Allocate(token, 100).value();
  for (const char* principal : {"uid:\033[2J", "subject:\033]0;x\007", "uid:1\n2"}) {
    client.Share(token, buffer, principal, v1::BUFFER_ACCESS_READ).status().IgnoreError();
  }
  const std::string table = Out({"buffers", "--all"});
  EXPECT_THAT(table, Not(HasSubstr("\033")));
  EXPECT_THAT(table, Not(HasSubstr("\007")));
  EXPECT_EQ(Lines(table).size(), 3U) << table;
}

}  // namespace
}  // namespace tessera::e2e
