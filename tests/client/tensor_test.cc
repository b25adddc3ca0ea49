// Views, and tensors that travel inside messages: any strides in, packed bytes out, and back.
#include "client/tensor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace tessera::client {
namespace {

// Memory whose byte i is i.
class TensorTest : public ::testing::Test {
 protected:
  TensorTest() : memory_(256) {
    for (std::size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<std::byte>(i);
  }

  std::vector<std::byte> memory_;
};

std::string Bytes(std::initializer_list<int> values) {
  std::string bytes;
  for (const int value : values) bytes += static_cast<char>(value);
  return bytes;
}

TEST_F(TensorTest, PackedViewsPackToThemselves) {
  const TensorView view = InlineTensor(memory_.data(), DType::kS8, {2, 3});
  EXPECT_TRUE(view.is_inline());
  EXPECT_EQ(view.strides, (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(PackTensor(view), Bytes({0, 1, 2, 3, 4, 5}));
}

TEST_F(TensorTest, OtherViewsPackInTheirOwnOrder) {
  const TensorView view = InlineTensor(memory_.data(), DType::kS8, {2, 3});
  EXPECT_EQ(PackTensor(view.Transposed()), Bytes({0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(PackTensor(view.Slice(1, 1, 3)), Bytes({1, 2, 4, 5}));
  EXPECT_EQ(PackTensor(InlineTensor(memory_.data(), DType::kS8, {2, 3}, {0, 1})), Bytes({0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(PackTensor(InlineTensor(memory_.data() + 1, DType::kBf16, {2, 2}, {1, 4})),
            Bytes({1, 2, 9, 10, 3, 4, 11, 12}));
  EXPECT_EQ(PackTensor(InlineTensor(memory_.data(), DType::kF32, {1, 2, 1, 2}, {9, 8, 9, 2})),
            Bytes({0, 1, 2, 3, 8, 9, 10, 11, 32, 33, 34, 35, 40, 41, 42, 43}));
}

TEST_F(TensorTest, NoDimensionsAreOneElementAndNoElementsAreNone) {
  EXPECT_EQ(PackTensor(InlineTensor(memory_.data(), DType::kBf16, {})), Bytes({0, 1}));
  EXPECT_EQ(PackTensor(InlineTensor(nullptr, DType::kF32, {4, 0, 2})), "");
  EXPECT_TRUE(UnpackTensor("", InlineTensor(nullptr, DType::kF32, {4, 0, 2})).ok());
}

TEST_F(TensorTest, UnpackingWritesTheElementsAndNothingElse) {
  std::vector<std::byte> before = memory_;
  const TensorView view = InlineTensor(memory_.data() + 16, DType::kBf16, {2, 3}, {16, 4});
  const std::string packed = "abcdefghijkl";
  ASSERT_TRUE(UnpackTensor(packed, view).ok());
  EXPECT_EQ(PackTensor(view), packed);
  for (std::size_t i = 0; i < 6; ++i) {
    std::memcpy(before.data() + 16 + 32 * (i / 3) + 8 * (i % 3), packed.data() + 2 * i, 2);
  }
  EXPECT_EQ(memory_, before);
}

TEST_F(TensorTest, ARepliesSizeMustFit) {
  const std::vector<std::byte> before = memory_;
  const TensorView view = InlineTensor(memory_.data(), DType::kBf16, {2, 3});
  for (const std::size_t bytes : {0, 11, 13}) {
    EXPECT_EQ(UnpackTensor(std::string(bytes, 'x'), view).code(), absl::StatusCode::kInternal) << bytes;
  }
  EXPECT_EQ(memory_, before);
}

}  // namespace
}  // namespace tessera::client
