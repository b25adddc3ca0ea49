#include "tests/fuzz/rows_mutator.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/gemm/family.h"
#include "planner/row_set.h"
#include "tests/fuzz/planner_rows.h"

namespace tessera::fuzz {
namespace {

using kernels::GemmVariant;
using Random = std::minstd_rand;

std::size_t Below(Random& random, std::size_t limit) {
  return random() % limit;
}

template <typename List>
const auto& OneOf(Random& random, const List& list) {
  return list[Below(random, std::size(list))];
}

// Numbers on the edges of bands, gates and knobs, and of what the parser takes.
std::string_view Number(Random& random) {
  static constexpr std::array<std::string_view, 20> kNumbers = {"0",
                                                                "1",
                                                                "2",
                                                                "3",
                                                                "4",
                                                                "15",
                                                                "16",
                                                                "17",
                                                                "64",
                                                                "511",
                                                                "512",
                                                                "513",
                                                                "4096",
                                                                "65537",
                                                                "00512",
                                                                "2147483648",
                                                                "1048576",
                                                                "1048577",
                                                                "1152921504606846976",
                                                                "1152921504606846977"};
  return OneOf(random, kNumbers);
}

std::string Band(Random& random, std::string_view axis) {
  const std::string_view min = Below(random, 2) == 0 ? "*" : Number(random);
  const std::string_view max = Below(random, 2) == 0 ? "*" : Number(random);
  return absl::StrCat(" ", Av(axis), "(", Av(min), ",", Av(max), "]");
}

// A row, mostly of the class of the question and of a recipe that its device has.
std::string RowFor(Random& random, const RowsQuestion& question) {
  std::vector<std::size_t> fitting;
  for (std::size_t i = 0; i < kernels::GemmVariants().size(); ++i) {
    const GemmVariant& variant = kernels::GemmVariants()[i];
    if (variant.gemm_class == question.problem.gemm_class && question.facts.archs.Has(variant.info.arch)) {
      fitting.push_back(i);
    }
  }
  const bool any = fitting.empty() || Below(random, 8) == 0;
  const GemmVariant& variant =
      kernels::GemmVariants()[any ? Below(random, kernels::GemmVariants().size()) : OneOf(random, fitting)];
  std::string row(variant.info.class_name);
  for (const std::string_view axis : {"m", "n", "k"}) {
    if (Below(random, 4) == 0) row += Band(random, axis);
  }
  if (Below(random, 8) == 0) absl::StrAppend(&row, " waves>=", Av(Number(random)));
  if (Below(random, 8) == 0) absl::StrAppend(&row, " blocks>=", Av(Number(random)));
  absl::StrAppend(&row, " -> ", Av(variant.info.recipe));
  if (Below(random, 4) == 0) absl::StrAppend(&row, " raster=", Av(Number(random)));
  if (Below(random, 4) == 0) absl::StrAppend(&row, " split=", Av(Number(random)));
  return row;
}

std::string PositionalRow(Random& random) {
  static constexpr std::array<std::string_view, 5> kClasses = {"w16a16", "w8a8", "f8a8", "0", "3"};
  static constexpr std::array<std::string_view, 6> kTiles = {"small 4", "big 4", "0 4", "2 4", "narrow 4", "small 3"};
  std::string row = absl::StrCat(Av(Number(random)), " 0 0 ", Av(Number(random)), " ", Av(OneOf(random, kClasses)), " ",
                                 Below(random, 3), " ", Av(OneOf(random, kTiles)), " ", Av(Number(random)));
  if (Below(random, 2) == 0) absl::StrAppend(&row, Below(random, 2) == 0 ? " 32" : " 64");
  return row;
}

// Another number in the place of one that is there.
void ChangeNumber(Random& random, std::string& line) {
  constexpr std::string_view kDigits = "0123456789";
  const std::size_t from = line.find_first_of(kDigits, Below(random, line.size() + 1));
  if (from == std::string::npos) return;
  const std::size_t end = std::min(line.find_first_not_of(kDigits, from), line.size());
  line.replace(from, end - from, Number(random));
}

// What is no row would keep all that comes of this input from being a table.
void DropRefused(std::vector<std::string>& lines) {
  const planner::RowSchema* const schemas[] = {&planner::GemmFamily::Schema()};
  std::erase_if(lines, [&](const std::string& line) { return !planner::ParseRows(line, schemas).ok(); });
  if (lines.empty()) lines.emplace_back();
}

void ChangeLines(Random& random, const RowsQuestion& question, std::vector<std::string>& lines) {
  const std::size_t at = Below(random, lines.size());
  switch (Below(random, 7)) {
    case 0:
    case 1:
      lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(at), RowFor(random, question));
      break;
    case 2:
      lines[at] = RowFor(random, question);
      break;
    case 3:
      lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(at), PositionalRow(random));
      break;
    case 4:
      if (lines.size() > 1) lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 5:
      std::swap(lines[at], lines[Below(random, lines.size())]);
      break;
    default:
      ChangeNumber(random, lines[at]);
  }
}

}  // namespace

std::string MutateRows(std::string_view input, unsigned seed) {
  Random random(seed);
  std::string choices(input.substr(0, kChoices));
  choices.resize(kChoices, 'a');
  if (Below(random, 3) == 0) choices[Below(random, kChoices)] = static_cast<char>('a' + Below(random, 256));
  const RowsQuestion question = QuestionOf(choices);
  std::vector<std::string> lines = absl::StrSplit(Av(input.substr(std::min(kChoices, input.size()))), '\n');
  if (Below(random, 2) == 0) DropRefused(lines);
  for (std::size_t changes = 1 + Below(random, 3); changes > 0; --changes) ChangeLines(random, question, lines);
  return absl::StrCat(choices, absl::StrJoin(lines, "\n"));
}

}  // namespace tessera::fuzz
