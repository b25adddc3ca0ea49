// Rows that outlive the daemon, as an operator meets them: over restarts, with several daemons in one directory, with
// files that are damaged or come from another device, and where nothing can be kept.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <vector>

#include "client/planner.h"
#include "common/state_directory.h"
#include "common/text.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/exact_product.h"

namespace tessera::e2e {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kClass[] = "gemm.cpu.bf16_bf16.f32.fast.NT";
constexpr std::int64_t kM = 96;
constexpr std::int64_t kN = 80;
constexpr std::int64_t kK = 300;

std::string RowFor(int m_max, const std::string& recipe = "reference") {
  return std::string(kClass) + " m(0," + std::to_string(m_max) + "] -> " + recipe;
}

std::string Read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::size_t CountOf(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// The real daemon in a process of its own, on a cache directory that the test chooses.
class Node {
 public:
  // `environment`: "NAME=value" and, as env has it, "-u" and a name; nothing else of the caller's changes.
  Node(const fs::path& directory, const std::string& name, const std::vector<std::string>& flags,
       const std::vector<std::string>& environment = {})
      : socket_((directory / (name + ".sock")).string()) {
    std::vector<std::string> argv = {"/usr/bin/env", "-u", "TESSERA_CACHE_DIR"};
    argv.insert(argv.end(), environment.begin(), environment.end());
    argv.insert(argv.end(), {TESSERAD, "--socket", socket_, "--http-address", "127.0.0.1:0", "--cuda-device", "off"});
    argv.insert(argv.end(), flags.begin(), flags.end());
    process_.emplace(argv);
    EXPECT_TRUE(Eventually(30s, [this] {
      auto client = client::Client::Connect({.socket = socket_, .side_channel = {}, .timeout = 1s});
      const auto info = client.ok() ? client->ServerInfo() : client.status();
      if (info.ok()) http_address_ = info->http_address();
      return info.ok();
    })) << process_->Err();
    client_.emplace(client::Client::Connect({.socket = socket_, .side_channel = {}, .timeout = 20s}).value());
    planner_.emplace(*client_);
  }

  v1::ChangeReply Import(const std::string& text, v1::InjectMode mode = v1::INJECT_MODE_APPEND, bool persist = true) {
    v1::ImportRowsRequest request;
    request.set_text(text);
    request.set_mode(mode);
    request.set_persist(persist);
    const auto reply = planner_->ImportRows(request);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *reply : v1::ChangeReply();
  }

  // "source recipe" of what a launch would do.
  std::string Probe(std::int64_t m = kM) {
    v1::ProbeRequest request;
    v1::GemmShape& shape = *request.mutable_problem()->mutable_gemm();
    shape.set_d(v1::DTYPE_F32);
    shape.set_m(m);
    shape.set_n(kN);
    shape.set_k(kK);
    const auto reply = planner_->Probe(request);
    EXPECT_TRUE(reply.ok()) << reply.status();
    if (!reply.ok()) return "";
    const std::string& variant = reply->plan().variant();
    return reply->plan().source() + " " + variant.substr(variant.find('/') + 1);
  }

  // The bytes of a product of integers, which must be right.
  std::string Compute() {
    client::Session session = client_->OpenSession("rows").value();
    const client::Buffer buffer = session.Share(ExactProduct::Bytes(kM, kN, kK)).value();
    ExactProduct product(buffer, kM, kN, kK);
    product.Fill(7);
    const auto result = session.Gemm(product.spec());
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(product.Right(7));
    return std::string(reinterpret_cast<const char*>(product.spec().d.data), 4 * kM * kN);
  }

  v1::PlannerStateReply State() {
    const auto state = planner_->State();
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? *state : v1::PlannerStateReply();
  }
  std::string InjectedRows() {
    v1::ExportRowsRequest request;
    request.set_tier(v1::ROW_TIER_INJECTED);
    const std::string text = planner_->ExportRows(request).value().text();
    return text.substr(text.find('\n') + 1);  // without the heading
  }

  std::string Metrics() const { return HttpGet(http_address_, "/metrics").body; }
  std::string Log() const { return process_->Out() + process_->Err(); }
  std::size_t Warnings() const { return CountOf(Log(), "Z warn ["); }
  void Stop() {
    planner_.reset();
    client_.reset();  // a drain waits for open connections
    process_->Signal(SIGTERM);
    EXPECT_EQ(process_->Wait(30s), 0) << Log();
  }
  void Kill() {
    process_->Signal(SIGKILL);
    EXPECT_TRUE(process_->Wait(30s).has_value());
  }

 private:
  const std::string socket_;
  std::optional<ChildProcess> process_;
  std::string http_address_;
  std::optional<client::Client> client_;
  std::optional<client::Planner> planner_;
};

class KeptRowsTest : public ::testing::Test {
 protected:
  fs::path root() const { return directory_.File(""); }
  fs::path cache() const { return directory_.File("cache"); }
  Node Start(const std::string& name = "d") const { return Node(root(), name, {"--cache-dir", cache().string()}); }

  // The only file of rows; empty if there is none.
  fs::path RowsFile() const {
    for (const auto& entry : fs::directory_iterator(cache())) {
      if (entry.path().extension() == ".rows") return entry.path();
    }
    return {};
  }

  const TemporaryDirectory directory_;
};

TEST_F(KeptRowsTest, ARowSurvivesARestartAndDecides) {
  std::string bytes;
  std::string name;
  {
    Node node = Start();
    EXPECT_EQ(node.Probe(), "degraded blocked_96x96x256");
    bytes = node.Compute();
    const v1::ChangeReply reply = node.Import(RowFor(100) + "\n" + RowFor(200, "blocked_96x96x256"));
    EXPECT_EQ(reply.persist_error(), "");
    EXPECT_EQ(reply.rows_persisted(), 2U);
    EXPECT_EQ(node.Probe(), "injected reference");
    EXPECT_EQ(node.Compute(), bytes);
    name = node.State().rows_file();
    EXPECT_EQ(name, RowsFile().filename());
    EXPECT_EQ(node.State().rows_file_error(), "");
    EXPECT_EQ(MetricSum(node.Metrics(), "tessera_planner_store_saves_total"), 1);
    node.Kill();
  }
  Node node = Start();
  EXPECT_EQ(node.Probe(), "injected reference") << node.Log();
  EXPECT_EQ(node.Probe(150), "injected blocked_96x96x256");
  EXPECT_EQ(node.Probe(250), "degraded blocked_96x96x256");
  EXPECT_EQ(node.Compute(), bytes);
  EXPECT_EQ(node.State().rows_file(), name);
  EXPECT_EQ(MetricSum(node.Metrics(), "tessera_planner_store_rows_total", {"use=\"loaded\""}), 2);
  EXPECT_EQ(MetricSum(node.Metrics(), "tessera_planner_rows", {"tier=\"injected\""}), 2);
  EXPECT_EQ(node.Warnings(), 0U) << node.Log();
}

TEST_F(KeptRowsTest, WhatIsReplacedOrClearedStaysAway) {
  {
    Node node = Start();
    EXPECT_EQ(node.Import(RowFor(100) + "\n" + RowFor(200)).rows_persisted(), 2U);
    EXPECT_EQ(node.Import(RowFor(300), v1::INJECT_MODE_APPEND, /*persist=*/false).rows_persisted(), 0U);
    EXPECT_EQ(CountOf(Read(RowsFile()), " -> "), 2U);
    EXPECT_EQ(node.Import(RowFor(400), v1::INJECT_MODE_REPLACE).rows_persisted(), 1U);
    node.Stop();
  }
  {
    Node node = Start();
    EXPECT_EQ(node.InjectedRows(), RowFor(400) + "\n");
    const v1::ChangeReply cleared = node.Import("", v1::INJECT_MODE_CLEAR);
    EXPECT_EQ(cleared.rows_persisted(), 0U);
    EXPECT_EQ(cleared.persist_error(), "");
    node.Stop();
  }
  Node node = Start();
  EXPECT_EQ(node.InjectedRows(), "");
}

TEST_F(KeptRowsTest, TwoDaemonsShareADirectory) {
  {
    Node one = Start("one");
    Node two = Start("two");
    EXPECT_EQ(one.Import(RowFor(10)).rows_persisted(), 1U);
    EXPECT_EQ(two.Import(RowFor(20)).rows_persisted(), 2U);
    EXPECT_EQ(one.Import(RowFor(30)).rows_persisted(), 3U);
    EXPECT_EQ(one.InjectedRows(), RowFor(30) + "\n" + RowFor(10) + "\n") << "the other's come with a restart";
    one.Stop();
    two.Stop();
  }
  Node node = Start();
  EXPECT_THAT(node.InjectedRows(), AllOf(HasSubstr(RowFor(10)), HasSubstr(RowFor(20)), HasSubstr(RowFor(30))));
}

// Somebody who has the lock and never lets go costs saves, and nobody else's calls.
TEST_F(KeptRowsTest, ASaveThatWaitsHoldsNobodyUp) {
  Node node = Start();
  ASSERT_EQ(node.Import(RowFor(10)).rows_persisted(), 1U);
  const StateDirectory directory = StateDirectory::Open(cache().string(), /*create=*/false).value();
  std::vector<std::future<v1::ChangeReply>> saves;
  {
    const auto lock = directory.Lock(RowsFile().filename().string() + ".lock", 1s);
    ASSERT_TRUE(lock.ok()) << lock.status();
    for (int i = 0; i < 3; ++i) {
      saves.push_back(std::async(std::launch::async, [&node, i] { return node.Import(RowFor(20 + i)); }));
    }
    ASSERT_TRUE(Eventually(5s, [&] { return node.State().changes() >= 4; }));
    EXPECT_EQ(node.Probe(), "degraded blocked_96x96x256");
    node.Compute();
    EXPECT_TRUE(std::any_of(saves.begin(), saves.end(), [](auto& save) {
      return save.wait_for(0s) == std::future_status::timeout;
    })) << "saves are one after the other, and the third gives up after six seconds";
    for (auto& save : saves) EXPECT_THAT(save.get().persist_error(), HasSubstr("has held"));
  }
  EXPECT_EQ(MetricSum(node.Metrics(), "tessera_planner_store_save_failures_total", {"reason=\"locked\""}), 3);
  EXPECT_EQ(node.Warnings(), 1U) << node.Log();
  EXPECT_EQ(node.Import(RowFor(30)).rows_persisted(), 5U) << "what could not be kept is kept with the next";
}

TEST_F(KeptRowsTest, RowsOfOtherKernelsAreNotKept) {
  Node node = Start();
  const v1::ChangeReply reply =
      node.Import(RowFor(10) + "\n" + RowFor(20, "no_such_recipe") + "\ngemm.sm80.bf16_bf16.bf16.fast.NT -> nothing");
  EXPECT_EQ(reply.rows_persisted(), 1U);
  EXPECT_THAT(reply.persist_error(), HasSubstr("2 rows are not kept"));
}

// What stands in the file's place of a daemon that has kept a row, and what the daemon says of it.
TEST_F(KeptRowsTest, FilesThatCannotBeTrusted) {
  std::string good;
  std::string bytes;
  {
    Node node = Start();
    ASSERT_EQ(node.Import(RowFor(100)).rows_persisted(), 1U);
    bytes = node.Compute();
    node.Stop();
    good = Read(RowsFile());
  }
  const fs::path file = RowsFile();
  struct Case {
    std::string contents;
    std::string reason;
  };
  const std::vector<Case> cases = {{"", "damaged"},
                                   {good.substr(0, good.size() / 2), "damaged"},
                                   {std::string(3000, '\xff'), "damaged"},
                                   {std::string(6 << 20, 'x'), "too_large"},
                                   {Replaced(good, "device = ", "device = Another "), "foreign"},
                                   {Replaced(good, "processors = ", "processors = 9"), "foreign"}};
  for (const Case& each : cases) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << each.contents;
    Node node = Start();
    EXPECT_EQ(node.Probe(), "degraded blocked_96x96x256") << each.reason;
    EXPECT_EQ(node.Compute(), bytes);
    EXPECT_EQ(node.Warnings(), 1U) << node.Log();
    EXPECT_THAT(node.Log(), HasSubstr(each.reason));
    EXPECT_THAT(node.State().rows_file_error(), HasSubstr(each.reason));
    EXPECT_EQ(MetricSum(node.Metrics(), "tessera_planner_store_set_aside_total", {"reason=\"" + each.reason + "\""}),
              1);
    EXPECT_EQ(Read(file.string() + "." + each.reason), each.contents);
    EXPECT_EQ(node.Import(RowFor(50)).rows_persisted(), 1U);
    EXPECT_EQ(node.State().rows_file_error(), "");
    node.Stop();
  }
}

// A file that fits, and a row in it that does not.
TEST_F(KeptRowsTest, RowsThatCannotBeTrusted) {
  std::string good;
  {
    Node node = Start();
    ASSERT_EQ(node.Import(RowFor(100) + "\n" + RowFor(200)).rows_persisted(), 2U);
    node.Stop();
    good = Read(RowsFile());
  }
  const std::size_t hash = good.find("hash=") + 5;
  std::string stale = good;
  stale[hash] = stale[hash] == '0' ? '1' : '0';
  std::ofstream(RowsFile(), std::ios::trunc) << stale;
  {
    Node node = Start();
    EXPECT_EQ(node.InjectedRows(), RowFor(200) + "\n");
    EXPECT_EQ(MetricSum(node.Metrics(), "tessera_planner_store_rows_total", {"use=\"stale\""}), 1);
    EXPECT_EQ(node.Warnings(), 0U) << "an update is no trouble\n" << node.Log();
    node.Stop();
  }
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"m(0,100]", "m(100,100]"}, {"-> reference", "-> blocked_96x96x256"}, {"m(0,100]", "q(0,100]"}}) {
    std::ofstream(RowsFile(), std::ios::trunc) << Replaced(good, from, to);
    Node node = Start();
    EXPECT_EQ(node.InjectedRows(), RowFor(200) + "\n") << to;
    EXPECT_EQ(MetricSum(node.Metrics(), "tessera_planner_store_rows_total", {"use=\"refused\""}), 1);
    EXPECT_EQ(node.Warnings(), 1U) << node.Log();
    node.Stop();
  }
}

// A daemon that cannot keep rows serves all the same, and says so once.
void ExpectServesWithoutRows(Node& node, const std::string& reason) {
  EXPECT_EQ(node.Warnings(), 1U) << node.Log();
  EXPECT_THAT(node.State().rows_file_error(), HasSubstr(reason));
  node.Compute();
  EXPECT_EQ(node.Probe(), "degraded blocked_96x96x256");
  for (int i = 0; i < 2; ++i) {
    const v1::ChangeReply reply = node.Import(RowFor(100 + i));
    EXPECT_EQ(reply.rows_persisted(), 0U);
    EXPECT_THAT(reply.persist_error(), HasSubstr(reason));
  }
  EXPECT_EQ(node.Probe(), "injected reference") << "what is not kept is in force";
  EXPECT_EQ(node.Warnings(), 1U) << node.Log();
}

TEST_F(KeptRowsTest, NoPlaceToKeepRows) {
  {
    Node node(root(), "d", {}, {"-u", "HOME", "-u", "XDG_CACHE_HOME"});
    ExpectServesWithoutRows(node, "HOME");
    EXPECT_EQ(node.State().rows_file(), "");
  }
  {
    std::ofstream(cache()) << "a file";
    Node node = Start();
    ExpectServesWithoutRows(node, cache().string());
    EXPECT_EQ(Read(cache()), "a file");
  }
  {
    Node node(root(), "d", {"--cache-dir", "/proc/tessera"});
    ExpectServesWithoutRows(node, "/proc/tessera");
  }
  {
    Node node(root(), "d", {"--cache-dir", "off"});
    EXPECT_EQ(node.Warnings(), 0U) << node.Log();
    EXPECT_EQ(node.Import(RowFor(1)).persist_error(), "the setting cache_dir is off");
  }
}

TEST_F(KeptRowsTest, ADirectoryOfSomebodyElse) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a program as another user";
  const fs::path open = directory_.File("open");
  fs::create_directories(open);
  fs::create_directories(cache());
  fs::permissions(root(), fs::perms(0755));
  fs::permissions(cache(), fs::perms(0700));
  ASSERT_EQ(::chown(open.c_str(), 12'345, 12'345), 0);
  fs::permissions(open, fs::perms(0750));
  fs::copy_file(TESSERAD, open / "tesserad");
  fs::permissions(open / "tesserad", fs::perms(0755));
  const std::vector<std::string> as_nobody = {"/usr/bin/setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"};
  Node node(open, "d", {"--cache-dir", cache().string()}, as_nobody);
  ExpectServesWithoutRows(node, cache().string());
}

TEST_F(KeptRowsTest, TheUsersCacheIsWhereTheEnvironmentSays) {
  const std::string home = directory_.File("home");
  {
    Node node(root(), "d", {}, {"-u", "XDG_CACHE_HOME", "HOME=" + home});
    EXPECT_EQ(node.Import(RowFor(1)).rows_persisted(), 1U);
    EXPECT_TRUE(fs::exists(fs::path(home) / ".cache" / "tessera" / node.State().rows_file()));
  }
  Node node(root(), "e", {}, {"HOME=" + home, "XDG_CACHE_HOME=" + directory_.File("xdg")});
  EXPECT_EQ(node.InjectedRows(), "");
  EXPECT_TRUE(fs::is_directory(fs::path(directory_.File("xdg")) / "tessera"));
}

}  // namespace
}  // namespace tessera::e2e
