// What a hostile local user can do with HTTP/2 frames to the daemon, and to somebody who works beside.

#include <gmock/gmock.h>
#include <zlib.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include <utility>
#include <vector>

#include "client/client.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/inline_problem.h"
#include "tests/e2e/raw_http2.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using http2::Frame;
using http2::FrameHead;
using http2::GrpcPrefix;
using http2::HeaderBlock;
using http2::Number;
using http2::SettingsPayload;
using workload::MemoryOwner;
using workload::SharedProblem;

constexpr std::int64_t kMiB = 1 << 20;
constexpr char kGemm[] = "/tessera.v1.Compute/Gemm";
constexpr char kServerInfo[] = "/tessera.v1.Admin/ServerInfo";

// Computes without pause, inline and in shared memory, and remembers what went wrong.
class GoodClient {
 public:
  explicit GoodClient(client::Client client)
      : client_(std::move(client)), session_(client_.OpenSession("good").value()), thread_([this] { Work(); }) {}
  ~GoodClient() { Stop(); }

  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

  // Calls that begin from now on are answered, too.
  bool IsServed() {
    const int before = rounds_;
    return Eventually(60s, [&] { return rounds_ >= before + 3; });
  }
  // Calls that were turned away, as happens when gRPC lacks memory.
  int Refused() const { return refused_; }
  // Of calls that ended in another way.
  std::string FirstFailure() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return first_failure_;
  }

 private:
  void Work() {
    for (std::uint64_t seed = 0; !stop_; ++seed) {
      if (ComputeInline() && ComputeShared(seed)) {
        ++rounds_;
      } else {
        std::this_thread::sleep_for(1ms);
      }
    }
  }

  bool ComputeInline() {
    InlineProblem problem(8, 16, 32);
    if (!Note(client_.Gemm(problem.spec()).status())) return false;
    problem.ExpectRight();
    return true;
  }

  bool ComputeShared(std::uint64_t seed) {
    const auto shared = SharedProblem::Make(session_, {.m = 8, .n = 8, .k = 24}, seed, MemoryOwner::kDaemon);
    return Note(shared.status()) && Note(session_.Gemm(shared->spec()).status()) &&
           Note(shared->Check().ok ? absl::OkStatus() : absl::DataLossError("a wrong product"));
  }

  bool Note(const absl::Status& status) {
    if (status.ok()) return true;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status.code() == StatusCode::kResourceExhausted || status.code() == StatusCode::kUnavailable) {
      ++refused_;
    } else if (first_failure_.empty()) {
      first_failure_ = Text(status);
    }
    return false;
  }

  client::Client client_;
  client::Session session_;
  mutable std::mutex mutex_;
  std::string first_failure_;
  std::atomic<int> rounds_ = 0;
  std::atomic<int> refused_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// The real tesserad, whose memory is its own, with one good client. Each test begins with Start and ends all of its
// connections before it returns; what it left behind is looked at in TearDown.
class Http2AbuseTest : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& settings = {}) {
    std::vector<std::string> argv = {TESSERAD,      "--socket",        socket(), "--http-address",
                                     "127.0.0.1:0", "--drain-grace-s", "5"};
    argv.insert(argv.end(), settings.begin(), settings.end());
    daemon_ = std::make_unique<ChildProcess>(argv);
    ASSERT_TRUE(Eventually(20s, [this] { return client::Client::Connect({.socket = socket(), .timeout = 1s}).ok(); }))
        << daemon_->Err();
    client::Client client = client::Client::Connect({.socket = socket(), .timeout = 30s}).value();
    info_ = client.ServerInfo().value();
    good_ = std::make_unique<GoodClient>(std::move(client));
    ASSERT_TRUE(good_->IsServed());
    peak_before_ = PeakBytes();
  }

  void TearDown() override {
    ASSERT_NE(good_, nullptr);
    EXPECT_TRUE(good_->IsServed());
    good_->Stop();
    EXPECT_EQ(good_->FirstFailure(), "");
    EXPECT_TRUE(may_be_refused_ || good_->Refused() == 0) << good_->Refused() << " calls were refused";
    EXPECT_TRUE(Eventually(20s, [this] { return Metric("tessera_in_flight") == 0; })) << Metric("tessera_in_flight");
    EXPECT_TRUE(Eventually(20s, [this] { return Connections() == 1; })) << Connections();
    good_.reset();
    daemon_->Signal(SIGTERM);
    EXPECT_EQ(daemon_->Wait(), 0) << daemon_->Err();
  }

  std::string socket() const { return directory_.File("d.sock"); }
  GoodClient& good() { return *good_; }
  double Metric(const std::string& name) const {
    return MetricSum(HttpGet(info_.http_address(), "/metrics").body, name);
  }
  double Connections() const { return Metric("tessera_rpc_connections"); }

  // The most that was ever resident.
  std::int64_t PeakBytes() const {
    std::ifstream status("/proc/" + std::to_string(info_.pid()) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
    }
    return 0;
  }
  std::int64_t Growth() const { return PeakBytes() - peak_before_; }

  // For tests that leave gRPC short of memory: it ends anybody's calls and connections then.
  void LetTheGoodClientBeRefused() { may_be_refused_ = true; }

  void ExpectGrowthBelow(std::int64_t bytes) const {
#ifndef __SANITIZE_ADDRESS__  // which keeps what was freed
    EXPECT_LT(Growth() / kMiB, bytes / kMiB) << "MiB";
#else
    static_cast<void>(bytes);
#endif
  }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> daemon_;
  std::unique_ptr<GoodClient> good_;
  v1::ServerInfoReply info_;
  std::int64_t peak_before_ = 0;
  bool may_be_refused_ = false;
};

// One call on a connection that should be as good as new.
void ExpectServes(RawHttp2& http) {
  const std::uint32_t id = http.OpenGrpc(kServerInfo);
  EXPECT_TRUE(http.Finish(id, GrpcPrefix(0)));
  EXPECT_TRUE(http.AwaitEnd(id));
  EXPECT_EQ(http.stream(id).Text(), "status 0: ");
}

constexpr std::uint32_t kMessage = 8 * kMiB - 100;  // what its prefix says

TEST_F(Http2AbuseTest, HalfSentMessagesStayWithinTheLimit) {
  ASSERT_NO_FATAL_FAILURE(Start({"--rpc-memory-bytes-max", "64MiB"}));
  LetTheGoodClientBeRefused();
  RawHttp2 http(socket());
  ASSERT_TRUE(http.Start());
  const int kept = http.SendSideBySide(kGemm, 60, kMessage, 7 * kMiB);
  EXPECT_LT(kept, 60);
  int calmed = http.ended() ? 1 : 0;
  for (std::uint32_t id = 1; id < http.next_id(); id += 2) {
    const RawHttp2::Stream& stream = http.stream(id);
    if (stream.reset == http2::kEnhanceYourCalm || stream.Header("grpc-status") == "8") ++calmed;
  }
  EXPECT_GT(calmed, 0);
  ExpectGrowthBelow(160 * kMiB);
  EXPECT_TRUE(good().IsServed());
}

// The same, to show that it is the limit that holds the memory down.
TEST_F(Http2AbuseTest, HalfSentMessagesTakeWhatTheyMay) {
  ASSERT_NO_FATAL_FAILURE(Start({"--rpc-memory-bytes-max", "1GiB"}));
  RawHttp2 http(socket());
  ASSERT_TRUE(http.Start());
  EXPECT_EQ(http.SendSideBySide(kGemm, 30, kMessage, 7 * kMiB), 30);
  EXPECT_GT(Growth(), 160 * kMiB);
  EXPECT_TRUE(good().IsServed());
}

TEST_F(Http2AbuseTest, OneEndlessMessageStaysWithinTheLimit) {
  ASSERT_NO_FATAL_FAILURE(Start({"--rpc-memory-bytes-max", "64MiB"}));
  LetTheGoodClientBeRefused();
  RawHttp2 http(socket());
  ASSERT_TRUE(http.Start());
  EXPECT_EQ(http.SendSideBySide(kGemm, 1, 0xffffffff, 300 * kMiB), 0);
  ExpectGrowthBelow(160 * kMiB);
  EXPECT_TRUE(good().IsServed());
}

TEST_F(Http2AbuseTest, StreamsBeyondTheLimitAreRefused) {
  ASSERT_NO_FATAL_FAILURE(Start({"--calls-per-connection-max", "8"}));
  RawHttp2 http(socket());
  ASSERT_TRUE(http.Start());
  EXPECT_EQ(http.settings().at(http2::kMaxConcurrentStreams), 8U);
  for (int i = 0; i < 8; ++i) http.OpenGrpc(kGemm);
  EXPECT_TRUE(http.PingPong());
  for (std::uint32_t id = 1; id < 17; id += 2) EXPECT_EQ(http.stream(id).Text(), "open") << id;
  // One that ends makes room for another.
  http.Send(Frame(http2::kRstStream, 0, 1, Number(http2::kCancel, 4)));
  ExpectServes(http);
  EXPECT_FALSE(http.ended());

  http.OpenGrpc(kGemm);
  const std::uint32_t ninth = http.OpenGrpc(kGemm);
  EXPECT_TRUE(http.Await([&] { return http.closed() || http.stream(ninth).ended; })) << http.stream(ninth).Text();
  EXPECT_TRUE(good().IsServed());
}

class FloodTest : public Http2AbuseTest, public ::testing::WithParamInterface<std::pair<std::string, std::string>> {};

// Frames that must be answered, from somebody who does not read the answers.
TEST_P(FloodTest, AnswersThatNobodyReadsDoNotPileUp) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::string& frame = GetParam().second;
  std::string frames;
  for (int i = 0; i < 30'000; ++i) frames += frame;
  std::vector<std::pair<std::unique_ptr<RawHttp2>, std::size_t>> flooders;  // with how many frames they got rid of
  for (int i = 0; i < 10; ++i) {
    auto http = std::make_unique<RawHttp2>(socket());
    ASSERT_TRUE(http->Start());
    const std::size_t sent = http->SendUnread(frames, 100ms) / frame.size();
    flooders.emplace_back(std::move(http), sent);
  }
  EXPECT_TRUE(good().IsServed());
  // They begin to read.
  for (const auto& [http, sent] : flooders) {
    EXPECT_TRUE(http->Await([&] { return http->ended() || http->pongs() + http->settings_acks() >= sent; })) << sent;
  }
  EXPECT_TRUE(good().IsServed());
  ExpectGrowthBelow(64 * kMiB);
}

INSTANTIATE_TEST_SUITE_P(All, FloodTest,
                         ::testing::Values(std::pair("EmptySettings", Frame(http2::kSettings, 0, 0, "")),
                                           std::pair("Settings",
                                                     Frame(http2::kSettings, 0, 0,
                                                           SettingsPayload({{http2::kInitialWindowSize, 70'000}})))),
                         [](const auto& row) { return row.param.first; });

TEST_F(Http2AbuseTest, HeaderBombsAreRefused) {
  ASSERT_NO_FATAL_FAILURE(Start());
  http2::Fields one_large = http2::GrpcRequestFields(kServerInfo);
  one_large.emplace_back("large", std::string(kMiB, 'x'));
  http2::Fields many_small = http2::GrpcRequestFields(kServerInfo);
  for (int i = 0; i < 10'000; ++i) many_small.emplace_back("small-" + std::to_string(i), "x");
  for (const http2::Fields& fields : {one_large, many_small}) {
    SCOPED_TRACE(fields.size());
    RawHttp2 http(socket());
    ASSERT_TRUE(http.Start());
    const std::uint32_t id = http.Open(HeaderBlock(fields));
    http.Finish(id, GrpcPrefix(0));
    EXPECT_TRUE(http.Await([&] { return http.closed() || http.stream(id).ended; }));
    EXPECT_NE(http.stream(id).Header("grpc-status"), "0");
  }
  ExpectGrowthBelow(32 * kMiB);
}

// gRPC limits the headers of each frame, not of the whole block: the daemon holds what it is sent. (Fields that refer
// to the table of earlier ones take more than they send: docs/decisions/0008-what-grpc-leaves-open.md.)
TEST_F(Http2AbuseTest, LiteralHeadersWithoutAnEndTakeNoMoreThanWasSent) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (const std::size_t bytes : {1, 8000}) {
    SCOPED_TRACE(bytes);
    RawHttp2 http(socket());
    ASSERT_TRUE(http.Start());
    http.Send(Frame(http2::kHeaders, 0, 1, HeaderBlock(http2::GrpcRequestFields(kGemm))));
    const std::string more = Frame(http2::kContinuation, 0, 1, HeaderBlock({{"more", std::string(bytes, 'x')}}));
    for (int i = 0; i < 5000; ++i) http.Send(more);
    EXPECT_TRUE(good().IsServed());
    ExpectGrowthBelow((bytes == 1 ? 16 : 16 + 40) * kMiB);
    // Nothing but CONTINUATION may come now.
    EXPECT_FALSE(http.PingPong());
    EXPECT_TRUE(http.closed());
  }
}

TEST_F(Http2AbuseTest, IllegalFramesEndTheConnectionOrNothing) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (const http2::IllegalFrames& row : http2::AllIllegalFrames()) {
    SCOPED_TRACE(row.what);
    RawHttp2 http(socket());
    ASSERT_TRUE(http.Start());
    http.Send(row.frames);
    const bool goes_on = http.PingPong() && !http.ended();
    if (row.outcome == http2::Outcome::kGoesOn) ExpectServes(http);
    EXPECT_TRUE(goes_on || http.ended()) << "neither";
    EXPECT_TRUE(row.outcome == http2::Outcome::kEither || goes_on == (row.outcome == http2::Outcome::kGoesOn))
        << goes_on;
  }
  RawHttp2 other_protocol(socket());
  other_protocol.Start("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(other_protocol.AwaitClosed());
  ExpectGrowthBelow(32 * kMiB);
}

// As gRPC compresses messages: `window_bits` 15 is deflate, 31 gzip.
std::string CompressedZeros(std::size_t mebibytes, int window_bits) {
  z_stream stream{};
  EXPECT_EQ(::deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, window_bits, 9, Z_DEFAULT_STRATEGY), Z_OK);
  std::string zeros(kMiB, '\0');
  std::string all;
  std::string part(1 << 16, '\0');
  for (std::size_t i = 0; i <= mebibytes; ++i) {
    stream.next_in = reinterpret_cast<Bytef*>(zeros.data());
    stream.avail_in = i < mebibytes ? kMiB : 0;
    do {
      stream.next_out = reinterpret_cast<Bytef*>(part.data());
      stream.avail_out = static_cast<uInt>(part.size());
      ::deflate(&stream, i < mebibytes ? Z_NO_FLUSH : Z_FINISH);
      all.append(part, 0, part.size() - stream.avail_out);
    } while (stream.avail_out == 0);
  }
  ::deflateEnd(&stream);
  return all;
}

struct BadMessage {
  std::string what, encoding, bytes;
};

TEST_F(Http2AbuseTest, BadMessagesAreRefused) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const auto bomb = [](std::size_t mebibytes, int window_bits) {
    const std::string zeros = CompressedZeros(mebibytes, window_bits);
    return GrpcPrefix(static_cast<std::uint32_t>(zeros.size()), true) + zeros;
  };
  const BadMessage rows[] = {
      {"no message", "", ""},
      {"half a prefix", "", std::string(2, '\0')},
      {"4 GiB - 1 announced", "", GrpcPrefix(0xffffffff) + "abc"},
      {"2 GiB announced", "", GrpcPrefix(1U << 31U) + "abc"},
      {"8 MiB + 1 sent", "", GrpcPrefix(8 * kMiB + 1) + std::string(8 * kMiB + 1, 'x')},
      {"an unknown flag", "", '\x02' + Number(3, 4) + "abc"},
      {"compressed, with no encoding named", "", GrpcPrefix(3, true) + "abc"},
      {"compressed, with none", "identity", GrpcPrefix(3, true) + "abc"},
      {"compressed, with an unknown one", "br", GrpcPrefix(3, true) + "abc"},
      {"compressed, but not readable", "gzip", GrpcPrefix(3, true) + "abc"},
      {"1 GiB in a gzip of 5 MiB", "gzip", bomb(1024, 31)},
      {"256 MiB in a deflate of 1 MiB", "deflate", bomb(256, 15)},
  };
  for (const BadMessage& row : rows) {
    SCOPED_TRACE(row.what);
    RawHttp2 http(socket());
    ASSERT_TRUE(http.Start());
    http2::Fields fields = http2::GrpcRequestFields(kGemm);
    if (!row.encoding.empty()) fields.emplace_back("grpc-encoding", row.encoding);
    const std::uint32_t id = http.Open(HeaderBlock(fields));
    http.Finish(id, row.bytes);
    EXPECT_TRUE(http.AwaitEnd(id));
    // INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED or INTERNAL; or a reset, which is INTERNAL to gRPC's clients.
    EXPECT_THAT(http.stream(id).Text(), ::testing::MatchesRegex("status (3|8|12|13): .+|reset 2"));
    ExpectServes(http);
    ExpectGrowthBelow(64 * kMiB);
  }
}

TEST_F(Http2AbuseTest, SilentConnectionsAreCheap) {
  ASSERT_NO_FATAL_FAILURE(Start());
  std::vector<std::unique_ptr<RawHttp2>> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(std::make_unique<RawHttp2>(socket()));
  EXPECT_TRUE(Eventually(20s, [&] { return Connections() == 201; })) << Connections();
  for (int i = 0; i < 200; ++i) RawHttp2(socket()).Send(http2::kPreface);
  EXPECT_TRUE(good().IsServed());
  EXPECT_TRUE(Eventually(20s, [&] { return Connections() == 201; })) << Connections();
  ExpectGrowthBelow(32 * kMiB);
}

TEST_F(Http2AbuseTest, RandomFramesHarmNobody) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    RawHttp2 http(socket());
    ASSERT_TRUE(http.Start());
    http.Send(http2::RandomFrames(random));
    http.Await([&] { return http.ended(); }, 5ms);
  }
  ExpectGrowthBelow(64 * kMiB);
}

}  // namespace
}  // namespace tessera::e2e
