// A client that goes to one point of its life and waits there to be killed: tessera-victim SOCKET POINT MEMFD, where
// MEMFD is a descriptor that it has inherited. Exits by itself only on an error.

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/core.h"
#include "client/gemm_stream.h"
#include "common/paths.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/victim.h"

namespace tessera::e2e {
namespace {

[[noreturn]] void WaitForTheEnd() {
  while (true) ::pause();
}

void SayReady() {
  std::printf("ready\n");
  std::fflush(stdout);
}

struct Scene {
  std::string socket;
  int memfd = -1;
  int waiting = 0;  // as VictimPoint says
};

absl::StatusOr<client::Client> Connect(const Scene& scene) {
  return client::Client::Connect({.socket = scene.socket, .side_channel = {}, .timeout = std::chrono::minutes(1)});
}

// What a client has once it is set up. Gone only with the process.
struct Standing {
  client::Client client;
  client::Session session;
  std::string buffer;
};

// Never freed: a destructor would end what the daemon has to end by itself.
absl::StatusOr<Standing*> Stand(const Scene& scene) {
  ASSIGN_OR_RETURN(client::Client client, Connect(scene));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession("victim"));
  ASSIGN_OR_RETURN(client::Buffer buffer, session.Import(scene.memfd));
  const std::string id = buffer.id();
  new client::Buffer(std::move(buffer));
  return new Standing{std::move(client), std::move(session), id};
}

// A slow call and small ones behind it. That the daemon has them all is for the test to see.
void SendWork(Standing& standing, int waiting) {
  const auto ignore = [](const absl::StatusOr<client::GemmResult>&) {};
  standing.session.GemmAsync(VictimGround::Slow(standing.buffer), ignore);
  for (int i = 0; i < waiting; ++i) standing.session.GemmAsync(VictimGround::Small(standing.buffer, i), ignore);
}

absl::Status KeepConnecting(const Scene& scene) {
  for (bool first = true;; first = false) {
    ASSIGN_OR_RETURN(client::Client client, Connect(scene));
    if (first) SayReady();
    ASSIGN_OR_RETURN(const client::Session session, client.OpenSession("connecting"));
  }
}

absl::Status ConnectSide(const Scene& scene) {
  ASSIGN_OR_RETURN(const auto side,
                   client::SideChannel::Connect(SideChannelPath(scene.socket), std::chrono::minutes(1)));
  SayReady();
  WaitForTheEnd();
}

absl::Status ConnectHalf(const Scene& scene) {
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  scene.socket.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const std::string half = "PRI * HTTP/2.0\r\n";
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::send(socket.get(), half.data(), half.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(half.size())) {
    return absl::UnavailableError("cannot connect");
  }
  SayReady();
  WaitForTheEnd();
}

absl::Status PassDescriptors(const Scene& scene) {
  ASSIGN_OR_RETURN(const client::Client client, Connect(scene));
  ASSIGN_OR_RETURN(const auto side,
                   client::SideChannel::Connect(SideChannelPath(scene.socket), std::chrono::minutes(1)));
  v1::SideRequest pass;
  pass.mutable_pass_descriptor();
  for (int i = 0; i < 3; ++i) RETURN_IF_ERROR(side->Call(pass, scene.memfd).status());
  SayReady();
  WaitForTheEnd();
}

absl::Status KeepImporting(const Scene& scene) {
  constexpr std::size_t kHeld = 32;
  ASSIGN_OR_RETURN(Standing * standing, Stand(scene));
  std::list<client::Buffer> held;
  for (bool first = true;; first = false) {
    ASSIGN_OR_RETURN(client::Buffer imported, standing->session.Import(scene.memfd));
    ASSIGN_OR_RETURN(client::Buffer allocated, standing->session.Allocate(1 << 16));
    held.push_back(std::move(imported));
    held.push_back(std::move(allocated));
    if (first) SayReady();
    while (held.size() >= kHeld) held.pop_front();
  }
}

absl::Status HoldBuffers(const Scene& scene) {
  ASSIGN_OR_RETURN(Standing * standing, Stand(scene));
  std::vector<client::Buffer> held;
  for (int i = 0; i < 3; ++i) {
    ASSIGN_OR_RETURN(client::Buffer imported, standing->session.Import(scene.memfd, std::uint64_t{4096} << i));
    ASSIGN_OR_RETURN(client::Buffer allocated, standing->session.Allocate(1 << 20));
    held.push_back(std::move(imported));
    held.push_back(std::move(allocated));
  }
  SayReady();
  WaitForTheEnd();
}

absl::Status Compute(const Scene& scene) {
  ASSIGN_OR_RETURN(Standing * standing, Stand(scene));
  SendWork(*standing, scene.waiting);
  SayReady();
  WaitForTheEnd();
}

absl::Status ComputeUnasked(const Scene& scene) {
  ASSIGN_OR_RETURN(Standing * standing, Stand(scene));
  client::GemmSpec slow = VictimGround::Slow(standing->buffer);
  slow.order.reply_when = v1::REPLY_WHEN_ENQUEUED;
  RETURN_IF_ERROR(standing->session.Gemm(slow).status());
  SayReady();
  WaitForTheEnd();
}

// The first answer is never returned from, so that none is read any more.
absl::Status StreamToNobody(const Scene& scene) {
  ASSIGN_OR_RETURN(Standing * standing, Stand(scene));
  client::GemmStream stream = standing->session.OpenStream();
  const auto never = [](const absl::StatusOr<client::GemmResult>&) { WaitForTheEnd(); };
  RETURN_IF_ERROR(stream.Gemm(VictimGround::Small(standing->buffer, scene.waiting), never));
  RETURN_IF_ERROR(stream.Gemm(VictimGround::Slow(standing->buffer), never));
  for (int i = 0; i < scene.waiting; ++i) {
    RETURN_IF_ERROR(stream.Gemm(VictimGround::Small(standing->buffer, i), never));
  }
  SayReady();
  WaitForTheEnd();
}

absl::Status Release(const Scene& scene) {
  ASSIGN_OR_RETURN(client::Client client, Connect(scene));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession("releasing"));
  ASSIGN_OR_RETURN(client::Buffer buffer, session.Import(scene.memfd));
  session.GemmAsync(VictimGround::Slow(buffer.id()), [](const absl::StatusOr<client::GemmResult>&) {});
  while (true) {
    ASSIGN_OR_RETURN(const v1::ServerInfoReply info, client.ServerInfo());
    ASSIGN_OR_RETURN(const v1::ListBuffersReply buffers, client.ListBuffers());
    for (const v1::BufferInfo& row : buffers.buffers()) {
      if (row.buffer_id() != buffer.id() || row.references() == 0) continue;
      SayReady();
      RETURN_IF_ERROR(buffer.Release());  // answers after the call
      WaitForTheEnd();
    }
  }
}

// Its memory is the daemon's: leases without the side channel pass no descriptors.
absl::Status ComputeOn(const client::SessionOptions& lease, const Scene& scene) {
  ASSIGN_OR_RETURN(client::Client client, Connect(scene));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession(lease));
  v1::AllocateBufferRequest request;
  request.set_bytes(VictimGround::kBytes);
  v1::AllocateBufferReply reply;
  grpc::ClientContext context;
  context.AddMetadata("tessera-session-bin", session.token());
  RETURN_IF_ERROR(client::FromGrpc(v1::Memory::NewStub(client.channel())->AllocateBuffer(&context, request, &reply)));
  auto* standing = new Standing{std::move(client), std::move(session), reply.buffer_id()};
  SendWork(*standing, scene.waiting);
  SayReady();
  WaitForTheEnd();
}

absl::Status GoTo(const std::string& point, const Scene& scene) {
  using client::Lease;
  const std::map<std::string, std::function<absl::Status(const Scene&)>> ways = {
      {"connecting", KeepConnecting},
      {"side-channel", ConnectSide},
      {"half-connected", ConnectHalf},
      {"descriptors-passed", PassDescriptors},
      {"importing", KeepImporting},
      {"idle", HoldBuffers},
      {"running", Compute},
      {"enqueued", ComputeUnasked},
      {"queued", Compute},
      {"stream", StreamToNobody},
      {"releasing", Release},
      {"attached", [](const Scene& in) { return ComputeOn({.label = "attached", .lease = Lease::kAttach}, in); }},
      {"time-to-live",
       [](const Scene& in) { return ComputeOn({.label = "ttl", .lease = Lease::kTtl, .ttl = kVictimTtl}, in); }}};
  const auto way = ways.find(point);
  if (way == ways.end()) return absl::InvalidArgumentError("no such point: " + point);
  return way->second(scene);
}

}  // namespace
}  // namespace tessera::e2e

int main(int argc, char** argv) {
  using namespace tessera::e2e;
  if (argc != 4) return EXIT_FAILURE;
  const std::string point = argv[2];
  Scene scene{.socket = argv[1], .memfd = std::atoi(argv[3])};
  for (const VictimPoint& known : kVictimPoints) {
    if (point == known.name) scene.waiting = known.waiting;
  }
  std::fprintf(stderr, "%s\n", Text(GoTo(point, scene)).c_str());
  return EXIT_FAILURE;
}
