// Buffers that other sessions may use: who may, for what, how that ends, and what it does not give.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "tests/server/session/table_fixture.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class SessionSharingTest : public TableTest {
 protected:
  void SetUp() override {
    ann_ = OpenOn(anns_lease_, kAnn, "ann");
    anns_other_ = Open(kAnn);
    ben_ = OpenOn(bens_lease_, kBen, "ben");
    ASSERT_TRUE(ann_ && anns_other_ && ben_);
    buffer_ = Allocate(*ann_);
  }

  StatusCode ShareCode(const Session& session, const std::string& principal,
                       std::optional<BufferAccess> access = BufferAccess::kRead) {
    return CodeOf(table_.ShareBuffer(session, buffer_, principal, access));
  }

  const Id anns_lease_ = Lease(kAnn);
  const Id bens_lease_ = Lease(kBen);
  std::shared_ptr<Session> ann_, anns_other_, ben_;
  Id buffer_;
};

TEST_F(SessionSharingTest, NobodyElseMayUntilItIsShared) {
  for (const auto& session : {anns_other_, ben_}) {
    EXPECT_EQ(PinCode(*session, buffer_), StatusCode::kPermissionDenied);
  }
  MustShare(*ann_, buffer_, kAnnsPrincipal, BufferAccess::kReadWrite);
  EXPECT_EQ(PinCode(*anns_other_, buffer_, BufferAccess::kReadWrite), StatusCode::kOk);
  EXPECT_EQ(PinCode(*ben_, buffer_), StatusCode::kPermissionDenied);
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kReadWrite);
  BufferPin pin = Pin(*ben_, buffer_);
  pin->data()[5] = std::byte{42};
  EXPECT_EQ(Pin(*ann_, buffer_)->data()[5], std::byte{42}) << "it is one memory";
  const std::shared_ptr<Session> cid = Open(kCid);
  ASSERT_NE(cid, nullptr);
  EXPECT_EQ(PinCode(*cid, buffer_), StatusCode::kPermissionDenied);
  const std::shared_ptr<Session> bens_next = Open(kBen);
  ASSERT_NE(bens_next, nullptr);
  EXPECT_EQ(PinCode(*bens_next, buffer_), StatusCode::kOk) << "all sessions of a principal may";
}

TEST_F(SessionSharingTest, ReadingIsNotWriting) {
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kRead);
  EXPECT_EQ(PinCode(*ben_, buffer_, BufferAccess::kRead), StatusCode::kOk);
  const auto as_output = table_.PinBuffer(*ben_, buffer_, BufferAccess::kReadWrite);
  EXPECT_EQ(CodeOf(as_output), StatusCode::kPermissionDenied);
  EXPECT_THAT(MessageOf(as_output.status()), HasSubstr("reading only"));
  EXPECT_EQ(PinCode(*ann_, buffer_, BufferAccess::kReadWrite), StatusCode::kOk) << "its owner may";
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kReadWrite);
  EXPECT_EQ(PinCode(*ben_, buffer_, BufferAccess::kReadWrite), StatusCode::kOk);
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kRead);
  EXPECT_EQ(PinCode(*ben_, buffer_, BufferAccess::kReadWrite), StatusCode::kPermissionDenied);
}

TEST_F(SessionSharingTest, RevokingLetsRunningCallsFinish) {
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kReadWrite);
  BufferPin bens = Pin(*ben_, buffer_);
  BufferPin anns = Pin(*ann_, buffer_);
  const auto revoked = table_.ShareBuffer(*ann_, buffer_, kBensPrincipal, std::nullopt);
  ASSERT_TRUE(revoked.ok()) << revoked.status();
  EXPECT_EQ(*revoked, 2U) << "the running users, its owner's included";
  EXPECT_EQ(PinCode(*ben_, buffer_), StatusCode::kPermissionDenied);
  bens->data()[0] = std::byte{1};
  bens = BufferPin();
  const auto again = table_.ShareBuffer(*ann_, buffer_, kBensPrincipal, std::nullopt);
  ASSERT_TRUE(again.ok()) << "that it is not shared is what was asked for";
  EXPECT_EQ(*again, 1U);
}

TEST_F(SessionSharingTest, SixteenPrincipalsABuffer) {
  for (std::size_t i = 0; i < SessionTable::kSharesMax; ++i) {
    MustShare(*ann_, buffer_, absl::StrCat("uid:", 5'000 + i), BufferAccess::kRead);
  }
  const auto refused = table_.ShareBuffer(*ann_, buffer_, kBensPrincipal, BufferAccess::kRead);
  EXPECT_EQ(CodeOf(refused), StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(refused.status()), StartsWith("principal: "));
  EXPECT_EQ(PinCode(*ben_, buffer_), StatusCode::kPermissionDenied);
  MustShare(*ann_, buffer_, "uid:5003", BufferAccess::kReadWrite);  // it has its place
  MustShare(*ann_, Allocate(*ann_), kBensPrincipal, BufferAccess::kRead);
  ASSERT_TRUE(table_.ShareBuffer(*ann_, buffer_, "uid:5003", std::nullopt).ok());
  EXPECT_EQ(ShareCode(*ann_, kBensPrincipal), StatusCode::kOk);
  EXPECT_EQ(PinCode(*ben_, buffer_), StatusCode::kOk);
}

TEST_F(SessionSharingTest, PrincipalsThatCannotBe) {
  for (const std::string& principal :
       {std::string(), std::string("anonymous"), std::string("ben"), std::string("UID:1"), std::string("uid:"),
        std::string("uid:-1"), std::string("uid:+1"), std::string("uid:01"), std::string("uid: 1"),
        std::string("uid:1 "), std::string("uid:4294967296"), std::string("uid:1\n"), std::string("subject:CN=trainer"),
        "uid:" + std::string(600, '1')}) {
    const auto refused = table_.ShareBuffer(*ann_, buffer_, principal, BufferAccess::kRead);
    EXPECT_EQ(CodeOf(refused), StatusCode::kInvalidArgument) << principal;
    EXPECT_THAT(MessageOf(refused.status()), StartsWith("principal: "));
  }
  EXPECT_TRUE(table_.ListBuffers(Everybody).rows[0].shares.empty());
  for (const char* principal : {"uid:0", "uid:4294967295"}) EXPECT_EQ(ShareCode(*ann_, principal), StatusCode::kOk);
}

TEST_F(SessionSharingTest, OnlyItsOwnerGivesIt) {
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kReadWrite);
  MustShare(*ann_, buffer_, kAnnsPrincipal, BufferAccess::kReadWrite);
  for (const auto& session : {ben_, anns_other_}) {
    EXPECT_EQ(ShareCode(*session, "uid:3000"), StatusCode::kPermissionDenied) << "it is not handed on";
    EXPECT_EQ(ShareCode(*session, kBensPrincipal, std::nullopt), StatusCode::kPermissionDenied);
    EXPECT_EQ(table_.ReleaseBuffer(*session, buffer_).code(), StatusCode::kPermissionDenied);
  }
  EXPECT_EQ(CodeOf(table_.ExportBuffer(bens_lease_, buffer_)), StatusCode::kPermissionDenied)
      << "a descriptor could not be taken back";
  const auto unknown = table_.ShareBuffer(*ann_, Id{.epoch = 7, .index = 99}, kBensPrincipal, BufferAccess::kRead);
  EXPECT_EQ(CodeOf(unknown), StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(unknown.status()), StartsWith("buffer_id: "));
}

TEST_F(SessionSharingTest, ItGoesWithItsOwner) {
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kReadWrite);
  const Id released = Allocate(*ann_);
  MustShare(*ann_, released, kBensPrincipal, BufferAccess::kReadWrite);
  ASSERT_TRUE(table_.ReleaseBuffer(*ann_, released).ok());
  EXPECT_EQ(PinCode(*ben_, released), StatusCode::kNotFound);
  BufferPin running = Pin(*ben_, buffer_);
  Watched gone;
  ASSERT_TRUE(table_.EndSession(ann_->id(), SessionEnd::kClosed, gone.Token()).ok());
  ann_.reset();
  EXPECT_EQ(PinCode(*ben_, buffer_), StatusCode::kNotFound);
  EXPECT_EQ(Counts().bytes_held, 100U);
  EXPECT_FALSE(gone.gone()) << "another's call uses it";
  running->data()[99] = std::byte{1};
  running = BufferPin();
  EXPECT_EQ(Counts().bytes_held, 0U);
  EXPECT_TRUE(gone.gone());
}

TEST_F(SessionSharingTest, UserThatEndsLeavesTheBufferAlone) {
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kReadWrite);
  { const BufferPin pin = Pin(*ben_, buffer_); }
  ASSERT_TRUE(table_.EndSession(ben_->id(), SessionEnd::kClosed).ok());
  ben_.reset();
  EXPECT_EQ(Counts().buffers, 1U);
  EXPECT_EQ(PinCode(*ann_, buffer_), StatusCode::kOk);
}

TEST_F(SessionSharingTest, ListsShowWhatIsSharedWithTheCaller) {
  const Id other = Allocate(*ann_);
  const Id bens = Allocate(*ben_);
  MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kRead);
  const auto of_ben = [](const Peer& owner) { return owner.uid == kBen.uid; };
  auto rows = table_.ListBuffers(of_ben, kBensPrincipal).rows;
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].id, buffer_);
  EXPECT_EQ(rows[0].owner.uid, kAnn.uid);
  EXPECT_EQ(rows[0].session, ann_->id());
  EXPECT_EQ(rows[0].session_label, "ann");
  ASSERT_EQ(rows[0].shares.size(), 1U);
  EXPECT_EQ(rows[0].shares[0].principal, kBensPrincipal);
  EXPECT_EQ(rows[0].shares[0].access, BufferAccess::kRead);
  EXPECT_EQ(rows[1].id, bens);
  EXPECT_EQ(table_.ListBuffers(of_ben).rows.size(), 1U);
  EXPECT_EQ(table_.ListBuffers(Nobody, "uid:3000").rows.size(), 0U);
  EXPECT_EQ(table_.ListBuffers(Everybody).rows.size(), 3U);
  ASSERT_TRUE(table_.ShareBuffer(*ann_, buffer_, kBensPrincipal, std::nullopt).ok());
  rows = table_.ListBuffers(of_ben, kBensPrincipal).rows;
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_TRUE(rows[0].shares.empty());
  EXPECT_FALSE(other == buffer_);
}

// After the answer to a revocation nobody takes the buffer up any more: the count of its users only falls.
TEST_F(SessionSharingTest, RevocationHoldsUnderThreads) {
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> users;
  for (int t = 0; t < 2; ++t) {
    users.emplace_back([&] {
      while (!stop) {
        const StatusCode code = PinCode(*ben_, buffer_, BufferAccess::kReadWrite);
        if (code != StatusCode::kOk && code != StatusCode::kPermissionDenied) ++wrong;
      }
    });
  }
  for (int i = 0; i < 1'000; ++i) {
    MustShare(*ann_, buffer_, kBensPrincipal, BufferAccess::kReadWrite);
    std::this_thread::yield();
    auto left = table_.ShareBuffer(*ann_, buffer_, kBensPrincipal, std::nullopt);
    ASSERT_TRUE(left.ok());
    for (std::uint32_t before = *left; before > 0; before = *left) {
      left = table_.ShareBuffer(*ann_, buffer_, kBensPrincipal, std::nullopt);
      ASSERT_TRUE(left.ok());
      ASSERT_LE(*left, before);
    }
  }
  stop = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace tessera::server
