// Text of rows: what is taken, what is refused and how that is said, and that rows survive being text.
#include "planner/row_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/gemm/family.h"

namespace tessera::planner {
namespace {

using ::testing::HasSubstr;

constexpr char kClass[] = "gemm.sm90a.bf16_bf16.bf16.fast.NT";

const std::vector<const RowSchema*>& Schemas() {
  static const std::vector<const RowSchema*> kSchemas = {&GemmFamily::Schema()};
  return kSchemas;
}

absl::StatusOr<std::vector<Row>> Parse(std::string_view text) {
  return ParseRows(text, Schemas());
}

std::string ErrorOf(std::string_view text) {
  const auto rows = Parse(text);
  return rows.ok() ? "no error"
                   : absl::StrCat(absl::StatusCodeToString(rows.status().code()), ": ", rows.status().message());
}

TEST(Rows, ParsesAllThatARowCanSay) {
  const auto rows = Parse(
      "# a comment\n"
      "\n"
      "  gemm.sm90a.bf16_bf16.bf16.fast.NT k(512,*] waves>=2 m(0,16] n( 8 , 4096 ] blocks>=3 -> 128x128x64_s6 split=4 "
      "raster=8 # why\r\n"
      "gemm.cpu.bf16_bf16.f32.fast.TN -> reference");
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(rows->size(), 2U);
  const Row& full = rows->front();
  EXPECT_EQ(full.class_name, kClass);
  EXPECT_EQ(full.recipe, "128x128x64_s6");
  EXPECT_EQ(full.bands[0], (Band{.min = 0, .max = 16}));
  EXPECT_EQ(full.bands[1], (Band{.min = 8, .max = 4096}));
  EXPECT_EQ(full.bands[2], (Band{.min = 512, .max = kOpen}));
  EXPECT_EQ(full.waves, 2);
  EXPECT_EQ(full.blocks, 3);
  EXPECT_EQ(full.knobs[0], 8);
  EXPECT_EQ(full.knobs[1], 4);
  EXPECT_EQ(full.line, 3);
  const Row& bare = rows->back();
  for (const Band& band : bare.bands) EXPECT_TRUE(band.open());
  EXPECT_TRUE(bare.bands[0].Has(0)) << "an axis that is not named has empty problems, too";
  EXPECT_FALSE(full.bands[0].Has(0));
  EXPECT_EQ(bare.line, 4);
}

TEST(Rows, SaysLineColumnAndField) {
  const std::pair<std::string, std::string> kWrong[] = {
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT m(0,16", "line 1, column 41, m: expected ]"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT m(16,16] -> x", "line 1, column 37, m: the band is empty"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT m(17,16] -> x", "line 1, column 37, m: the band is empty"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT m(-1,16] -> x", "line 1, column 37, m: expected * or a number"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT m(0,nan] -> x", "line 1, column 39, m: expected * or a number"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT m(0,99999999999999999999999] -> x", "column 39, m: expected * or a number"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT m(0,16] m(0,17] -> x", "line 1, column 43, m: stands twice"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT waves>=0 -> x", "waves: expected a number from 1"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT waves>2 -> x", "column 40, waves: expected >="},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT q(0,16] -> x", "line 1, column 35, condition: expected a band of m, n, k"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT", "column 34, recipe: -> and a recipe are missing"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT ->", "column 37, recipe: expected one"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT -> x raster=0", "column 47, raster: expected a number from 1"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT -> x split=1 split=2", "column 48, split: stands twice"},
      {"gemm.sm90a.bf16_bf16.bf16.fast.NT -> x warps=2", "column 40, knob: expected one of raster, split"},
      {"gemm.sm91.bf16_bf16.bf16.fast.NT -> x",
       "class: no class is named 'gemm.sm91.bf16_bf16.bf16.fast.NT'; `tessera plan vocabulary"},
      {"conv.sm90a.bf16 -> x", "column 1, class: of no family that is planned; a row begins with a class"},
      {"\n\n  -> x", "line 3, column 3, class: expected a class"},
      {"\x01\xff", "class: expected a class and found '\\x01\\xff'"},
      {"0 16 0 0 w16a16 0 small 4", "line 1, column 1, line: 8 fields"},
      {"0 16 0 0 w4a16 0 small 4 0", "line 1, column 10, field 5: perf_class"},
      {"0 16 0 0 w16a16 3 small 4 0", "field 6: 0 to 2 operands"},
      {"32 16 0 0 w16a16 0 small 4 0", "field 2: the band is empty"},
      {"0 16 0 0 w16a16 0 big 4 0", "field 7: no portable kernel of w16a16 has tiles of 128x128x64"},
  };
  for (const auto& [text, message] : kWrong) {
    EXPECT_THAT(ErrorOf(text), HasSubstr("INVALID_ARGUMENT")) << text;
    EXPECT_THAT(ErrorOf(text), HasSubstr(message)) << text;
  }
}

TEST(Rows, LimitsHold) {
  EXPECT_THAT(ErrorOf(std::string(kRowLimits.text_bytes + 1, '\n')), HasSubstr("RESOURCE_EXHAUSTED"));
  EXPECT_THAT(ErrorOf(std::string(kRowLimits.line_bytes + 1, ' ')), HasSubstr("line 1, column 1025, line: longer"));
  const std::string row = "gemm.cpu.bf16_bf16.bf16.fast.NT -> reference\n";
  std::string most;
  for (std::size_t i = 0; i < kRowLimits.rows; ++i) most += row;
  const auto rows = Parse(most);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->size(), kRowLimits.rows);
  EXPECT_THAT(ErrorOf(most + row), HasSubstr("RESOURCE_EXHAUSTED: line 4097: more than 4096 rows"));
}

// What is in force can be exported, so it must be possible to import it, whatever the texts were that it came from.
TEST(Rows, TheLongestRowsOfATierAreAText) {
  Row longest;
  longest.class_name = "gemm.vendor.bf16_bf16.bf16.exact.NT";
  longest.class_key = *GemmFamily::Schema().ClassKey(longest.class_name);
  longest.recipe = std::string(96, 'r');
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  for (std::size_t axis = 0; axis < 3; ++axis) longest.bands[axis] = {.min = kMost - 1, .max = kMost};
  longest.waves = longest.blocks = 1 << 20;
  longest.knobs[0] = longest.knobs[1] = 1 << 20;
  const std::vector<Row> rows(kRowLimits.rows, longest);
  const std::string text = ToText(rows, Schemas());
  EXPECT_GT(text.size(), std::size_t{1} << 20);
  const auto again = Parse(text);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(*again == rows);
}

// A line for int8 or fp8 is of as many rows as the portable tree has classes for it, which may be none.
TEST(Rows, PositionalLinesBecomeRowsOfToday) {
  const auto rows = Parse("0 16 0 0 0 0 0 4 0\n64 512 0 4096 w16a16 2 big 4 6 32 512 0 2\n");
  ASSERT_TRUE(rows.ok()) << rows.status();
  std::size_t small = 0;
  std::size_t big = 0;
  for (const Row& row : *rows) {
    ASSERT_TRUE(kernels::FindGemmVariant(row.class_name + "/" + row.recipe).has_value()) << row.recipe;
    EXPECT_THAT(row.class_name, HasSubstr("bf16_bf16"));
    if (row.line == 1) {
      ++small;
      EXPECT_EQ(row.recipe, "64x64x64_s4");
      EXPECT_THAT(row.class_name, HasSubstr(".NT"));
      EXPECT_EQ(row.bands[0], (Band{.min = -1, .max = 16}));
      EXPECT_TRUE(row.bands[1].open() && row.bands[2].open());
      EXPECT_EQ(row.blocks, 0);
      EXPECT_EQ(row.knobs[0], 0);
      continue;
    }
    ++big;
    EXPECT_EQ(row.recipe, "128x128x32_s4");
    EXPECT_THAT(row.class_name, HasSubstr(".TN"));
    EXPECT_EQ(row.bands[0], (Band{.min = 64, .max = 512}));
    EXPECT_EQ(row.bands[1], (Band{.min = -1, .max = 4096}));
    EXPECT_EQ(row.bands[2], (Band{.min = 512, .max = kOpen}));
    EXPECT_EQ(row.blocks, 2);
    EXPECT_EQ(row.knobs[0], 6);
  }
  EXPECT_EQ(small, 2U) << "one for each type of D";
  EXPECT_EQ(big, 2U);
}

Row RandomRow(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t limit) { return static_cast<std::int64_t>(random() % limit); };
  const auto variants = kernels::GemmVariants();
  Row row;
  row.class_name = variants[random() % variants.size()].info.class_name;
  row.recipe = variants[random() % variants.size()].info.recipe;
  row.class_key = *GemmFamily::Schema().ClassKey(row.class_name);
  for (std::size_t axis = 0; axis < 3; ++axis) {
    Band& band = row.bands[axis];
    if (below(3) > 0) band.min = below(std::uint64_t{1} << below(60));
    if (below(3) > 0) band.max = std::max<std::int64_t>(band.min, 0) + 1 + below(1 << 20);
  }
  if (below(3) == 0) row.waves = 1 + below(1 << 20);
  if (below(3) == 0) row.blocks = 1 + below(1 << 20);
  for (std::size_t knob = 0; knob < 2; ++knob) {
    if (below(2) == 0) row.knobs[knob] = static_cast<int>(1 + below(1 << 20));
  }
  return row;
}

TEST(Rows, TextAndBackIsTheIdentity) {
  std::mt19937_64 random(20260715);
  std::vector<Row> rows;
  for (int i = 0; i < 2000; ++i) rows.push_back(RandomRow(random));
  const std::string text = ToText(rows, Schemas());
  const auto again = Parse(text);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(*again == rows);
  EXPECT_EQ(ToText(*again, Schemas()), text);
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ((*again)[i].class_key, rows[i].class_key);
}

// Whatever is done to a text, the answer is rows or a status.
TEST(Rows, DamagedTextsAreAnswered) {
  std::mt19937_64 random(7);
  std::string good = "0 16 0 0 0 0 0 4 0\n";
  std::vector<Row> rows;
  for (int i = 0; i < 8; ++i) rows.push_back(RandomRow(random));
  good += ToText(rows, Schemas());
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text = good;
    for (int edits = 0; edits < 3; ++edits) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 8);
          break;
        default:
          text.insert(at, 1, "0(]>=*#\n \t,-"[random() % 12]);
      }
    }
    const auto parsed = Parse(text);
    if (parsed.ok()) {
      const auto again = Parse(ToText(*parsed, Schemas()));
      ASSERT_TRUE(again.ok() && *again == *parsed) << text;
    } else {
      ++refused;
      ASSERT_THAT(MessageOf(parsed.status()), HasSubstr("line ")) << text;
      ASSERT_LT(parsed.status().message().size(), 400U);
    }
  }
  EXPECT_GT(refused, 5'000);
}

}  // namespace
}  // namespace tessera::planner
