#include "tests/gpu/bench_gemm_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "common/text.h"

namespace tessera::gpu_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

BenchCell Cell(BenchFamily family, std::int64_t m) {
  for (const BenchCell& cell : CellsOf(family, /*small=*/false)) {
    if (cell.m == m) return cell;
  }
  ADD_FAILURE() << "no cell of M=" << m;
  return {};
}

nlohmann::ordered_json Row(BenchFamily family, std::int64_t m, double us) {
  return RowOf(Cell(family, m), {.variant = "v", .source = "degraded", .us = us, .peer_us = 2});
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string TemporaryFile() {
  std::string path = ::testing::TempDir() + "/bench_gemm_rows_test.jsonl";
  static_cast<void>(std::remove(path.c_str()));
  return path;
}

TEST(BenchGemmGridTest, NoCellIsThereTwiceAndSmallOnesAreOfTheGrid) {
  std::set<CellKey> all;
  std::size_t cells = 0;
  for (std::size_t i = 0; i < kBenchFamilyNames.size(); ++i) {
    const auto family = static_cast<BenchFamily>(i);
    std::set<CellKey> of_family;
    for (const BenchCell& cell : CellsOf(family, /*small=*/false)) {
      EXPECT_EQ(cell.family, family);
      of_family.insert(KeyOf(cell));
      ++cells;
    }
    for (const BenchCell& cell : CellsOf(family, /*small=*/true)) {
      EXPECT_TRUE(of_family.contains(KeyOf(cell))) << cell.Describe();
    }
    all.merge(of_family);
  }
  EXPECT_EQ(all.size(), cells);
  EXPECT_EQ(CellsOf(BenchFamily::kBf16, false).size(), 56U);
  EXPECT_EQ(CellsOf(BenchFamily::kHoldout, false).size(), 27U);
}

TEST(BenchGemmGridTest, FamiliesAreFoundByName) {
  EXPECT_EQ(BenchFamilyFrom("fp8_rowcol"), BenchFamily::kFp8RowCol);
  EXPECT_EQ(BenchFamilyFrom("fp16"), std::nullopt);
}

TEST(BenchGemmRowsTest, ARowNamesItsCellAndNothingThatWasNotMeasured) {
  const nlohmann::ordered_json row = RowOf(Cell(BenchFamily::kInt8, 512), {.us = 4, .peer_us = 0, .peer_s8_us = 3});
  EXPECT_EQ(row.at("pair"), "s8_s8");
  EXPECT_EQ(row.at("accum"), nullptr);
  EXPECT_EQ(row.at("scales"), "row_col");
  EXPECT_EQ(row.at("regime"), "sustained");
  EXPECT_EQ(row.at("peer_us"), nullptr);
  EXPECT_EQ(row.at("ratio"), nullptr);
  EXPECT_EQ(row.at("peer_s8_us"), 3);
  EXPECT_EQ(Row(BenchFamily::kFp8Exact, 16, 1).at("accum"), "exact");
  EXPECT_EQ(Row(BenchFamily::kFp8Exact, 16, 1).at("regime"), "burst");
  EXPECT_EQ(Row(BenchFamily::kBf16, 16, 1).at("ratio"), 2);
  EXPECT_FALSE(Row(BenchFamily::kBf16, 16, 1).contains("peer_s8_us"));
}

TEST(BenchGemmRowsTest, APutReplacesItsOwnCellOnly) {
  RowTable table;
  ASSERT_TRUE(table.Put(Row(BenchFamily::kBf16, 16, 1)).ok());
  ASSERT_TRUE(table.Put(Row(BenchFamily::kBf16, 64, 2)).ok());
  ASSERT_TRUE(table.Put(Row(BenchFamily::kFp8, 16, 3)).ok());
  ASSERT_TRUE(table.Put(Row(BenchFamily::kFp8Exact, 16, 4)).ok());
  ASSERT_TRUE(table.Put(Row(BenchFamily::kFp8RowCol, 16, 5)).ok());
  EXPECT_EQ(table.size(), 5U);
  ASSERT_TRUE(table.Put(Row(BenchFamily::kFp8, 16, 6)).ok());
  EXPECT_EQ(table.size(), 5U);
  EXPECT_THAT(table.Text(), HasSubstr("\"us\":6.0"));
  EXPECT_THAT(table.Text(), Not(HasSubstr("\"us\":3.0")));
  table.Drop(KeyOf(Cell(BenchFamily::kBf16, 64)));
  EXPECT_EQ(table.size(), 4U);
  EXPECT_THAT(table.Text(), Not(HasSubstr("\"us\":2.0")));
}

TEST(BenchGemmRowsTest, TextIsReadBackAndItsOrderIsThatOfTheCells) {
  RowTable one;
  RowTable other;
  for (const std::int64_t m : {1, 16, 64}) ASSERT_TRUE(one.Put(Row(BenchFamily::kBf16, m, 1)).ok());
  for (const std::int64_t m : {64, 1, 16}) ASSERT_TRUE(other.Put(Row(BenchFamily::kBf16, m, 1)).ok());
  EXPECT_EQ(one.Text(), other.Text());
  const absl::StatusOr<RowTable> read = RowTable::Parse(one.Text());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->Text(), one.Text());
}

TEST(BenchGemmRowsTest, TextsThatAreNoRowsAreRefusedWithTheirLine) {
  const std::string row = Row(BenchFamily::kBf16, 16, 1).dump() + "\n";
  for (const char* const bad :
       {"{", "{\"bench\":\"gemm_vendor\"}", "{\"bench\":\"gemm\",\"pair\":\"bf16_bf16\"}", "7"}) {
    const absl::StatusOr<RowTable> read = RowTable::Parse(row + bad + "\n");
    ASSERT_FALSE(read.ok()) << bad;
    EXPECT_THAT(MessageOf(read.status()), HasSubstr("line 2: no row"));
  }
  EXPECT_THAT(MessageOf(RowTable::Parse(row + row).status()), HasSubstr("line 2: a second row"));
}

TEST(BenchGemmRowsTest, AFileKeepsOtherRowsOnlyWhenMerged) {
  const std::string path = TemporaryFile();
  absl::StatusOr<RowFile> first = RowFile::Open(path, /*merge=*/true);  // none there yet
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(first->Put(Row(BenchFamily::kBf16, 16, 1)).ok());
  ASSERT_TRUE(first->Put(Row(BenchFamily::kFp8, 16, 2)).ok());

  absl::StatusOr<RowFile> merged = RowFile::Open(path, /*merge=*/true);
  ASSERT_TRUE(merged.ok()) << merged.status();
  ASSERT_TRUE(merged->Put(Row(BenchFamily::kFp8, 16, 3)).ok());
  EXPECT_EQ(ReadFile(path), Row(BenchFamily::kBf16, 16, 1).dump() + "\n" + Row(BenchFamily::kFp8, 16, 3).dump() + "\n");
  ASSERT_TRUE(merged->Drop(KeyOf(Cell(BenchFamily::kBf16, 16))).ok());
  EXPECT_EQ(ReadFile(path), Row(BenchFamily::kFp8, 16, 3).dump() + "\n");

  ASSERT_TRUE(RowFile::Open(path, /*merge=*/false).ok());
  EXPECT_EQ(ReadFile(path), "");
}

TEST(BenchGemmRowsTest, AFileThatIsNoReportIsLeftAlone) {
  const std::string path = TemporaryFile();
  std::ofstream(path) << "dear diary\n";
  EXPECT_THAT(MessageOf(RowFile::Open(path, /*merge=*/true).status()), HasSubstr(path + ": line 1: no row"));
  EXPECT_EQ(ReadFile(path), "dear diary\n");
  EXPECT_FALSE(RowFile::Open("/nowhere/gemm.jsonl", /*merge=*/false).ok());
}

TEST(BenchSummaryTest, MeansAndLeastCellsByFamilyAndM) {
  BenchSummary summary;
  summary.Add(Cell(BenchFamily::kBf16, 1), {.us = 1, .peer_us = 4});
  summary.Add(Cell(BenchFamily::kBf16, 64), {.us = 2, .peer_us = 2});
  summary.Add(Cell(BenchFamily::kBf16, 2048), {.us = 4, .peer_us = 1});
  summary.Add(Cell(BenchFamily::kFp8, 16), {.us = 1, .peer_us = 0});
  summary.Skip(Cell(BenchFamily::kInt8, 1), "no kernel");
  summary.Skip(Cell(BenchFamily::kInt8, 16), "no kernel");
  const std::string text = summary.Text();
  EXPECT_THAT(text, HasSubstr("bf16       all          3 cells, geomean 1.000, least 0.250 at bf16_bf16"));
  EXPECT_THAT(text, HasSubstr("bf16       M 1          1 cells, geomean 4.000, least 4.000"));
  EXPECT_THAT(text, HasSubstr("bf16       M >= 16      2 cells, geomean 0.500, least 0.250"));
  EXPECT_THAT(text, Not(HasSubstr("M 129-1024")));
  EXPECT_THAT(text, HasSubstr("1 cells have nothing to be compared with"));
  EXPECT_THAT(text, HasSubstr("int8       no row of 2 cells: no kernel"));
}

}  // namespace
}  // namespace tessera::gpu_test
