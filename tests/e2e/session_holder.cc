// Opens a session as the user and on the lease that it is told, allocates buffers, creates a timeline and starts calls
// if it is told to, says so and waits to be killed: a client whose end a test can choose.

#include <unistd.h>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <string>
#include <thread>

#include "client/core.h"
#include "tests/e2e/product_in_buffers.h"

namespace tessera::e2e {
namespace {

struct Options {
  std::string socket;
  std::string lease = "side";
  std::uint32_t uid = 0;
  std::uint64_t ttl_ms = 10'000;
  std::uint64_t bytes = kSlowProduct.BufferBytes();
  int buffers = 1;
  int calls = 0;
  bool timeline = false;  // for all of the user's sessions, too
};

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

absl::StatusOr<std::string> Allocate(client::ClientCore& core, const std::string& token, std::uint64_t bytes) {
  grpc::ClientContext context;
  context.AddMetadata("tessera-session-bin", token);
  v1::AllocateBufferRequest request;
  request.set_bytes(bytes);
  v1::AllocateBufferReply reply;
  const absl::Status status = client::FromGrpc(core.memory->AllocateBuffer(&context, request, &reply));
  if (!status.ok()) return status;
  return reply.buffer_id();
}

absl::StatusOr<std::string> CreateTimeline(client::ClientCore& core, const std::string& token) {
  grpc::ClientContext context;
  context.AddMetadata("tessera-session-bin", token);
  v1::CreateTimelineRequest request;
  request.set_shared_with_own(true);
  v1::CreateTimelineReply reply;
  const absl::Status status = client::FromGrpc(core.memory->CreateTimeline(&context, request, &reply));
  if (!status.ok()) return status;
  return reply.timeline_id();
}

void Compute(client::ClientCore& core, const std::string& token, const std::string& buffer) {
  grpc::ClientContext context;
  context.AddMetadata("tessera-session-bin", token);
  v1::GemmReply reply;
  core.compute->Gemm(&context, ProductOf(kSlowProduct, buffer, buffer), &reply);
}

int Run(const Options& options) {
  // Before any thread: they all become that user.
  if (options.uid != 0 && ::setresuid(options.uid, options.uid, options.uid) != 0) {
    std::perror("setresuid");
    return 1;
  }
  auto core = client::ClientCore::Make({.socket = options.socket});
  if (!core.ok()) return Fail(core.status());
  const client::SessionOptions session_options{.label = "holder",
                                               .lease = options.lease == "ttl"      ? client::Lease::kTtl
                                                        : options.lease == "attach" ? client::Lease::kAttach
                                                                                    : client::Lease::kSideChannel,
                                               .ttl = std::chrono::milliseconds(options.ttl_ms)};
  auto session = client::SessionCore::Open(*core, session_options);
  if (!session.ok()) return Fail(session.status());
  const std::string token = (*session)->token;
  std::string buffer;
  for (int i = 0; i < options.buffers; ++i) {
    auto allocated = Allocate(**core, token, options.bytes);
    if (!allocated.ok()) return Fail(allocated.status());
    buffer = *allocated;
  }
  for (int i = 0; i < options.calls; ++i) std::thread([&] { Compute(**core, token, buffer); }).detach();
  if (options.timeline) {
    const auto timeline = CreateTimeline(**core, token);
    if (!timeline.ok()) return Fail(timeline.status());
    for (const char byte : *timeline) std::printf("%02x", static_cast<unsigned char>(byte));
    std::printf("\n");
  }
  std::printf("holding\n");
  std::fflush(stdout);
  while (true) ::pause();
}

}  // namespace
}  // namespace tessera::e2e

int main(int argc, char** argv) {
  tessera::e2e::Options options;
  CLI::App app("Holds a session until killed.");
  app.add_option("--socket", options.socket)->required();
  app.add_option("--lease", options.lease)->check(CLI::IsMember({"side", "attach", "ttl"}));
  app.add_option("--ttl-ms", options.ttl_ms);
  app.add_option("--uid", options.uid);
  app.add_option("--bytes", options.bytes);
  app.add_option("--buffers", options.buffers);
  app.add_option("--calls", options.calls);
  app.add_flag("--timeline", options.timeline, "Creates one and writes its id in hexadecimal.");
  CLI11_PARSE(app, argc, argv);
  return tessera::e2e::Run(options);
}
