// The `tessera` command as people and scripts meet it: output for both, files in and out, exit codes.

#include <gmock/gmock.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <set>

#include "client/tensor_file.h"
#include "server/config/settings.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/oracle/codec.h"

namespace tessera::e2e {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::vector<std::string> kCommands = {"status", "gemm", "buffers", "metrics", "log-level", "config", "drain"};

class CliTest : public DaemonFixture {
 protected:
  Finished Tessera(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), TESSERA_CLI);
    arguments.insert(arguments.end(), {"--socket", socket()});
    return RunProgram(arguments);
  }

  // Runs with --json; the document, discarded (see is_discarded) if it is none.
  json Json(std::vector<std::string> arguments, int code = 0) const {
    arguments.emplace_back("--json");
    const Finished run = Tessera(arguments);
    EXPECT_EQ(run.code, code) << run.out << run.err;
    json document = json::parse(run.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(document.is_discarded()) << run.out;
    return document;
  }
};

std::set<std::string> KeysOf(const json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

// Packed elements of a tensor file.
std::vector<std::byte> Elements(DType dtype, const std::vector<double>& values) {
  std::vector<std::byte> bytes(values.size() * DTypeBytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    oracle::Encode(dtype, values[i], bytes.data() + i * DTypeBytes(dtype));
  }
  return bytes;
}

TEST_F(CliTest, EveryCommandExplainsItself) {
  const Finished all = RunProgram({TESSERA_CLI, "--help"});
  EXPECT_EQ(all.code, 0);
  for (const std::string& command : kCommands) {
    EXPECT_THAT(all.out, HasSubstr(command));
    const Finished one = RunProgram({TESSERA_CLI, command, "--help"});
    EXPECT_EQ(one.code, 0) << command;
    EXPECT_THAT(one.out, HasSubstr(command));
  }
}

TEST_F(CliTest, Status) {
  const Finished table = Tessera({"status"});
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr(socket()));
  EXPECT_THAT(table.out, HasSubstr("serving"));
  EXPECT_THAT(table.out, HasSubstr("cpu (default)"));
  const json status = Json({"status"});
  EXPECT_EQ(status.value("version", ""), server::Version());
  EXPECT_EQ(status.value("pid", 0), ::getpid());
  EXPECT_EQ(status.value("state", ""), "serving");
  EXPECT_EQ(status.value("socket", ""), socket());
  EXPECT_EQ(status.value("sessions", -1), 0);
  EXPECT_EQ(status.value("administrator", false), true);
  ASSERT_TRUE(status.contains("backends"));
  EXPECT_EQ(status["backends"].size(), 3U);
}

TEST_F(CliTest, TalksOverTcp) {
  StartDaemon({{"tcp_address", "127.0.0.1:0"}, {"tcp_plaintext", "true"}});
  const std::vector<std::string> tcp = {TESSERA_CLI, "--address", daemon().tcp_address(), "--plaintext"};
  const auto over_tcp = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), tcp.begin(), tcp.end());
    return RunProgram(arguments);
  };
  const Finished status = over_tcp({"status"});
  EXPECT_EQ(status.code, 0) << status.err;
  EXPECT_THAT(status.out, HasSubstr("anonymous"));
  const Finished gemm = over_tcp({"gemm", "-m", "50", "-n", "40", "-k", "30", "--pair", "s8_s8", "--layout", "TT",
                                  "--scales", "row_col", "--bias", "--check"});
  EXPECT_EQ(gemm.code, 0) << gemm.out << gemm.err;
  EXPECT_THAT(gemm.out, HasSubstr("ok, worst error"));
  const Finished large = over_tcp({"gemm", "-m", "1024", "-n", "16", "-k", "1024"});
  EXPECT_EQ(large.code, 1);
  EXPECT_THAT(large.err, HasSubstr("inline_bytes_max"));
  const Finished config = over_tcp({"config"});
  EXPECT_EQ(config.code, 1);
  EXPECT_THAT(config.err, HasSubstr("anonymous is no administrator"));
}

TEST_F(CliTest, TcpOptionsGoTogether) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--plaintext", "status"}, {"--ca", "x", "status"}, {"--key", "x", "status"}}) {
    std::vector<std::string> command = arguments;
    command.insert(command.begin(), TESSERA_CLI);
    const Finished run = RunProgram(command);
    EXPECT_EQ(run.code, 2) << arguments[0];
    EXPECT_THAT(run.err, HasSubstr("--address")) << arguments[0];
  }
  const Finished no_files = RunProgram({TESSERA_CLI, "--address", "127.0.0.1:1", "status"});
  EXPECT_EQ(no_files.code, 1);
  EXPECT_THAT(no_files.err, HasSubstr("cannot read the CA file"));
  const Finished nobody =
      RunProgram({TESSERA_CLI, "--address", "127.0.0.1:1", "--plaintext", "--timeout-ms", "300", "status"});
  EXPECT_EQ(nobody.code, 3);
  EXPECT_THAT(nobody.err, HasSubstr("no daemon answers at 127.0.0.1:1"));
}

TEST_F(CliTest, GemmOnRandomDataIsChecked) {
  const Finished table = Tessera({"gemm", "-m", "50", "-n", "40", "-k", "30", "--check"});
  EXPECT_EQ(table.code, 0) << table.out << table.err;
  EXPECT_THAT(table.out, HasSubstr("ok, worst error"));
  EXPECT_THAT(table.out, HasSubstr("50x30 . 40x30^T -> 50x40"));
  for (const char* pair : {"bf16_bf16", "e4m3_e5m2", "s8_s8", "bf16_s8", "s8_bf16"}) {
    for (const char* layout : {"NT", "NN", "TN", "TT"}) {
      const json result =
          Json({"gemm",  "-m",  "33",       "-n",      "18",     "-k",      "70", "--pair",   pair, "--layout", layout,
                "--out", "f32", "--scales", "row_col", "--bias", "--batch", "2",  "--repeat", "2",  "--check"});
      EXPECT_EQ(result.value("wrong", -1), 0) << pair << ' ' << layout << ": " << result;
    }
  }
}

TEST_F(CliTest, GemmReportsWhatRan) {
  const json result = Json({"gemm", "-m", "16", "-n", "24", "-k", "8", "--repeat", "3", "--check"});
  EXPECT_EQ(KeysOf(result),
            (std::set<std::string>{"variant", "backend", "source", "split", "a", "b", "d", "calls", "round_trip_us",
                                   "run_us", "gflops", "wrong", "worst_error_of_allowed"}));
  EXPECT_EQ(result.value("backend", ""), "cpu");
  EXPECT_EQ(result.value("a", ""), "16x8");
  EXPECT_EQ(result.value("calls", 0), 3);
  EXPECT_GT(result.value("round_trip_us", 0.0), 0);
}

TEST_F(CliTest, GemmReadsAndWritesFiles) {
  const std::string a = directory().File("x.safetensors");
  const std::string b = directory().File("y.npy");
  const std::vector<std::byte> a_data = Elements(DType::kBf16, {1, 2, 3, 4, -1, 0, 5, 2});
  const std::vector<std::byte> b_data = Elements(DType::kS8, {1, 0, -2, 1, 10, 20, 30, 40, 0, 0, 0, 7});
  ASSERT_TRUE(client::WriteTensorFile(a, {.name = "x", .dtype = DType::kBf16, .shape = {2, 4}, .data = a_data}).ok());
  ASSERT_TRUE(client::WriteTensorFile(b, {.name = "", .dtype = DType::kS8, .shape = {3, 4}, .data = b_data}).ok());
  const std::vector<double> want = {-0.5, 150, 14, -4.5, 110, 7};  // times the scale of one half
  for (const char* name : {"d.npy", "d.safetensors"}) {
    const std::string d = directory().File(name);
    const json result = Json({"gemm", "--a", a + ":x", "--b", b, "--b-scale", "0.5", "--out", "f32", "--repeat", "1",
                              "--check", "--save", d});
    EXPECT_EQ(result.value("wrong", -1), 0) << result;
    EXPECT_EQ(result.value("d", ""), "2x3");
    const client::TensorFile file = client::TensorFile::Open(d).value();
    const client::TensorFileEntry entry = file.Find("").value();
    EXPECT_EQ(entry.dtype, DType::kF32);
    EXPECT_EQ(entry.shape, (std::vector<std::int64_t>{2, 3}));
    std::vector<std::byte> data(entry.bytes);
    ASSERT_TRUE(file.Read(entry, data).ok());
    EXPECT_EQ(data, Elements(DType::kF32, want)) << name;
  }
}

TEST_F(CliTest, GemmTakesAFileOfKByN) {
  const std::string b = directory().File("kn.npy");
  const std::vector<std::byte> b_data = Elements(DType::kS8, {1, 2, 3, 4, 5, 6});
  ASSERT_TRUE(client::WriteTensorFile(b, {.name = "", .dtype = DType::kS8, .shape = {3, 2}, .data = b_data}).ok());
  const json result = Json({"gemm", "--b", b, "--b-is-kn", "-m", "5", "-k", "3", "--b-scale", "1", "--check"});
  EXPECT_EQ(result.value("wrong", -1), 0) << result;
  EXPECT_EQ(result.value("b", ""), "2x3");
}

TEST_F(CliTest, Buffers) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("held by the test").value();
  const client::Buffer buffer = session.Allocate(5000).value();
  for (const bool all : {false, true}) {
    std::vector<std::string> arguments = {"buffers"};
    if (all) arguments.emplace_back("--all");
    const Finished table = Tessera(arguments);
    EXPECT_EQ(table.code, 0) << table.err;
    EXPECT_THAT(table.out, HasSubstr("held by the test"));
    EXPECT_THAT(table.out, HasSubstr("1 buffer,"));
    const json list = Json(arguments);
    ASSERT_EQ(list.size(), 1U);
    EXPECT_EQ(KeysOf(list[0]), (std::set<std::string>{"buffer_id", "origin", "space", "bytes", "references", "age_ms",
                                                      "principal", "owner_pid", "session", "session_label", "shares"}));
    EXPECT_EQ(list[0].value("bytes", 0), 5000);
    EXPECT_EQ(list[0].value("origin", ""), "allocated");
    EXPECT_EQ(list[0].value("buffer_id", "").size(), 32U);
  }
}

TEST_F(CliTest, LogLevel) {
  EXPECT_EQ(Json({"log-level"}), (json{{"level", "error"}}));
  EXPECT_EQ(Json({"log-level", "off"}), (json{{"previous", "error"}, {"level", "off"}}));
  const Finished shown = Tessera({"log-level"});
  EXPECT_EQ(shown.out, "off\n");
  const Finished set = Tessera({"log-level", "error"});
  EXPECT_EQ(set.out, "off -> error\n");
  const Finished refused = Tessera({"log-level", "shout"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("shout"));
}

TEST_F(CliTest, Config) {
  const Finished table = Tessera({"config"});
  EXPECT_EQ(table.code, 0) << table.err;
  const json rows = Json({"config"});
  ASSERT_EQ(rows.size(), server::SettingRows().size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string name(server::SettingRows()[i].name);
    EXPECT_EQ(rows[i].value("name", ""), name);
    EXPECT_EQ(KeysOf(rows[i]), (std::set<std::string>{"name", "value", "default", "unit", "source"}));
    EXPECT_THAT(table.out, HasSubstr(name));
  }
}

TEST_F(CliTest, MetricsShowsWhatIsNotZero) {
  const Finished table = Tessera({"metrics"});
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr("tessera_ready"));
  EXPECT_THAT(table.out, Not(HasSubstr("_bucket")));
  const json some = Json({"metrics", "tessera_rpcs_total"});
  EXPECT_FALSE(some.empty());
  for (const auto& [name, value] : some.items()) {
    EXPECT_EQ(name.rfind("tessera_rpcs_total", 0), 0U) << name;
    EXPECT_NE(value, "0") << name;
  }
  EXPECT_GT(Json({"metrics", "--all"}).size(), Json({"metrics"}).size());
}

TEST_F(CliTest, Drain) {
  const json drain = Json({"drain"});
  EXPECT_EQ(KeysOf(drain), (std::set<std::string>{"in_flight", "grace_s"}));
  EXPECT_EQ(drain.value("grace_s", 0), server::Settings().drain_grace_s);
  EXPECT_TRUE(daemon().AwaitDrained());
  const Finished again = Tessera({"drain"});
  EXPECT_EQ(again.code, 0);
  EXPECT_THAT(again.out, HasSubstr("draining"));
  EXPECT_THAT(Tessera({"status"}).out, HasSubstr("draining"));
  EXPECT_NE(Tessera({"gemm", "-m", "4", "-n", "4", "-k", "4"}).code, 0);
}

TEST_F(CliTest, RefusalsExitWithOne) {
  const Finished backend = Tessera({"gemm", "-m", "4", "-n", "4", "-k", "4", "--backend", "cuda"});
  EXPECT_EQ(backend.code, 1);
  EXPECT_THAT(backend.err, HasSubstr("UNIMPLEMENTED"));
  EXPECT_THAT(backend.out, IsEmpty());
  EXPECT_EQ(Tessera({"gemm", "--pair", "bf16_f32"}).code, 1);
  EXPECT_EQ(Tessera({"gemm", "--a", directory().File("none.npy")}).code, 1);
  const json error = Json({"gemm", "-m", "4", "-n", "4", "-k", "4", "--backend", "cuda"}, 1);
  ASSERT_TRUE(error.contains("error"));
  EXPECT_EQ(error["error"].value("code", ""), "UNIMPLEMENTED");
  EXPECT_FALSE(error["error"].value("message", "").empty());
}

TEST_F(CliTest, WrongCommandLinesExitWithTwo) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"nonsense"}, {"status", "--nonsense"}, {"gemm", "-m", "minus"}, {"gemm", "--layout", "XY"}, {}}) {
    const Finished run = Tessera(arguments);
    EXPECT_EQ(run.code, 2) << ::testing::PrintToString(arguments);
    EXPECT_THAT(run.out + run.err, Not(IsEmpty()));
  }
}

TEST_F(CliTest, NoDaemonExitsWithThree) {
  StopDaemon();
  for (const std::string& command : kCommands) {
    const Finished run = Tessera({command, "--timeout-ms", "200"});
    EXPECT_EQ(run.code, 3) << command;
    EXPECT_THAT(run.err, HasSubstr(socket())) << command;
  }
  const json error = Json({"status", "--timeout-ms", "200"}, 3);
  ASSERT_TRUE(error.contains("error"));
  EXPECT_EQ(error["error"].value("code", ""), "UNAVAILABLE");
}

}  // namespace
}  // namespace tessera::e2e
