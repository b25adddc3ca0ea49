// Text of both versions -> rows. What is parsed comes from outside: every number, name, line and text has a limit, and
// whatever it is, the answer is rows or a message that says where it is wrong.

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "planner/row_set.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kBoundMax = std::int64_t{1} << 60;
constexpr std::int64_t kGateMax = std::int64_t{1} << 20;
constexpr std::int64_t kKnobMax = std::int64_t{1} << 20;
constexpr std::size_t kNameMax = 96;  // bytes of a class or recipe

bool IsSpace(char c) {
  return c == ' ' || c == '\t' || c == '\r';
}
bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}
bool IsWord(char c) {
  return IsDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.';
}

// Where in a line the parser stands.
class Cursor {
 public:
  Cursor(std::string_view line, int number) : line_(line), number_(number) {}

  void SkipSpace() {
    while (at_ < line_.size() && IsSpace(line_[at_])) ++at_;
  }
  bool done() const { return at_ == line_.size(); }

  bool Eat(std::string_view text) {
    if (line_.substr(at_, text.size()) != text) return false;
    at_ += text.size();
    return true;
  }

  std::string_view Word() {
    const std::size_t begin = at_;
    while (at_ < line_.size() && IsWord(line_[at_])) ++at_;
    return line_.substr(begin, at_ - begin);
  }

  // Digits alone; nullopt if there are none or the number is not from `min` to `max`.
  std::optional<std::int64_t> Number(std::int64_t min, std::int64_t max) {
    const std::size_t begin = at_;
    std::int64_t value = 0;
    for (; at_ < line_.size() && IsDigit(line_[at_]); ++at_) {
      const int digit = line_[at_] - '0';
      // Asked before it is reckoned: ten times the largest bound is more than 63 bits hold. Above `max` it stays there.
      value = value > (max - digit) / 10 ? max + 1 : value * 10 + digit;
    }
    if (at_ == begin || value < min || value > max) {
      at_ = begin;
      return std::nullopt;
    }
    return value;
  }

  std::size_t at() const { return at_; }

  // `at`: where it is wrong, as of `at()`.
  absl::Status Wrong(std::size_t at, std::string_view field, std::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("line ", number_, ", column ", at + 1, ", ", Av(field), ": ", Av(what)));
  }
  absl::Status Wrong(std::string_view field, std::string_view what) const { return Wrong(at_, field, what); }

  // What stands here, for messages.
  std::string Here() const {
    if (done()) return "the end of the line";
    constexpr std::size_t kShown = 16;
    return absl::StrCat("'", absl::CHexEscape(Av(line_.substr(at_, kShown))), "'");
  }

 private:
  std::string_view line_;
  int number_;
  std::size_t at_ = 0;
};

std::string Listed(std::span<const std::string_view> names) {
  return absl::StrJoin(names, ", ", [](std::string* out, std::string_view name) { absl::StrAppend(out, Av(name)); });
}

absl::Status TakeBand(Cursor& cursor, std::string_view axis, Band& band) {
  if (!cursor.Eat("(")) return cursor.Wrong(axis, absl::StrCat("expected ( and found ", cursor.Here()));
  const auto bound = [&](std::int64_t open, std::int64_t& value) -> absl::Status {
    cursor.SkipSpace();
    if (cursor.Eat("*")) {
      value = open;
      return absl::OkStatus();
    }
    const auto number = cursor.Number(0, kBoundMax);
    if (!number.has_value()) {
      return cursor.Wrong(axis, absl::StrCat("expected * or a number up to 2^60 and found ", cursor.Here()));
    }
    value = *number;
    return absl::OkStatus();
  };
  const std::size_t begin = cursor.at();
  RETURN_IF_ERROR(bound(-1, band.min));
  cursor.SkipSpace();
  if (!cursor.Eat(",")) return cursor.Wrong(axis, absl::StrCat("expected , and found ", cursor.Here()));
  RETURN_IF_ERROR(bound(kOpen, band.max));
  cursor.SkipSpace();
  if (!cursor.Eat("]")) {
    return cursor.Wrong(axis, absl::StrCat("expected ] and found ", cursor.Here(), "; bands are (min,max]"));
  }
  if (band.min >= band.max) return cursor.Wrong(begin, axis, "the band is empty: it has what is above min, up to max");
  return absl::OkStatus();
}

absl::Status TakeGate(Cursor& cursor, std::string_view gate, std::int64_t& value) {
  if (!cursor.Eat(">=")) return cursor.Wrong(gate, absl::StrCat("expected >= and found ", cursor.Here()));
  const auto number = cursor.Number(1, kGateMax);
  if (!number.has_value()) {
    return cursor.Wrong(gate, absl::StrCat("expected a number from 1 to 2^20 and found ", cursor.Here()));
  }
  value = *number;
  return absl::OkStatus();
}

// Items that may stand once each.
class Seen {
 public:
  bool Add(std::size_t item) { return !std::exchange(seen_[item], true); }

 private:
  std::array<bool, kAxesMax + kKnobsMax + 2> seen_{};
};

absl::Status TakeCondition(Cursor& cursor, const RowSchema& schema, Seen& seen, Row& row) {
  const std::size_t begin = cursor.at();
  const std::string_view name = cursor.Word();
  const auto once = [&](std::size_t item) {
    return seen.Add(item) ? absl::OkStatus() : cursor.Wrong(begin, name, "stands twice");
  };
  const auto axes = schema.axes();
  const auto axis = static_cast<std::size_t>(std::find(axes.begin(), axes.end(), name) - axes.begin());
  if (axis < axes.size()) {
    RETURN_IF_ERROR(once(axis));
    return TakeBand(cursor, name, row.bands[axis]);
  }
  if (name == "waves") {
    RETURN_IF_ERROR(once(kAxesMax));
    return TakeGate(cursor, name, row.waves);
  }
  if (name == "blocks") {
    RETURN_IF_ERROR(once(kAxesMax + 1));
    return TakeGate(cursor, name, row.blocks);
  }
  Cursor at_name = cursor;
  return cursor.Wrong(begin, "condition",
                      absl::StrCat("expected a band of ", Listed(axes), ", waves>=, blocks>= or -> and found ",
                                   name.empty() ? at_name.Here() : absl::StrCat("'", Av(name.substr(0, 16)), "'")));
}

absl::Status TakeKnob(Cursor& cursor, const RowSchema& schema, Seen& seen, Row& row) {
  const std::size_t begin = cursor.at();
  const std::string_view name = cursor.Word();
  const auto knobs = schema.knobs();
  const auto knob = static_cast<std::size_t>(std::find(knobs.begin(), knobs.end(), name) - knobs.begin());
  if (knob == knobs.size()) {
    return cursor.Wrong(begin, "knob",
                        absl::StrCat("expected one of ", Listed(knobs), " and found ",
                                     name.empty() ? cursor.Here() : absl::StrCat("'", Av(name.substr(0, 16)), "'")));
  }
  if (!seen.Add(kAxesMax + 2 + knob)) return cursor.Wrong(begin, name, "stands twice");
  if (!cursor.Eat("=")) return cursor.Wrong(name, absl::StrCat("expected = and found ", cursor.Here()));
  const auto number = cursor.Number(1, kKnobMax);
  if (!number.has_value()) {
    return cursor.Wrong(name, absl::StrCat("expected a number from 1 to 2^20 and found ", cursor.Here()));
  }
  row.knobs[knob] = static_cast<int>(*number);
  return absl::OkStatus();
}

const RowSchema* SchemaOf(std::string_view class_name, std::span<const RowSchema* const> schemas) {
  for (const RowSchema* schema : schemas) {
    if (schema->family() == class_name.substr(0, class_name.find('.'))) return schema;
  }
  return nullptr;
}

absl::StatusOr<Row> ParseNamed(Cursor& cursor, std::span<const RowSchema* const> schemas) {
  Row row;
  const std::size_t begin = cursor.at();
  const std::string_view class_name = cursor.Word();
  if (class_name.empty()) return cursor.Wrong("class", absl::StrCat("expected a class and found ", cursor.Here()));
  if (class_name.size() > kNameMax) return cursor.Wrong(begin, "class", "longer than any class");
  const RowSchema* schema = SchemaOf(class_name, schemas);
  if (schema == nullptr) {
    return cursor.Wrong(begin, "class",
                        "of no family that is planned; a row begins with a class, such as those of "
                        "`tessera plan vocabulary`");
  }
  const auto key = schema->ClassKey(class_name);
  if (!key.has_value())
    return cursor.Wrong(begin, "class",
                        absl::StrCat("no class is named '", Av(class_name),
                                     "'; `tessera plan vocabulary --all` lists those there are"));
  row.class_name = class_name;
  row.class_key = *key;
  Seen seen;
  for (cursor.SkipSpace(); !cursor.Eat("->"); cursor.SkipSpace()) {
    if (cursor.done()) return cursor.Wrong("recipe", "-> and a recipe are missing");
    RETURN_IF_ERROR(TakeCondition(cursor, *schema, seen, row));
  }
  cursor.SkipSpace();
  const std::size_t at_recipe = cursor.at();
  row.recipe = cursor.Word();
  if (row.recipe.empty()) return cursor.Wrong("recipe", absl::StrCat("expected one and found ", cursor.Here()));
  if (row.recipe.size() > kNameMax) return cursor.Wrong(at_recipe, "recipe", "longer than any recipe");
  for (cursor.SkipSpace(); !cursor.done(); cursor.SkipSpace()) {
    RETURN_IF_ERROR(TakeKnob(cursor, *schema, seen, row));
  }
  return row;
}

absl::StatusOr<std::vector<Row>> ParsePositional(std::string_view line, Cursor& cursor,
                                                 std::span<const RowSchema* const> schemas) {
  std::vector<std::string_view> fields;
  std::vector<std::size_t> columns;
  for (cursor.SkipSpace(); !cursor.done(); cursor.SkipSpace()) {
    const std::size_t begin = cursor.at();
    if (cursor.Word().empty()) {
      return cursor.Wrong(absl::StrCat("field ", fields.size() + 1),
                          absl::StrCat("expected a number or a name and found ", cursor.Here()));
    }
    fields.push_back(line.substr(begin, cursor.at() - begin));
    columns.push_back(begin);
  }
  std::size_t field = 0;
  absl::StatusOr<std::vector<Row>> rows = schemas.front()->FromPositional(fields, field);
  if (rows.ok()) return rows;
  const std::size_t at = field == 0 || field > columns.size() ? 0 : columns[field - 1];
  return cursor.Wrong(at, field == 0 ? std::string("line") : absl::StrCat("field ", field), MessageOf(rows.status()));
}

absl::StatusOr<std::vector<Row>> ParseLine(std::string_view line, int number,
                                           std::span<const RowSchema* const> schemas) {
  line = line.substr(0, line.find('#'));
  Cursor cursor(line, number);
  cursor.SkipSpace();
  std::vector<Row> rows;
  if (cursor.done()) return rows;
  if (IsDigit(line[cursor.at()])) {
    ASSIGN_OR_RETURN(rows, ParsePositional(line, cursor, schemas));
  } else {
    ASSIGN_OR_RETURN(Row row, ParseNamed(cursor, schemas));
    rows.push_back(std::move(row));
  }
  for (Row& row : rows) row.line = number;
  return rows;
}

}  // namespace

absl::StatusOr<std::vector<Row>> ParseRows(std::string_view text, std::span<const RowSchema* const> schemas,
                                           const RowLimits& limits) {
  if (text.size() > limits.text_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the text has ", text.size(), " bytes; at most ", limits.text_bytes, " are taken"));
  }
  std::vector<Row> rows;
  for (int number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.size() > limits.line_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("line ", number, ", column ", limits.line_bytes + 1,
                                                     ", line: longer than ", limits.line_bytes, " bytes"));
    }
    ASSIGN_OR_RETURN(std::vector<Row> parsed, ParseLine(line, number, schemas));
    std::move(parsed.begin(), parsed.end(), std::back_inserter(rows));
    if (rows.size() > limits.rows) {
      return absl::ResourceExhaustedError(
          absl::StrCat("line ", number, ": more than ", limits.rows, " rows; that many are kept of a tier"));
    }
  }
  return rows;
}

}  // namespace tessera::planner
