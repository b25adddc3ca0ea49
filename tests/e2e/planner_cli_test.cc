// `tessera plan`: every subcommand for people and for machines, what it refuses, and its exit codes.
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/inline_problem.h"

namespace tessera::e2e {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

constexpr char kRow[] = "gemm.cpu.bf16_bf16.bf16.fast.NT m(0,64] -> reference";

class PlannerCliTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cache_dir", "off"}});
  }

  std::vector<std::string> Command(const std::vector<std::string>& arguments) const {
    std::vector<std::string> command = {TESSERA_CLI, "plan"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    command.insert(command.end(), {"--socket", socket()});
    return command;
  }
  Finished Plan(const std::vector<std::string>& arguments, int code = 0) const {
    Finished run = RunProgram(Command(arguments));
    EXPECT_EQ(run.code, code) << ::testing::PrintToString(arguments) << "\n" << run.out << run.err;
    return run;
  }
  json Json(std::vector<std::string> arguments, int code = 0) const {
    arguments.emplace_back("--json");
    const Finished run = Plan(arguments, code);
    json document = json::parse(run.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(document.is_discarded()) << run.out;
    return document;
  }
  std::string Write(const std::string& text) const {
    std::string path = directory().File("rows.txt");
    std::ofstream(path) << text;
    return path;
  }
};

TEST_F(PlannerCliTest, EverySubcommandExplainsItself) {
  const Finished all = RunProgram({TESSERA_CLI, "plan", "--help"});
  EXPECT_EQ(all.code, 0);
  for (const char* name : {"probe", "state", "facts", "vocabulary", "set", "table", "inject", "log", "staging",
                           "export", "import", "watch", "rollback", "audit"}) {
    EXPECT_THAT(all.out, HasSubstr(name));
    EXPECT_EQ(RunProgram({TESSERA_CLI, "plan", name, "--help"}).code, 0) << name;
  }
  EXPECT_EQ(RunProgram({TESSERA_CLI, "plan"}).code, 2);
  EXPECT_EQ(RunProgram({TESSERA_CLI, "plan", "nonsense"}).code, 2);
}

TEST_F(PlannerCliTest, StateFactsAndVocabulary) {
  EXPECT_THAT(Plan({"state"}).out, AllOf(HasSubstr("hybrid (default)"), HasSubstr("revision")));
  const json state = Json({"state"});
  EXPECT_EQ(state.value("mode", ""), "hybrid");
  EXPECT_EQ(state["rows"].value("override", -1), 0);
  EXPECT_THAT(Plan({"facts"}).out, AllOf(HasSubstr("cpu"), HasSubstr("h200")));
  EXPECT_GE(Json({"facts"}).size(), 4U);
  EXPECT_THAT(Plan({"vocabulary", "gemm.cpu.bf16_bf16.bf16"}).out,
              AllOf(HasSubstr("blocked_96x96x256"), Not(HasSubstr("gemm.sm90a"))));
  EXPECT_THAT(Plan({"vocabulary", "--all"}).out, HasSubstr("gemm.sm90a"));
  const json recipes = Json({"vocabulary", "gemm.cpu.bf16_bf16.bf16.fast.NT"});
  ASSERT_GE(recipes.size(), 3U);
  EXPECT_EQ(recipes[0].value("family", ""), "gemm");
}

TEST_F(PlannerCliTest, Probe) {
  const Finished table = Plan({"probe", "-m", "40", "-n", "40", "-k", "200"});
  EXPECT_THAT(table.out, AllOf(HasSubstr("gemm.cpu.bf16_bf16.bf16.fast.NT/blocked_96x96x256"), HasSubstr("decided by"),
                               HasSubstr("degraded"), HasSubstr("reference")));
  const json probe = Json({"probe", "-m", "4096", "-n", "4096", "-k", "4096", "--pair", "e4m3_e5m2", "--out", "f32",
                           "--accumulation", "exact", "--device", "h200"});
  EXPECT_THAT(probe.value("variant", ""), HasSubstr("gemm.sm90a.e4m3_e5m2.f32.exact.NT"));
  EXPECT_EQ(probe.value("backend", ""), "cuda");
  EXPECT_THAT(Plan({"probe", "-m", "8", "-n", "8", "-k", "8", "--backend", "cuda"}, 1).err, HasSubstr("not available"));
  EXPECT_THAT(Plan({"probe", "-m", "8", "-n", "8", "-k", "8", "--pair", "bf16"}, 1).err, HasSubstr("--pair"));
  Plan({"probe", "-m", "0", "-n", "8", "-k", "8"}, 2);
  Plan({"probe", "-m", "8"}, 2);
  Plan({"probe", "-m", "8", "-n", "8", "-k", "8", "--layout", "XX"}, 2);
}

TEST_F(PlannerCliTest, TablesFromFilesAndRows) {
  const std::string path = Write(std::string(kRow) + "\n");
  const Finished dry = Plan({"table", path, "--dry-run", "--probe", "40x40x200", "--probe", "400x40x200:bf16_bf16:NT"});
  EXPECT_THAT(dry.out,
              AllOf(HasSubstr("would be revision"), HasSubstr("reference (override"), HasSubstr("400x40x200")));
  EXPECT_EQ(Json({"state"})["rows"].value("override", -1), 0);
  EXPECT_THAT(Plan({"table", path}).out, HasSubstr("1 row in force"));
  EXPECT_THAT(Plan({"probe", "-m", "40", "-n", "40", "-k", "200"}).out,
              AllOf(HasSubstr("override"), HasSubstr("line 1")));
  EXPECT_THAT(Plan({"table", path}).out, HasSubstr("nothing to change"));
  Plan({"table", "-"});
  EXPECT_THAT(Plan({"state"}).out, HasSubstr("off"));
  Plan({"table", "--clear"});
  Plan({"table", "--off"});
  EXPECT_TRUE(Json({"state"}).value("rows_off", false));
  Plan({"table", "--clear"});
  EXPECT_EQ(Json({"inject", "--row", kRow, "--row", kRow}).value("rows", 0), 2);
  EXPECT_EQ(Json({"inject", "--row", kRow, "--replace"}).value("rows", 0), 1);
  EXPECT_EQ(Json({"inject", "--clear"}).value("rows", -1), 0);
}

TEST_F(PlannerCliTest, WhatIsWrongIsSaidWithTheWayOut) {
  EXPECT_THAT(Plan({"table", "/no/such/file"}, 1).err, HasSubstr("/no/such/file"));
  const Finished wrong = Plan({"table", Write(std::string(kRow) + "\n\ngemm.cpu.x -> y\n")}, 1);
  EXPECT_THAT(wrong.err, AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("line 3")));
  const json error = Json({"inject", "--row", "x"}, 1);
  EXPECT_EQ(error["error"].value("code", ""), "INVALID_ARGUMENT");
  Plan({"table"}, 2);
  Plan({"table", "--clear", "--row", kRow}, 2);
  Plan({"set", "best"}, 2);
  Plan({"staging"}, 2);
  EXPECT_THAT(Plan({"staging", "--mx", "on"}, 1).err, HasSubstr("UNIMPLEMENTED"));
  EXPECT_THAT(Plan({"rollback", "999999"}, 1).err, HasSubstr("NOT_FOUND"));
  EXPECT_THAT(Plan({"set", "table", "--expect-revision", "999999"}, 1).err, HasSubstr("ABORTED"));
  EXPECT_THAT(Plan({"set", "table", "--probe", "4x4"}, 1).err, HasSubstr("MxNxK"));
  StopDaemon();
  EXPECT_THAT(Plan({"state"}, 3).err, HasSubstr("no daemon answers"));
}

TEST_F(PlannerCliTest, SwitchesRollbackAndAudit) {
  const auto revision = std::to_string(Json({"state"}).value("revision", 0));
  EXPECT_THAT(Plan({"set", "table"}).out, HasSubstr("hybrid"));
  Plan({"log", "on"});
  Plan({"staging", "--tma", "off"});
  json state = Json({"state"});
  EXPECT_EQ(state.value("mode", ""), "table");
  EXPECT_TRUE(state.value("log", false));
  EXPECT_FALSE(state.value("tma", true));
  Plan({"rollback", revision});
  state = Json({"state"});
  EXPECT_EQ(state.value("mode", ""), "hybrid");
  EXPECT_FALSE(state.value("log", true));
  EXPECT_TRUE(state.value("tma", false));
  EXPECT_THAT(Plan({"audit"}).out,
              AllOf(HasSubstr("Rollback"), HasSubstr("SetStaging"), HasSubstr("SetLog"), HasSubstr("SetPlanner")));
  const json audit = Json({"audit", "--limit", "2"});
  ASSERT_EQ(audit["changes"].size(), 2U);
  EXPECT_EQ(audit["changes"][0].value("what", ""), "Rollback");
  EXPECT_TRUE(audit.value("more", false));
  Plan({"set", "default"});
}

TEST_F(PlannerCliTest, ExportAndImport) {
  Plan({"inject", "--row", kRow});
  EXPECT_THAT(Plan({"export"}).out, HasSubstr("m(0,64]"));
  const std::string path = directory().File("out.rows");
  EXPECT_THAT(Plan({"export", "--tier", "injected", "--to", path}).out, HasSubstr("1 row"));
  Plan({"inject", "--clear"});
  EXPECT_THAT(Plan({"import", path}).out, HasSubstr("1 row in force"));
  EXPECT_EQ(Json({"state"})["rows"].value("injected", -1), 1);
  EXPECT_THAT(Plan({"export", "--to", "/no/such/dir/x"}, 1).err, HasSubstr("cannot write"));
  const Finished persist = Plan({"import", path, "--persist"}, 1);
  EXPECT_THAT(persist.out, HasSubstr("not persisted")) << "there is no cache directory";
}

TEST_F(PlannerCliTest, Watch) {
  ChildProcess watch(Command({"watch", "--cached", "--count", "3", "--json"}));
  ASSERT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_planner_watchers") == 1; }));
  client::Client client = Connect();
  for (int i = 0; i < 3; ++i) {
    InlineProblem problem(5, 6, 7);
    ASSERT_TRUE(client.Gemm(problem.spec()).ok());
  }
  ASSERT_EQ(watch.Wait(10s), 0) << watch.Err();
  std::istringstream lines(watch.Out());
  int decisions = 0;
  for (std::string line; std::getline(lines, line); ++decisions) {
    const json decision = json::parse(line, nullptr, /*allow_exceptions=*/false);
    ASSERT_FALSE(decision.is_discarded()) << line;
    EXPECT_THAT(decision.value("problem", ""), HasSubstr("m=5"));
    EXPECT_EQ(decision.value("source", ""), "degraded");
  }
  EXPECT_EQ(decisions, 3);
}

TEST_F(PlannerCliTest, RefusalsSayWhatToDoNext) {
  const std::pair<std::vector<std::string>, const char*> kUsage[] = {
      {{"nosuch"}, "unknown command 'nosuch'; `tessera plan --help` lists them"},
      {{"rollback", "-1"}, "not in range"},
      {{"set", "table", "--expect-revision", "-1"}, "not in range"},
      {{"watch", "--count", "-1"}, "not in range"},
      {{"probe", "-m", "1", "-n", "1", "-k", "1", "--candidates", "1025"}, "not in range"},
  };
  for (const auto& [arguments, message] : kUsage) EXPECT_THAT(Plan(arguments, 2).err, HasSubstr(message));
  const std::string row = kRow;
  const std::pair<std::vector<std::string>, const char*> kRefused[] = {
      {{"table", "--row", "nonsense"},
       "INVALID_ARGUMENT: text: line 1, column 1, class: of no family that is planned; a row begins with a class"},
      {{"inject", "--row", "gemm.cpu.bf16 -> x"},
       "INVALID_ARGUMENT: text: line 1, column 1, class: no class is named 'gemm.cpu.bf16'; `tessera plan vocabulary"},
      {{"rollback", "999999"}, "NOT_FOUND: revision: 999999 is not kept; "},
      {{"set", "table", "--expect-revision", "999999"}, "ABORTED: expected_revision: is 999999, and the configuration"},
      {{"table", "--row", row, "--probe", "8x8x8:foo"}, "--probe 8x8x8:foo: 'foo' is no pair"},
      {{"table", "--row", row, "--probe", "8x8x8:bf16_foo"}, "--probe 8x8x8:bf16_foo: --pair"},
  };
  for (const auto& [arguments, message] : kRefused) EXPECT_THAT(Plan(arguments, 1).err, HasSubstr(message));
  EXPECT_THAT(Plan({"table", Write(row + "\n# caf\xe9\n")}, 1).err, HasSubstr(": line 2 is not UTF-8 text"));
  EXPECT_THAT(Plan({"table", "--row", "\xff"}, 1).err, HasSubstr("--row: line 1 is not UTF-8 text"));
  EXPECT_EQ(Json({"state"}).value("revision", 0), 1) << "refused";
  Plan({"table", Write(row + " # caf\xc3\xa9\n")});
}

TEST_F(PlannerCliTest, CountsTheRowsThatAreInForce) {
  std::string rows;
  for (int i = 0; i < 1000; ++i) rows += std::string(kRow) + "\n";
  const std::string path = Write(rows);
  EXPECT_THAT(Plan({"inject", path}).out, AllOf(HasSubstr("1000 rows in force"), HasSubstr("(and 999 more)")));
  EXPECT_THAT(Plan({"table", path}).out, HasSubstr("2000 rows in force"));
  EXPECT_THAT(Plan({"audit"}).out, HasSubstr("(and 999 more)"));
  EXPECT_THAT(Plan({"table", "--off"}).out, HasSubstr("0 rows in force"));
  EXPECT_THAT(Plan({"table", path}).out, HasSubstr("2000 rows in force"));
  EXPECT_THAT(Plan({"set", "model"}).out, HasSubstr("0 rows in force"));
}

// Changes of whole tables are larger than a small daemon's messages: the list comes in parts.
TEST_F(PlannerCliTest, TheRecordIsListedWhateverItsSize) {
  StopDaemon();
  StartDaemon({{"cache_dir", "off"}, {"message_bytes_max", "96KiB"}, {"inline_bytes_max", "16KiB"}});
  std::string rows;
  for (int i = 0; i < 60; ++i) rows += std::string(kRow) + "\n";
  constexpr std::size_t kChanges = 24;
  for (std::size_t i = 0; i < kChanges; ++i) {
    Plan({"table", Write(rows + "gemm.cpu.bf16_bf16.bf16.fast.NT m(0," + std::to_string(i + 1) + "] -> reference\n")});
  }
  const json all = Json({"audit", "--limit", "1000"});
  ASSERT_EQ(all["changes"].size(), kChanges);
  EXPECT_FALSE(all.value("more", true));
  for (std::size_t i = 0; i < kChanges; ++i) {
    EXPECT_EQ(all["changes"][i].value("sequence", std::size_t{0}), kChanges - i);
    EXPECT_EQ(all["changes"][i].value("epoch", "a"), all.value("epoch", "b"));
  }
  const json some = Json({"audit", "--limit", "20"});
  EXPECT_EQ(some["changes"].size(), 20U);
  EXPECT_TRUE(some.value("more", false));
  EXPECT_THAT(Plan({"audit"}).out, AllOf(HasSubstr("24 changes"), HasSubstr("it has no state_dir")));
}

TEST_F(PlannerCliTest, TheRecordTellsStartsOfTheDaemonApart) {
  StopDaemon();
  const std::string state = directory().File("state");
  for (const char* mode : {"table", "model"}) {
    StartDaemon({{"cache_dir", "off"}, {"state_dir", state}});
    Plan({"set", mode});
    if (std::string(mode) == "table") StopDaemon();
  }
  const Finished audit = Plan({"audit"});
  EXPECT_THAT(audit.out, AllOf(HasSubstr("(2)"), HasSubstr("former starts of the daemon"), HasSubstr("2 changes")));
  EXPECT_THAT(audit.out, Not(HasSubstr("ends with the daemon")));
  const json list = Json({"audit"});
  EXPECT_TRUE(list.value("persisted", false));
  EXPECT_EQ(list.value("persist_error", "-"), "");
  EXPECT_NE(list["changes"][0]["epoch"], list["changes"][1]["epoch"]);
}

}  // namespace
}  // namespace tessera::e2e
