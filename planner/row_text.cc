// Rows -> text of version 2.

#include <string>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/row_set.h"

namespace tessera::planner {
namespace {

std::string Bound(std::int64_t bound) {
  return bound < 0 || bound == kOpen ? "*" : std::to_string(bound);
}

const RowSchema* SchemaOf(const Row& row, std::span<const RowSchema* const> schemas) {
  const std::string_view family = std::string_view(row.class_name).substr(0, row.class_name.find('.'));
  for (const RowSchema* schema : schemas) {
    if (schema->family() == family) return schema;
  }
  return nullptr;
}

}  // namespace

std::string ToText(const Row& row, const RowSchema& schema) {
  std::string text = row.class_name;
  for (std::size_t axis = 0; axis < schema.axes().size(); ++axis) {
    const Band& band = row.bands[axis];
    if (band.open()) continue;
    absl::StrAppend(&text, " ", Av(schema.axes()[axis]), "(", Bound(band.min), ",", Bound(band.max), "]");
  }
  if (row.waves > 0) absl::StrAppend(&text, " waves>=", row.waves);
  if (row.blocks > 0) absl::StrAppend(&text, " blocks>=", row.blocks);
  absl::StrAppend(&text, " -> ", row.recipe);
  for (std::size_t knob = 0; knob < schema.knobs().size(); ++knob) {
    if (row.knobs[knob] != 0) absl::StrAppend(&text, " ", Av(schema.knobs()[knob]), "=", row.knobs[knob]);
  }
  return text;
}

std::string ToText(std::span<const Row> rows, std::span<const RowSchema* const> schemas) {
  std::string text;
  for (const Row& row : rows) {
    const RowSchema* schema = SchemaOf(row, schemas);
    if (schema != nullptr) absl::StrAppend(&text, ToText(row, *schema), "\n");
  }
  return text;
}

}  // namespace tessera::planner
