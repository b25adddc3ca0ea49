#include "planner/builtin_rows.h"

#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/gemm/family.h"

namespace tessera::planner {
namespace {

constexpr BuiltinRows kRows[] = {
#include "planner/builtin_rows.inc"
};

}  // namespace

std::span<const BuiltinRows> AllBuiltinRows() {
  return kRows;
}

absl::StatusOr<RowSetPtr> BuiltinRowsOf(std::span<const std::string_view> devices) {
  const RowSchema* const schemas[] = {&GemmFamily::Schema()};
  std::vector<Row> rows;
  for (const std::string_view device : devices) {
    for (const BuiltinRows& builtin : kRows) {
      if (builtin.device != device) continue;
      absl::StatusOr<std::vector<Row>> parsed = ParseRows(builtin.text, schemas);
      if (!parsed.ok()) {
        return absl::InternalError(absl::StrCat("built-in rows of ", Av(device), ": ", parsed.status().message()));
      }
      rows.insert(rows.end(), std::make_move_iterator(parsed->begin()), std::make_move_iterator(parsed->end()));
    }
  }
  if (rows.empty()) return NoRows();
  return std::make_shared<const RowSet>(std::move(rows));
}

}  // namespace tessera::planner
