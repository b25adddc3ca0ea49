// What keeps a session alive, how soon it ends without that, and what its end does: the three kinds of leases,
// CloseSession, and an administrator's EndSession.

#include <gmock/gmock.h>
#include <signal.h>

#include <list>
#include <set>

#include "client/gemm_stream.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/raw_client.h"
#include "tests/e2e/raw_http2.h"
#include "tests/e2e/raw_side_channel.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlowness = 5;
#else
constexpr int kSlowness = 1;
#endif
constexpr std::chrono::milliseconds kLeaseLossMax =
    kSlowness * 2000ms;  // from the end of a lease to that of its session
constexpr std::chrono::milliseconds kTtlExcessMax = kSlowness * 500ms;  // how late a time to live may end

void ExpectRefused(const absl::Status& status, StatusCode code, const std::string& begins,
                   const std::string& names = "") {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith(begins));
  EXPECT_THAT(std::string(status.message()), HasSubstr(names));
}

class LeaseTest : public DaemonFixture {
 protected:
  double Leases(const std::string& kind) const {
    return MetricSum(Metrics(), "tessera_leases", {"kind=\"" + kind + "\""});
  }
  double Ends(const std::string& reason) const {
    return MetricSum(Metrics(), "tessera_session_ends_total", {"reason=\"" + reason + "\""});
  }
  double Refused(const std::string& limit) const {
    return MetricSum(Metrics(), "tessera_refused_total", {"limit=\"" + limit + "\""});
  }

  static bool HoldsNothing(const RawClient& looker) {
    const v1::ServerInfoReply info = looker.ServerInfo();
    return info.sessions() == 0 && info.sessions_ending() == 0 && info.buffers() == 0 && info.buffer_bytes() == 0;
  }

  // A product on memory of the session's own.
  static absl::Status Compute(const RawClient& client, const std::string& token) {
    const auto buffer = client.Allocate(token, kSmallProduct.BufferBytes());
    if (!buffer.ok()) return buffer.status();
    absl::Status status = client.Gemm(token, ProductOf(kSmallProduct, *buffer, *buffer));
    status.Update(client.Release(token, *buffer));
    return status;
  }
};

// ---- Attach ----

using AttachTest = LeaseTest;

TEST_F(AttachTest, TheLibrarysSessionWorksAndEndsWithItsObject) {
  client::Client client = Connect();
  const RawClient raw(socket());
  {
    client::Session session = client.OpenSession({.label = "attached", .lease = client::Lease::kAttach}).value();
    EXPECT_EQ(Leases("attach"), 1);
    EXPECT_EQ(Leases("side_channel"), 0);
    EXPECT_EQ(Text(Compute(raw, session.token())), "OK");
    ASSERT_TRUE(raw.Allocate(session.token(), 4096).ok());  // goes with the session, and with nothing else
    ExpectRefused(session.KeepAlive().status(), StatusCode::kFailedPrecondition, "the session's lease is its call");
    // What passes descriptors is refused before it leaves anything behind.
    ExpectRefused(session.Allocate(4096).status(), StatusCode::kFailedPrecondition, "passing descriptors");
    ExpectRefused(session.Share(4096).status(), StatusCode::kFailedPrecondition, "passing descriptors");
    EXPECT_EQ(raw.ServerInfo().buffers(), 1U);
  }
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] { return HoldsNothing(raw); }));
  EXPECT_EQ(Ends("lease_lost"), 1);
  EXPECT_EQ(Leases("attach"), 0);
}

TEST_F(AttachTest, EndsWhenTheCallIsCancelled) {
  const RawClient client(socket());
  RawAttach attach(client);
  const v1::AttachReply reply = attach.First().value();
  EXPECT_EQ(reply.lease().size(), 16U);
  EXPECT_EQ(reply.epoch(), client.ServerInfo().epoch());
  const std::string token = client.OpenOn(reply.lease(), "raw").value();
  ExpectRefused(client.OpenOn(reply.lease()).status(), StatusCode::kAlreadyExists, "lease: ");
  EXPECT_EQ(Text(Compute(client, token)), "OK");
  ASSERT_TRUE(client.Allocate(token, 10'000).ok());
  attach.Cancel();
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] { return HoldsNothing(client); }));
  ExpectRefused(Compute(client, token), StatusCode::kNotFound, "metadata tessera-session-bin: ");
  ExpectRefused(client.OpenOn(reply.lease()).status(), StatusCode::kNotFound, "lease: ");
  EXPECT_EQ(Ends("lease_lost"), 1);
}

TEST_F(AttachTest, EndsWithItsDeadlineToo) {
  const RawClient client(socket());
  auto context = RawClient::Context(std::nullopt, 1000ms);
  const auto call = client.memory().Attach(context.get(), {});
  v1::AttachReply reply;
  ASSERT_TRUE(call->Read(&reply));
  ASSERT_TRUE(client.OpenOn(reply.lease()).ok());
  EXPECT_FALSE(call->Read(&reply));
  EXPECT_EQ(call->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] { return HoldsNothing(client); }));
  EXPECT_EQ(Leases("attach"), 0);
}

TEST_F(AttachTest, EndsWithItsConnection) {
  const RawClient looker(socket());
  const RawClient client(socket());
  RawAttach attach(client);
  const std::string token = client.OpenOn(attach.First()->lease()).value();
  ASSERT_TRUE(client.Allocate(token, 10'000).ok());
  EXPECT_FALSE(HoldsNothing(looker));
  client.HangUp();
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] { return HoldsNothing(looker); }));
  EXPECT_EQ(Ends("lease_lost"), 1);
  EXPECT_EQ(attach.AwaitEnd().code(), StatusCode::kUnavailable);
}

// The session was opened over another connection than the one that the lease is on; it is the lease's that counts.
TEST_F(AttachTest, TheConnectionOfTheLeaseCounts) {
  const RawClient other(socket());
  const RawClient client(socket());
  RawAttach attach(client);
  const std::string token = other.OpenOn(attach.First()->lease()).value();
  EXPECT_EQ(Text(Compute(other, token)), "OK");
  client.HangUp();
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] { return HoldsNothing(other); }));
  EXPECT_EQ(Compute(other, token).code(), StatusCode::kNotFound);
}

class KilledClientTest : public LeaseTest, public ::testing::WithParamInterface<std::string> {};

TEST_P(KilledClientTest, GivesEverythingBackSoon) {
  const RawClient looker(socket());
  const std::chrono::milliseconds ttl = GetParam() == "ttl" ? 2000ms : 0ms;
  ChildProcess child({SESSION_HOLDER, "--socket", socket(), "--lease", GetParam(), "--ttl-ms",
                      std::to_string(ttl.count()), "--buffers", "3", "--calls", "3"});
  ASSERT_TRUE(Eventually(20s, [&] { return child.Out() == "holding\n" && looker.ServerInfo().in_flight() > 0; }))
      << child.Err();
  EXPECT_EQ(looker.ServerInfo().sessions(), 1U);
  EXPECT_EQ(looker.ServerInfo().buffer_bytes(), 3 * kSlowProduct.BufferBytes());
  const Clock::time_point killed = Clock::now();
  child.Signal(SIGKILL);
  EXPECT_TRUE(Eventually(20s, [&] { return looker.ServerInfo().sessions() == 0; }));
  EXPECT_LT(Clock::now() - killed, ttl + kLeaseLossMax);
  // The one that runs may finish first.
  EXPECT_TRUE(Eventually(20s, [&] { return HoldsNothing(looker) && looker.ServerInfo().in_flight() == 0; }));
  EXPECT_EQ(child.Wait(), -SIGKILL);
  EXPECT_EQ(Ends(GetParam() == "ttl" ? "expired" : "lease_lost"), 1);
  for (const char* kind : {"side_channel", "attach", "ttl"}) EXPECT_EQ(Leases(kind), 0) << kind;
}

INSTANTIATE_TEST_SUITE_P(Leases, KilledClientTest, ::testing::Values("side", "attach", "ttl"),
                         [](const auto& test) { return test.param; });

TEST_F(AttachTest, LeasesOfBothKindsCountTogether) {
  StartDaemon({{"side_connections_max", "3"}});
  const RawClient client(socket());
  std::optional<RawAttach> first(std::in_place, client);
  RawAttach second(client);
  const RawSideChannel side(socket());
  const std::string lease = first->First().value().lease();
  ASSERT_TRUE(second.First().has_value());
  for (int i = 0; i < 3; ++i) {
    RawAttach refused(client);
    EXPECT_EQ(refused.First().has_value(), false);
    ExpectRefused(refused.AwaitEnd(), StatusCode::kResourceExhausted, "side_connections_max: ", "3");
  }
  client::Client library = Connect();
  for (const client::Lease kind : {client::Lease::kAttach, client::Lease::kSideChannel}) {
    ExpectRefused(library.OpenSession({.lease = kind}).status(), StatusCode::kResourceExhausted,
                  "side_connections_max: ");
  }
  EXPECT_EQ(Leases("attach"), 2);
  EXPECT_EQ(Refused("side_connections_max"), 5);
  EXPECT_TRUE(library.OpenSession({.lease = client::Lease::kTtl, .ttl = 1s}).ok()) << "takes no lease";
  first.reset();
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] { return Leases("attach") == 1; }));
  RawAttach next(client);
  const std::optional<v1::AttachReply> reply = next.First();
  ASSERT_TRUE(reply.has_value());
  EXPECT_NE(reply->lease(), lease);
  EXPECT_TRUE(client.OpenOn(reply->lease()).ok());
}

TEST_F(AttachTest, LeasesOfOnePrincipalAreLimited) {
  StartDaemon({{"connections_per_principal_max", "2"}});
  const RawClient client(socket());
  std::optional<RawAttach> first(std::in_place, client);
  RawAttach second(client);
  ASSERT_TRUE(first->First().has_value() && second.First().has_value());
  RawAttach third(client);
  EXPECT_EQ(third.First().has_value(), false);
  ExpectRefused(third.AwaitEnd(), StatusCode::kResourceExhausted, "connections_per_principal_max: ", "2");
  EXPECT_EQ(Refused("connections_per_principal_max"), 1);
  if (::geteuid() == 0) {
    const RawClient other(socket(), kAliceUid);
    RawAttach of_other(other);
    EXPECT_TRUE(of_other.First().has_value()) << "others have their own";
  }
  first.reset();
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] {
    RawAttach next(client);
    return next.First().has_value();
  }));
}

TEST_F(AttachTest, IsOfNoUseToOthers) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const RawClient mine(socket());
  const RawClient alice(socket(), kAliceUid);
  RawAttach attach(mine);
  const std::string lease = attach.First()->lease();
  ExpectRefused(alice.OpenOn(lease).status(), StatusCode::kPermissionDenied, "lease: ");
  EXPECT_TRUE(mine.OpenOn(lease).ok()) << "the refusal has not used it up";
}

TEST_F(AttachTest, PassesNoDescriptors) {
  const RawClient client(socket());
  RawAttach attach(client);
  const std::string token = client.OpenOn(attach.First()->lease()).value();
  const std::string timed = client.OpenFor(60'000).value();
  RawSideChannel side(socket());
  const UniqueFd memfd(::memfd_create("lease-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(memfd.get(), 4096), 0);
  ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  v1::ImportBufferRequest request;
  request.set_descriptor_ticket(side.Pass(memfd.get()).descriptor_accepted().ticket());
  for (const std::string& of : {token, timed}) {
    ExpectRefused(RawClient::Call(client.memory(), &v1::Memory::Stub::ImportBuffer, request, of).status(),
                  StatusCode::kFailedPrecondition, "descriptor_ticket: ");
    // Nor are those of its buffers to be had over somebody's side channel.
    const std::string buffer = client.Allocate(of, 4096).value();
    EXPECT_EQ(side.Ask(RawSideChannel::FetchRequest(buffer)).error().code(),
              static_cast<int>(StatusCode::kFailedPrecondition));
  }
  // The ticket was of a lease of its own, and still is.
  const std::string own = client.OpenOn(side.lease()).value();
  EXPECT_TRUE(RawClient::Call(client.memory(), &v1::Memory::Stub::ImportBuffer, request, own).ok());
  const v1::ListBuffersReply list = client.ListBuffers().value();
  for (const v1::BufferInfo& row : list.buffers()) {
    if (row.origin() == v1::BUFFER_ORIGIN_IMPORTED) continue;
    const v1::SideReply reply = side.Ask(RawSideChannel::FetchRequest(row.buffer_id()));
    EXPECT_EQ(reply.error().code(), static_cast<int>(StatusCode::kPermissionDenied)) << reply.ShortDebugString();
  }
}

constexpr char kAttachMethod[] = "/tessera.v1.Memory/Attach";

// A client that takes not one byte of the reply: it is told no lease, but the lease is there and must not stay.
class DeafAttach {
 public:
  explicit DeafAttach(const std::string& socket) : connection_(std::in_place, socket) {
    EXPECT_TRUE(connection_->Start(
        std::string(http2::kPreface) +
        http2::Frame(http2::kSettings, http2::kNoFlags, 0, http2::SettingsPayload({{http2::kInitialWindowSize, 0}}))));
    const std::uint32_t id = connection_->OpenGrpc(kAttachMethod);
    EXPECT_TRUE(connection_->Finish(id, http2::GrpcPrefix(0)));
  }
  void HangUp() { connection_.reset(); }

 private:
  std::optional<RawHttp2> connection_;
};

TEST_F(AttachTest, MayNeverRead) {
  std::list<DeafAttach> deaf;
  for (int i = 0; i < 4; ++i) deaf.emplace_back(socket());
  EXPECT_TRUE(Eventually(10s, [&] { return Leases("attach") == 4; })) << Leases("attach");
  deaf.front().HangUp();
  EXPECT_TRUE(Eventually(kLeaseLossMax, [&] { return Leases("attach") == 3; }));
  const Clock::time_point start = Clock::now();
  StopDaemon();
  EXPECT_LT(Clock::now() - start, kSlowness * 2500ms);
}

TEST_F(AttachTest, TheDaemonsEndDoesNotWaitForIt) {
  const RawClient client(socket());
  std::list<RawAttach> attached;
  for (int i = 0; i < 20; ++i) {
    attached.emplace_back(client);
    const std::string token = client.OpenOn(attached.back().First()->lease()).value();
    ASSERT_TRUE(client.Allocate(token, 1 << 20).ok());
  }
  const Clock::time_point start = Clock::now();
  daemon().RequestDrain();
  EXPECT_TRUE(daemon().AwaitDrained()) << "a lease is no operation";
  StopDaemon();
  EXPECT_LT(Clock::now() - start, kSlowness * 2500ms);
  for (RawAttach& attach : attached) {
    const absl::Status end = attach.AwaitEnd();
    EXPECT_TRUE(end.code() == StatusCode::kCancelled || end.code() == StatusCode::kUnavailable) << end;
  }
}

TEST(AttachSigtermTest, TheProcessEndsSoon) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("d.sock");
  ChildProcess daemon({TESSERAD, "--socket", path, "--http-address", "", "--cuda-device", "off"});
  absl::StatusOr<client::Client> client = absl::UnknownError("");
  ASSERT_TRUE(Eventually(20s, [&] {
    client = client::Client::Connect({.socket = path, .timeout = 1s});
    return client.ok();
  })) << daemon.Err();
  const RawClient raw(path);
  RawAttach attach(raw);
  ASSERT_TRUE(raw.OpenOn(attach.First()->lease()).ok());
  client::Session session = client->OpenSession({.lease = client::Lease::kAttach}).value();
  const Clock::time_point start = Clock::now();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(20s), 0) << daemon.Err();
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  EXPECT_LT(took, kSlowness * 2500ms);
  ::testing::Test::RecordProperty("exit_ms", static_cast<int>(took.count()));
  EXPECT_EQ(session.Close().code(), StatusCode::kUnavailable);
}

// ---- Time to live ----

using TtlTest = LeaseTest;

TEST_F(TtlTest, EndsByItselfInTime) {
  constexpr auto kTtl = 700ms;
  const RawClient client(socket());
  const Clock::time_point before = Clock::now();
  const std::string token = client.OpenFor(kTtl.count()).value();
  const Clock::time_point opened = Clock::now();
  const auto row = client.ListSessions()->sessions(0);
  EXPECT_EQ(row.lease(), v1::LEASE_KIND_TTL);
  EXPECT_LE(row.ttl_ms(), static_cast<std::uint64_t>(kTtl.count()));
  EXPECT_EQ(Leases("ttl"), 1);
  EXPECT_TRUE(Eventually(20s, [&] { return client.ServerInfo().sessions() == 0; }));
  EXPECT_GE(Clock::now() - before, kTtl);
  EXPECT_LE(Clock::now() - opened, kTtl + kTtlExcessMax);
  ExpectRefused(client.KeepAlive(token).status(), StatusCode::kNotFound, "metadata tessera-session-bin: ");
  ExpectRefused(client.Allocate(token, 1).status(), StatusCode::kNotFound, "metadata tessera-session-bin: ");
  EXPECT_EQ(Ends("expired"), 1);
  EXPECT_EQ(Leases("ttl"), 0);
}

// What the daemon says of the only session, which is in the middle of its time: `keep` starts it anew, and looking at
// it does not.
void ExpectKept(const RawClient& client, const std::function<void()>& keep) {
  std::this_thread::sleep_for(60ms);
  const auto session = [&client] { return client.ListSessions().value().sessions(0); };
  const v1::SessionInfo before = session();
  EXPECT_GE(before.idle_ms(), 60U);
  const Clock::time_point start = Clock::now();
  keep();
  const v1::SessionInfo after = session();
  const auto since = std::chrono::ceil<std::chrono::milliseconds>(Clock::now() - start).count();
  EXPECT_LE(after.idle_ms(), static_cast<std::uint64_t>(since));
  EXPECT_GT(after.ttl_ms() + static_cast<std::uint64_t>(since), before.ttl_ms() + before.idle_ms() - 2);
}

TEST_F(TtlTest, AnyCallOfTheSessionStartsItAnew) {
  const RawClient client(socket());
  const std::string token = client.OpenFor(50'000).value();
  const std::string buffer = client.Allocate(token, kSmallProduct.BufferBytes()).value();
  const struct {
    std::string what;
    std::function<StatusCode()> call;
    StatusCode code;
  } calls[] = {
      {"KeepAlive", [&] { return client.KeepAlive(token).status().code(); }, StatusCode::kOk},
      {"Gemm", [&] { return client.Gemm(token, ProductOf(kSmallProduct, buffer, buffer)).code(); }, StatusCode::kOk},
      {"a refused Gemm", [&] { return client.Gemm(token, {}).code(); }, StatusCode::kInvalidArgument},
      {"a refused AllocateBuffer", [&] { return client.Allocate(token, 0).status().code(); },
       StatusCode::kInvalidArgument},
      {"a refused ReleaseBuffer", [&] { return client.Release(token, token).code(); }, StatusCode::kNotFound},
      {"a refused ShareBuffer", [&] { return client.Share(token, token, "", v1::BUFFER_ACCESS_READ).status().code(); },
       StatusCode::kNotFound},
  };
  for (const auto& row : calls) {
    SCOPED_TRACE(row.what);
    ExpectKept(client, [&] { EXPECT_EQ(row.call(), row.code); });
  }
}

TEST_F(TtlTest, EachProductOfAStreamStartsItAnew) {
  client::Client client = Connect();
  client::Session session = client.OpenSession({.lease = client::Lease::kTtl, .ttl = 50s}).value();
  const RawClient raw(socket());
  const std::string buffer = raw.Allocate(session.token(), 4096).value();
  const client::TensorView matrix{
      .buffer_id = buffer, .byte_offset = 0, .dtype = DType::kBf16, .shape = {4, 4}, .strides = {4, 1}};
  client::TensorView d = matrix;
  d.byte_offset = 1024;
  client::GemmStream stream = session.OpenStream();
  for (int i = 0; i < 4; ++i) {
    ExpectKept(raw, [&] {
      const auto result = stream.Gemm({.a = matrix, .b = matrix, .d = d}).get();
      EXPECT_TRUE(result.ok()) << result.status();
    });
  }
}

TEST_F(TtlTest, LivesAsLongAsItIsKept) {
  constexpr auto kTtl = kSlowness * 1200ms;
  client::Client client = Connect();
  client::Session session = client.OpenSession({.lease = client::Lease::kTtl, .ttl = kTtl}).value();
  client::GemmStream stream = session.OpenStream();
  for (const Clock::time_point end = Clock::now() + 2 * kTtl; Clock::now() < end;) {
    ASSERT_TRUE(session.KeepAlive().ok());
    std::this_thread::sleep_for(50ms);
  }
  // An open call that carries nothing keeps nothing.
  EXPECT_TRUE(Eventually(kTtl + kTtlExcessMax, [&] { return client.ServerInfo().value().sessions() == 0; }));
  EXPECT_EQ(stream.Gemm(client::GemmSpec()).get().status().code(), StatusCode::kNotFound);
  EXPECT_EQ(session.KeepAlive().status().code(), StatusCode::kNotFound);
}

TEST_F(TtlTest, KeepAliveTellsTheTimeAndOnlyTimedSessionsHaveOne) {
  client::Client client = Connect();
  client::Session timed = client.OpenSession({.lease = client::Lease::kTtl, .ttl = 1234ms}).value();
  EXPECT_EQ(timed.KeepAlive().value(), 1234ms);
  client::Session side = client.OpenSession("side").value();
  ExpectRefused(side.KeepAlive().status(), StatusCode::kFailedPrecondition, "", "side channel");
  client::Session attached = client.OpenSession({.lease = client::Lease::kAttach}).value();
  ExpectRefused(attached.KeepAlive().status(), StatusCode::kFailedPrecondition, "", "Attach");
  const RawClient raw(socket());
  ExpectRefused(RawClient::Call(raw.memory(), &v1::Memory::Stub::KeepAlive, v1::KeepAliveRequest()).status(),
                StatusCode::kInvalidArgument, "metadata tessera-session-bin: missing");
}

TEST_F(TtlTest, OnlySaneTimesAreTaken) {
  StartDaemon({{"lease_ttl_max_s", "2"}});
  const RawClient client(socket());
  for (const std::uint64_t ttl_ms :
       {std::uint64_t{1}, std::uint64_t{99}, std::uint64_t{2001}, std::uint64_t{1} << 63U, ~std::uint64_t{0}}) {
    SCOPED_TRACE(ttl_ms);
    ExpectRefused(client.OpenFor(ttl_ms).status(), StatusCode::kInvalidArgument, "ttl_ms: ", "lease_ttl_max_s");
  }
  ExpectRefused(client.OpenFor(0).status(), StatusCode::kInvalidArgument, "lease: ");
  const RawSideChannel side(socket());
  v1::OpenSessionRequest both;
  both.set_ttl_ms(1000);
  both.set_lease(side.lease());
  ExpectRefused(client.Token(both).status(), StatusCode::kInvalidArgument, "ttl_ms: ");
  client::Client library = Connect();
  for (const auto ttl : {0ms, -1ms, 99ms, 2001ms}) {
    const absl::Status status = library.OpenSession({.lease = client::Lease::kTtl, .ttl = ttl}).status();
    ExpectRefused(status, StatusCode::kInvalidArgument, "ttl");
  }
  EXPECT_EQ(client.ServerInfo().sessions(), 0U) << "no refusal opens one";
  EXPECT_TRUE(client.OpenFor(100).ok());
  EXPECT_TRUE(client.OpenFor(2000).ok());
  EXPECT_TRUE(client.OpenOn(side.lease()).ok()) << "the refusals have not used up the lease";
}

TEST_F(TtlTest, QueuedWorkIsCancelledAtOnceBesideALongCall) {
  StartDaemon({{"cpu_threads", "1"}});
  const RawClient client(socket());
  const std::string busy = client.OpenFor(60'000).value();
  const std::string busy_buffer = client.Allocate(busy, kSlowProduct.BufferBytes()).value();
  std::list<std::future<absl::Status>> slow;
  for (int i = 0; i < 4; ++i) slow.push_back(client.Send(busy, ProductOf(kSlowProduct, busy_buffer, busy_buffer)));
  ASSERT_TRUE(Eventually(10s, [&] { return client.ServerInfo().in_flight() == 4; }));
  const std::string timed = client.OpenFor(700).value();
  const std::string buffer = client.Allocate(timed, kSmallProduct.BufferBytes()).value();
  std::list<std::future<absl::Status>> queued;
  for (int i = 0; i < 5; ++i) queued.push_back(client.Send(timed, ProductOf(kSmallProduct, buffer, buffer)));
  ASSERT_TRUE(Eventually(10s, [&] { return client.ServerInfo().in_flight() == 9 || Ends("expired") == 1; }));
  for (auto& answer : queued) {
    const absl::Status status = answer.get();
    EXPECT_EQ(status.code(), StatusCode::kCancelled) << status;
  }
  EXPECT_FALSE(IsReady(slow.back())) << "the long calls were over: use larger products";
  EXPECT_EQ(client.ServerInfo().buffers(), 1U);
  EXPECT_TRUE(Eventually(1s, [&] { return client.ServerInfo().buffer_bytes() == kSlowProduct.BufferBytes(); }))
      << "the memory of the expired session waits for nobody";
  EXPECT_EQ(Ends("expired"), 1);
  for (auto& answer : slow) EXPECT_EQ(Text(answer.get()), "OK");
}

// ---- The end that somebody asks for ----

class EndTest : public LeaseTest {
 protected:
  void SetUp() override {
    LeaseTest::SetUp();
    StartDaemon({{"cpu_threads", "1"}});
  }

  // The only session of the caller's.
  static v1::SessionInfo TheSession(const RawClient& client) {
    const v1::ListSessionsReply list = client.ListSessions().value();
    EXPECT_EQ(list.sessions_size(), 1) << list.ShortDebugString();
    return list.sessions_size() == 0 ? v1::SessionInfo() : list.sessions(0);
  }
};

TEST_F(EndTest, CloseAnswersWhenTheMemoryIsGone) {
  const RawClient client(socket());
  const std::string token = client.OpenFor(60'000, "closing").value();
  const std::string buffer = client.Allocate(token, kSlowProduct.BufferBytes()).value();
  ASSERT_TRUE(client.Allocate(token, 1 << 20).ok());
  std::future<absl::Status> running = client.Send(token, ProductOf(kSlowProduct, buffer, buffer));
  ASSERT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > 0; }));
  std::future<absl::Status> queued = client.Send(token, ProductOf(kSlowProduct, buffer, buffer));
  ASSERT_TRUE(Eventually(10s, [&] { return client.ServerInfo().in_flight() == 2; }));
  auto closed = std::async(std::launch::async, [&] { return client.Close(token); });
  EXPECT_EQ(queued.get().code(), StatusCode::kCancelled);
  ASSERT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  EXPECT_EQ(closed.wait_for(0s), std::future_status::timeout) << "answered while a call had the memory";
  const v1::SessionInfo ending = TheSession(client);
  EXPECT_EQ(ending.state(), v1::SESSION_STATE_ENDING);
  EXPECT_EQ(ending.end_reason(), "closed");
  EXPECT_EQ(ending.label(), "closing");
  EXPECT_EQ(ending.in_flight(), 1U);
  EXPECT_EQ(ending.buffers(), 1U);
  EXPECT_EQ(ending.bytes(), kSlowProduct.BufferBytes());
  EXPECT_EQ(client.ServerInfo().sessions_ending(), 1U);
  const auto reply = closed.get();
  const v1::ServerInfoReply info = client.ServerInfo();  // at once: no waiting here
  EXPECT_EQ(info.buffer_bytes(), 0U);
  EXPECT_EQ(reply->buffers_released(), 2U);
  EXPECT_EQ(Text(running.get()), "OK");
  EXPECT_TRUE(Eventually(2s, [&] { return HoldsNothing(client); }));
  EXPECT_EQ(client.ListSessions()->sessions_size(), 0);
  ExpectRefused(client.Close(token).status(), StatusCode::kNotFound, "metadata tessera-session-bin: ");
  EXPECT_EQ(Ends("closed"), 1);
}

// A client may let go of memory that it exported once the session is closed, whatever became of its releases.
TEST_F(EndTest, CloseWaitsForReleasedBuffersToo) {
  const RawClient client(socket());
  const std::string token = client.OpenFor(60'000).value();
  const std::string buffer = client.Allocate(token, kSlowProduct.BufferBytes()).value();
  std::future<absl::Status> running = client.Send(token, ProductOf(kSlowProduct, buffer, buffer));
  ASSERT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > 0; }));
  v1::ReleaseBufferRequest release;
  release.set_buffer_id(buffer);
  EXPECT_EQ(RawClient::Call(client.memory(), &v1::Memory::Stub::ReleaseBuffer, release, token, 50ms).status().code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  const auto closed = client.Close(token);
  EXPECT_EQ(client.ServerInfo().buffer_bytes(), 0U) << "answered while a call had the memory";
  EXPECT_EQ(closed->buffers_released(), 0U);
  EXPECT_EQ(Text(running.get()), "OK");
}

TEST_F(EndTest, ADeadlineOfCloseUndoesNothing) {
  const RawClient client(socket());
  const std::string token = client.OpenFor(60'000).value();
  const std::string buffer = client.Allocate(token, kSlowProduct.BufferBytes()).value();
  std::future<absl::Status> running = client.Send(token, ProductOf(kSlowProduct, buffer, buffer));
  ASSERT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > 0; }));
  EXPECT_EQ(client.Close(token, 50ms).status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  EXPECT_EQ(client.KeepAlive(token).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Text(running.get()), "OK");
  EXPECT_TRUE(Eventually(2s, [&] { return HoldsNothing(client); }));
}

TEST_F(EndTest, MemoryIsGoneAfterEveryCloseWithoutWaiting) {
  const RawClient client(socket());
  for (int i = 0; i < 50; ++i) {
    const std::string token = client.OpenFor(60'000).value();
    for (int j = 0; j < 5; ++j) ASSERT_TRUE(client.Allocate(token, 3'000'000).ok());
    ASSERT_EQ(client.Close(token)->buffers_released(), 5U);
    const v1::ServerInfoReply info = client.ServerInfo();
    ASSERT_EQ(info.buffer_bytes(), 0U) << i;
    ASSERT_EQ(info.sessions(), 0U) << i;
    ASSERT_EQ(info.sessions_ending(), 0U) << i;
  }
}

TEST_F(EndTest, AnAdministratorEndsAnySession) {
  client::Client library = Connect();
  client::Session session = library.OpenSession("unlucky").value();
  const client::Buffer buffer = session.Allocate(5000).value();
  const RawClient admin(socket());
  const std::string name = TheSession(admin).name();
  const v1::EndSessionReply reply = library.EndSession(name).value();
  EXPECT_EQ(reply.buffers_released(), 1U);
  EXPECT_EQ(Ends("evicted"), 1);
  EXPECT_TRUE(Eventually(2s, [&] { return HoldsNothing(admin); }));
  EXPECT_EQ(session.Allocate(1).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(session.Close().code(), StatusCode::kNotFound);
  ExpectRefused(library.EndSession(name).status(), StatusCode::kNotFound, "name: ");
  // A new one in the same slot has another name.
  client::Session next = library.OpenSession("lucky").value();
  EXPECT_NE(TheSession(admin).name(), name);
  EXPECT_EQ(library.EndSession(name).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(next.Allocate(1).ok());
}

TEST_F(EndTest, AnEvictedSessionsCallsFinishOrAreCancelled) {
  const RawClient client(socket());
  const std::string token = client.OpenFor(60'000).value();
  const std::string buffer = client.Allocate(token, kSlowProduct.BufferBytes()).value();
  const v1::GemmRequest product = ProductOf(kSlowProduct, buffer, buffer);
  std::future<absl::Status> running = client.Send(token, product);
  ASSERT_TRUE(Eventually(10s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > 0; }));
  std::future<absl::Status> queued = client.Send(token, product);
  ASSERT_TRUE(Eventually(10s, [&] { return client.ServerInfo().in_flight() == 2; }));
  EXPECT_EQ(client.EndSession(TheSession(client).name())->buffers_released(), 1U) << "returns at once";
  EXPECT_EQ(queued.get().code(), StatusCode::kCancelled);
  EXPECT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  const v1::SessionInfo row = TheSession(client);
  EXPECT_EQ(row.state(), v1::SESSION_STATE_ENDING);
  EXPECT_EQ(row.end_reason(), "evicted");
  EXPECT_EQ(row.in_flight(), 1U);
  EXPECT_EQ(client.EndSession(row.name()).status().code(), StatusCode::kNotFound) << "it is not open";
  EXPECT_EQ(Text(running.get()), "OK");
  EXPECT_TRUE(Eventually(2s, [&] { return HoldsNothing(client); }));
}

TEST_F(EndTest, OtherUsersEndNothing) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const RawClient root(socket());
  const RawClient alice(socket(), kAliceUid);
  const std::string token = alice.OpenFor(60'000).value();
  const std::string name = TheSession(alice).name();
  // Not even her own by its name.
  ExpectRefused(alice.EndSession(name).status(), StatusCode::kPermissionDenied,
                PrincipalOf(kAliceUid) + " is no administrator");
  ExpectRefused(alice.ListSessions("", 0, true).status(), StatusCode::kPermissionDenied,
                PrincipalOf(kAliceUid) + " is no administrator");
  EXPECT_EQ(root.ListSessions()->sessions_size(), 0) << "hers are not root's";
  ASSERT_EQ(root.ListSessions("", 0, true)->sessions_size(), 1);
  EXPECT_EQ(root.ListSessions("", 0, true)->sessions(0).principal(), PrincipalOf(kAliceUid));
  EXPECT_TRUE(alice.KeepAlive(token).ok());
  EXPECT_EQ(root.KeepAlive(token).status().code(), StatusCode::kPermissionDenied) << "a token is for its owner";
  EXPECT_TRUE(root.EndSession(name).ok());
  EXPECT_EQ(alice.KeepAlive(token).status().code(), StatusCode::kNotFound);
}

TEST_F(EndTest, NamesAreCheckedWhole) {
  const RawClient client(socket());
  const std::string token = client.OpenFor(60'000).value();
  const std::string name = TheSession(client).name();
  EXPECT_THAT(name, ::testing::MatchesRegex("[0-9]+\\.[0-9]+"));
  for (const std::string& bad :
       {std::string(), std::string("."), std::string("0"), std::string("0."), std::string(".1"), name + ".",
        name + ".1", std::string("a.b"), "-" + name, " " + name, "+" + name, "0" + name, name + " ",
        std::string("0.-1"), std::string("4294967296.1"), std::string("0.4294967297"), std::string("0x0.1"),
        name + std::string("\0", 1), std::string(10'000, '1')}) {
    SCOPED_TRACE(bad.substr(0, 20));
    ExpectRefused(client.EndSession(bad).status(), StatusCode::kInvalidArgument, "name: ");
  }
  for (const char* unknown : {"0.0", "0.4294967295", "4294967295.1", "1.1", "4294967295.4294967295"}) {
    SCOPED_TRACE(unknown);
    ExpectRefused(client.EndSession(unknown).status(), StatusCode::kNotFound, "name: ");
  }
  EXPECT_TRUE(client.KeepAlive(token).ok()) << "and nothing has ended";
  EXPECT_EQ(Ends("evicted"), 0);
}

TEST_F(EndTest, ListSessionsTellsTheKindsOfLeases) {
  client::Client library = Connect();
  const RawClient raw(socket());
  client::Session side = library.OpenSession("by side channel").value();
  client::Session attached = library.OpenSession({.label = "by attach", .lease = client::Lease::kAttach}).value();
  client::Session timed = library.OpenSession({.label = "by time", .lease = client::Lease::kTtl, .ttl = 50s}).value();
  const client::Buffer buffer = side.Allocate(4000).value();
  ASSERT_TRUE(raw.Allocate(attached.token(), 500).ok());
  const v1::ListSessionsReply list = library.ListSessions().value();
  ASSERT_EQ(list.sessions_size(), 3);
  std::set<std::string> names;
  for (const v1::SessionInfo& row : list.sessions()) {
    SCOPED_TRACE(row.label());
    names.insert(row.name());
    const bool by_side = row.label() == "by side channel";
    const bool by_time = row.label() == "by time";
    EXPECT_EQ(row.lease(), by_side   ? v1::LEASE_KIND_SIDE_CHANNEL
                           : by_time ? v1::LEASE_KIND_TTL
                                     : v1::LEASE_KIND_ATTACH);
    EXPECT_EQ(row.principal(), PrincipalOf(::geteuid()));
    EXPECT_EQ(row.owner_pid(), ::getpid());
    EXPECT_EQ(row.state(), v1::SESSION_STATE_OPEN);
    EXPECT_EQ(row.end_reason(), "");
    EXPECT_EQ(row.bytes(), by_side ? 4000U : by_time ? 0U : 500U);
    EXPECT_EQ(row.buffers(), by_time ? 0U : 1U);
    EXPECT_EQ(row.in_flight(), 0U);
    EXPECT_EQ(row.ttl_ms() > 0, by_time);
    EXPECT_LE(row.ttl_ms(), 50'000U);
    EXPECT_LE(row.idle_ms(), row.age_ms());
    EXPECT_LT(row.age_ms(), 60'000U);
  }
  EXPECT_EQ(names.size(), 3U);
  // A buffer names its session.
  const v1::ListBuffersReply buffers = library.ListBuffers().value();
  for (const v1::BufferInfo& row : buffers.buffers()) EXPECT_TRUE(names.contains(row.session()));
}

}  // namespace
}  // namespace tessera::e2e
