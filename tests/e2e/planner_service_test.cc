// The planner of a daemon as its operators meet it: every call, who may make it, what is refused, what a change does to
// products that are computed, what is left over a restart. On the CPU backend, whose recipes are many too.
#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "client/planner.h"
#include "common/text.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/inline_problem.h"

namespace tessera::e2e {
namespace {

using absl::StatusCode;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr char kClass[] = "gemm.cpu.bf16_bf16.f32.fast.NT";

std::string RowTo(const std::string& recipe, const std::string& bands = "") {
  return std::string(kClass) + " " + bands + (bands.empty() ? "" : " ") + "-> " + recipe + "\n";
}

v1::Problem Shape(std::int64_t m, std::int64_t n, std::int64_t k) {
  v1::Problem problem;
  v1::GemmShape& shape = *problem.mutable_gemm();
  shape.set_d(v1::DTYPE_F32);
  shape.set_m(m);
  shape.set_n(n);
  shape.set_k(k);
  return problem;
}

class PlannerTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    Restart({});
  }

  void Restart(SettingTexts settings) {
    settings.emplace_back("cache_dir", "off");
    settings.insert(settings.end(), extra_.begin(), extra_.end());
    StartDaemon(settings);
    client_.emplace(Connect());
    planner_.emplace(*client_);
  }

  const client::Planner& planner() const { return *planner_; }

  absl::StatusOr<v1::ChangeReply> SetTable(const std::string& text, const v1::ChangeOptions& options = {}) {
    v1::SetTableRequest request;
    request.set_text(text);
    *request.mutable_options() = options;
    return planner().SetTable(request);
  }
  absl::StatusOr<v1::ChangeReply> Inject(const std::string& text, v1::InjectMode mode = v1::INJECT_MODE_APPEND) {
    v1::InjectRowsRequest request;
    request.set_text(text);
    request.set_mode(mode);
    return planner().InjectRows(request);
  }
  absl::StatusOr<v1::ChangeReply> SetMode(const std::string& mode, const v1::ChangeOptions& options = {}) {
    v1::SetPlannerRequest request;
    request.set_mode(mode);
    *request.mutable_options() = options;
    return planner().SetPlanner(request);
  }
  absl::StatusOr<v1::ChangeReply> Rollback(std::uint64_t revision) {
    v1::RollbackRequest request;
    request.set_revision(revision);
    return planner().Rollback(request);
  }

  v1::ProbeReply Probe(std::int64_t m = 40, std::int64_t n = 40, std::int64_t k = 200) {
    v1::ProbeRequest request;
    *request.mutable_problem() = Shape(m, n, k);
    const auto reply = planner().Probe(request);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *reply : v1::ProbeReply();
  }
  // "source recipe" of a product that is computed, and must be right.
  std::string Computed(std::int64_t m = 40, std::int64_t n = 40, std::int64_t k = 200) {
    InlineProblem problem(m, n, k);
    const auto result = client_->Gemm(problem.spec());
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return "failed";
    problem.ExpectRight();
    const std::string& variant = result->report.variant();
    return result->report.source() + " " + variant.substr(variant.find('/') + 1);
  }
  v1::PlannerStateReply State() {
    const auto state = planner().State();
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? *state : v1::PlannerStateReply();
  }
  std::uint32_t RowsOf(const std::string& tier) {
    const v1::PlannerStateReply state = State();
    for (const v1::RowCount& row : state.rows()) {
      if (row.tier() == tier) return row.rows();
    }
    ADD_FAILURE() << "no tier " << tier;
    return 0;
  }
  std::vector<v1::PlannerChange> Changes() {
    const auto list = planner().ListChanges();
    EXPECT_TRUE(list.ok()) << list.status();
    return list.ok() ? std::vector<v1::PlannerChange>(list->changes().begin(), list->changes().end())
                     : std::vector<v1::PlannerChange>();
  }

  client::Client& client() { return *client_; }

  SettingTexts extra_;

 private:
  std::optional<client::Client> client_;
  std::optional<client::Planner> planner_;
};

TEST_F(PlannerTest, BeginsWithTheDefaults) {
  const v1::PlannerStateReply state = State();
  EXPECT_EQ(state.mode(), "hybrid");
  EXPECT_TRUE(state.mode_is_default());
  EXPECT_FALSE(state.rows_off());
  EXPECT_TRUE(state.tma());
  EXPECT_FALSE(state.log());
  EXPECT_EQ(RowsOf("override"), 0U);
  EXPECT_EQ(RowsOf("injected"), 0U);
  EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
}

TEST_F(PlannerTest, OverrideRowsDecideUntilTheyAreRemoved) {
  const auto set = SetTable("# mine\n\n" + RowTo("reference", "m(0,64] k(64,*]"));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_TRUE(set->changed());
  EXPECT_GT(set->new_revision(), set->old_revision());
  EXPECT_EQ(set->rows(), 1U);
  EXPECT_EQ(RowsOf("override"), 1U);
  EXPECT_EQ(Computed(), "override reference");
  EXPECT_EQ(Computed(65), "degraded blocked_96x96x256") << "outside of the band";
  const v1::ProbeReply probe = Probe();
  EXPECT_EQ(probe.plan().source(), "override");
  EXPECT_EQ(probe.plan().variant(), std::string(kClass) + "/reference");
  EXPECT_THAT(probe.row(), HasSubstr("m(0,64]"));
  EXPECT_EQ(probe.line(), 3U);
  ASSERT_TRUE(SetTable("").ok());
  EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
  EXPECT_EQ(RowsOf("override"), 0U);
}

TEST_F(PlannerTest, InjectedRowsStandBelowOverrideRows) {
  ASSERT_TRUE(Inject(RowTo("reference")).ok());
  EXPECT_EQ(Computed(), "injected reference");
  ASSERT_TRUE(SetTable(RowTo("splitk_48x48x512", "k(100,*]")).ok());
  EXPECT_EQ(Computed(), "override splitk_48x48x512");
  EXPECT_EQ(Computed(40, 40, 100), "injected reference");
  const auto replaced = Inject(RowTo("blocked_96x96x256"), v1::INJECT_MODE_REPLACE);
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_EQ(RowsOf("injected"), 1U);
  EXPECT_EQ(Computed(40, 40, 100), "injected blocked_96x96x256");
  ASSERT_TRUE(Inject("", v1::INJECT_MODE_CLEAR).ok());
  EXPECT_EQ(RowsOf("injected"), 0U);
}

TEST_F(PlannerTest, ADashSwitchesEveryRowOff) {
  ASSERT_TRUE(Inject(RowTo("reference")).ok());
  ASSERT_TRUE(SetTable("-").ok());
  EXPECT_TRUE(State().rows_off());
  EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
  ASSERT_TRUE(SetTable("").ok());
  EXPECT_FALSE(State().rows_off());
  EXPECT_EQ(Computed(), "injected reference");
}

TEST_F(PlannerTest, TheModeSaysWhoIsAsked) {
  ASSERT_TRUE(Inject(RowTo("reference")).ok());
  const auto model = SetMode("model");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->new_value(), "model");
  EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
  ASSERT_TRUE(SetMode("table").ok());
  EXPECT_EQ(State().mode(), "table");
  EXPECT_FALSE(State().mode_is_default());
  EXPECT_EQ(Computed(), "injected reference");
  ASSERT_TRUE(SetMode("").ok());
  EXPECT_TRUE(State().mode_is_default());
  EXPECT_EQ(SetMode("best").status().code(), StatusCode::kInvalidArgument);
}

TEST_F(PlannerTest, ADryRunSaysWhatWouldChangeAndChangesNothing) {
  v1::ChangeOptions options;
  options.set_dry_run(true);
  *options.add_probes() = Shape(40, 40, 200);
  *options.add_probes() = Shape(4000, 40, 200);
  const std::uint64_t revision = State().revision();
  const auto reply = SetTable(RowTo("reference", "m(0,64]"), options);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->dry_run());
  EXPECT_TRUE(reply->changed());
  EXPECT_EQ(reply->rows(), 1U);
  EXPECT_EQ(reply->probes_changed(), 1U);
  ASSERT_EQ(reply->probes_size(), 2);
  EXPECT_TRUE(reply->probes(0).changed());
  EXPECT_EQ(reply->probes(0).before().source(), "degraded");
  EXPECT_EQ(reply->probes(0).after().source(), "override");
  EXPECT_FALSE(reply->probes(1).changed());
  EXPECT_EQ(State().revision(), revision);
  EXPECT_EQ(RowsOf("override"), 0U);
  EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
}

TEST_F(PlannerTest, WhoWasSlowerIsToldTheRevision) {
  v1::ChangeOptions options;
  options.set_expected_revision(State().revision());
  const auto first = SetMode("table", options);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = SetMode("model", options);
  EXPECT_EQ(second.status().code(), StatusCode::kAborted);
  EXPECT_THAT(MessageOf(second.status()), HasSubstr(std::to_string(first->new_revision())));
  EXPECT_EQ(State().mode(), "table");
  options.set_dry_run(true);
  EXPECT_EQ(SetMode("model", options).status().code(), StatusCode::kAborted) << "a dry run tells it too";
}

TEST_F(PlannerTest, RollbackSetsEverythingAsItWas) {
  ASSERT_TRUE(SetTable(RowTo("reference")).ok());
  const std::uint64_t wanted = State().revision();
  ASSERT_TRUE(SetMode("table").ok());
  ASSERT_TRUE(SetTable(RowTo("splitk_48x48x512")).ok());
  EXPECT_THAT(State().revisions(), Contains(wanted));
  const auto back = Rollback(wanted);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_GT(back->new_revision(), wanted);
  EXPECT_EQ(State().mode(), "hybrid");
  EXPECT_EQ(Computed(), "override reference");
  const absl::Status unknown = Rollback(123'456).status();
  EXPECT_EQ(unknown.code(), StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(unknown), HasSubstr("123456"));
}

TEST_F(PlannerTest, WrongRowsAreNamedByLineColumnAndField) {
  ASSERT_TRUE(SetTable(RowTo("reference")).ok());
  const std::uint64_t revision = State().revision();
  const std::pair<std::string, std::string> cases[] = {
      {RowTo("reference") + "gemm.cpu.nonsense -> x\n", "line 2"},
      {RowTo("reference", "m(9,3]"), "line 1"},
      {RowTo("reference", "q(0,3]"), "line 1"},
      {RowTo("reference", "m(0,3"), "line 1"},
      {std::string(kClass) + "\n", "line 1"},
      {std::string(kClass) + " ->\n", "line 1"},
      {"\n\n1 2 3\n", "line 3"},
      {RowTo("reference split=0"), "line 1"},
      {std::string(100'000, 'x'), "line 1"},
      {std::string("\0\1\2", 3), "line 1"},
  };
  for (const auto& [text, where] : cases) {
    const absl::Status status = SetTable(text).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text.substr(0, 80) << ": " << status;
    EXPECT_THAT(MessageOf(status), AllOf(HasSubstr("text"), HasSubstr(where))) << text.substr(0, 80);
    EXPECT_EQ(Inject(text).status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(SetTable("\xff\xfe").status().code(), StatusCode::kInvalidArgument) << "no text that protobuf carries";
  std::string many;
  for (int i = 0; i < 20'000; ++i) many += RowTo("reference");
  EXPECT_EQ(SetTable(many).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(State().revision(), revision) << "a refused call changes nothing";
  EXPECT_EQ(Computed(), "override reference");
}

TEST_F(PlannerTest, StagingIsSwitchedAndWhatIsNotThereIsRefused) {
  v1::SetStagingRequest request;
  EXPECT_EQ(planner().SetStaging(request).status().code(), StatusCode::kInvalidArgument) << "nothing named";
  request.set_tma(false);
  const auto off = planner().SetStaging(request);
  ASSERT_TRUE(off.ok()) << off.status();
  EXPECT_TRUE(off->changed());
  EXPECT_FALSE(State().tma());
  const auto again = planner().SetStaging(request);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->changed());
  EXPECT_EQ(again->new_revision(), again->old_revision());
  request.set_mx(true);
  const absl::Status mx = planner().SetStaging(request).status();
  EXPECT_EQ(mx.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(MessageOf(mx), HasSubstr("mx"));
}

TEST_F(PlannerTest, TheLogIsSwitched) {
  v1::SetLogRequest request;
  request.set_enabled(true);
  ASSERT_TRUE(planner().SetLog(request).ok());
  EXPECT_TRUE(State().log());
  EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
}

TEST_F(PlannerTest, RowsGoOutAndComeBackAsText) {
  ASSERT_TRUE(SetTable(RowTo("reference", "m(0,64] n(16,*]")).ok());
  ASSERT_TRUE(Inject(RowTo("splitk_48x48x512", "k(1024,*]")).ok());
  const auto all = planner().ExportRows();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->rows(), 2U);
  v1::ExportRowsRequest only;
  only.set_tier(v1::ROW_TIER_OVERRIDE);
  const auto override_rows = planner().ExportRows(only);
  ASSERT_TRUE(override_rows.ok());
  EXPECT_EQ(override_rows->rows(), 1U);
  ASSERT_TRUE(SetTable("").ok());
  v1::ImportRowsRequest import;
  import.set_text(all->text());
  import.set_mode(v1::INJECT_MODE_REPLACE);
  const auto imported = planner().ImportRows(import);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(RowsOf("injected"), 2U);
  only.set_tier(v1::ROW_TIER_INJECTED);
  EXPECT_EQ(planner().ExportRows(only)->rows(), 2U);
  EXPECT_EQ(Computed(), "injected reference");
}

TEST_F(PlannerTest, FactsAndVocabularySayWhatRowsCanName) {
  const auto facts = planner().Facts();
  ASSERT_TRUE(facts.ok()) << facts.status();
  ASSERT_GT(facts->devices_size(), 0);
  EXPECT_EQ(facts->devices(0).name(), "cpu");
  EXPECT_TRUE(facts->devices(0).served());
  std::vector<std::string> known;
  for (const v1::DeviceFactsInfo& device : facts->devices()) known.push_back(device.name());
  EXPECT_THAT(known, AllOf(Contains("h200"), Contains("a100")));
  v1::TileVocabularyRequest request;
  request.set_class_prefix(kClass);
  const auto vocabulary = planner().TileVocabulary(request);
  ASSERT_TRUE(vocabulary.ok()) << vocabulary.status();
  ASSERT_GE(vocabulary->recipes_size(), 3);
  for (const v1::Recipe& recipe : vocabulary->recipes()) {
    EXPECT_EQ(recipe.class_name(), kClass);
    EXPECT_TRUE(recipe.available());
    EXPECT_TRUE(SetTable(RowTo(recipe.recipe())).ok()) << recipe.recipe();
  }
}

// As another device would, on this machine.
TEST_F(PlannerTest, ProbesPlanForDevicesThatAreNotHere) {
  v1::ProbeRequest request;
  *request.mutable_problem() = Shape(4096, 4096, 4096);
  request.mutable_problem()->set_device("h200");
  const auto hopper = planner().Probe(request);
  ASSERT_TRUE(hopper.ok()) << hopper.status();
  EXPECT_THAT(hopper->plan().variant(), HasSubstr(".sm90a."));
  request.mutable_problem()->set_device("a100");
  const auto ampere = planner().Probe(request);
  ASSERT_TRUE(ampere.ok()) << ampere.status();
  EXPECT_THAT(ampere->plan().variant(), HasSubstr(".sm80."));
  request.mutable_problem()->set_device("abacus");
  const absl::Status unknown = planner().Probe(request).status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(unknown), AllOf(HasSubstr("problem.device"), HasSubstr("h200")));
}

TEST_F(PlannerTest, AProbeSaysWhyTheOthersLost) {
  ASSERT_TRUE(Inject(RowTo("reference", "m(0,8]")).ok());
  const v1::ProbeReply probe = Probe();
  EXPECT_EQ(probe.plan().variant(), std::string(kClass) + "/blocked_96x96x256");
  bool row_seen = false;
  for (const v1::ProbeCandidate& candidate : probe.candidates()) {
    EXPECT_NE(candidate.reason(), "");
    EXPECT_NE(candidate.variant(), probe.plan().variant());
    row_seen = row_seen || (candidate.source() == "injected" && candidate.reason() == "bands");
  }
  EXPECT_TRUE(row_seen);
  EXPECT_GE(probe.candidates_size(), 3);
  v1::ProbeRequest request;
  *request.mutable_problem() = Shape(40, 40, 200);
  request.set_candidates_max(1);
  const auto cut = planner().Probe(request);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(cut->candidates_size(), 1);
  EXPECT_TRUE(cut->more());
}

TEST_F(PlannerTest, ProbesOfWhatCannotBePlannedSayWhy) {
  v1::ProbeRequest request;
  EXPECT_EQ(planner().Probe(request).status().code(), StatusCode::kInvalidArgument);
  *request.mutable_problem() = Shape(40, 40, 200);
  request.mutable_problem()->set_backend(v1::BACKEND_CUDA);
  const absl::Status cuda = planner().Probe(request).status();
  EXPECT_EQ(cuda.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(MessageOf(cuda), HasSubstr("cuda is not available"));
  *request.mutable_problem() = Shape(40, 40, 200);
  request.mutable_problem()->mutable_gemm()->set_a(v1::DTYPE_S32);
  EXPECT_EQ(planner().Probe(request).status().code(), StatusCode::kUnimplemented);
}

TEST_F(PlannerTest, TheCacheCountsAndFollowsChanges) {
  const v1::PlannerStateReply before = State();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
  v1::PlannerStateReply after = State();
  EXPECT_EQ(after.cache_misses() - before.cache_misses(), 1U);
  EXPECT_EQ(after.cache_hits() - before.cache_hits(), 4U);
  ASSERT_TRUE(SetTable(RowTo("reference")).ok());
  EXPECT_EQ(Computed(), "override reference");
  EXPECT_EQ(State().cache_misses() - after.cache_misses(), 1U);
  after = State();
  Probe();
  EXPECT_EQ(State().cache_hits() + State().cache_misses(), after.cache_hits() + after.cache_misses())
      << "a probe leaves it alone";
  extra_ = {{"planner_cache_plans", "0"}};
  Restart({});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Computed(), "degraded blocked_96x96x256");
  EXPECT_EQ(State().cache_hits(), 0U);
}

TEST_F(PlannerTest, EveryChangeIsRecordedWithWhoMadeIt) {
  const std::size_t at_start = Changes().size();
  ASSERT_TRUE(SetMode("table").ok());
  ASSERT_TRUE(SetTable(RowTo("reference")).ok());
  ASSERT_FALSE(SetTable("nonsense").ok());
  v1::ChangeOptions dry;
  dry.set_dry_run(true);
  ASSERT_TRUE(SetMode("model", dry).ok());
  const std::vector<v1::PlannerChange> changes = Changes();
  ASSERT_EQ(changes.size(), at_start + 2) << "neither refusals nor dry runs";
  EXPECT_EQ(changes[0].what(), "SetTable");
  EXPECT_EQ(changes[1].what(), "SetPlanner");
  EXPECT_EQ(changes[0].revision(), State().revision());
  EXPECT_EQ(changes[0].old_revision(), changes[1].revision());
  EXPECT_EQ(changes[1].new_value(), "table");
  for (const v1::PlannerChange& change : {changes[0], changes[1]}) {
    EXPECT_EQ(change.who(), client().ServerInfo()->principal());
    EXPECT_GT(change.time_unix_ms(), 1'600'000'000'000);
  }
  v1::ListChangesRequest one;
  one.set_limit(1);
  const auto newest = planner().ListChanges(one);
  ASSERT_TRUE(newest.ok());
  ASSERT_EQ(newest->changes_size(), 1);
  EXPECT_TRUE(newest->more());
  one.set_before_sequence(newest->changes(0).sequence());
  EXPECT_EQ(planner().ListChanges(one)->changes(0).what(), "SetPlanner");
}

TEST_F(PlannerTest, TheRecordSurvivesRestartsAndDamage) {
  extra_ = {{"state_dir", directory().File("state")}};
  Restart({});
  ASSERT_TRUE(SetMode("table").ok());
  ASSERT_TRUE(SetTable(RowTo("reference")).ok());
  const std::vector<v1::PlannerChange> before = Changes();
  ASSERT_TRUE(planner().ListChanges()->persisted());
  Restart({});
  std::vector<v1::PlannerChange> after = Changes();
  ASSERT_GE(after.size(), before.size());
  const auto same = [&](const v1::PlannerChange& change) {
    return change.sequence() == before[0].sequence() && change.what() == "SetTable" &&
           change.epoch() == before[0].epoch();
  };
  EXPECT_EQ(std::count_if(after.begin(), after.end(), same), 1);
  EXPECT_EQ(State().mode(), "hybrid") << "what was set is gone, only its record is kept";
  ASSERT_TRUE(SetMode("model").ok());
  EXPECT_GT(Changes()[0].sequence(), before[0].sequence());
}

TEST_F(PlannerTest, SettingsAreWhatItBeginsWith) {
  const std::string path = directory().File("rows.txt");
  std::ofstream(path) << RowTo("reference");
  Restart({{"planner_table", path}, {"planner_mode", "table"}, {"planner_log", "true"}, {"planner_tma", "false"}});
  const v1::PlannerStateReply state = State();
  EXPECT_EQ(state.mode(), "table");
  EXPECT_TRUE(state.log());
  EXPECT_FALSE(state.tma());
  EXPECT_EQ(Computed(), "override reference");
  std::ofstream(path) << RowTo("splitk_48x48x512");
  EXPECT_EQ(Computed(40, 41, 200), "override reference") << "read once";
  ASSERT_TRUE(SetTable("").ok());
  EXPECT_EQ(Computed(), "degraded blocked_96x96x256") << "a call wins";
  Restart({{"planner_table", "-"}});
  EXPECT_TRUE(State().rows_off());
}

TEST_F(PlannerTest, ATableThatCannotBeUsedKeepsTheDaemonFromStarting) {
  StopDaemon();
  const std::string path = directory().File("rows.txt");
  const auto start = [&](const std::string& table) {
    const auto loaded = server::LoadSettings({.flags = {{"socket", socket()},
                                                        {"http_address", ""},
                                                        {"cuda_device", "off"},
                                                        {"cache_dir", "off"},
                                                        {"planner_table", table}}});
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return server::Daemon::Start(*loaded).status();
  };
  EXPECT_THAT(MessageOf(start(path)), AllOf(HasSubstr("planner_table"), HasSubstr(path)));
  std::ofstream(path) << RowTo("reference") << "nonsense\n";
  EXPECT_THAT(MessageOf(start(path)), AllOf(HasSubstr(path), HasSubstr("line 2")));
  EXPECT_THAT(MessageOf(start(directory().File(""))), HasSubstr("planner_table"));
  EXPECT_THAT(MessageOf(start("/dev/zero")), HasSubstr("planner_table"));
  Restart({});
}

TEST_F(PlannerTest, WhoMay) {
  extra_ = {{"tcp_address", "127.0.0.1:0"}, {"tcp_plaintext", "true"}};
  Restart({});
  client::ConnectOptions tcp;
  tcp.address = daemon().tcp_address();
  const client::Client anonymous = client::Client::Connect(tcp).value();
  const client::Planner remote(anonymous);
  v1::ProbeRequest probe;
  *probe.mutable_problem() = Shape(8, 8, 8);
  EXPECT_TRUE(remote.Probe(probe).ok());
  EXPECT_TRUE(remote.Facts().ok());
  EXPECT_TRUE(remote.TileVocabulary().ok());
  const auto denied = [](const absl::Status& status) { return status.code() == StatusCode::kPermissionDenied; };
  EXPECT_TRUE(denied(remote.State().status()));
  EXPECT_TRUE(denied(remote.ExportRows().status()));
  EXPECT_TRUE(denied(remote.SetPlanner({}).status()));
  EXPECT_TRUE(denied(remote.SetTable({}).status()));
  EXPECT_TRUE(denied(remote.InjectRows({}).status()));
  EXPECT_TRUE(denied(remote.SetLog({}).status()));
  EXPECT_TRUE(denied(remote.SetStaging({}).status()));
  EXPECT_TRUE(denied(remote.Rollback({}).status()));
  EXPECT_TRUE(denied(remote.ImportRows({}).status()));
  EXPECT_TRUE(denied(remote.ListChanges().status()));
  EXPECT_TRUE(denied(remote.WatchDecisions({}, [](const v1::WatchDecisionsReply&) { return true; })));
}

TEST_F(PlannerTest, MetricsFollow) {
  const std::string at_start = Metrics();
  EXPECT_EQ(MetricSum(at_start, "tessera_planner_decisions_total", {R"(source="override")"}), 0);
  EXPECT_EQ(MetricSum(at_start, "tessera_planner_rows", {R"(tier="override")"}), 0);
  ASSERT_TRUE(SetTable(RowTo("reference")).ok());
  EXPECT_EQ(Computed(), "override reference");
  EXPECT_EQ(Computed(), "override reference");
  const std::string metrics = Metrics();
  EXPECT_EQ(MetricSum(metrics, "tessera_planner_decisions_total",
                      {R"(source="override")", R"(class="bf16_bf16.f32.fast.NT")"}),
            2);
  EXPECT_EQ(MetricSum(metrics, "tessera_planner_rows", {R"(tier="override")"}), 1);
  EXPECT_EQ(MetricSum(metrics, "tessera_planner_revision"), static_cast<double>(State().revision()));
  EXPECT_EQ(MetricSum(metrics, "tessera_planner_cache_lookups_total", {R"(result="hit")"}), 1);
  EXPECT_EQ(MetricSum(metrics, "tessera_planner_changes_total") - MetricSum(at_start, "tessera_planner_changes_total"),
            1);
  EXPECT_EQ(MetricSum(metrics, "tessera_rpcs_total", {R"(method="Planner.SetTable")", R"(code="OK")"}), 1);
}

}  // namespace
}  // namespace tessera::e2e
