#include "tests/gpu/bench_gemm_rows.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::gpu_test {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kOpen = std::numeric_limits<std::int64_t>::max();

struct Band {
  const char* name;
  std::int64_t m_min;
  std::int64_t m_max;
};
constexpr Band kBands[] = {{"all", 0, kOpen},         {"M 1", 1, 1},
                           {"M 2-128", 2, 128},       {"M 129-1024", 129, 1024},
                           {"M > 1024", 1025, kOpen}, {"M >= 16", 16, kOpen}};

Json Accum(const BenchCell& cell) {
  if (!kernels::HasAccumulationChoice(cell.gemm_class.a, cell.gemm_class.b)) return nullptr;
  return kernels::kAccumulationNames[static_cast<std::size_t>(cell.gemm_class.accumulation)];
}

// Throws where a field is missing or of another type.
CellKey KeyOfRow(const Json& row) {
  if (row.at("bench") != "gemm") throw std::invalid_argument("bench is not gemm");
  const Json& accum = row.at("accum");
  return {.pair = row.at("pair").get<std::string>(),
          .accum = accum.is_null() ? std::string() : accum.get<std::string>(),
          .scales = row.at("scales").get<std::string>(),
          .layout = row.at("layout").get<std::string>(),
          .out = row.at("out").get<std::string>(),
          .n = row.at("n").get<std::int64_t>(),
          .k = row.at("k").get<std::int64_t>(),
          .m = row.at("m").get<std::int64_t>()};
}

absl::StatusOr<CellKey> CheckedKey(const Json& row) {
  try {
    return KeyOfRow(row);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("no row of the GEMM benchmark: ", error.what()));
  }
}

Json OrNull(double value) {
  return value > 0 ? Json(value) : Json(nullptr);
}

}  // namespace

CellKey KeyOf(const BenchCell& cell) {
  const Json accum = Accum(cell);
  return {.pair = cell.Pair(),
          .accum = accum.is_null() ? std::string() : accum.get<std::string>(),
          .scales = std::string(BenchScalesName(cell.scales)),
          .layout = std::string(kernels::kGemmLayoutNames[static_cast<std::size_t>(cell.gemm_class.layout)]),
          .out = std::string(DTypeName(cell.gemm_class.out)),
          .n = cell.n,
          .k = cell.k,
          .m = cell.m};
}

Json RowOf(const BenchCell& cell, const BenchResult& result) {
  const CellKey key = KeyOf(cell);
  Json row = {{"bench", "gemm"},
              {"pair", key.pair},
              {"layout", key.layout},
              {"m", cell.m},
              {"n", cell.n},
              {"k", cell.k},
              {"out", key.out},
              {"accum", Accum(cell)},
              {"scales", key.scales},
              {"backend", "cuda"},
              {"variant", result.variant},
              {"source", result.source},
              {"us", result.us},
              {"tflops", cell.Flops() / result.us * 1e-6},
              {"peer", "cublaslt"},
              {"peer_us", OrNull(result.peer_us)},
              {"ratio", OrNull(result.peer_us / result.us)}};
  if (result.peer_s8_us > 0) row["peer_s8_us"] = result.peer_s8_us;
  row["regime"] = cell.Sustained() ? "sustained" : "burst";
  return row;
}

absl::StatusOr<RowTable> RowTable::Parse(const std::string& text) {
  RowTable table;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.empty()) continue;
    const Json row = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    const absl::StatusOr<CellKey> key = CheckedKey(row);
    if (!key.ok()) return InField(absl::StrCat("line ", number), key.status());
    if (!table.rows_.try_emplace(*key, row).second) {
      return absl::InvalidArgumentError(absl::StrCat("line ", number, ": a second row of its cell"));
    }
  }
  return table;
}

absl::Status RowTable::Put(Json row) {
  ASSIGN_OR_RETURN(const CellKey key, CheckedKey(row));
  rows_.insert_or_assign(key, std::move(row));
  return absl::OkStatus();
}

std::string RowTable::Text() const {
  std::string text;
  for (const auto& [key, row] : rows_) text.append(row.dump()).append("\n");
  return text;
}

absl::StatusOr<RowFile> RowFile::Open(const std::string& path, bool merge) {
  RowFile file(path);
  if (path.empty()) return file;
  if (std::ifstream stream(path); merge && stream) {
    std::ostringstream text;
    text << stream.rdbuf();
    absl::StatusOr<RowTable> table = RowTable::Parse(text.str());
    if (!table.ok()) return InField(path, table.status());
    file.table_ = *std::move(table);
  }
  RETURN_IF_ERROR(file.Write());
  return file;
}

absl::Status RowFile::Put(Json row) {
  RETURN_IF_ERROR(table_.Put(std::move(row)));
  return Write();
}

absl::Status RowFile::Drop(const CellKey& key) {
  table_.Drop(key);
  return Write();
}

// Whole or not at all, for whoever reads it while the program runs or after it was killed.
absl::Status RowFile::Write() const {
  if (path_.empty()) return absl::OkStatus();
  const std::string unfinished = path_ + ".new";
  std::ofstream file(unfinished, std::ios::trunc);
  file << table_.Text();
  file.close();
  if (!file) return absl::InvalidArgumentError("cannot write " + unfinished);
  if (std::rename(unfinished.c_str(), path_.c_str()) != 0) {
    return ErrnoStatus(absl::StatusCode::kInvalidArgument, "cannot write " + path_);
  }
  return absl::OkStatus();
}

void BenchSummary::Add(const BenchCell& cell, const BenchResult& result) {
  entries_.push_back({.cell = cell, .ratio = result.peer_us / result.us});
}

void BenchSummary::Skip(const BenchCell& cell, const std::string& reason) {
  ++skipped_[{cell.family, reason}];
}

std::string BenchSummary::FamilyText(BenchFamily family) const {
  std::string text;
  for (const Band& band : kBands) {
    const Entry* least = nullptr;
    double log_sum = 0;
    int compared = 0;
    for (const Entry& entry : entries_) {
      if (entry.cell.family != family || entry.cell.m < band.m_min || entry.cell.m > band.m_max) continue;
      if (entry.ratio <= 0) continue;
      ++compared;
      log_sum += std::log(entry.ratio);
      if (least == nullptr || entry.ratio < least->ratio) least = &entry;
    }
    if (least == nullptr) continue;
    absl::StrAppendFormat(&text, "%-10s %-10s %3d cells, geomean %.3f, least %.3f at %s\n", Av(BenchFamilyName(family)),
                          band.name, compared, std::exp(log_sum / compared), least->ratio, least->cell.Describe());
  }
  return text;
}

std::string BenchSummary::Text() const {
  std::string text;
  for (std::size_t i = 0; i < kBenchFamilyNames.size(); ++i) text += FamilyText(static_cast<BenchFamily>(i));
  int alone = 0;
  for (const Entry& entry : entries_) alone += entry.ratio > 0 ? 0 : 1;
  if (alone > 0)
    absl::StrAppend(&text, alone, " cells have nothing to be compared with: cuBLASLt has no such product\n");
  for (const auto& [what, cells] : skipped_) {
    absl::StrAppendFormat(&text, "%-10s no row of %d cells: %s\n", Av(BenchFamilyName(what.first)), cells, what.second);
  }
  return text;
}

}  // namespace tessera::gpu_test
