// Who is at the other end of a socket, and that a connection's number means one connection for long enough.
#include "server/session/peer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "tests/server/session/posix_fixtures.h"

namespace tessera::server {
namespace {

const Peer kPeer{.pid = 1, .uid = 2, .gid = 3};
constexpr ConnectionLimits kPlenty{.connections_max = 1'000, .connections_per_principal_max = 1'000};

std::string NameOf(int number) {
  return "fd:" + std::to_string(number);
}

class PeerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    near_.Reset(ends[0]);
    far_.Reset(ends[1]);
  }

  // A connection of its own for each call; closed by the registry's caller, as gRPC would.
  static UniqueFd NewConnection() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    ::close(ends[1]);
    return UniqueFd(ends[0]);
  }

  bool Refused(const std::string& limit, int times) const {
    return metrics_.Serialize().find("tessera_refused_total{limit=\"" + limit + "\"} " + std::to_string(times) +
                                     "\n") != std::string::npos;
  }

  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  UniqueFd near_;
  UniqueFd far_;
};

TEST_F(PeerTest, PrincipalsAreNamedByWhatVouchesForThem) {
  const Peer local{.pid = 7, .uid = 1000, .gid = 1};
  const Peer certificate{.kind = PeerKind::kCertificate, .subject = "CN=a,O=b"};
  const Peer anonymous{.kind = PeerKind::kAnonymous};
  EXPECT_EQ(local.Principal(), "uid:1000");
  EXPECT_EQ(certificate.Principal(), "subject:CN=a,O=b");
  EXPECT_EQ(anonymous.Principal(), "anonymous");

  EXPECT_TRUE(SamePrincipal(local, Peer{.pid = 8, .uid = 1000, .gid = 2}));
  EXPECT_FALSE(SamePrincipal(local, Peer{.pid = 7, .uid = 1001, .gid = 1}));
  EXPECT_TRUE(SamePrincipal(certificate, Peer{.kind = PeerKind::kCertificate, .subject = "CN=a,O=b"}));
  EXPECT_FALSE(SamePrincipal(certificate, Peer{.kind = PeerKind::kCertificate, .subject = "CN=a"}));
  EXPECT_FALSE(SamePrincipal(anonymous, anonymous)) << "nobody vouches that they are one";
  // The members that do not name a kind do not count for it: all of these have uid 0 and one subject.
  EXPECT_FALSE(SamePrincipal(Peer{}, anonymous));
  EXPECT_FALSE(SamePrincipal(Peer{}, Peer{.kind = PeerKind::kCertificate}));
}

TEST_F(PeerTest, SocketTellsWhoConnected) {
  const auto peer = PeerOfSocket(near_.get());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->pid, ::getpid());
  EXPECT_EQ(peer->uid, ::geteuid());
  EXPECT_EQ(peer->gid, ::getegid());
  EXPECT_EQ(peer->Principal(), "uid:" + std::to_string(::geteuid()));
}

TEST_F(PeerTest, OtherDescriptorsHaveNoPeer) {
  const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(PeerOfSocket(file.get()).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(PeerOfSocket(-1).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(PeerTest, AdoptDuplicatesAndRemembers) {
  PeerRegistry peers(kPlenty, metrics_);
  const auto number = peers.Adopt(near_.get(), kPeer);
  ASSERT_TRUE(number.ok()) << number.status();
  const UniqueFd adopted(*number);
  EXPECT_NE(*number, near_.get());
  EXPECT_NE(::fcntl(*number, F_GETFD) & FD_CLOEXEC, 0);
  ASSERT_EQ(::send(far_.get(), "x", 1, MSG_NOSIGNAL), 1);
  near_.Reset();
  char byte = 0;
  EXPECT_EQ(::recv(*number, &byte, 1, 0), 1);
  const auto found = peers.Find(NameOf(*number));
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->pid, kPeer.pid);
  EXPECT_EQ(found->uid, kPeer.uid);
  EXPECT_EQ(found->gid, kPeer.gid);
}

TEST_F(PeerTest, NumbersRiseAndAreNotReusedAtOnce) {
  PeerRegistry peers(kPlenty, metrics_);
  int last = 0;
  for (int i = 0; i < 20; ++i) {
    const auto number = peers.Adopt(near_.get(), Peer{.pid = i, .uid = 0, .gid = 0});
    ASSERT_TRUE(number.ok()) << number.status();
    EXPECT_GT(*number, last);
    last = *number;
    ASSERT_EQ(::close(*number), 0);
    // Calls of the closed connection may live on; they still find their own peer.
    const auto found = peers.Find(NameOf(*number));
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(found->pid, i);
  }
}

TEST_F(PeerTest, AdoptOfAClosedDescriptorFails) {
  PeerRegistry peers(kPlenty, metrics_);
  EXPECT_FALSE(peers.Adopt(-1, kPeer).ok());
}

TEST_F(PeerTest, OnlyTheExactNameFinds) {
  PeerRegistry peers(kPlenty, metrics_);
  const auto number = peers.Adopt(near_.get(), kPeer);
  ASSERT_TRUE(number.ok());
  const UniqueFd adopted(*number);
  const std::string digits = std::to_string(*number);
  EXPECT_TRUE(peers.Find("fd:" + digits).ok());
  const std::string bad[] = {"",
                             "fd",
                             "fd:",
                             digits,
                             " fd:" + digits,
                             "fd: " + digits,
                             "fd:" + digits + " ",
                             "fd:" + digits + "x",
                             "fd:" + digits + ":1",
                             "fd:+" + digits,
                             "fd:-" + digits,
                             "fd:0" + digits,
                             "fd:0x" + digits,
                             "FD:" + digits,
                             "unix:" + digits,
                             "ipv4:127.0.0.1:" + digits,
                             "fd:" + std::to_string(*number + 1),
                             "fd:" + std::to_string((std::int64_t{1} << 32) + *number),
                             "fd:99999999999999999999",
                             std::string("fd:") + '\0' + digits,
                             "fd:" + digits + '\0'};
  for (const std::string& name : bad) EXPECT_FALSE(peers.Find(name).ok()) << '"' << name << '"';
}

TEST_F(PeerTest, ConnectionsOfOnePrincipalAreLimited) {
  PeerRegistry peers({.connections_max = 100, .connections_per_principal_max = 2}, metrics_);
  std::vector<UniqueFd> open;
  for (int i = 0; i < 3; ++i) {
    const auto number = peers.Adopt(NewConnection().get(), kPeer);
    ASSERT_TRUE(number.ok()) << number.status();
    open.emplace_back(*number);
  }
  EXPECT_TRUE(peers.Find(NameOf(open[0].get())).ok());
  EXPECT_TRUE(peers.Find(NameOf(open[1].get())).ok());
  const absl::Status over = peers.Find(NameOf(open[2].get())).status();
  EXPECT_EQ(over.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(over.message()), ::testing::StartsWith("connections_per_principal_max: uid:2 has 2 "));
  EXPECT_TRUE(Refused("connections_per_principal_max", 2)) << "the connection, and its call";
  EXPECT_EQ(peers.CountOpen(), 3U);

  const auto other = peers.Adopt(NewConnection().get(), Peer{.pid = 1, .uid = 3, .gid = 3});
  ASSERT_TRUE(other.ok());
  open.emplace_back(*other);
  EXPECT_TRUE(peers.Find(NameOf(*other)).ok()) << "others have their own";

  open[0].Reset();
  const auto admitted = peers.Find(NameOf(open[2].get()));
  ASSERT_TRUE(admitted.ok()) << "there is room now: " << admitted.status();
  EXPECT_EQ(admitted->uid, kPeer.uid);
  EXPECT_EQ(peers.CountOpen(), 3U);
}

TEST_F(PeerTest, AllConnectionsAreLimited) {
  PeerRegistry peers({.connections_max = 3, .connections_per_principal_max = 100}, metrics_);
  std::vector<UniqueFd> open;
  for (int i = 0; i < 4; ++i) {
    const auto number = peers.Adopt(NewConnection().get(), Peer{.pid = 1, .uid = static_cast<uid_t>(i), .gid = 0});
    ASSERT_TRUE(number.ok());
    open.emplace_back(*number);
  }
  const absl::Status over = peers.Find(NameOf(open[3].get())).status();
  EXPECT_EQ(over.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(over.message()), ::testing::StartsWith("connections_max: "));
  open[1].Reset();
  EXPECT_TRUE(peers.Find(NameOf(open[3].get())).ok());
}

TEST_F(PeerTest, FewConnectionsOverTheLimitAreKept) {
  PeerRegistry peers({.connections_max = 1, .connections_per_principal_max = 1}, metrics_);
  std::vector<UniqueFd> open;
  for (std::size_t i = 0; i < 1 + PeerRegistry::kOverLimitMax; ++i) {
    const auto number = peers.Adopt(NewConnection().get(), kPeer);
    ASSERT_TRUE(number.ok());
    open.emplace_back(*number);
  }
  EXPECT_EQ(peers.Adopt(NewConnection().get(), kPeer).status().code(), absl::StatusCode::kResourceExhausted);
  open.pop_back();
  EXPECT_TRUE(peers.Adopt(NewConnection().get(), kPeer).ok());
}

TEST_F(PeerTest, UnnamedConnectionsCountForTheirAccountAndHaveNoPeer) {
  PeerRegistry peers({.connections_max = 100, .connections_per_principal_max = 1}, metrics_);
  const auto first = peers.AdoptUnnamed(NewConnection().get(), "address:10.0.0.7");
  ASSERT_TRUE(first.ok());
  UniqueFd open(*first);
  EXPECT_EQ(peers.Find(NameOf(*first)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(peers.AdoptUnnamed(NewConnection().get(), "address:10.0.0.7").status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(peers.AdoptUnnamed(NewConnection().get(), "address:10.0.0.8").ok());
  open.Reset();
  EXPECT_TRUE(peers.AdoptUnnamed(NewConnection().get(), "address:10.0.0.7").ok());
}

TEST_F(PeerTest, HangingUpEndsEveryConnection) {
  PeerRegistry peers(kPlenty, metrics_);
  const auto number = peers.Adopt(near_.get(), kPeer);
  ASSERT_TRUE(number.ok());
  const UniqueFd adopted(*number);
  near_.Reset();
  peers.HangUp();
  char byte = 0;
  EXPECT_EQ(::recv(far_.get(), &byte, 1, MSG_DONTWAIT), 0) << "the other end is told";
  EXPECT_EQ(::send(*number, "x", 1, MSG_NOSIGNAL), -1);
}

// The daemon's own descriptors may take a number whose connection is gone.
TEST_F(PeerTest, AnotherFileUnderTheNumberIsNotTheConnection) {
  PeerRegistry peers({.connections_max = 1, .connections_per_principal_max = 1}, metrics_);
  const auto number = peers.Adopt(NewConnection().get(), kPeer);
  ASSERT_TRUE(number.ok());
  const UniqueFd other = NewConnection();
  ASSERT_EQ(::dup3(other.get(), *number, O_CLOEXEC), *number);
  const UniqueFd taken(*number);
  EXPECT_EQ(peers.CountOpen(), 0U);
  const auto next = peers.Adopt(NewConnection().get(), kPeer);
  ASSERT_TRUE(next.ok());
  const UniqueFd adopted(*next);
  EXPECT_NE(*next, *number);
  EXPECT_TRUE(peers.Find(NameOf(*next)).ok());
}

// Runs `body` in a child that may open `descriptors` descriptors at most; its exit status is the number of failures.
int FailuresWithLimit(rlim_t descriptors, const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    // Whoever started this program may have left descriptors open in the range that is to be used up.
    ::close_range(static_cast<unsigned>(descriptors) / 2, ~0U, 0);
    const rlimit limit{.rlim_cur = descriptors, .rlim_max = descriptors};
    ::_exit(::setrlimit(RLIMIT_NOFILE, &limit) == 0 ? body() : 100);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

int Failed(bool ok, const char* what) {
  if (!ok) std::fprintf(stderr, "failed: %s\n", what);
  return ok ? 0 : 1;
}

TEST_F(PeerTest, NumbersStartOverAfterTheWholeRange) {
  constexpr int kLimit = 64;
  EXPECT_EQ(FailuresWithLimit(kLimit,
                              [this] {
                                PeerRegistry peers(kPlenty, metrics_);
                                int failures = 0;
                                std::vector<int> seen;
                                for (int i = 0; i < kLimit; ++i) {
                                  const auto number = peers.Adopt(near_.get(), Peer{.pid = i, .uid = 0, .gid = 0});
                                  if (!number.ok()) return 50;
                                  ::close(*number);
                                  seen.push_back(*number);
                                  failures += Failed(peers.Find(NameOf(*number))->pid == i,
                                                     "the newest connection of a number is the one found");
                                  failures += Failed(*number < kLimit, "the number is within the limit");
                                }
                                std::size_t restart = 1;
                                while (restart < seen.size() && seen[restart] > seen[restart - 1]) ++restart;
                                failures += Failed(restart >= 16, "many numbers pass before the first is used again");
                                failures += Failed(restart < seen.size(), "the range starts over");
                                if (restart < seen.size())
                                  failures += Failed(seen[restart] == seen[0], "it starts over at its beginning");
                                failures += Failed(seen[restart - 1] == kLimit - 1, "the range was used to its end");
                                return failures;
                              }),
            0);
}

TEST_F(PeerTest, LiveConnectionsKeepTheirNumbersWhenTheRangeStartsOver) {
  EXPECT_EQ(FailuresWithLimit(
                64,
                [this] {
                  PeerRegistry peers(kPlenty, metrics_);
                  const auto live = peers.Adopt(near_.get(), kPeer);
                  if (!live.ok()) return 50;
                  int failures = 0;
                  for (int i = 0; i < 200; ++i) {
                    const auto number = peers.Adopt(near_.get(), Peer{.pid = 1000 + i, .uid = 0, .gid = 0});
                    if (!number.ok()) return 51;
                    ::close(*number);
                    failures += Failed(*number != *live, "a number in use was given again");
                  }
                  failures += Failed(peers.Find(NameOf(*live))->pid == kPeer.pid, "the live connection has its peer");
                  return failures;
                }),
            0);
}

TEST_F(PeerTest, FullRangeIsResourceExhaustedAndRecovers) {
  EXPECT_EQ(FailuresWithLimit(64,
                              [this] {
                                PeerRegistry peers(kPlenty, metrics_);
                                std::vector<int> open;
                                absl::Status status;
                                while (open.size() < 100) {
                                  const auto number = peers.Adopt(near_.get(), kPeer);
                                  status = number.status();
                                  if (!number.ok()) break;
                                  open.push_back(*number);
                                }
                                int failures = Failed(status.code() == absl::StatusCode::kResourceExhausted,
                                                      "RESOURCE_EXHAUSTED when full");
                                failures += Failed(open.size() >= 16 && open.size() < 64, "the range is filled first");
                                ::close(open[open.size() / 2]);
                                const auto number = peers.Adopt(near_.get(), kPeer);
                                failures += Failed(number.ok() && *number == open[open.size() / 2],
                                                   "the freed number serves again");
                                return failures;
                              }),
            0);
}

}  // namespace
}  // namespace tessera::server
