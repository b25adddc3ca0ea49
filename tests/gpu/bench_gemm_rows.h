// Rows of the GEMM benchmark's report, one a cell, and what they say together. Free of CUDA.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/gpu/bench_gemm_grid.h"

namespace tessera::gpu_test {

// What makes a cell; also the order of rows in a file.
struct CellKey {
  std::string pair;
  std::string accum;  // empty where there is no choice
  std::string scales;
  std::string layout;
  std::string out;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t m = 0;

  friend auto operator<=>(const CellKey&, const CellKey&) = default;
};

CellKey KeyOf(const BenchCell& cell);

// What a cell was measured to be.
struct BenchResult {
  std::string variant;  // of ours
  std::string source;   // who planned it
  double us = 0;
  double peer_us = 0;     // 0 = the library has no such product
  double peer_s8_us = 0;  // of the library's product that stays s8; 0 = not measured
};

// The row of `cell`, without what is the same for all rows of a run (gpu, driver, cuda, git).
nlohmann::ordered_json RowOf(const BenchCell& cell, const BenchResult& result);

// The rows of a file: one a cell, whatever is put, in an order that does not depend on when it was.
class RowTable {
 public:
  RowTable() = default;
  // Of the text of such a file. INVALID_ARGUMENT with the line's number for what is no row, or a second one of a cell.
  static absl::StatusOr<RowTable> Parse(const std::string& text);

  absl::Status Put(nlohmann::ordered_json row);  // in the place of the cell's former one
  void Drop(const CellKey& key) { rows_.erase(key); }
  std::size_t size() const { return rows_.size(); }
  std::string Text() const;

 private:
  std::map<CellKey, nlohmann::ordered_json> rows_;
};

// A table and its file, which has every row as soon as it is put: a run that dies leaves what it measured.
class RowFile {
 public:
  // With `merge` the rows that the file has are there to be replaced one by one; else it begins empty. A `path` that
  // is empty is no file.
  static absl::StatusOr<RowFile> Open(const std::string& path, bool merge);

  absl::Status Put(nlohmann::ordered_json row);
  absl::Status Drop(const CellKey& key);

 private:
  explicit RowFile(std::string path) : path_(std::move(path)) {}
  absl::Status Write() const;

  std::string path_;
  RowTable table_;
};

// Geometric means and least cells, by family and size of M, and what has no row.
class BenchSummary {
 public:
  void Add(const BenchCell& cell, const BenchResult& result);
  void Skip(const BenchCell& cell, const std::string& reason);
  std::string Text() const;

 private:
  struct Entry {
    BenchCell cell;
    double ratio = 0;  // 0 = there is nothing to compare with
  };
  std::string FamilyText(BenchFamily family) const;

  std::vector<Entry> entries_;
  // Family and reason -> cells.
  std::map<std::pair<BenchFamily, std::string>, int> skipped_;
};

}  // namespace tessera::gpu_test
