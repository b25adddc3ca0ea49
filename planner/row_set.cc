#include "planner/row_set.h"

#include <utility>

namespace tessera::planner {

RowSet::RowSet(std::vector<Row> rows) : rows_(std::move(rows)) {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    by_class_[rows_[i].class_key].push_back(static_cast<std::uint32_t>(i));
    bytes_ += sizeof(Row) + rows_[i].class_name.size() + rows_[i].recipe.size() + sizeof(std::uint32_t);
  }
}

std::span<const std::uint32_t> RowSet::Find(std::uint64_t class_key) const {
  const auto found = by_class_.find(class_key);
  if (found == by_class_.end()) return {};
  return found->second;
}

RowSetPtr NoRows() {
  static const RowSetPtr kNone = std::make_shared<const RowSet>(std::vector<Row>());
  return kNone;
}

}  // namespace tessera::planner
