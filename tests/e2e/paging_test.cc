// Lists that are longer than one reply: every row once, in pages of any size.

#include <gmock/gmock.h>

#include <algorithm>
#include <set>
#include <vector>

#include "tests/e2e/raw_client.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using ::testing::StartsWith;

constexpr int kBuffers = 2500;
constexpr int kSessions = 1200;

class PagingTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    StartDaemon({{"sessions_max", "2000"}, {"sessions_per_principal_max", "2000"}});
    client_.emplace(socket());
  }

  void TearDown() override {
    client_.reset();
    DaemonFixture::TearDown();
  }

  static void ExpectBadAfter(const absl::Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith("after: "));
  }

  std::optional<RawClient> client_;
};

TEST_F(PagingTest, Buffers) {
  const std::string token = client_->OpenFor(60'000).value();
  std::set<std::string> ids;
  for (int i = 0; i < kBuffers; ++i) ids.insert(client_->Allocate(token, 1).value());
  ASSERT_EQ(ids.size(), static_cast<std::size_t>(kBuffers));

  const v1::ListBuffersReply all = Connect().ListBuffers().value();
  EXPECT_EQ(all.buffers_size(), kBuffers);
  EXPECT_FALSE(all.more());
  std::set<std::string> listed;
  for (const v1::BufferInfo& row : all.buffers()) listed.insert(row.buffer_id());
  EXPECT_EQ(listed, ids) << "no row twice, and none lost";

  // The library's order is that of pages of any other size.
  for (const std::uint32_t limit : {0U, 1000U, 999U, 7U}) {
    SCOPED_TRACE(limit);
    const int rows_most = limit == 0 ? 1000 : static_cast<int>(limit);
    int at = 0;
    std::string after;
    for (bool more = true; more;) {
      const v1::ListBuffersReply page = client_->ListBuffers(after, limit).value();
      more = page.more();
      ASSERT_EQ(page.buffers_size(), std::min(rows_most, kBuffers - at));
      for (const v1::BufferInfo& row : page.buffers()) ASSERT_EQ(row.buffer_id(), all.buffers(at++).buffer_id());
      after = page.buffers(page.buffers_size() - 1).buffer_id();
      ASSERT_EQ(more, at < kBuffers);
    }
    EXPECT_EQ(at, kBuffers);
  }
  EXPECT_EQ(client_->ListBuffers("", 4'000'000'000U)->buffers_size(), 1000) << "never more than 1000";
  EXPECT_EQ(client_->ListBuffers(all.buffers(kBuffers - 1).buffer_id())->buffers_size(), 0) << "after the last";
}

// Between two pages buffers come and go, the one that the next page begins after, too: what stays is listed once.
TEST_F(PagingTest, BuffersThatComeAndGo) {
  const std::string token = client_->OpenFor(60'000).value();
  std::vector<std::string> ids;
  for (int i = 0; i < 60; ++i) ids.push_back(client_->Allocate(token, 1).value());
  const v1::ListBuffersReply first = client_->ListBuffers("", 30).value();
  ASSERT_TRUE(first.more());
  ASSERT_EQ(first.buffers(29).buffer_id(), ids[29]);
  const std::set<std::size_t> gone = {10, 29, 30, 45};
  for (const std::size_t i : gone) ASSERT_TRUE(client_->Release(token, ids[i]).ok());
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(client_->Allocate(token, 1).ok());
  const v1::ListBuffersReply rest = client_->ListBuffers(ids[29]).value();
  std::multiset<std::string> listed;
  for (const v1::ListBuffersReply* page : {&first, &rest}) {
    for (const v1::BufferInfo& row : page->buffers()) listed.insert(row.buffer_id());
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const bool before = i < 30;  // it was there when its page was made
    EXPECT_EQ(listed.count(ids[i]), before || !gone.contains(i) ? 1U : 0U) << i;
  }
}

// Pages fit into messages, however small those are and however much each row has to tell.
TEST_F(PagingTest, BuffersInSmallMessages) {
  StartDaemon({{"message_bytes_max", "66KiB"}, {"inline_bytes_max", "1KiB"}});
  client_.emplace(socket());
  const std::string token = client_->OpenFor(60'000, std::string(64, '~')).value();
  for (int i = 0; i < 300; ++i) {
    const std::string id = client_->Allocate(token, 1).value();
    for (uid_t uid = 4'000'000'000; uid < 4'000'000'016; ++uid) {
      ASSERT_TRUE(client_->Share(token, id, PrincipalOf(uid), v1::BUFFER_ACCESS_READ_WRITE).ok());
    }
  }
  const auto all = Connect().ListBuffers();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->buffers_size(), 300);
}

TEST_F(PagingTest, Sessions) {
  std::set<std::string> labels;
  for (int i = 0; i < kSessions; ++i) {
    const std::string label = "number " + std::to_string(i);
    ASSERT_TRUE(client_->OpenFor(60'000, label).ok()) << i;
    labels.insert(label);
  }
  const v1::ListSessionsReply all = Connect().ListSessions().value();
  EXPECT_EQ(all.sessions_size(), kSessions);
  EXPECT_FALSE(all.more());
  std::set<std::string> names;
  std::set<std::string> listed;
  for (const v1::SessionInfo& row : all.sessions()) {
    names.insert(row.name());
    listed.insert(row.label());
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kSessions));
  EXPECT_EQ(listed, labels);
  for (const std::uint32_t limit : {0U, 500U, 11U}) {
    SCOPED_TRACE(limit);
    int at = 0;
    std::string after;
    for (bool more = true; more;) {
      const v1::ListSessionsReply page = client_->ListSessions(after, limit).value();
      more = page.more();
      ASSERT_GT(page.sessions_size(), 0);
      ASSERT_LE(page.sessions_size(), limit == 0 ? 1000 : static_cast<int>(limit));
      for (const v1::SessionInfo& row : page.sessions()) ASSERT_EQ(row.name(), all.sessions(at++).name());
      after = page.sessions(page.sessions_size() - 1).name();
      ASSERT_EQ(more, at < kSessions);
    }
    EXPECT_EQ(at, kSessions);
  }
}

TEST_F(PagingTest, BadBeginnings) {
  const std::string token = client_->OpenFor(60'000).value();
  const std::string id = client_->Allocate(token, 1).value();
  for (const std::string& after : {std::string("x"), id.substr(1), id + "x", std::string(10'000, 'x')}) {
    ExpectBadAfter(client_->ListBuffers(after).status());
  }
  for (const char* after : {"x", "1", "1.", ".1", "1.1.1", "-1.1", "4294967296.0", "1,1"}) {
    SCOPED_TRACE(after);
    ExpectBadAfter(client_->ListSessions(after).status());
  }
  // Any id and any name is a place in the order, whether or not it is one that exists.
  EXPECT_EQ(client_->ListBuffers(std::string(16, '\0'))->buffers_size(), 1);
  EXPECT_EQ(client_->ListBuffers(std::string(16, '\xff'))->buffers_size(), 0);
  EXPECT_EQ(client_->ListSessions("0.0")->sessions_size(), 1);
  EXPECT_EQ(client_->ListSessions("4294967295.4294967295")->sessions_size(), 0);
}

}  // namespace
}  // namespace tessera::e2e
