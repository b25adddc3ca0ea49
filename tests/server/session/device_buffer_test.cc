// Buffers in GPU memory: which requests become buffers, what each refusal says and leaves behind (nothing), and that
// memory is opened once and closed once.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "server/session/session_table.h"
#include "tests/server/session/fake_device_memory.h"
#include "tests/server/session/posix_fixtures.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kPage = kFakeGranularity;
constexpr char kOtherGpu[] = "GPU-99999999-0000-0000-0000-000000000000";
constexpr char kMig[] = "MIG-11111111-2222-3333-4444-555555555555";
const Peer kAlice{.pid = 10, .uid = 1000, .gid = 1000};
constexpr SessionLimits kLimits{.sessions_max = 3,
                                .leases_max = 4,
                                .buffers_per_session_max = 20,
                                .buffer_bytes_max = 20 * kPage,
                                .session_buffer_bytes_max = 10 * kPage};

class DeviceBufferTest : public ::testing::Test {
 protected:
  void SetUp() override { session_ = Open(table_, lease_); }

  static std::shared_ptr<Session> Open(SessionTable& table, Id& lease) {
    lease = table.OpenLease(kAlice).value_or(Id{});
    const auto token = table.OpenSession(kAlice, lease, "test");
    EXPECT_TRUE(token.ok()) << token.status();
    return token.ok() ? table.FindSession(kAlice, *token).value_or(nullptr) : nullptr;
  }

  // A good import of an allocation of two pages.
  LegacyImport Legacy() {
    return {.handle = gpu_.ExportLegacy(2 * kPage),
            .device_uuid = kFakeGpu,
            .allocation_id = 77,
            .exporter_pid = ::getpid() + 1};
  }

  DescriptorImport Descriptor(const UniqueFd& fd, std::uint64_t allocation_id = 5) {
    const auto ticket = table_.KeepDescriptor(lease_, Duplicate(fd));
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return {.ticket = ticket.value_or(0),
            .device_uuid = kFakeGpu,
            .allocation_id = allocation_id,
            .allocation_bytes = 2 * kPage};
  }

  Id MustImport(const LegacyImport& import) { return Must(table_.ImportLegacy(*session_, import)); }
  Id MustImport(const DescriptorImport& import) { return Must(table_.ImportDescriptor(*session_, import)); }
  static Id Must(const absl::StatusOr<SessionTable::NewBuffer>& made) {
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? made->id : Id{};
  }

  BufferPin Pin(const Id& buffer) {
    auto pin = table_.PinBuffer(*session_, buffer, BufferAccess::kReadWrite);
    EXPECT_TRUE(pin.ok()) << pin.status();
    return pin.ok() ? *std::move(pin) : BufferPin();
  }

  // Refused with `code`, `text` in the message, and nothing left: no buffer, no byte, no mapping, no descriptor.
  void ExpectRefused(StatusCode code, const std::string& text, const absl::Status& status) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr(text));
    ExpectNothingHeld();
  }

  // Once what went has been cleaned up.
  std::uint64_t BytesHeld() {
    EXPECT_TRUE(AwaitIdle(reaper_));
    return table_.Counts().bytes_held;
  }

  void ExpectNothingHeld() {
    EXPECT_EQ(BytesHeld(), 0U);
    EXPECT_EQ(table_.Counts().buffers, 0U);
    EXPECT_EQ(gpu_.mapped(), 0);
  }

  FakeDeviceMemory gpu_;
  FakeDeviceMemory second_gpu_{"GPU-22222222-2222-3333-4444-555555555555"};
  Metrics metrics_{MetricsOptions{.version = "test", .variants = {}}};
  Reaper reaper_{std::chrono::seconds(10), metrics_};
  SessionTable table_{1, kLimits, metrics_, reaper_, MakeIdleLane, {&gpu_, &second_gpu_}};
  Id lease_;
  std::shared_ptr<Session> session_;
};

TEST_F(DeviceBufferTest, AllocationIsOfTheSpaceAskedFor) {
  for (const auto& [space, expected] :
       std::vector<std::pair<std::string, std::string>>{{"", "host"},
                                                        {"host", "host"},
                                                        {"cuda", kFakeGpu},
                                                        {kFakeGpu, kFakeGpu},
                                                        {second_gpu_.uuid(), second_gpu_.uuid()}}) {
    const auto made = table_.AllocateBuffer(*session_, 10, space);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->space.Name(), expected);
    EXPECT_EQ(made->bytes, 10U);
    const auto rows = table_.ListBuffers([](const Peer&) { return true; }).rows;
    ASSERT_EQ(rows.size(), 1U);
    EXPECT_EQ(rows[0].space.Name(), expected);
    EXPECT_EQ(rows[0].origin, BufferOrigin::kAllocated);
    ASSERT_TRUE(table_.ReleaseBuffer(*session_, made->id).ok());
  }
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(gpu_.counts().closed, 2);
  EXPECT_EQ(second_gpu_.counts().closed, 1);
}

TEST_F(DeviceBufferTest, SpacesThatAreNotServed) {
  const auto allocate = [&](std::string_view space) { return table_.AllocateBuffer(*session_, 10, space).status(); };
  ExpectRefused(StatusCode::kInvalidArgument, "space: \"gpu\"", allocate("gpu"));
  ExpectRefused(StatusCode::kInvalidArgument, "space: \"HOST\"", allocate("HOST"));
  ExpectRefused(StatusCode::kUnimplemented, kMig, allocate(kMig));
  ExpectRefused(StatusCode::kInvalidArgument, kOtherGpu, allocate(kOtherGpu));
  ExpectRefused(StatusCode::kInvalidArgument, gpu_.uuid() + ", " + second_gpu_.uuid(), allocate(kOtherGpu));
  ExpectRefused(StatusCode::kInvalidArgument, "bytes: ", table_.AllocateBuffer(*session_, 0, "cuda").status());
}

TEST_F(DeviceBufferTest, DaemonWithoutAGpuSaysSo) {
  SessionTable table(1, kLimits, metrics_, reaper_, MakeIdleLane);
  Id lease;
  const std::shared_ptr<Session> session = Open(table, lease);
  ASSERT_NE(session, nullptr);
  for (const char* space : {"cuda", kFakeGpu}) {
    const absl::Status status = table.AllocateBuffer(*session, 10, space).status();
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
    EXPECT_THAT(MessageOf(status), HasSubstr("serves no GPU"));
  }
  EXPECT_EQ(table.ImportLegacy(*session, Legacy()).status().code(), StatusCode::kUnimplemented);
  const auto ticket = table.KeepDescriptor(lease, MakeMemfd(kPage));
  ASSERT_TRUE(ticket.ok());
  DescriptorImport import{.ticket = *ticket, .device_uuid = kFakeGpu, .allocation_id = 1, .allocation_bytes = kPage};
  EXPECT_EQ(table.ImportDescriptor(*session, import).status().code(), StatusCode::kUnimplemented);
  EXPECT_EQ(table.ImportDescriptor(*session, import).status().code(), StatusCode::kNotFound) << "the ticket is used up";
}

TEST_F(DeviceBufferTest, QuotasCountWholeAllocations) {
  const Id first = Must(table_.AllocateBuffer(*session_, 1, "cuda"));
  EXPECT_EQ(BytesHeld(), kPage);
  const Id second = Must(table_.AllocateBuffer(*session_, 8 * kPage + 1, "cuda"));
  EXPECT_EQ(BytesHeld(), 10 * kPage);
  for (const std::uint64_t bytes : {std::uint64_t{1}, kMax, kMax - kPage + 1, kMax / 2}) {
    const absl::Status status = table_.AllocateBuffer(*session_, bytes, "cuda").status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << bytes;
    EXPECT_THAT(MessageOf(status), HasSubstr("session_buffer_bytes_max"));
  }
  EXPECT_EQ(table_.AllocateBuffer(*session_, 1).status().code(), StatusCode::kResourceExhausted)
      << "host and GPU bytes come from one budget";
  ASSERT_TRUE(table_.ReleaseBuffer(*session_, first).ok());
  ASSERT_TRUE(table_.ReleaseBuffer(*session_, second).ok());
  ExpectNothingHeld();
}

TEST_F(DeviceBufferTest, FullGpuCostsNothing) {
  FakeDeviceMemory huge;
  const BufferHome home{.budget = std::make_shared<MemoryBudget>(MemoryLimits{}, metrics_), .reaper = &reaper_};
  EXPECT_EQ(Buffer::AllocateOn(huge, std::uint64_t{1} << 40, home).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(home.budget->used().bytes, 0U);
  EXPECT_EQ(home.budget->used().buffers, 0U);
}

TEST_F(DeviceBufferTest, AllocationsRoundUpWithoutWrapping) {
  static_assert(AllocationBytes(0, 4096) == 0);
  static_assert(AllocationBytes(1, 4096) == 4096);
  static_assert(AllocationBytes(4096, 4096) == 4096);
  static_assert(AllocationBytes(4097, 4096) == 8192);
  static_assert(AllocationBytes(kMax, 4096) == kMax);
  static_assert(AllocationBytes(kMax - 4095, 4096) == kMax - 4095);
  static_assert(AllocationBytes(kMax - 4094, 4096) == kMax);
}

TEST_F(DeviceBufferTest, ExportShowsTheWholeAllocation) {
  const Id buffer = Must(table_.AllocateBuffer(*session_, 100, "cuda"));
  const auto pin = table_.ExportBuffer(lease_, buffer);
  ASSERT_TRUE(pin.ok()) << pin.status();
  EXPECT_GE((*pin)->fd(), 0);
  EXPECT_EQ((*pin)->bytes(), 100U);
  EXPECT_EQ((*pin)->allocation_bytes(), kPage);
  const Id imported = MustImport(Legacy());
  EXPECT_EQ(table_.ExportBuffer(lease_, imported).status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(DeviceBufferTest, ImportsShareOneMappingAndCloseItOnce) {
  LegacyImport import = Legacy();
  const Id first = MustImport(import);
  import.byte_offset = kPage;
  import.bytes = 16;
  const Id second = MustImport(import);
  EXPECT_EQ(gpu_.counts().opened, 1);
  EXPECT_EQ(BytesHeld(), 2 * kPage + 16);
  {
    const BufferPin a = Pin(first);
    const BufferPin b = Pin(second);
    EXPECT_EQ(a->origin(), BufferOrigin::kImported);
    EXPECT_EQ(a->bytes(), 2 * kPage);
    EXPECT_EQ(b->bytes(), 16U);
    EXPECT_EQ(b->data(), a->data() + kPage);
    EXPECT_EQ(a->memory(), b->memory());
    EXPECT_EQ(b->memory_offset(), kPage);
    EXPECT_EQ(b->space(), MemorySpace::Gpu(kFakeGpu));
  }
  ASSERT_TRUE(table_.ReleaseBuffer(*session_, first).ok());
  EXPECT_EQ(BytesHeld(), 16U);
  EXPECT_EQ(gpu_.counts().closed, 0);
  ASSERT_TRUE(table_.ReleaseBuffer(*session_, second).ok());
  ExpectNothingHeld();
  EXPECT_EQ(gpu_.counts().closed, 1);
  MustImport(import);
  EXPECT_EQ(gpu_.counts().opened, 2) << "a mapping that is gone is opened anew";
}

TEST_F(DeviceBufferTest, DifferentAllocationsHaveDifferentKeys) {
  LegacyImport other = Legacy();
  other.allocation_id = 78;
  const Id first = MustImport(Legacy());
  const Id second = MustImport(other);
  const Id third = MustImport(Descriptor(MakeMemfd(2 * kPage)));
  const Id fourth = Must(table_.AllocateBuffer(*session_, 1, "cuda"));
  const Id host = Must(table_.AllocateBuffer(*session_, 1));
  const BufferPin pins[] = {Pin(first), Pin(second), Pin(third), Pin(fourth), Pin(host)};
  for (const BufferPin& a : pins) {
    for (const BufferPin& b : pins) EXPECT_EQ(a->memory() == b->memory(), &a == &b);
  }
}

TEST_F(DeviceBufferTest, DescriptorsOfOneAllocationShareItsMapping) {
  const UniqueFd memory = MakeMemfd(2 * kPage);
  const Id first = MustImport(Descriptor(memory));
  DescriptorImport import = Descriptor(memory);
  import.byte_offset = 8;
  import.bytes = 8;
  const Id second = MustImport(import);
  EXPECT_EQ(gpu_.counts().opened, 1);
  EXPECT_EQ(Pin(first)->memory(), Pin(second)->memory());
  DescriptorImport smaller = Descriptor(memory);
  smaller.allocation_bytes = kPage;
  const absl::Status status = table_.ImportDescriptor(*session_, smaller).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(status), StartsWith("cuda_descriptor.allocation_bytes: "));
}

TEST_F(DeviceBufferTest, AddressOfFreedMemoryIsNotTheOldMemory) {
  LegacyImport import = Legacy();
  const Id old = MustImport(import);
  const BufferPin running = Pin(old);
  ASSERT_TRUE(table_.ReleaseBuffer(*session_, old).ok());
  import.allocation_id += 1;
  const absl::Status status = table_.ImportLegacy(*session_, import).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(status), HasSubstr("as another allocation than 78"));
}

TEST_F(DeviceBufferTest, EachSessionImportsForItself) {
  LegacyImport import = Legacy();
  const Id mine = MustImport(import);
  Id other_lease;
  const std::shared_ptr<Session> other = Open(table_, other_lease);
  ASSERT_NE(other, nullptr);
  import.allocation_id += 1;  // what one client says of its memory binds no other
  const Id theirs = Must(table_.ImportLegacy(*other, import));
  EXPECT_EQ(gpu_.counts().opened, 2);
  EXPECT_EQ(BytesHeld(), 4 * kPage);
  ASSERT_TRUE(table_.ReleaseBuffer(*session_, mine).ok());
  EXPECT_EQ(BytesHeld(), 2 * kPage);
  EXPECT_EQ(gpu_.mapped(), 1) << "the other session's";
  ASSERT_TRUE(table_.ReleaseBuffer(*other, theirs).ok());
  ExpectNothingHeld();
}

TEST_F(DeviceBufferTest, LastPinCloses) {
  const Id buffer = MustImport(Legacy());
  BufferPin pin = Pin(buffer);
  ASSERT_TRUE(table_.ReleaseBuffer(*session_, buffer).ok());
  EXPECT_EQ(BytesHeld(), 2 * kPage);
  EXPECT_EQ(gpu_.mapped(), 1);
  pin = BufferPin();
  ExpectNothingHeld();
}

TEST_F(DeviceBufferTest, EndOfSessionCloses) {
  LegacyImport import = Legacy();
  MustImport(import);
  const Id pinned = MustImport(import);
  MustImport(Descriptor(MakeMemfd(2 * kPage)));
  Must(table_.AllocateBuffer(*session_, 1, "cuda"));
  BufferPin pin = Pin(pinned);
  table_.CloseLease(lease_);
  EXPECT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(gpu_.mapped(), 1) << "what the running call uses";
  pin = BufferPin();
  ExpectNothingHeld();
  EXPECT_EQ(gpu_.counts().opened, 3);
  EXPECT_EQ(table_.ImportLegacy(*session_, import).status().code(), StatusCode::kNotFound);
  ExpectNothingHeld();
}

TEST_F(DeviceBufferTest, SessionsDoNotShareWhatClientsSayOfTheirMemory) {
  const UniqueFd mine = MakeMemfd(2 * kPage);
  const UniqueFd theirs = MakeMemfd(2 * kPage);
  const BufferPin a = Pin(MustImport(Descriptor(mine)));
  Id other_lease;
  const std::shared_ptr<Session> other = Open(table_, other_lease);
  ASSERT_NE(other, nullptr);
  DescriptorImport import = Descriptor(mine);
  const auto ticket = table_.KeepDescriptor(other_lease, Duplicate(theirs));
  ASSERT_TRUE(ticket.ok());
  import.ticket = *ticket;
  const auto made = table_.ImportDescriptor(*other, import);
  ASSERT_TRUE(made.ok()) << made.status();
  const auto b = table_.PinBuffer(*other, made->id, BufferAccess::kReadWrite);
  ASSERT_TRUE(b.ok());
  EXPECT_NE(a->data(), (*b)->data());
}

TEST_F(DeviceBufferTest, LegacyImportsThatAreRefused) {
  const LegacyImport good = Legacy();
  struct Row {
    StatusCode code;
    const char* text;
    void (*spoil)(LegacyImport&);
  };
  const Row rows[] = {
      {StatusCode::kInvalidArgument, "cuda_ipc_handle.handle: 0 bytes", [](LegacyImport& i) { i.handle.clear(); }},
      {StatusCode::kInvalidArgument, "cuda_ipc_handle.handle: 63", [](LegacyImport& i) { i.handle.pop_back(); }},
      {StatusCode::kInvalidArgument, "cuda_ipc_handle.handle: 65", [](LegacyImport& i) { i.handle += 'x'; }},
      {StatusCode::kInvalidArgument, "cuda_ipc_handle: not a handle", [](LegacyImport& i) { i.handle[0] = 'x'; }},
      {StatusCode::kInvalidArgument, "cuda_ipc_handle.device_uuid: missing",
       [](LegacyImport& i) { i.device_uuid.clear(); }},
      {StatusCode::kInvalidArgument, kOtherGpu, [](LegacyImport& i) { i.device_uuid = kOtherGpu; }},
      {StatusCode::kUnimplemented, kMig, [](LegacyImport& i) { i.device_uuid = kMig; }},
      {StatusCode::kInvalidArgument, "cuda_ipc_handle.allocation_id", [](LegacyImport& i) { i.allocation_id = 0; }},
      {StatusCode::kInvalidArgument, "cuda_ipc_handle.exporter_pid", [](LegacyImport& i) { i.exporter_pid = 0; }},
      {StatusCode::kInvalidArgument, "cuda_ipc_handle.exporter_pid", [](LegacyImport& i) { i.exporter_pid = -1; }},
      {StatusCode::kFailedPrecondition, "cuda_descriptor", [](LegacyImport& i) { i.exporter_pid = ::getpid(); }},
      {StatusCode::kInvalidArgument, "byte_offset: ", [](LegacyImport& i) { i.byte_offset = 2 * kPage + 1; }},
      {StatusCode::kInvalidArgument, "byte_offset: ", [](LegacyImport& i) { i.byte_offset = kMax; }},
      {StatusCode::kInvalidArgument, "bytes: ", [](LegacyImport& i) { i.byte_offset = 2 * kPage; }},
      {StatusCode::kInvalidArgument, "bytes: ", [](LegacyImport& i) { i.bytes = 2 * kPage + 1; }},
      {StatusCode::kInvalidArgument, "bytes: ", [](LegacyImport& i) { i.byte_offset = 1, i.bytes = kMax; }},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.text);
    LegacyImport import = good;
    row.spoil(import);
    ExpectRefused(row.code, row.text, table_.ImportLegacy(*session_, import).status());
  }
  MustImport(good);
}

TEST_F(DeviceBufferTest, DaemonsOwnProcessIsNotAnExporter) {
  const Peer self{.pid = ::getpid(), .uid = 1000, .gid = 1000};
  const auto lease = table_.OpenLease(self);
  ASSERT_TRUE(lease.ok());
  const auto token = table_.OpenSession(self, *lease, "");
  ASSERT_TRUE(token.ok());
  const auto session = table_.FindSession(self, *token);
  ASSERT_TRUE(session.ok());
  ExpectRefused(StatusCode::kFailedPrecondition, "the daemon's process",
                table_.ImportLegacy(**session, Legacy()).status());
}

TEST_F(DeviceBufferTest, DescriptorImportsThatAreRefused) {
  const UniqueFd memory = MakeMemfd(2 * kPage);
  struct Row {
    StatusCode code;
    const char* text;
    void (*spoil)(DescriptorImport&);
  };
  const Row rows[] = {
      {StatusCode::kNotFound, "descriptor_ticket", [](DescriptorImport& i) { i.ticket += 1000; }},
      {StatusCode::kInvalidArgument, kOtherGpu, [](DescriptorImport& i) { i.device_uuid = kOtherGpu; }},
      {StatusCode::kUnimplemented, kMig, [](DescriptorImport& i) { i.device_uuid = kMig; }},
      {StatusCode::kInvalidArgument, "cuda_descriptor.allocation_id", [](DescriptorImport& i) { i.allocation_id = 0; }},
      {StatusCode::kInvalidArgument, "cuda_descriptor.allocation_bytes: 0",
       [](DescriptorImport& i) { i.allocation_bytes = 0; }},
      {StatusCode::kInvalidArgument, "cuda_descriptor.allocation_bytes: 100",
       [](DescriptorImport& i) { i.allocation_bytes = 100; }},
      {StatusCode::kInvalidArgument, "cuda_descriptor: ", [](DescriptorImport& i) { i.allocation_bytes = 3 * kPage; }},
      {StatusCode::kInvalidArgument, "byte_offset: ", [](DescriptorImport& i) { i.byte_offset = 2 * kPage + 1; }},
      {StatusCode::kInvalidArgument, "bytes: ", [](DescriptorImport& i) { i.byte_offset = 9, i.bytes = kMax - 8; }},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.text);
    DescriptorImport import = Descriptor(memory, 9);
    const std::uint64_t ticket = import.ticket;
    row.spoil(import);
    ExpectRefused(row.code, row.text, table_.ImportDescriptor(*session_, import).status());
    if (import.ticket == ticket) {
      import = Descriptor(memory, 9);
      import.ticket = ticket;
      EXPECT_EQ(table_.ImportDescriptor(*session_, import).status().code(), StatusCode::kNotFound);
    }
    table_.CloseLease(lease_);  // sixteen descriptors may wait on one
    session_ = Open(table_, lease_);
  }
  const DescriptorImport garbage = Descriptor(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)), 9);
  ExpectRefused(StatusCode::kInvalidArgument, "cuda_descriptor: not an",
                table_.ImportDescriptor(*session_, garbage).status());
  MustImport(Descriptor(memory, 9));
}

TEST_F(DeviceBufferTest, DaemonsOwnDescriptorIsNoImport) {
  if (::syscall(SYS_kcmp, ::getpid(), ::getpid(), KCMP_FILE, 0, 0) != 0) GTEST_SKIP() << "the system denies kcmp";
  const Id buffer = Must(table_.AllocateBuffer(*session_, 2 * kPage, "cuda"));
  const UniqueFd passed(::fcntl(Pin(buffer)->fd(), F_DUPFD_CLOEXEC, 0));
  const absl::Status status = table_.ImportDescriptor(*session_, Descriptor(passed)).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(status), HasSubstr("that buffer's id"));
  EXPECT_EQ(gpu_.mapped(), 1);
}

TEST_F(DeviceBufferTest, MemfdImportOfAGpusDescriptorNamesTheOtherWay) {
  const auto ticket = table_.KeepDescriptor(lease_, UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)));
  ASSERT_TRUE(ticket.ok());
  ExpectRefused(StatusCode::kInvalidArgument, "cuda_descriptor",
                table_.ImportBuffer(*session_, *ticket, 0, 0).status());
}

TEST_F(DeviceBufferTest, ConcurrentImportsOpenOnceAndCloseOnce) {
  LegacyImport import = Legacy();
  import.bytes = 1;
  constexpr int kThreads = 4;
  constexpr int kRounds = 200;
  const BufferPin held = Pin(MustImport(import));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        absl::StatusOr<SessionTable::NewBuffer> made = absl::UnknownError("");
        // Released buffers count until the reaper has had its turn.
        ASSERT_TRUE(Eventually([&] {
          made = table_.ImportLegacy(*session_, import);
          return CodeOf(made) != StatusCode::kResourceExhausted;
        }));
        ASSERT_TRUE(made.ok()) << made.status();
        ASSERT_TRUE(table_.ReleaseBuffer(*session_, made->id).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(BytesHeld(), 1U);
  EXPECT_EQ(gpu_.counts().opened, 1);
  EXPECT_EQ(gpu_.counts().closed, 0);
}

}  // namespace
}  // namespace tessera::server
