// Buffers that several sessions use: who may, for how long, and what the owner keeps to itself.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <random>
#include <set>

#include "tests/e2e/raw_client.h"
#include "tests/e2e/raw_side_channel.h"
#include "tests/oracle/codec.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

void ExpectRefused(const absl::Status& status, StatusCode code, const std::string& begins) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith(begins));
}

// An owner of the library's, whose one buffer has inputs of ones and space for an output.
class SharingTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"cpu_threads", "1"}});
    client_.emplace(Connect());
    owner_.emplace(client_->OpenSession("owner").value());
    buffer_.emplace(owner_->Share(kSlowProduct.BufferBytes()).value());
    for (std::uint64_t at = 0; at < ProductSize::kInputBytes; at += 2) {
      oracle::Encode(DType::kBf16, 1, buffer_->data() + at);
    }
    ClearOutput();
    root_.emplace(socket());
    other_ = root_->OpenFor(60'000, "other").value();
  }

  void TearDown() override {
    root_.reset();
    buffer_.reset();
    owner_.reset();
    client_.reset();
    DaemonFixture::TearDown();
  }

  // Uses a buffer as inputs; what comes back, in the message, must be right.
  static absl::Status Read(const RawClient& client, const std::string& token, const std::string& buffer) {
    v1::GemmRequest request = ProductOf(kSmallProduct, buffer, buffer);
    v1::Tensor& d = *request.mutable_op()->mutable_d();
    d.clear_byte_offset();
    d.mutable_inline_result();
    const auto reply = RawClient::Call(client.compute(), &v1::Compute::Stub::Gemm, request, token);
    if (!reply.ok()) return reply.status();
    const std::string& result = reply->inline_result();
    EXPECT_EQ(result.size(), kSmallProduct.extent * kSmallProduct.extent * sizeof(float));
    for (std::size_t at = 0; at < result.size(); at += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, result.data() + at, sizeof(value));
      EXPECT_EQ(value, kSmallProduct.terms);
    }
    return absl::OkStatus();
  }

  // Uses a buffer as the output of a product of zeros.
  static absl::Status Write(const RawClient& client, const std::string& token, const std::string& buffer) {
    const auto zeros = client.Allocate(token, kSmallProduct.BufferBytes());
    if (!zeros.ok()) return zeros.status();
    absl::Status status = client.Gemm(token, ProductOf(kSmallProduct, *zeros, buffer));
    EXPECT_TRUE(client.Release(token, *zeros).ok());
    return status;
  }

  float* output() const { return reinterpret_cast<float*>(buffer_->data() + ProductSize::kInputBytes); }
  void ClearOutput() const { std::fill_n(output(), kSlowProduct.extent * kSlowProduct.extent, kPattern); }
  bool OutputIs(float value) const {
    return std::all_of(output(), output() + kSmallProduct.extent * kSmallProduct.extent,
                       [value](float element) { return element == value; });
  }

  // A slow product of `token`'s on the shared inputs, which has begun when this returns.
  std::future<absl::Status> StartSlow(const RawClient& client, const std::string& token) {
    const std::string own = client.Allocate(token, kSlowProduct.BufferBytes()).value();
    const double before = MetricSum(Metrics(), "tessera_kernel_launches_total");
    std::future<absl::Status> running = client.Send(token, ProductOf(kSlowProduct, buffer_->id(), own));
    EXPECT_TRUE(Eventually(20s, [&] { return MetricSum(Metrics(), "tessera_kernel_launches_total") > before; }));
    return running;
  }

  static constexpr float kPattern = 123;

  std::optional<client::Client> client_;
  std::optional<client::Session> owner_;
  std::optional<client::Buffer> buffer_;
  std::optional<RawClient> root_;
  std::string other_;  // another session of the owner's user
};

constexpr v1::BufferAccess kNone = v1::BUFFER_ACCESS_NONE;
constexpr v1::BufferAccess kRead = v1::BUFFER_ACCESS_READ;
constexpr v1::BufferAccess kReadWrite = v1::BUFFER_ACCESS_READ_WRITE;

TEST_F(SharingTest, SessionsOfOneUser) {
  const std::string& id = buffer_->id();
  ExpectRefused(Read(*root_, other_, id), StatusCode::kPermissionDenied, "op.a.buffer_id: ");
  ExpectRefused(Write(*root_, other_, id), StatusCode::kPermissionDenied, "op.d.buffer_id: ");

  ASSERT_EQ(Text(buffer_->Share(kRead)), "OK");
  EXPECT_EQ(Text(Read(*root_, other_, id)), "OK");
  ExpectRefused(Write(*root_, other_, id), StatusCode::kPermissionDenied, "op.d.buffer_id: ");
  EXPECT_TRUE(OutputIs(kPattern));

  ASSERT_EQ(Text(buffer_->Share(kReadWrite)), "OK");
  EXPECT_EQ(Text(Read(*root_, other_, id)), "OK");
  EXPECT_EQ(Text(Write(*root_, other_, id)), "OK");
  EXPECT_TRUE(OutputIs(0)) << "what the other session wrote is in the owner's mapping";
  ClearOutput();

  ASSERT_EQ(Text(buffer_->Share(kRead)), "OK");  // less than before
  ExpectRefused(Write(*root_, other_, id), StatusCode::kPermissionDenied, "op.d.buffer_id: ");
  ASSERT_EQ(Text(buffer_->Share(kNone)), "OK");
  ExpectRefused(Read(*root_, other_, id), StatusCode::kPermissionDenied, "op.a.buffer_id: ");
  EXPECT_EQ(Text(buffer_->Share(kNone)), "OK") << "nothing to end is no error";
  EXPECT_TRUE(OutputIs(kPattern));
  EXPECT_EQ(Text(Read(*root_, owner_->token(), id)), "OK") << "the owner's own use is as before";
  EXPECT_EQ(Text(Write(*root_, owner_->token(), id)), "OK");
}

TEST_F(SharingTest, AStreamIsNoWayAround) {
  const RawClient raw(socket());
  client::Client library = Connect();
  client::Session session = library.OpenSession({.lease = client::Lease::kTtl, .ttl = 60s}).value();
  const auto view = [&](DType dtype, std::uint64_t at) {
    return client::TensorView{
        .buffer_id = buffer_->id(), .byte_offset = at, .dtype = dtype, .shape = {4, 4}, .strides = {4, 1}};
  };
  const client::GemmSpec spec{
      .a = view(DType::kBf16, 0), .b = view(DType::kBf16, 0), .d = view(DType::kF32, ProductSize::kInputBytes)};
  EXPECT_EQ(session.Gemm(spec).status().code(), StatusCode::kPermissionDenied);
  ASSERT_TRUE(buffer_->Share(kRead).ok());
  EXPECT_EQ(session.Gemm(spec).status().code(), StatusCode::kPermissionDenied) << "the output, too, is in it";
  ASSERT_TRUE(buffer_->Share(kReadWrite).ok());
  const auto result = session.Gemm(spec);
  EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(output()[15], 4);
}

class TwoUsersTest : public SharingTest {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    SharingTest::SetUp();
    alice_.emplace(socket(), kAliceUid);
    alice_token_ = alice_->OpenFor(60'000, "alice").value();
  }

  void TearDown() override {
    alice_.reset();
    SharingTest::TearDown();
  }

  std::optional<RawClient> alice_;
  std::string alice_token_;
};

TEST_F(TwoUsersTest, OneIsLetInAndTheOthersAreNot) {
  const std::string& id = buffer_->id();
  const RawClient bob(socket(), kBobUid);
  const std::string bob_token = bob.OpenFor(60'000, "bob").value();
  ASSERT_TRUE(buffer_->Share(kReadWrite).ok());  // the owner's other sessions: nobody else's
  ExpectRefused(Read(*alice_, alice_token_, id), StatusCode::kPermissionDenied, "op.a.buffer_id: ");
  ASSERT_TRUE(buffer_->Share(kRead, PrincipalOf(kAliceUid)).ok());
  EXPECT_EQ(Text(Read(*alice_, alice_token_, id)), "OK");
  EXPECT_EQ(Text(Read(*alice_, alice_->OpenFor(60'000).value(), id)), "OK") << "all of her sessions may";
  ExpectRefused(Write(*alice_, alice_token_, id), StatusCode::kPermissionDenied, "op.d.buffer_id: ");
  ExpectRefused(Read(bob, bob_token, id), StatusCode::kPermissionDenied, "op.a.buffer_id: ");
  ASSERT_TRUE(buffer_->Share(kReadWrite, PrincipalOf(kAliceUid)).ok());
  EXPECT_EQ(Text(Write(*alice_, alice_token_, id)), "OK");
  EXPECT_TRUE(OutputIs(0));
  ASSERT_TRUE(buffer_->Share(kNone).ok());
  EXPECT_EQ(Text(Read(*alice_, alice_token_, id)), "OK") << "ending one share leaves the other";
  ASSERT_TRUE(buffer_->Share(kNone, PrincipalOf(kAliceUid)).ok());
  ExpectRefused(Read(*alice_, alice_token_, id), StatusCode::kPermissionDenied, "op.a.buffer_id: ");
}

TEST_F(TwoUsersTest, UsingIsAllThatItAllows) {
  const std::string& id = buffer_->id();
  client::Buffer allocated = owner_->Allocate(4096).value();
  ASSERT_TRUE(buffer_->Share(kReadWrite, PrincipalOf(kAliceUid)).ok());
  ASSERT_TRUE(allocated.Share(kReadWrite, PrincipalOf(kAliceUid)).ok());
  const auto denied = StatusCode::kPermissionDenied;
  for (const std::string& mine : {id, allocated.id()}) {
    ExpectRefused(alice_->Release(alice_token_, mine), denied, "buffer_id: ");
    for (const std::string& principal : {std::string(), PrincipalOf(kAliceUid), PrincipalOf(kBobUid)}) {
      for (const v1::BufferAccess access : {kNone, kRead, kReadWrite}) {
        ExpectRefused(alice_->Share(alice_token_, mine, principal, access).status(), denied, "buffer_id: ");
      }
    }
  }
  // Nor its memory itself.
  std::optional<RawSideChannel> side;
  AsUser(kAliceUid, [&] { side.emplace(socket()); });
  const std::string with_side = alice_->OpenOn(side->lease()).value();
  EXPECT_EQ(Text(Read(*alice_, with_side, id)), "OK");
  for (const std::string& mine : {id, allocated.id()}) {
    const v1::SideReply reply = side->Ask(RawSideChannel::FetchRequest(mine));
    EXPECT_EQ(reply.error().code(), static_cast<int>(denied)) << reply.ShortDebugString();
    EXPECT_THAT(reply.error().message(), StartsWith("fetch_descriptor.buffer_id: "));
  }
  // The token of the owner's session is not part of it either.
  EXPECT_EQ(Read(*alice_, owner_->token(), id).code(), denied);
  ASSERT_TRUE(allocated.Release().ok()) << "all this has left the owner its own";
}

TEST_F(TwoUsersTest, ListsShowWhatIsSharedAndNothingElse) {
  const client::Buffer hidden = owner_->Allocate(100).value();
  const std::string own = alice_->Allocate(alice_token_, 200).value();
  const auto ids = [](const v1::ListBuffersReply& list) {
    std::set<std::string> found;
    for (const v1::BufferInfo& row : list.buffers()) found.insert(row.buffer_id());
    return found;
  };
  using Ids = std::set<std::string>;
  EXPECT_EQ(ids(*alice_->ListBuffers()), (Ids{own}));
  ASSERT_TRUE(buffer_->Share(kRead, PrincipalOf(kAliceUid)).ok());
  ASSERT_TRUE(buffer_->Share(kReadWrite).ok());
  EXPECT_EQ(ids(*alice_->ListBuffers()), (Ids{own, buffer_->id()}));
  EXPECT_EQ(ids(*client_->ListBuffers()), (Ids{hidden.id(), buffer_->id()})) << "hers is not the owner's";
  EXPECT_EQ(ids(*client_->ListBuffers(true)), (Ids{hidden.id(), buffer_->id(), own}));
  EXPECT_EQ(alice_->ListSessions()->sessions_size(), 1) << "the owner's session is not hers to see";
  const v1::ListBuffersReply own_list = client_->ListBuffers().value();
  for (const v1::BufferInfo& row : own_list.buffers()) {
    if (row.buffer_id() == hidden.id()) {
      EXPECT_EQ(row.shares_size(), 0);
      continue;
    }
    ASSERT_EQ(row.shares_size(), 2);
    EXPECT_EQ(row.shares(0).principal(), PrincipalOf(kAliceUid));
    EXPECT_EQ(row.shares(0).access(), kRead);
    EXPECT_EQ(row.shares(1).principal(), PrincipalOf(::geteuid()));
    EXPECT_EQ(row.shares(1).access(), kReadWrite);
  }
  ASSERT_TRUE(buffer_->Share(kNone, PrincipalOf(kAliceUid)).ok());
  EXPECT_EQ(ids(*alice_->ListBuffers()), (Ids{own}));
}

TEST_F(TwoUsersTest, ARevokedShareLetsTheRunningCallFinish) {
  ASSERT_TRUE(buffer_->Share(kRead, PrincipalOf(kAliceUid)).ok());
  std::future<absl::Status> running = StartSlow(*alice_, alice_token_);
  const RawClient root(socket());
  const auto revoked = root.Share(owner_->token(), buffer_->id(), PrincipalOf(kAliceUid), kNone);
  ASSERT_TRUE(revoked.ok()) << revoked.status();
  EXPECT_GE(revoked->references(), 1U) << "the owner is told that a call is still at it";
  EXPECT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  ExpectRefused(Read(*alice_, alice_token_, buffer_->id()), StatusCode::kPermissionDenied, "op.a.buffer_id: ");
  EXPECT_EQ(Text(running.get()), "OK");
  EXPECT_EQ(root.Share(owner_->token(), buffer_->id(), PrincipalOf(kAliceUid), kNone)->references(), 0U);
}

TEST_F(TwoUsersTest, TheOwnersReleaseWaitsForTheRunningCallAndEndsTheShare) {
  ASSERT_TRUE(buffer_->Share(kRead, PrincipalOf(kAliceUid)).ok());
  const std::string id = buffer_->id();
  std::future<absl::Status> running = StartSlow(*alice_, alice_token_);
  auto released = std::async(std::launch::async, [&] { return buffer_->Release(); });
  EXPECT_TRUE(Eventually(5s, [&] { return client_->ListBuffers()->buffers_size() == 0; }));
  ExpectRefused(Read(*alice_, alice_token_, id), StatusCode::kNotFound, "op.a.buffer_id: ");
  EXPECT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  EXPECT_FALSE(IsReady(released)) << "answered while a call of another session had the memory";
  EXPECT_EQ(Text(released.get()), "OK");
  EXPECT_EQ(Text(running.get()), "OK");
  EXPECT_EQ(alice_->ListBuffers()->buffers_size(), 1) << "the output of hers";
}

TEST_F(TwoUsersTest, ItGoesWithItsOwnersSession) {
  ASSERT_TRUE(buffer_->Share(kRead, PrincipalOf(kAliceUid)).ok());
  const std::string id = buffer_->id();
  EXPECT_EQ(Text(Read(*alice_, alice_token_, id)), "OK");
  std::future<absl::Status> running = StartSlow(*alice_, alice_token_);
  auto closed = std::async(std::launch::async, [&] { return owner_->Close(); });
  EXPECT_TRUE(Eventually(5s, [&] { return client_->ListBuffers()->buffers_size() == 0; }));
  ExpectRefused(Read(*alice_, alice_token_, id), StatusCode::kNotFound, "op.a.buffer_id: ");
  EXPECT_FALSE(IsReady(running)) << "the call was over: use a larger product";
  EXPECT_EQ(Text(closed.get()), "OK");
  EXPECT_EQ(Text(running.get()), "OK") << "her call is her session's, which goes on";
  EXPECT_TRUE(alice_->KeepAlive(alice_token_).ok());
}

TEST_F(TwoUsersTest, IdsCannotBeGuessed) {
  const std::string& id = buffer_->id();
  client::Buffer former = owner_->Allocate(4096).value();
  ASSERT_TRUE(former.Share(kReadWrite, PrincipalOf(kAliceUid)).ok());
  const std::string old = former.id();
  ASSERT_TRUE(former.Release().ok());
  const client::Buffer next = owner_->Allocate(kSmallProduct.BufferBytes()).value();  // in the slot of `former`
  ASSERT_EQ(next.id().substr(0, 8), old.substr(0, 8)) << "epoch and slot";
  ASSERT_TRUE(buffer_->Share(kReadWrite, PrincipalOf(kAliceUid)).ok());
  ExpectRefused(Read(*alice_, alice_token_, old), StatusCode::kNotFound, "op.a.buffer_id: ");
  ExpectRefused(Write(*alice_, alice_token_, old), StatusCode::kNotFound, "op.d.buffer_id: ");
  ExpectRefused(Read(*alice_, alice_token_, next.id()), StatusCode::kPermissionDenied, "op.a.buffer_id: ");

  std::mt19937 random(7);
  for (int i = 0; i < 500; ++i) {
    // Any bytes; then those of a buffer that she may use, but for the index, the generation or the secret.
    std::string guess = id;
    const std::size_t from = i % 4 == 0 ? 0 : 4 * static_cast<std::size_t>(i % 4);
    const std::size_t to = from == 0 ? guess.size() : from + 4;
    for (std::size_t at = from; at < to; ++at) guess[at] = static_cast<char>(random() % 256);
    if (from == 4) guess.replace(4, 4, std::string({static_cast<char>(i % 7), 0, 0, 0}));
    if (guess == id) continue;
    const absl::Status status = Read(*alice_, alice_token_, guess);
    ASSERT_TRUE(status.code() == StatusCode::kNotFound ||
                (from == 0 && status.code() == StatusCode::kFailedPrecondition))
        << i << ": " << status;
  }
  EXPECT_EQ(Text(Read(*alice_, alice_token_, id)), "OK");
}

TEST_F(SharingTest, SixteenPrincipals) {
  const std::string& id = buffer_->id();
  for (int i = 0; i < 16; ++i) {
    ASSERT_EQ(Text(buffer_->Share(kRead, PrincipalOf(static_cast<uid_t>(20'000 + i)))), "OK") << i;
  }
  ExpectRefused(buffer_->Share(kRead, PrincipalOf(30'000)), StatusCode::kResourceExhausted, "principal: ");
  ExpectRefused(buffer_->Share(kRead), StatusCode::kResourceExhausted, "principal: ");
  EXPECT_EQ(Text(buffer_->Share(kReadWrite, PrincipalOf(20'003))), "OK") << "one of the sixteen may get more";
  EXPECT_EQ(Text(buffer_->Share(kNone, PrincipalOf(30'000))), "OK");
  EXPECT_EQ(client_->ListBuffers()->buffers(0).shares_size(), 16);
  EXPECT_EQ(Text(buffer_->Share(kNone, PrincipalOf(20'005))), "OK");
  EXPECT_EQ(Text(buffer_->Share(kRead)), "OK") << "there is room again";
  EXPECT_EQ(Text(Read(*root_, other_, id)), "OK");
}

TEST_F(SharingTest, WrongRequestsChangeNothing) {
  const std::string& id = buffer_->id();
  const std::string& mine = owner_->token();
  const auto invalid = StatusCode::kInvalidArgument;
  const std::string principal = PrincipalOf(kAliceUid);
  for (const int access : {0, 4, 99, -1}) {
    SCOPED_TRACE(access);
    ExpectRefused(root_->Share(mine, id, principal, static_cast<v1::BufferAccess>(access)).status(), invalid,
                  "access: ");
  }
  for (const std::string& wrong :
       {std::string("root"), std::string("1000"), std::string("anonymous"), std::string("uid"), std::string("UID:1000"),
        std::string(" uid:1000"), std::string("uid:"), std::string("uid:root"), std::string("uid:-1"),
        std::string("uid:01000"), std::string("uid: 1000"), std::string("uid:1000 "), std::string("uid:4294967296"),
        std::string("subject:CN=trainer"), std::string("uid:\033[2J"), std::string("gid:1000"), std::string(1, '\0'),
        "uid:" + std::string(10'000, '1')}) {
    SCOPED_TRACE(wrong.substr(0, 20));
    ExpectRefused(root_->Share(mine, id, wrong, kRead).status(), invalid, "principal: ");
  }
  ExpectRefused(root_->Share(mine, "", principal, kRead).status(), invalid, "buffer_id: missing");
  ExpectRefused(root_->Share(mine, id.substr(1), principal, kRead).status(), invalid, "buffer_id: ");
  ExpectRefused(root_->Share(mine, mine, principal, kRead).status(), StatusCode::kNotFound, "buffer_id: ");
  ExpectRefused(root_->Share(other_, id, principal, kRead).status(), StatusCode::kPermissionDenied, "buffer_id: ");
  v1::ShareBufferRequest no_session;
  no_session.set_buffer_id(id);
  no_session.set_access(kRead);
  ExpectRefused(RawClient::Call(root_->memory(), &v1::Memory::Stub::ShareBuffer, no_session).status(), invalid,
                "metadata tessera-session-bin: missing");
  EXPECT_EQ(client_->ListBuffers()->buffers(0).shares_size(), 0);
}

// Which memory an output overlaps does not depend on whose buffers show it.
TEST_F(SharingTest, OverlapIsSeenThroughTwoBuffersOfOneMemfd) {
  const UniqueFd memfd(::memfd_create("sharing-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(memfd.get(), static_cast<off_t>(2 * kSmallProduct.BufferBytes())), 0);
  ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  const client::Buffer theirs = owner_->Import(memfd.get()).value();
  client::Buffer shared = owner_->Import(memfd.get()).value();
  ASSERT_TRUE(shared.Share(kRead).ok());
  client::Session session = client_->OpenSession("second").value();
  const client::Buffer own = session.Import(memfd.get()).value();
  const auto product = [&](std::uint64_t output_at) {
    v1::GemmRequest request = ProductOf(kSmallProduct, shared.id(), own.id());
    request.mutable_op()->mutable_d()->set_byte_offset(output_at);
    return root_->Gemm(session.token(), request);
  };
  const std::uint64_t input_bytes = static_cast<std::uint64_t>(kSmallProduct.terms) * 2;
  ExpectRefused(product(0), StatusCode::kInvalidArgument, "op.d");
  ExpectRefused(product(input_bytes - 4), StatusCode::kInvalidArgument, "op.d");
  EXPECT_EQ(Text(product(input_bytes)), "OK") << "the byte after the last";
  // The same with a buffer that begins elsewhere in that memory.
  const client::Buffer later = session.Import(memfd.get(), 512).value();
  v1::GemmRequest request = ProductOf(kSmallProduct, shared.id(), later.id());
  request.mutable_op()->mutable_d()->set_byte_offset(input_bytes - 512 - 4);
  ExpectRefused(root_->Gemm(session.token(), request), StatusCode::kInvalidArgument, "op.d");
  request.mutable_op()->mutable_d()->set_byte_offset(input_bytes - 512);
  EXPECT_EQ(Text(root_->Gemm(session.token(), request)), "OK");
}

// A share is of the buffer, not of whoever has its slot next.
TEST_F(SharingTest, ASuccessorInTheSlotIsNotShared) {
  client::Buffer first = owner_->Allocate(kSmallProduct.BufferBytes()).value();
  ASSERT_TRUE(first.Share(kReadWrite).ok());
  ASSERT_TRUE(first.Release().ok());
  const client::Buffer second = owner_->Allocate(kSmallProduct.BufferBytes()).value();
  ExpectRefused(Read(*root_, other_, second.id()), StatusCode::kPermissionDenied, "op.a.buffer_id: ");
}

}  // namespace
}  // namespace tessera::e2e
