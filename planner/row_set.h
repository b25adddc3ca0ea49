// Rows of one tier, and their text.
//
// Version 2, a row a line, items of the left side in any order and each at most once; an axis that is not named is
// open:
//   gemm.sm90a.bf16_bf16.bf16.fast.NT m(0,16] n(0,*] k(512,*] waves>=2 -> 128x128x64_s6 raster=8 split=4
// Version 1, positional, for tables of the kernels' former front end:
//   m_min m_max n_min n_max perf_class crosswise cta stages raster [k [k_min k_max [min_ctas_per_sm]]]
// `#` begins a comment; blank lines are skipped; both versions may stand in one text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/row.h"

namespace tessera::planner {

// What a tier may have, its text may: 4096 rows of all that a row can say are less than 2 MiB.
struct RowLimits {
  std::size_t text_bytes = std::size_t{2} << 20;
  std::size_t line_bytes = 1024;
  std::size_t rows = 4096;  // of one tier
};
inline constexpr RowLimits kRowLimits;

// INVALID_ARGUMENT naming line, column and field of the first thing wrong; RESOURCE_EXHAUSTED naming the limit.
absl::StatusOr<std::vector<Row>> ParseRows(std::string_view text, std::span<const RowSchema* const> schemas,
                                           const RowLimits& limits = kRowLimits);

// Text of version 2. ParseRows of it gives equal rows.
std::string ToText(const Row& row, const RowSchema& schema);
std::string ToText(std::span<const Row> rows, std::span<const RowSchema* const> schemas);

// Rows in the order in which they are asked. Thread-safe: immutable.
class RowSet {
 public:
  explicit RowSet(std::vector<Row> rows);

  std::span<const Row> rows() const { return rows_; }
  // Indices of the rows of these classes, in order.
  std::span<const std::uint32_t> Find(std::uint64_t class_key) const;
  std::size_t bytes() const { return bytes_; }  // about what it takes of memory

 private:
  std::vector<Row> rows_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> by_class_;
  std::size_t bytes_ = 0;
};

using RowSetPtr = std::shared_ptr<const RowSet>;  // never null
RowSetPtr NoRows();

}  // namespace tessera::planner
