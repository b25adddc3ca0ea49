// Overlap of strided views against counting every byte: "apart" is never said of views that share one, and is said of
// the cases that callers rely on.
#include "server/exec/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace tessera::server {
namespace {

StridedBytes View(std::uint64_t begin, std::uint64_t element_bytes, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<std::int64_t> stride_bytes) {
  StridedBytes view{.begin = begin, .element_bytes = element_bytes, .rank = static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::copy(stride_bytes.begin(), stride_bytes.end(), view.stride_bytes.begin());
  return view;
}

std::string Text(const StridedBytes& view) {
  std::string text = "begin " + std::to_string(view.begin) + " element " + std::to_string(view.element_bytes);
  for (int i = 0; i < view.rank; ++i) {
    text += " " + std::to_string(view.shape[i]) + "@" + std::to_string(view.stride_bytes[i]);
  }
  return text;
}

// Every byte of the view, once for each index that names it.
std::vector<std::uint64_t> BytesOf(const StridedBytes& view) {
  std::vector<std::uint64_t> starts = {view.begin};
  for (int d = 0; d < view.rank; ++d) {
    std::vector<std::uint64_t> next;
    for (const std::uint64_t start : starts) {
      for (std::int64_t i = 0; i < view.shape[d]; ++i) {
        next.push_back(start + static_cast<std::uint64_t>(i * view.stride_bytes[d]));
      }
    }
    starts = std::move(next);
  }
  std::vector<std::uint64_t> bytes;
  for (const std::uint64_t start : starts) {
    for (std::uint64_t b = 0; b < view.element_bytes; ++b) bytes.push_back(start + b);
  }
  return bytes;
}

bool ShareAByte(const StridedBytes& a, const StridedBytes& b) {
  const std::vector<std::uint64_t> a_bytes = BytesOf(a);
  const std::set<std::uint64_t> taken(a_bytes.begin(), a_bytes.end());
  const std::vector<std::uint64_t> b_bytes = BytesOf(b);
  return std::any_of(b_bytes.begin(), b_bytes.end(), [&](std::uint64_t byte) { return taken.contains(byte); });
}

bool NamesAByteTwice(const StridedBytes& view) {
  const std::vector<std::uint64_t> bytes = BytesOf(view);
  return std::set<std::uint64_t>(bytes.begin(), bytes.end()).size() != bytes.size();
}

class RandomViews {
 public:
  explicit RandomViews(std::uint64_t seed) : random_(seed) {}

  StridedBytes Next() {
    StridedBytes view;
    view.element_bytes = std::uint64_t{1} << Below(3);
    view.begin = Below(64);
    view.rank = static_cast<int>(Below(4));
    const auto pitch = static_cast<std::int64_t>(4 + Below(20));
    for (int i = 0; i < view.rank; ++i) {
      view.shape[i] = static_cast<std::int64_t>(1 + Below(5));
      // A pitch that two views may share, a multiple of the element, or anything.
      const std::uint64_t kind = Below(3);
      view.stride_bytes[i] = kind == 0 ? 16 * static_cast<std::int64_t>(Below(4))
                             : kind == 1
                                 ? static_cast<std::int64_t>(view.element_bytes) * static_cast<std::int64_t>(Below(6))
                                 : pitch;
    }
    return view;
  }

 private:
  std::uint64_t Below(std::uint64_t bound) { return random_() % bound; }
  std::mt19937_64 random_;
};

TEST(OverlapTest, RandomPairsThatShareAByteAreNeverApart) {
  constexpr std::uint64_t kSeed = 4711;
  RandomViews views(kSeed);
  int apart = 0;
  int sharing = 0;
  for (int i = 0; i < 30'000; ++i) {
    const StridedBytes a = views.Next();
    const StridedBytes b = views.Next();
    const bool shares = ShareAByte(a, b);
    const bool may = MayOverlap(a, b);
    ASSERT_TRUE(may || !shares) << "seed " << kSeed << " pair " << i << ": " << Text(a) << " and " << Text(b);
    ASSERT_EQ(may, MayOverlap(b, a)) << "seed " << kSeed << " pair " << i << ": " << Text(a) << " and " << Text(b);
    apart += may ? 0 : 1;
    sharing += shares ? 1 : 0;
  }
  EXPECT_GT(apart, 1'000);
  EXPECT_GT(sharing, 1'000);
}

TEST(OverlapTest, RandomViewsThatRepeatAByteAreNeverCalledFree) {
  constexpr std::uint64_t kSeed = 815;
  RandomViews views(kSeed);
  int free_of_overlap = 0;
  int repeating = 0;
  for (int i = 0; i < 30'000; ++i) {
    const StridedBytes view = views.Next();
    const bool repeats = NamesAByteTwice(view);
    const bool may = MayOverlapItself(view);
    ASSERT_TRUE(may || !repeats) << "seed " << kSeed << " view " << i << ": " << Text(view);
    free_of_overlap += may ? 0 : 1;
    repeating += repeats ? 1 : 0;
  }
  EXPECT_GT(free_of_overlap, 1'000);
  EXPECT_GT(repeating, 1'000);
}

TEST(OverlapTest, EveryViewOverlapsItsOwnCopy) {
  RandomViews views(99);
  for (int i = 0; i < 1'000; ++i) {
    const StridedBytes view = views.Next();
    ASSERT_TRUE(MayOverlap(view, view)) << Text(view);
  }
}

TEST(OverlapTest, DisjointRangesAreApartUpToTheLastByte) {
  RandomViews views(7);
  for (int i = 0; i < 1'000; ++i) {
    const StridedBytes a = views.Next();
    StridedBytes b = views.Next();
    b.begin = a.begin + a.Span();
    ASSERT_FALSE(MayOverlap(a, b)) << Text(a) << " and " << Text(b);
    ASSERT_FALSE(MayOverlap(b, a)) << Text(a) << " and " << Text(b);
    b.begin -= 1;  // the last byte of a and the first of b
    ASSERT_TRUE(MayOverlap(a, b)) << Text(a) << " and " << Text(b);
  }
}

TEST(OverlapTest, SpanEndsAtTheLastByte) {
  EXPECT_EQ(View(5, 4, {}, {}).Span(), 4U);
  EXPECT_EQ(View(5, 2, {3, 4}, {100, 2}).Span(), 208U);
  EXPECT_EQ(View(0, 2, {3, 4}, {0, 0}).Span(), 2U);
  RandomViews views(3);
  for (int i = 0; i < 1'000; ++i) {
    const StridedBytes view = views.Next();
    const std::vector<std::uint64_t> bytes = BytesOf(view);
    ASSERT_EQ(view.begin + view.Span(), *std::max_element(bytes.begin(), bytes.end()) + 1) << Text(view);
  }
}

TEST(OverlapTest, ColumnSlicesOfOneParentAreApart) {
  for (const std::uint64_t element : {1U, 2U, 4U}) {
    const auto e = static_cast<std::int64_t>(element);
    for (const std::int64_t columns : {2, 5, 64}) {
      const std::int64_t pitch = columns * e;
      for (std::int64_t cut = 1; cut < columns; ++cut) {
        // A [3, columns] parent, then a batch of such.
        const auto edge = static_cast<std::uint64_t>(cut * e);
        EXPECT_FALSE(
            MayOverlap(View(0, element, {3, cut}, {pitch, e}), View(edge, element, {3, columns - cut}, {pitch, e})))
            << columns << " columns cut at " << cut;
        EXPECT_FALSE(MayOverlap(View(0, element, {2, 3, cut}, {3 * pitch, pitch, e}),
                                View(edge, element, {2, 3, columns - cut}, {3 * pitch, pitch, e})))
            << columns << " columns cut at " << cut;
        EXPECT_TRUE(
            MayOverlap(View(0, element, {3, cut + 1}, {pitch, e}), View(edge, element, {3, columns - cut}, {pitch, e})))
            << columns << " columns cut at " << cut << " with one column in both";
      }
    }
  }
}

TEST(OverlapTest, ColumnSlicesFarIntoMemoryAreApart) {
  const std::uint64_t far = (std::uint64_t{1} << 62U) + 12'345;
  const std::int64_t pitch = 96;
  EXPECT_FALSE(MayOverlap(View(far, 4, {1'000, 12}, {pitch, 4}), View(far + 48, 4, {1'000, 12}, {pitch, 4})));
  EXPECT_TRUE(MayOverlap(View(far, 4, {1'000, 13}, {pitch, 4}), View(far + 48, 4, {1'000, 12}, {pitch, 4})));
}

TEST(OverlapTest, SliceOfAFewRowsBesideAWholeColumn) {
  EXPECT_FALSE(MayOverlap(View(0, 2, {100, 4}, {16, 2}), View(16 * 7 + 8, 2, {1, 4}, {16, 2})));
  EXPECT_FALSE(MayOverlap(View(0, 2, {100, 4}, {16, 2}), View(16 * 7 + 8, 2, {4}, {2})));
  EXPECT_TRUE(MayOverlap(View(0, 2, {100, 4}, {16, 2}), View(16 * 7 + 6, 2, {4}, {2})));
}

TEST(OverlapTest, EvenAndOddRowsAreApart) {
  EXPECT_FALSE(MayOverlap(View(0, 4, {8, 10}, {80, 4}), View(40, 4, {8, 10}, {80, 4})));
  EXPECT_TRUE(MayOverlap(View(0, 4, {8, 10}, {80, 4}), View(36, 4, {8, 10}, {80, 4})));
}

TEST(OverlapTest, PackedAndPaddedViewsDoNotOverlapThemselves) {
  EXPECT_FALSE(MayOverlapItself(View(0, 4, {}, {})));
  EXPECT_FALSE(MayOverlapItself(View(0, 4, {2, 3, 5}, {60, 20, 4})));
  EXPECT_FALSE(MayOverlapItself(View(0, 4, {2, 3, 5}, {100, 32, 4})));
  EXPECT_FALSE(MayOverlapItself(View(0, 2, {3, 5}, {2, 6}))) << "transposed";
  EXPECT_FALSE(MayOverlapItself(View(0, 2, {1, 5}, {0, 2}))) << "the stride of one element is never walked";
  EXPECT_TRUE(MayOverlapItself(View(0, 2, {2, 5}, {0, 2})));
  EXPECT_TRUE(MayOverlapItself(View(0, 4, {2, 3}, {8, 4})));
  EXPECT_TRUE(MayOverlapItself(View(0, 4, {3}, {3})));
}

}  // namespace
}  // namespace tessera::server
