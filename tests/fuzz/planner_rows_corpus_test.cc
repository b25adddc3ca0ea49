// The seeds of the fuzzer of rows: the first part of a seed's name says how it ends. And the one check of the harness
// that could be wrong without a crash ever telling: where a refusal points.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "tests/fuzz/planner_rows.h"

namespace tessera::fuzz {
namespace {

TEST(PlannerRowsCorpus, SeedsEndAsTheirNamesSay) {
  std::set<std::string_view> seen;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_FUZZ_CORPUS "/planner_rows")) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string input{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const std::string name = entry.path().filename().string();
    std::string refusal;
    const std::string_view outcome = kRowsOutcomeNames[static_cast<std::size_t>(DrivePlannerRows(input, &refusal))];
    EXPECT_EQ(name.substr(0, name.find('-')), outcome) << name << ": " << refusal;
    seen.insert(outcome);
  }
  EXPECT_EQ(seen.size(), kRowsOutcomeNames.size()) << "each ending has a seed";
}

TEST(PlannerRowsCorpus, ARefusalPointsIntoTheText) {
  const std::string text = "one\ntwo";
  EXPECT_EQ(WhyBadRefusal(text, true, "line 1, column 4, class: x"), "") << "behind the end";
  EXPECT_EQ(WhyBadRefusal(text, true, "line 2, column 1, class: x"), "");
  EXPECT_EQ(WhyBadRefusal(text + "\n", true, "line 3, column 1, line: x"), "");
  EXPECT_NE(WhyBadRefusal(text, true, "line 3, column 1, class: x"), "");
  EXPECT_NE(WhyBadRefusal(text, true, "line 0, column 1, class: x"), "");
  EXPECT_NE(WhyBadRefusal(text, true, "line 1, column 5, class: x"), "");
  EXPECT_NE(WhyBadRefusal(text, true, "line 1, column 0, class: x"), "");
  EXPECT_NE(WhyBadRefusal(text, true, "line 1: x"), "");
  EXPECT_NE(WhyBadRefusal(text, true, "the text is wrong"), "");
  EXPECT_NE(WhyBadRefusal(text, true, "line 1, column 1, class: " + std::string(400, 'x')), "");
  EXPECT_EQ(WhyBadRefusal(text, false, "line 9: more than 4096 rows"), "");
  EXPECT_NE(WhyBadRefusal(text, false, "too much"), "");
}

}  // namespace
}  // namespace tessera::fuzz
