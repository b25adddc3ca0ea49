// Many clients at one daemon, with sessions that come and go on every kind of lease and calls of every kind: every
// result is right, and at the end nothing is left.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/gemm_stream.h"
#include "common/status_macros.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/exact_product.h"
#include "tests/e2e/inline_problem.h"
#include "tests/oracle/test_data.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using client::Lease;
using Clock = std::chrono::steady_clock;

constexpr int kClients = 64;
constexpr auto kDuration = 4s;
constexpr std::uint64_t kPlace = 64 << 10;  // of one product in a buffer
constexpr int kPlaces = 6;

struct Tally {
  int products = 0;
  int sessions = 0;
  int closed = 0;  // of those, by CloseSession
};

// One of many: a thread with a connection of its own. Stops at the first thing that is not right, and says it.
class Participant {
 public:
  Participant(const std::string& socket, std::uint64_t seed, Clock::time_point end)
      : socket_(socket), random_(seed), end_(end), thread_([this] { complaint_ = Text(Run()); }) {}

  void Join() { thread_.join(); }
  const std::string& complaint() const { return complaint_; }  // after Join; "OK" if there is none
  const Tally& tally() const { return tally_; }

 private:
  absl::Status Run() {
    absl::StatusOr<client::Client> client =
        client::Client::Connect({.socket = socket_, .side_channel = {}, .timeout = 60s});
    RETURN_IF_ERROR(client.status());
    while (Clock::now() < end_) {
      RETURN_IF_ERROR(random_.Int(0, 3) == 0 ? InlineSession(*client) : BufferSession(*client));
      if (random_.Int(0, 7) > 0) continue;  // the connection is another one now
      client = client::Client::Connect({.socket = socket_, .side_channel = {}, .timeout = 60s});
      RETURN_IF_ERROR(client.status());
    }
    return absl::OkStatus();
  }

  // A session without the side channel: inline tensors only.
  absl::Status InlineSession(client::Client& client) {
    client::SessionOptions options{.label = "inline", .lease = random_.Int(0, 1) == 0 ? Lease::kAttach : Lease::kTtl};
    if (options.lease == Lease::kTtl) options.ttl = 60s;
    ASSIGN_OR_RETURN(client::Session session, client.OpenSession(options));
    ++tally_.sessions;
    for (std::int64_t i = random_.Int(1, 4); i > 0; --i) {
      InlineProblem problem(random_.Int(1, 20), random_.Int(1, 20), random_.Int(1, 40));
      RETURN_IF_ERROR(session.Gemm(problem.spec()).status());
      problem.ExpectRight();
      if (::testing::Test::HasFailure()) return absl::DataLossError("an inline result");
      ++tally_.products;
    }
    return Close(session);  // nothing else ends one that has a time to live
  }

  absl::Status BufferSession(client::Client& client) {
    ASSIGN_OR_RETURN(client::Session session, client.OpenSession("buffers"));
    ++tally_.sessions;
    for (std::int64_t i = random_.Int(1, 3); i > 0; --i) {
      absl::StatusOr<client::Buffer> buffer =
          random_.Int(0, 1) == 0 ? session.Allocate(kPlaces * kPlace) : session.Share(kPlaces * kPlace);
      RETURN_IF_ERROR(buffer.status());
      RETURN_IF_ERROR(ComputeIn(session, *buffer));
    }
    return random_.Int(0, 1) == 0 ? Close(session) : absl::OkStatus();
  }

  absl::Status Close(client::Session& session) {
    ++tally_.closed;
    return session.Close();
  }

  // As many products as fit, one by one, side by side, or on a stream.
  absl::Status ComputeIn(client::Session& session, const client::Buffer& buffer) {
    struct Sent {
      ExactProduct product;
      std::uint64_t number;
      std::future<absl::StatusOr<client::GemmResult>> answer;
    };
    const std::int64_t way = random_.Int(0, 2);
    std::optional<client::GemmStream> stream;
    if (way == 2) stream.emplace(session.OpenStream());
    std::list<Sent> sent;
    for (std::uint64_t place = 0; place < kPlaces; ++place) {
      const std::int64_t extent = random_.Int(1, 64);
      ExactProduct product(buffer, extent, random_.Int(1, 64), random_.Int(1, 64), place * kPlace);
      const std::uint64_t number = random_.Next() % 1000;
      product.Fill(number);
      auto answer = stream.has_value() ? stream->Gemm(product.spec()) : session.GemmAsync(product.spec());
      sent.push_back({std::move(product), number, std::move(answer)});
      if (way == 0) sent.back().answer.wait();
    }
    for (Sent& call : sent) RETURN_IF_ERROR(call.answer.get().status());
    for (const Sent& call : sent) {
      if (!call.product.Right(call.number)) return absl::DataLossError("a result");
      ++tally_.products;
    }
    return stream.has_value() ? stream->Finish() : absl::OkStatus();
  }

  const std::string socket_;
  oracle::Random random_;
  const Clock::time_point end_;
  Tally tally_;
  std::string complaint_;
  std::thread thread_;
};

static_assert(3 * 64 * 64 * 4 <= kPlace);

class ManyClientsTest : public DaemonFixture {};

TEST_F(ManyClientsTest, EveryResultIsRightAndNothingIsLeft) {
  const std::uint64_t seed = TestSeed();
  std::list<Participant> participants;
  const auto end = Clock::now() + kDuration;
  for (int i = 0; i < kClients; ++i) participants.emplace_back(socket(), seed + static_cast<std::uint64_t>(i), end);
  Tally all;
  for (Participant& participant : participants) {
    participant.Join();
    EXPECT_EQ(participant.complaint(), "OK");
    all.products += participant.tally().products;
    all.sessions += participant.tally().sessions;
    all.closed += participant.tally().closed;
  }
  std::printf("%d products in %d sessions\n", all.products, all.sessions);
  EXPECT_GT(all.sessions, kClients) << "it was over too soon to say anything";

  std::string metrics;
  EXPECT_TRUE(Eventually(10s, [&] {
    metrics = Metrics();
    bool zero = true;
    for (const char* gauge :
         {"tessera_in_flight", "tessera_queue_depth", "tessera_sessions", "tessera_sessions_ending", "tessera_leases",
          "tessera_buffers", "tessera_buffer_bytes", "tessera_buffer_held_bytes", "tessera_side_connections",
          "tessera_rpc_connections", "tessera_cleanups_waiting", "tessera_cleanups_stuck"}) {
      zero = zero && MetricSum(metrics, gauge) == 0;
    }
    return zero;
  })) << metrics;
  EXPECT_EQ(MetricSum(metrics, "tessera_operations_total", {"outcome=\"ok\""}), all.products);
  EXPECT_EQ(MetricSum(metrics, "tessera_operations_total"), all.products);
  EXPECT_EQ(MetricSum(metrics, "tessera_session_ends_total", {"reason=\"closed\""}), all.closed);
  EXPECT_EQ(MetricSum(metrics, "tessera_session_ends_total", {"reason=\"lease_lost\""}), all.sessions - all.closed);
  EXPECT_EQ(MetricSum(metrics, "tessera_session_ends_total"), all.sessions);
  EXPECT_EQ(MetricSum(metrics, "tessera_quarantines_total"), 0);
}

}  // namespace
}  // namespace tessera::e2e
