// Every field of the requests of Memory and Admin, and every message of the side channel, wrong in every way: answered
// with the documented code and the field or limit, changing nothing.

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <limits>
#include <thread>

#include "common/unique_fd.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/e2e/bad_input_fixture.h"
#include "tests/e2e/raw_side_channel.h"

namespace tessera::e2e {
namespace {

using grpc::StatusCode;

constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t k2To63 = std::uint64_t{1} << 63U;
constexpr uid_t kOtherUid = 65'534;

UniqueFd Memfd(std::uint64_t bytes, int seals, unsigned flags = MFD_ALLOW_SEALING) {
  UniqueFd fd(::memfd_create("bad-input-test", MFD_CLOEXEC | flags));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_TRUE(seals == 0 || ::fcntl(fd.get(), F_ADD_SEALS, seals) == 0) << std::strerror(errno);
  return fd;
}

UniqueFd Open(const std::string& path, int flags) {
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC, 0600));
  EXPECT_TRUE(fd) << path << ": " << std::strerror(errno);
  return fd;
}

std::ptrdiff_t OpenDescriptors() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return std::distance(begin(descriptors), end(descriptors));
}

// Their number once connections that ended are closed, which is a little later and on the daemon's threads.
std::ptrdiff_t SettledDescriptors() {
  std::ptrdiff_t last = 0;
  std::ptrdiff_t now = OpenDescriptors();
  for (int same = 0; same < 10; same = now == last ? same + 1 : 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    last = std::exchange(now, OpenDescriptors());
  }
  return now;
}

::testing::AssertionResult DescriptorsFallTo(std::ptrdiff_t count) {
  if (Eventually(std::chrono::seconds(10), [&] { return OpenDescriptors() <= count; })) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << OpenDescriptors() << " descriptors are open, not " << count;
}

// Runs `work` as another user: the kernel keeps credentials for each thread, and a socket those of the thread that
// connected it.
void AsOtherUser(const std::function<void()>& work) {
  std::thread([&] {
    ASSERT_EQ(::syscall(SYS_setresuid, kOtherUid, kOtherUid, kOtherUid), 0) << std::strerror(errno);
    work();
  }).join();
  EXPECT_EQ(::prctl(PR_SET_DUMPABLE, 1), 0);  // the change took it from the whole process; leak checkers need it
}

class BadMemoryInputTest : public BadInputFixture {
 protected:
  using Call = std::function<grpc::Status()>;
  struct Row {
    std::string what;
    Call call;
    StatusCode code;
    std::string begins;
    std::string names = {};
  };

  void ExpectEachRefused(const std::vector<Row>& rows) {
    const std::ptrdiff_t descriptors = SettledDescriptors();
    for (const Row& row : rows) {
      SCOPED_TRACE(row.what);
      ExpectNothingChanges(operands_->Full(), [&] { ExpectRefused(row.call(), row.code, row.begins, row.names); });
      ASSERT_TRUE(DescriptorsFallTo(descriptors));
    }
  }

  // A call of a stub of any service.
  template <typename Stub, typename Request, typename Reply>
  Call With(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*), Request request,
            std::optional<std::string> token = std::nullopt) {
    return [&stub, method, request = std::move(request), token = std::move(token)] {
      Reply reply;
      return (stub.*method)(Context(token).get(), request, &reply);
    };
  }

  Call Open(const std::string& lease, const std::string& label = "") {
    v1::OpenSessionRequest request;
    request.set_lease(lease);
    request.set_label(label);
    return With(*memory_, &v1::Memory::Stub::OpenSession, request);
  }

  Call Allocate(std::uint64_t bytes) {
    v1::AllocateBufferRequest request;
    request.set_bytes(bytes);
    return With(*memory_, &v1::Memory::Stub::AllocateBuffer, request, session_->token());
  }

  Call Release(const std::string& id) {
    v1::ReleaseBufferRequest request;
    request.set_buffer_id(id);
    return With(*memory_, &v1::Memory::Stub::ReleaseBuffer, request, session_->token());
  }

  static std::string Flipped(std::string id, std::size_t byte) {
    id[byte] = static_cast<char>(id[byte] ^ 0x40);
    return id;
  }
};

TEST_F(BadMemoryInputTest, OpenSession) {
  const RawSideChannel fresh(socket());
  const RawSideChannel used(socket());
  ASSERT_TRUE(Open(used.lease())().ok());
  const std::string& lease = fresh.lease();
  ExpectEachRefused({{"no lease", Open(""), kInvalid, "lease: missing"},
                     {"lease of 1 byte", Open("x"), kInvalid, "lease: "},
                     {"lease of 15 bytes", Open(lease.substr(1)), kInvalid, "lease: "},
                     {"lease of 17 bytes", Open(lease + "x"), kInvalid, "lease: "},
                     {"lease of 1 MiB", Open(std::string(1U << 20U, 'x')), kInvalid, "lease: "},
                     {"zero lease", Open(std::string(16, '\0')), StatusCode::NOT_FOUND, "lease: "},
                     {"other epoch", Open(Flipped(lease, 0)), StatusCode::FAILED_PRECONDITION, "lease: "},
                     {"other index", Open(Flipped(lease, 4)), StatusCode::NOT_FOUND, "lease: "},
                     {"other nonce", Open(Flipped(lease, 12)), StatusCode::NOT_FOUND, "lease: "},
                     {"a buffer's id", Open(operands_->id()), StatusCode::NOT_FOUND, "lease: "},
                     {"used twice", Open(used.lease()), StatusCode::ALREADY_EXISTS, "lease: "},
                     {"label of 65 bytes", Open(lease, std::string(65, 'x')), kInvalid, "label: ", "64"},
                     {"label of 1 MiB", Open(lease, std::string(1U << 20U, 'x')), kInvalid, "label: ", "64"},
                     {"label with a line end", Open(lease, "two\nlines"), kInvalid, "label: "},
                     {"label with a zero", Open(lease, std::string("a\0b", 3)), kInvalid, "label: "},
                     {"label with DEL", Open(lease, "\x7f"), kInvalid, "label: "},
                     {"label in UTF-8", Open(lease, "\xc3\xa9t\xc3\xa9"), kInvalid, "label: "},
                     {"label in no encoding", Open(lease, "\xff\xfe"), kInvalid, "", "message"}});
  EXPECT_TRUE(Open(lease, std::string(64, '~'))().ok()) << "refusals have not used up the lease";
}

TEST_F(BadMemoryInputTest, ALeaseEndsWithItsConnection) {
  std::string lease;
  {
    const RawSideChannel side(socket());
    lease = side.lease();
  }
  ASSERT_TRUE(
      Eventually(std::chrono::seconds(20), [&] { return MetricSum(Metrics(), "tessera_side_connections") == 2; }));
  ExpectEachRefused({{"closed", Open(lease), StatusCode::NOT_FOUND, "lease: "}});
}

TEST_F(BadMemoryInputTest, EveryCallThatNeedsASession) {
  client::Session closed = client_->OpenSession("closed").value();
  const std::string token = session_->token();
  ASSERT_TRUE(closed.Close().ok());
  const struct {
    std::string what;
    std::optional<std::string> token;
    StatusCode code;
  } tokens[] = {{"none", std::nullopt, kInvalid},
                {"empty", "", kInvalid},
                {"15 bytes", token.substr(1), kInvalid},
                {"17 bytes", token + "x", kInvalid},
                {"other epoch", Flipped(token, 0), StatusCode::FAILED_PRECONDITION},
                {"other nonce", Flipped(token, 15), StatusCode::NOT_FOUND},
                {"closed", closed.token(), StatusCode::NOT_FOUND},
                {"a buffer's id", operands_->id(), StatusCode::NOT_FOUND}};
  v1::AllocateBufferRequest allocate;
  allocate.set_bytes(64);
  v1::ReleaseBufferRequest release;
  release.set_buffer_id(operands_->id());
  const std::string begins = "metadata tessera-session-bin: ";
  using Memory = v1::Memory::Stub;
  for (const auto& bad : tokens) {
    SCOPED_TRACE(bad.what);
    ExpectEachRefused(
        {{"CloseSession", With(*memory_, &Memory::CloseSession, {}, bad.token), bad.code, begins},
         {"ImportBuffer", With(*memory_, &Memory::ImportBuffer, {}, bad.token), bad.code, begins},
         {"AllocateBuffer", With(*memory_, &Memory::AllocateBuffer, allocate, bad.token), bad.code, begins},
         {"ReleaseBuffer", With(*memory_, &Memory::ReleaseBuffer, release, bad.token), bad.code, begins}});
  }
}

TEST_F(BadMemoryInputTest, ImportBuffer) {
  RawSideChannel side(socket());
  v1::OpenSessionRequest open;
  open.set_lease(side.lease());
  v1::OpenSessionReply opened;
  ASSERT_TRUE(memory_->OpenSession(Context({}).get(), open, &opened).ok());
  const auto import = [&](std::uint64_t ticket, std::uint64_t offset = 0, std::uint64_t bytes = 0) {
    v1::ImportBufferRequest request;
    request.set_descriptor_ticket(ticket);
    request.set_byte_offset(offset);
    request.set_bytes(bytes);
    return With(*memory_, &v1::Memory::Stub::ImportBuffer, request, opened.token());
  };
  // The ticket is used up even if the call fails, and with it the daemon's descriptor.
  const auto pass = [&](const UniqueFd& fd, std::uint64_t offset = 0, std::uint64_t bytes = 0) -> Call {
    return [&, offset, bytes] { return import(side.Pass(fd.get()).descriptor_accepted().ticket(), offset, bytes)(); };
  };
  const UniqueFd good = Memfd(4'096, F_SEAL_SHRINK);
  const std::uint64_t used = side.Pass(good.get()).descriptor_accepted().ticket();
  ASSERT_TRUE(import(used)().ok());
  RawSideChannel other(socket());
  const std::uint64_t others = other.Pass(good.get()).descriptor_accepted().ticket();

  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd pipe_read(ends[0]), pipe_write(ends[1]);
  const UniqueFd null = e2e::Open("/dev/null", O_RDWR);
  const UniqueFd file = e2e::Open(directory().File("file"), O_RDWR | O_CREAT);
  ASSERT_EQ(::ftruncate(file.get(), 4'096), 0);
  const UniqueFd folder = e2e::Open("/", O_RDONLY | O_DIRECTORY);
  const UniqueFd stream(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const UniqueFd unsealable = Memfd(4'096, 0, 0);
  const UniqueFd unsealed = Memfd(4'096, 0);
  const UniqueFd may_shrink = Memfd(4'096, F_SEAL_GROW);
  const UniqueFd no_write = Memfd(4'096, F_SEAL_SHRINK | F_SEAL_WRITE);
  const UniqueFd no_future_write = Memfd(4'096, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE);
  const UniqueFd read_only = e2e::Open("/proc/self/fd/" + std::to_string(good.get()), O_RDONLY);
  const UniqueFd empty = Memfd(0, F_SEAL_SHRINK);
  const UniqueFd sparse = Memfd(std::uint64_t{1} << 50U, F_SEAL_SHRINK);

  ExpectEachRefused({{"ticket 0", import(0), StatusCode::NOT_FOUND, "descriptor_ticket: "},
                     {"ticket 2^64 - 1", import(kMax), StatusCode::NOT_FOUND, "descriptor_ticket: "},
                     {"ticket used before", import(used), StatusCode::NOT_FOUND, "descriptor_ticket: "},
                     {"ticket of another lease", import(others), StatusCode::NOT_FOUND, "descriptor_ticket: "},
                     {"offset past the end", pass(good, 4'097), kInvalid, "byte_offset: "},
                     {"offset 2^63", pass(good, k2To63), kInvalid, "byte_offset: "},
                     {"offset 2^64 - 1", pass(good, kMax, 1), kInvalid, "byte_offset: "},
                     {"offset at the end", pass(good, 4'096), kInvalid, "bytes: "},
                     {"one byte past the end", pass(good, 0, 4'097), kInvalid, "bytes: "},
                     {"one byte past the end at an offset", pass(good, 1, 4'096), kInvalid, "bytes: "},
                     {"2^64 - 1 bytes", pass(good, 0, kMax), kInvalid, "bytes: "},
                     {"bytes that wrap to 0", pass(good, 4'000, 0 - std::uint64_t{4'000}), kInvalid, "bytes: "},
                     {"bytes that wrap to 96", pass(good, 4'000, 0 - std::uint64_t{3'904}), kInvalid, "bytes: "},
                     {"end of a pipe", pass(pipe_read), kInvalid, "descriptor: "},
                     {"other end of it", pass(pipe_write), kInvalid, "descriptor: "},
                     {"/dev/null", pass(null), kInvalid, "descriptor: "},
                     {"regular file", pass(file), kInvalid, "descriptor: "},
                     {"directory", pass(folder), kInvalid, "descriptor: "},
                     {"socket", pass(stream), kInvalid, "descriptor: "},
                     {"memfd that takes no seals", pass(unsealable), kInvalid, "descriptor: ", "F_SEAL_SHRINK"},
                     {"memfd without seals", pass(unsealed), kInvalid, "descriptor: ", "F_SEAL_SHRINK"},
                     {"memfd that may shrink", pass(may_shrink), kInvalid, "descriptor: ", "F_SEAL_SHRINK"},
                     {"memfd sealed against writing", pass(no_write), kInvalid, "descriptor: ", "F_SEAL_WRITE"},
                     {"and against later writing", pass(no_future_write), kInvalid, "descriptor: ", "F_SEAL_WRITE"},
                     {"memfd opened for reading", pass(read_only), kInvalid, "descriptor: ", "writing"},
                     {"empty memfd", pass(empty), kInvalid, "bytes: "},
                     {"2^50 bytes", pass(sparse), StatusCode::RESOURCE_EXHAUSTED, "buffer_bytes_max: "}});
  EXPECT_TRUE(pass(good, 4'095, 1)().ok()) << "the last byte";
}

TEST_F(BadMemoryInputTest, AllocateBuffer) {
  const StatusCode exhausted = StatusCode::RESOURCE_EXHAUSTED;
  ExpectEachRefused({{"0 bytes", Allocate(0), kInvalid, "bytes: "},
                     {"2^50 bytes", Allocate(std::uint64_t{1} << 50U), exhausted, "buffer_bytes_max: "},
                     {"2^63 bytes", Allocate(k2To63), exhausted, "buffer_bytes_max: "},
                     {"2^64 - 1 bytes", Allocate(kMax), exhausted, "buffer_bytes_max: "}});
}

TEST_F(BadMemoryInputTest, QuotasAreNamed) {
  StartDaemon({{"buffer_bytes_max", "64KiB"}, {"session_buffer_bytes_max", "40KiB"}, {"buffers_per_session_max", "3"}});
  Reconnect();  // 4 KiB for each of the two sessions
  const StatusCode exhausted = StatusCode::RESOURCE_EXHAUSTED;
  ExpectEachRefused({{"session", Allocate((36U << 10U) + 1), exhausted, "session_buffer_bytes_max: ", "40960"},
                     {"2^64 - 1 bytes", Allocate(kMax), exhausted, "session_buffer_bytes_max: ", "40960"}});
  client::Buffer most = other_session_->Allocate(36U << 10U).value();
  ExpectEachRefused({{"all", Allocate((20U << 10U) + 1), exhausted, "buffer_bytes_max: ", "65536"}});
  const client::Buffer rest = session_->Allocate(20U << 10U).value();
  ASSERT_TRUE(most.Release().ok());
  const client::Buffer third = session_->Allocate(1).value();
  ExpectEachRefused({{"number", Allocate(1), exhausted, "buffers_per_session_max: ", "3"}});
}

TEST_F(BadMemoryInputTest, ReleaseBuffer) {
  client::Buffer released = session_->Allocate(64).value();
  const std::string released_id = released.id();
  ASSERT_TRUE(released.Release().ok());
  const std::string& id = operands_->id();
  ExpectEachRefused({{"no id", Release(""), kInvalid, "buffer_id: missing"},
                     {"id of 15 bytes", Release(id.substr(1)), kInvalid, "buffer_id: "},
                     {"id of 17 bytes", Release(id + "x"), kInvalid, "buffer_id: "},
                     {"id of 1 MiB", Release(std::string(1U << 20U, 'x')), kInvalid, "buffer_id: "},
                     {"zero id", Release(std::string(16, '\0')), StatusCode::NOT_FOUND, "buffer_id: "},
                     {"other epoch", Release(Flipped(id, 0)), StatusCode::FAILED_PRECONDITION, "buffer_id: "},
                     {"other index", Release(Flipped(id, 4)), StatusCode::NOT_FOUND, "buffer_id: "},
                     {"other generation", Release(Flipped(id, 8)), StatusCode::NOT_FOUND, "buffer_id: "},
                     {"other nonce", Release(Flipped(id, 12)), StatusCode::NOT_FOUND, "buffer_id: "},
                     {"released before", Release(released_id), StatusCode::NOT_FOUND, "buffer_id: "},
                     {"the session's token", Release(session_->token()), StatusCode::NOT_FOUND, "buffer_id: "},
                     {"another's", Release(foreign_->id()), StatusCode::PERMISSION_DENIED, "buffer_id: "}});
}

TEST_F(BadMemoryInputTest, SetLogLevel) {
  const auto admin = v1::Admin::NewStub(client_->channel());
  const auto set = [&](const std::string& level) {
    v1::SetLogLevelRequest request;
    request.set_level(level);
    return With(*admin, &v1::Admin::Stub::SetLogLevel, request);
  };
  ExpectEachRefused({{"empty", set(""), kInvalid, "level: ", "trace, debug"},
                     {"unknown", set("shout"), kInvalid, "level: ", "shout"},
                     {"upper case", set("INFO"), kInvalid, "level: ", "INFO"},
                     {"with a space", set("info "), kInvalid, "level: ", "trace, debug"},
                     {"with a zero", set(std::string("info\0", 5)), kInvalid, "level: ", "trace, debug"},
                     {"1 MiB", set(std::string(1U << 20U, 'x')), kInvalid, "level: ", "trace, debug"},
                     {"no encoding", set("\xff\xfe"), kInvalid, "", "message"}});
}

TEST_F(BadMemoryInputTest, AnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  UniqueFd rpc(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::optional<RawSideChannel> side;
  AsOtherUser([&] {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socket().copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(::connect(rpc.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0) << std::strerror(errno);
    ASSERT_EQ(::fcntl(rpc.get(), F_SETFL, O_NONBLOCK), 0);
    side.emplace(socket());
  });
  ASSERT_TRUE(side.has_value());
  const auto channel = grpc::CreateInsecureChannelFromFd("another user", rpc.Release());
  const auto admin = v1::Admin::NewStub(channel);
  const auto memory = v1::Memory::NewStub(channel);
  const auto compute = v1::Compute::NewStub(channel);
  v1::ServerInfoReply info;
  ASSERT_TRUE(admin->ServerInfo(Context({}).get(), {}, &info).ok());
  ASSERT_EQ(info.principal(), "uid:" + std::to_string(kOtherUid));
  EXPECT_FALSE(info.administrator());

  const RawSideChannel mine(socket());
  v1::SetLogLevelRequest level;
  level.set_level("trace");
  v1::ListBuffersRequest everybodys;
  everybodys.set_all_principals(true);
  v1::OpenSessionRequest open;
  open.set_lease(mine.lease());
  v1::AllocateBufferRequest allocate;
  allocate.set_bytes(64);
  v1::ReleaseBufferRequest release;
  release.set_buffer_id(operands_->id());
  const StatusCode denied = StatusCode::PERMISSION_DENIED;
  const std::string who = "uid:" + std::to_string(kOtherUid) + " is no administrator";
  const std::string metadata = "metadata tessera-session-bin: ";
  const std::string token = session_->token();
  using Memory = v1::Memory::Stub;
  ExpectEachRefused(
      {{"GetConfig", With(*admin, &v1::Admin::Stub::GetConfig, {}), denied, who, "admin_uids"},
       {"SetLogLevel", With(*admin, &v1::Admin::Stub::SetLogLevel, level), denied, who, "admin_uids"},
       {"Drain", With(*admin, &v1::Admin::Stub::Drain, {}), denied, who, "admin_uids"},
       {"ListBuffers of all", With(*memory, &Memory::ListBuffers, everybodys), denied, who, "admin_uids"},
       {"OpenSession on our lease", With(*memory, &Memory::OpenSession, open), denied, "lease: "},
       {"OpenSession on its lease by us", Open(side->lease()), denied, "lease: "},
       {"CloseSession", With(*memory, &Memory::CloseSession, {}, token), denied, metadata},
       {"AllocateBuffer", With(*memory, &Memory::AllocateBuffer, allocate, token), denied, metadata},
       {"ReleaseBuffer", With(*memory, &Memory::ReleaseBuffer, release, token), denied, metadata},
       {"Gemm", With(*compute, &v1::Compute::Stub::Gemm, operands_->Full().request, token), denied, metadata}});
  v1::ListBuffersReply list;
  EXPECT_TRUE(memory->ListBuffers(Context({}).get(), {}, &list).ok());
  EXPECT_EQ(list.buffers_size(), 0) << "none of ours";
}

TEST_F(BadMemoryInputTest, SideChannelMessages) {
  RawSideChannel side(socket());
  ASSERT_TRUE(Open(side.lease())().ok());
  RawSideChannel no_session(socket());
  const UniqueFd memfd = Memfd(4'096, F_SEAL_SHRINK);
  const auto fetch = [](const std::string& id) { return RawSideChannel::FetchRequest(id); };
  const std::string pass = RawSideChannel::PassRequest();
  const std::string field = "fetch_descriptor.buffer_id: ";
  const std::string& id = foreign_->id();
  const struct {
    std::string what;
    std::string bytes;
    std::size_t descriptors;
    StatusCode code;
    std::string begins;
  } rows[] = {
      {"garbage", "\xff\xff\xff\xff", 0, kInvalid, "side channel: "},
      {"garbage with a descriptor", "\xff\xff\xff\xff", 1, kInvalid, "side channel: "},
      {"a kind of a later version", std::string("\x22\x00", 2), 1, kInvalid, "side channel: "},
      {"begins well", pass + "\xff", 1, kInvalid, "side channel: "},
      {"4097 bytes", std::string(4'097, 'x'), 1, kInvalid, "side channel message: longer than the limit of 4096"},
      {"60000 bytes", std::string(60'000, 'x'), 0, kInvalid, "side channel message: longer than the limit of 4096"},
      {"pass without a descriptor", pass, 0, kInvalid, "pass_descriptor: "},
      {"pass of two", pass, 2, kInvalid, "side channel message: more than 1 descriptor"},
      {"pass of 253", pass, 253, kInvalid, "side channel message: more than 1 descriptor"},
      {"fetch without an id", fetch(""), 0, kInvalid, field},
      {"fetch of 15 bytes", fetch(id.substr(1)), 1, kInvalid, field},
      {"fetch of 17 bytes", fetch(id + "x"), 0, kInvalid, field},
      {"fetch of another epoch's", fetch(Flipped(id, 0)), 0, StatusCode::FAILED_PRECONDITION, field},
      {"fetch of nobody's", fetch(Flipped(id, 15)), 0, StatusCode::NOT_FOUND, field},
      {"fetch of another's", fetch(id), 1, StatusCode::PERMISSION_DENIED, field}};
  const std::ptrdiff_t descriptors = SettledDescriptors();
  for (const auto& row : rows) {
    SCOPED_TRACE(row.what);
    ExpectNothingChanges(operands_->Full(), [&] {
      const v1::SideReply reply = side.Ask(row.bytes, std::vector<int>(row.descriptors, memfd.get()));
      ExpectRefused({static_cast<StatusCode>(reply.error().code()), reply.error().message()}, row.code, row.begins);
    });
    ASSERT_TRUE(DescriptorsFallTo(descriptors));
  }
  const v1::SideReply early = no_session.Ask(fetch(id));
  EXPECT_EQ(early.error().code(), static_cast<int>(StatusCode::FAILED_PRECONDITION)) << early.ShortDebugString();
  EXPECT_TRUE(side.Pass(memfd.get()).has_descriptor_accepted());
}

TEST_F(BadMemoryInputTest, SixteenDescriptorsWait) {
  std::optional<RawSideChannel> side(std::in_place, socket());
  const UniqueFd memfd = Memfd(4'096, F_SEAL_SHRINK);
  const std::ptrdiff_t before = SettledDescriptors();
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(side->Pass(memfd.get()).has_descriptor_accepted()) << i;
  ExpectNothingChanges(operands_->Full(), [&] {
    const v1::SideReply reply = side->Pass(memfd.get());
    ExpectRefused({static_cast<StatusCode>(reply.error().code()), reply.error().message()},
                  StatusCode::RESOURCE_EXHAUSTED, "", "16 descriptors");
  });
  ASSERT_TRUE(DescriptorsFallTo(before + 16));
  side.reset();
  ASSERT_TRUE(DescriptorsFallTo(before - 2));  // without both ends of the connection, and without all that waited
}

}  // namespace
}  // namespace tessera::e2e
