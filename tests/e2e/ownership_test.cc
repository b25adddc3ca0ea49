// Who may use which buffer, and what is left when its owner is gone.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/unique_fd.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/pipeline.h"
#include "tests/oracle/codec.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;

// What the daemon holds for its clients.
struct Holdings {
  std::uint32_t sessions = 0;
  std::uint32_t buffers = 0;
  std::uint64_t bytes = 0;
  bool operator==(const Holdings&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Holdings& held) {
  return out << held.sessions << " sessions, " << held.buffers << " buffers, " << held.bytes << " bytes";
}

std::ptrdiff_t OpenDescriptors() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return std::distance(begin(descriptors), end(descriptors));
}

// Bytes of memfds that this process, client and daemon in one, has mapped.
std::uint64_t MappedMemfdBytes() {
  std::ifstream maps("/proc/self/maps");
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:") == std::string::npos) continue;
    const std::size_t dash = line.find('-');
    bytes += std::stoull(line.substr(dash + 1), nullptr, 16) - std::stoull(line, nullptr, 16);
  }
  return bytes;
}

class OwnershipTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    client_.emplace(Connect());
  }

  void TearDown() override {
    client_.reset();
    DaemonFixture::TearDown();
  }

  Holdings Held() const {
    const v1::ServerInfoReply info = client_->ServerInfo().value();
    return {info.sessions(), info.buffers(), info.buffer_bytes()};
  }

  // A small GEMM whose tensors all lie in `buffer`.
  static client::GemmSpec SpecIn(const client::Buffer& buffer) {
    return {.a = buffer.Tensor(DType::kBf16, {4, 4}, 0),
            .b = buffer.Tensor(DType::kBf16, {4, 4}, 256),
            .d = buffer.Tensor(DType::kF32, {4, 4}, 512)};
  }

  static client::GemmSpec WithId(client::GemmSpec spec, const std::string& id) {
    for (client::TensorView* view : {&spec.a, &spec.b, &spec.d}) view->buffer_id = id;
    return spec;
  }

  // A session's token as metadata; any bytes may stand for one.
  static std::unique_ptr<grpc::ClientContext> Context(const std::optional<std::string>& token) {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + 10s);
    if (token.has_value()) context->AddMetadata("tessera-session-bin", *token);
    return context;
  }

  grpc::Status RawGemm(const client::GemmSpec& spec, const std::optional<std::string>& token) {
    v1::GemmRequest request;
    const auto set = [](const client::TensorView& view, v1::Tensor& tensor) {
      tensor.set_buffer_id(view.buffer_id);
      tensor.set_byte_offset(view.byte_offset);
      tensor.set_dtype(static_cast<v1::DType>(view.dtype));
      tensor.mutable_shape()->Assign(view.shape.begin(), view.shape.end());
    };
    set(spec.a, *request.mutable_op()->mutable_a());
    set(spec.b, *request.mutable_op()->mutable_b());
    set(spec.d, *request.mutable_op()->mutable_d());
    v1::GemmReply reply;
    return v1::Compute::NewStub(client_->channel())->Gemm(Context(token).get(), request, &reply);
  }

  grpc::Status RawRelease(const std::string& id, const std::optional<std::string>& token) {
    v1::ReleaseBufferRequest request;
    request.set_buffer_id(id);
    v1::ReleaseBufferReply reply;
    return v1::Memory::NewStub(client_->channel())->ReleaseBuffer(Context(token).get(), request, &reply);
  }

  std::optional<client::Client> client_;
};

TEST_F(OwnershipTest, AnotherSessionsBufferIsRefused) {
  client::Session owner = client_->OpenSession("owner").value();
  client::Session thief = client_->OpenSession("thief").value();
  const client::Buffer buffer = owner.Allocate(4096).value();
  const auto used = thief.Gemm(SpecIn(buffer));
  EXPECT_EQ(used.status().code(), StatusCode::kPermissionDenied) << used.status();
  EXPECT_THAT(Text(used.status()), HasSubstr("op.a.buffer_id"));
  EXPECT_EQ(RawRelease(buffer.id(), thief.token()).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  const auto own = owner.Gemm(SpecIn(buffer));
  EXPECT_TRUE(own.ok()) << own.status();
}

TEST_F(OwnershipTest, UnknownAndReleasedIdsAreNotFound) {
  client::Session session = client_->OpenSession("unknown").value();
  client::Buffer buffer = session.Allocate(4096).value();
  const client::GemmSpec spec = SpecIn(buffer);
  // The parts of an id after the epoch: index, generation, nonce. Each must match.
  for (const std::size_t byte : {4U, 8U, 12U, 15U}) {
    std::string id = buffer.id();
    id[byte] = static_cast<char>(id[byte] ^ 0x40);
    const auto result = session.Gemm(WithId(spec, id));
    EXPECT_EQ(result.status().code(), StatusCode::kNotFound) << byte << ": " << result.status();
    EXPECT_EQ(RawRelease(id, session.token()).error_code(), grpc::StatusCode::NOT_FOUND) << byte;
  }
  const std::string id = buffer.id();
  ASSERT_TRUE(buffer.Release().ok());
  EXPECT_EQ(session.Gemm(spec).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(RawRelease(id, session.token()).error_code(), grpc::StatusCode::NOT_FOUND);
  // A buffer in the same slot does not answer to the old id.
  const client::Buffer next = session.Allocate(4096).value();
  EXPECT_EQ(session.Gemm(spec).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(session.Gemm(SpecIn(next)).ok());
}

TEST_F(OwnershipTest, IdsOfAFormerDaemonFailPrecondition) {
  client::Session old_session = client_->OpenSession("old").value();
  const client::Buffer old_buffer = old_session.Share(4096).value();
  StartDaemon();
  client_.emplace(Connect());
  client::Session session = client_->OpenSession("new").value();
  const auto old_id = session.Gemm(SpecIn(old_buffer));
  EXPECT_EQ(old_id.status().code(), StatusCode::kFailedPrecondition) << old_id.status();
  const grpc::Status old_token = RawGemm(SpecIn(old_buffer), old_session.token());
  EXPECT_EQ(old_token.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << old_token.error_message();
  // Memory of the client outlives the daemon.
  std::memset(old_buffer.data(), 1, old_buffer.bytes());
  const client::Buffer buffer = session.Allocate(4096).value();
  EXPECT_TRUE(session.Gemm(SpecIn(buffer)).ok());
}

TEST_F(OwnershipTest, ABufferNeedsAToken) {
  client::Session session = client_->OpenSession("token").value();
  const client::Buffer buffer = session.Allocate(4096).value();
  const grpc::Status none = RawGemm(SpecIn(buffer), std::nullopt);
  EXPECT_EQ(none.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(none.error_message(), HasSubstr("op.a.buffer_id"));
  for (const std::size_t length : {0U, 1U, 15U, 17U, 100U}) {
    const grpc::Status wrong = RawGemm(SpecIn(buffer), std::string(length, 'x'));
    EXPECT_EQ(wrong.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << length << ": " << wrong.error_message();
    EXPECT_THAT(wrong.error_message(), HasSubstr("tessera-session-bin")) << length;
  }
  std::string forged = session.token();
  forged[15] = static_cast<char>(forged[15] ^ 1);
  EXPECT_EQ(RawGemm(SpecIn(buffer), forged).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_TRUE(RawGemm(SpecIn(buffer), session.token()).ok());
}

TEST_F(OwnershipTest, TheEndOfTheSideChannelEndsTheSession) {
  const Holdings before = Held();
  {
    client::Session session = client_->OpenSession("leaving").value();
    // Not owned by an object of this process, so that nothing but the session's end releases it.
    v1::AllocateBufferRequest request;
    request.set_bytes(1 << 20U);
    v1::AllocateBufferReply reply;
    const auto memory = v1::Memory::NewStub(client_->channel());
    ASSERT_TRUE(memory->AllocateBuffer(Context(session.token()).get(), request, &reply).ok());
    EXPECT_EQ(Held(), (Holdings{before.sessions + 1, before.buffers + 1, before.bytes + (1 << 20U)}));
  }
  EXPECT_TRUE(Eventually(2s, [&] { return Held() == before; })) << Held();
  EXPECT_EQ(MetricSum(Metrics(), "tessera_session_ends_total", {"reason=\"lease_lost\""}), 1);
}

TEST_F(OwnershipTest, AClosedSessionIsNotFound) {
  const Holdings before = Held();
  client::Session session = client_->OpenSession("closing").value();
  client::Buffer buffer = session.Allocate(4096).value();
  const client::GemmSpec spec = SpecIn(buffer);
  ASSERT_TRUE(session.Gemm(spec).ok());
  ASSERT_TRUE(session.Close().ok());
  // Not at once: the side channel holds a buffer whose descriptor it passes until its own thread is back from doing so.
  EXPECT_TRUE(Eventually(2s, [&] { return Held() == before; })) << Held();
  std::memset(buffer.data(), 1, buffer.bytes());  // the mapping stays until it is released here
  EXPECT_EQ(session.Gemm(spec).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(session.Allocate(4096).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(session.Share(4096).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(session.Close().code(), StatusCode::kNotFound);
  EXPECT_EQ(buffer.Release().code(), StatusCode::kNotFound);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_session_ends_total", {"reason=\"closed\""}), 1);
}

TEST_F(OwnershipTest, AKilledClientGivesEverythingBack) {
  const Holdings before = Held();
  ChildProcess child({TESSERA_WORKLOAD, "--socket", socket(), "--hold"});
  ASSERT_TRUE(Eventually(10s, [&] { return child.Out().find("holding") != std::string::npos; })) << child.Err();
  const Holdings during = Held();
  EXPECT_EQ(during.sessions, before.sessions + 1);
  EXPECT_EQ(during.buffers, before.buffers + 1);
  EXPECT_GE(during.bytes, before.bytes + (1 << 20U));
  child.Signal(SIGKILL);
  EXPECT_TRUE(Eventually(2s, [&] { return Held() == before; })) << Held();
  EXPECT_EQ(child.Wait(), -SIGKILL);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_side_connections"), 0);
}

TEST_F(OwnershipTest, ManyRoundsLeaveNothingBehind) {
  const auto round = [this] {
    client::Client client = Connect();
    client::Session session = client.OpenSession("round").value();
    const client::Buffer allocated = session.Allocate(1 << 16U).value();
    const client::Buffer shared = session.Share(1 << 16U).value();
    ASSERT_TRUE(session.Gemm(SpecIn(allocated)).ok());
    ASSERT_TRUE(session.Gemm(SpecIn(shared)).ok());
  };
  for (int i = 0; i < 10; ++i) round();  // what the libraries keep for good is there now
  // The daemon ends a session when it sees its lease closed, which is soon but not before the client goes on.
  ASSERT_TRUE(Eventually(2s, [&] { return Held() == Holdings(); })) << Held();
  const Holdings held = Held();
  std::ptrdiff_t descriptors = 0;
  // gRPC closes sockets on its own threads.
  ASSERT_TRUE(Eventually(5s, [&] {
    const std::ptrdiff_t now = OpenDescriptors();
    return std::exchange(descriptors, now) == now;
  }));
  EXPECT_EQ(MappedMemfdBytes(), 0U);
  for (int i = 0; i < 200; ++i) round();
  EXPECT_TRUE(Eventually(5s, [&] { return OpenDescriptors() <= descriptors; }))
      << OpenDescriptors() << " descriptors, before " << descriptors;
  EXPECT_TRUE(Eventually(2s, [&] { return Held() == held; })) << Held();
  EXPECT_EQ(MappedMemfdBytes(), 0U);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_buffer_bytes"), 0);
}

TEST_F(OwnershipTest, ABufferReleasedDuringItsCallLivesUntilTheCallEnds) {
  constexpr std::int64_t kExtent = 768;
  constexpr std::uint64_t kMatrixBytes = kExtent * kExtent * 2;
  constexpr std::uint64_t kBytes = 3 * kMatrixBytes;
  const UniqueFd memfd(::memfd_create("ownership-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(memfd.get(), kBytes), 0);
  ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  auto* mine = static_cast<std::byte*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0));
  ASSERT_NE(static_cast<void*>(mine), MAP_FAILED);
  std::memset(mine, 0x7b, kBytes);
  for (std::uint64_t at = 0; at < 2 * kMatrixBytes; at += 2) oracle::Encode(DType::kBf16, 1, mine + at);

  StartDaemon({{"cpu_threads", "1"}});
  // The release waits for all of the calls, which take their time under sanitizers.
  client_.emplace(client::Client::Connect({.socket = socket(), .timeout = 120s}).value());
  const Holdings before = Held();
  client::Session session = client_->OpenSession("releasing").value();
  client::Buffer buffer = session.Import(memfd.get()).value();
  const auto matrix = [&](std::uint64_t i) {
    return buffer.Tensor(DType::kBf16, {kExtent, kExtent}, i * kMatrixBytes);
  };
  const client::GemmSpec spec{.a = matrix(0), .b = matrix(1), .d = matrix(2)};
  Pipeline running(*client_);
  for (int i = 0; i < 32; ++i) running.Send(session, spec);
  running.AwaitArrival();
  std::future<absl::Status> released = std::async(std::launch::async, [&] { return buffer.Release(); });
  ASSERT_TRUE(Eventually(2s, [&] { return Held().buffers == before.buffers; }));
  EXPECT_GT(Held().bytes, before.bytes) << "the calls were over before the release: use a larger product";
  EXPECT_EQ(session.Gemm(spec).status().code(), StatusCode::kNotFound);  // new users are refused at once
  EXPECT_EQ(released.wait_for(0s), std::future_status::timeout) << "answered while the daemon had the memory";
  running.ExpectAllOk();
  EXPECT_EQ(Text(released.get()), "OK");
  EXPECT_EQ(Held().bytes, before.bytes);  // at once: the answer says that it is gone
  for (std::uint64_t at = 2 * kMatrixBytes; at < kBytes; at += 2) {
    ASSERT_EQ(oracle::Decode(DType::kBf16, mine + at), kExtent) << at;
  }
  EXPECT_EQ(::munmap(mine, kBytes), 0);
}

TEST_F(OwnershipTest, ASessionClosedDuringItsCallsFinishesWhatRuns) {
  StartDaemon({{"cpu_threads", "1"}});
  client_.emplace(Connect());
  client::Session session = client_->OpenSession("closing").value();
  const auto problem =
      workload::SharedProblem::Make(session, {.m = 512, .n = 512, .k = 512}, 5, workload::MemoryOwner::kClient).value();
  Pipeline running(*client_);
  for (int i = 0; i < 8; ++i) running.Send(session, problem.spec());
  running.AwaitArrival();
  ASSERT_TRUE(Eventually(5s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > 0; }));
  ASSERT_TRUE(session.Close().ok());
  int finished = 0;
  for (const auto& result : running.Results()) {
    EXPECT_TRUE(result.ok() || result.status().code() == StatusCode::kCancelled) << result.status();
    finished += result.ok() ? 1 : 0;
  }
  EXPECT_GT(finished, 0);
  EXPECT_TRUE(problem.Check().ok);
  EXPECT_TRUE(Eventually(2s, [&] { return Held() == Holdings(); })) << Held();
}

}  // namespace
}  // namespace tessera::e2e
