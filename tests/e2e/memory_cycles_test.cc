// Memory that comes and goes thousands of times leaves nothing behind in the daemon, and a place that is used again is
// never taken for what was there before.

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/unique_fd.h"
#include "tests/e2e/daemon_process.h"
#include "tests/e2e/exact_product.h"
#include "tests/oracle/codec.h"
#include "tests/server/session/posix_fixtures.h"

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr int kCycles = kSanitized ? 1000 : 10'000;
constexpr int kWarmUp = 300;
// The daemon's heap and gRPC's may still find their size; what is lost in each cycle is more than 100 bytes then.
constexpr std::int64_t kGrowthAllowed = 1 << 20;

class MemoryCyclesTest : public ::testing::Test {
 protected:
  // Each cycle's buffer is released by its end.
  void ExpectFlat(const std::function<void(int number)>& cycle) {
    for (int i = 0; i < kWarmUp && !HasFailure(); ++i) cycle(i);
    const ProcessView before = AtRest();
    for (int i = 0; i < kCycles && !HasFailure(); ++i) cycle(i);
    const ProcessView after = AtRest();
    RecordProperty("grown", std::to_string(after.resident_bytes - before.resident_bytes));
    EXPECT_EQ(after.memfd_mappings, 0U);
    EXPECT_EQ(after.file_mappings, before.file_mappings);
    EXPECT_EQ(after.descriptors, before.descriptors) << before << "\n" << after;
    // Stacks and heaps of gRPC's threads, of which there may be some more or less.
    EXPECT_LE(after.mappings, before.mappings + 32) << before << "\n" << after;
    if (!kSanitized) {
      EXPECT_LE(after.resident_bytes, before.resident_bytes + kGrowthAllowed) << before << "\n" << after;
    }
  }

  // A release has answered when its memory is gone, so there is nothing to wait for but the scrape's own connection.
  ProcessView AtRest() const {
    const std::string metrics = daemon_.Metrics();
    EXPECT_EQ(MetricSum(metrics, "tessera_buffers"), 0);
    EXPECT_EQ(MetricSum(metrics, "tessera_buffer_held_bytes"), 0);
    EXPECT_EQ(MetricSum(metrics, "tessera_cleanups_stuck"), 0);
    ProcessView view;
    EXPECT_TRUE(Eventually(10s, [&] {
      ProcessView now = ViewProcess(daemon_.pid());
      const bool same = now.descriptors == view.descriptors && now.mappings == view.mappings;
      view = std::move(now);
      return same;
    }));
    return view;
  }

  // Now and then, so that pages of the mapping are really used.
  void ExpectComputes(const client::Buffer& buffer, std::uint64_t number) {
    ExactProduct product(buffer, 8, 8, 32, kMiB - 4096);
    product.Fill(number);
    const auto result = session_.Gemm(product.spec());
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(product.Right(number)) << number;
  }

  const DaemonProcess daemon_{TESSERAD, {"--log-level", "warn"}};
  client::Client client_ = daemon_.Connect().value();
  client::Session session_ = client_.OpenSession("cycles").value();
};

TEST_F(MemoryCyclesTest, ImportAndReleaseStayFlat) {
  const UniqueFd memfd = server::MakeMemfd(kMiB);
  ExpectFlat([&](int number) {
    absl::StatusOr<client::Buffer> buffer = session_.Import(memfd.get());
    ASSERT_TRUE(buffer.ok()) << number << ": " << buffer.status();
    if (number % 16 == 0) ExpectComputes(*buffer, static_cast<std::uint64_t>(number));
    const absl::Status released = buffer->Release();
    ASSERT_TRUE(released.ok()) << number << ": " << released;
  });
}

TEST_F(MemoryCyclesTest, AllocateAndReleaseStayFlat) {
  ExpectFlat([&](int number) {
    absl::StatusOr<client::Buffer> buffer = session_.Allocate(kMiB);
    ASSERT_TRUE(buffer.ok()) << number << ": " << buffer.status();
    ASSERT_EQ(static_cast<int>(buffer->data()[kMiB - 4096]), 0) << "memory of one before";
    if (number % 16 == 0) ExpectComputes(*buffer, static_cast<std::uint64_t>(number));
    const absl::Status released = buffer->Release();
    ASSERT_TRUE(released.ok()) << number << ": " << released;
  });
}

// The same name for it in the client: the same memfd, which has grown.
TEST_F(MemoryCyclesTest, MemoryIsRegisteredAgainWithDoubleTheSizeAfterItsUse) {
  std::uint64_t bytes = 4096;
  const UniqueFd memfd = server::MakeMemfd(bytes);
  for (std::uint64_t round = 0; round < 8; ++round, bytes *= 2) {
    ASSERT_EQ(::ftruncate(memfd.get(), static_cast<off_t>(bytes)), 0);
    absl::StatusOr<client::Buffer> buffer = session_.Import(memfd.get());
    ASSERT_TRUE(buffer.ok()) << bytes << ": " << buffer.status();
    EXPECT_EQ(buffer->bytes(), bytes);
    ExactProduct product(*buffer, 8, 8, 32, bytes - ExactProduct::Bytes(8, 8, 32));  // what is new of it
    product.Fill(round);
    const auto result = session_.Gemm(product.spec());
    ASSERT_TRUE(result.ok()) << bytes << ": " << result.status();
    EXPECT_TRUE(product.Right(round)) << bytes;
    const absl::Status released = buffer->Release();
    ASSERT_TRUE(released.ok()) << bytes << ": " << released;
  }
  EXPECT_EQ(AtRest().memfd_mappings, 0U);
}

// Tensors of one allocation, each registered by itself, keep their places: none reads the first one's bytes.
TEST_F(MemoryCyclesTest, TensorsOfOneMemfdRegisteredOneByOneEachSeeTheirOwnNumbers) {
  constexpr std::array<std::uint64_t, 4> kOffsets = {0, 512, 4096, 65536};
  constexpr std::int64_t kTerms = 16;
  const UniqueFd memfd = server::MakeMemfd(kMiB);
  std::vector<client::Buffer> tensors;
  for (const std::uint64_t offset : kOffsets) {
    auto buffer = session_.Import(memfd.get(), offset, 512);
    ASSERT_TRUE(buffer.ok()) << offset << ": " << buffer.status();
    ASSERT_EQ(buffer->bytes(), 512U);
    tensors.push_back(*std::move(buffer));
  }
  const auto number = [](std::size_t i) { return static_cast<double>(i + 1); };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::int64_t at = 0; at < 256; ++at) oracle::Encode(DType::kBf16, number(i), tensors[i].data() + 2 * at);
  }
  const client::Buffer result = session_.Allocate(4096).value();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      std::memset(result.data(), 0x7b, result.bytes());
      const client::TensorView d = result.Tensor(DType::kF32, {16, 16});
      const auto called = session_.Gemm({.a = tensors[i].Tensor(DType::kBf16, {16, kTerms}),
                                         .b = tensors[j].Tensor(DType::kBf16, {16, kTerms}),
                                         .d = d});
      ASSERT_TRUE(called.ok()) << called.status();
      for (std::int64_t at = 0; at < d.elements(); ++at) {
        ASSERT_EQ(oracle::Decode(DType::kF32, d.data + 4 * at), number(i) * number(j) * kTerms) << i << ", " << j;
      }
    }
  }
  // As outputs: each lands in its own place, seen through one mapping of the whole.
  const client::Buffer whole = session_.Import(memfd.get()).value();
  const client::TensorView ones = result.Tensor(DType::kBf16, {4, 8});
  for (std::int64_t at = 0; at < ones.elements(); ++at) oracle::Encode(DType::kBf16, 1, ones.data + 2 * at);
  const client::TensorView factors = result.Tensor(DType::kBf16, {8, 8}, 1024);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::int64_t at = 0; at < factors.elements(); ++at) {
      oracle::Encode(DType::kBf16, number(i), factors.data + 2 * at);
    }
    const auto called = session_.Gemm({.a = ones, .b = factors, .d = tensors[i].Tensor(DType::kF32, {4, 8})});
    ASSERT_TRUE(called.ok()) << called.status();
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::uint64_t at = 0; at < 32; ++at) {
      ASSERT_EQ(oracle::Decode(DType::kF32, whole.data() + kOffsets[i] + 4 * at), 8 * number(i)) << i << ", " << at;
    }
    ASSERT_EQ(oracle::Decode(DType::kBf16, whole.data() + kOffsets[i] + 128), number(i)) << "beyond the output";
  }
}

}  // namespace
}  // namespace tessera::e2e
