#include "planner/gemm/positional_rows.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::planner {
namespace {

using kernels::GemmClass;
using kernels::GemmLayout;
using kernels::GemmVariant;

enum Field : std::size_t {
  kMMin,
  kMMax,
  kNMin,
  kNMax,
  kPerfClass,
  kCrosswise,
  kCta,
  kStages,
  kRaster,
  kRingK,
  kKMin,
  kKMax,
  kMinCtas,
  kFields
};
constexpr std::size_t kRequired = kRingK;
constexpr std::int64_t kDefaultRingK = 64;

// A tile by the name or number that it went by.
struct CtaName {
  std::string_view name;
  int m;
  int n;
};
constexpr CtaName kCtas[] = {{"small", 64, 64}, {"narrow", 128, 64}, {"big", 128, 128}, {"wide", 128, 256}};

// Classes of operands by number or name: both 16 bits, 8-bit weights, both int8, both fp8.
constexpr std::string_view kPerfClasses[] = {"w16a16", "w8a16", "w8a8", "f8a8"};

bool IsOfPerfClass(const GemmClass& gemm_class, std::size_t perf_class) {
  const DType a = gemm_class.a;
  const DType b = gemm_class.b;
  switch (perf_class) {
    case 0:
      return a == DType::kBf16 && b == DType::kBf16;
    case 1:
      return a == DType::kBf16 && b == DType::kS8;
    case 2:
      return a == DType::kS8 && b == DType::kS8;
    default:
      return IsFp8(a) && IsFp8(b);
  }
}

// Operands that are not contiguous along K.
int Crosswise(GemmLayout layout) {
  switch (layout) {
    case GemmLayout::kNT:
      return 0;
    case GemmLayout::kNN:
    case GemmLayout::kTT:
      return 1;
    case GemmLayout::kTN:
      break;
  }
  return 2;
}

std::optional<std::int64_t> NumberOf(std::string_view text) {
  constexpr std::int64_t kMax = std::int64_t{1} << 60;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > kMax) return std::nullopt;
  return value;
}

template <typename Names, typename NameOf>
std::optional<std::size_t> IndexOf(const Names& names, std::string_view text, NameOf name_of) {
  for (std::size_t i = 0; i < std::size(names); ++i) {
    if (name_of(names[i]) == text) return i;
  }
  const auto number = NumberOf(text);
  if (number.has_value() && *number < static_cast<std::int64_t>(std::size(names))) {
    return static_cast<std::size_t>(*number);
  }
  return std::nullopt;
}

Band BandOf(std::int64_t min, std::int64_t max) {
  return {.min = min == 0 ? -1 : min, .max = max == 0 ? kOpen : max};
}

// The fields as numbers; names are numbers by their place.
absl::Status Read(std::span<const std::string_view> fields, std::array<std::int64_t, kFields>& values,
                  std::size_t& field) {
  if (fields.size() < kRequired || fields.size() > kFields || fields.size() == kKMax) {
    field = 0;
    return absl::InvalidArgumentError(
        absl::StrCat(fields.size(),
                     " fields; takes m_min m_max n_min n_max perf_class crosswise cta stages raster [k "
                     "[k_min k_max [min_ctas_per_sm]]], or a row that begins with a class"));
  }
  values[kRingK] = kDefaultRingK;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    field = i + 1;
    std::optional<std::int64_t> value;
    if (i == kPerfClass) {
      const auto index = IndexOf(kPerfClasses, fields[i], [](std::string_view name) { return name; });
      if (!index.has_value()) return absl::InvalidArgumentError("perf_class is 0 to 3, or w16a16, w8a16, w8a8, f8a8");
      value = *index;
    } else if (i == kCta) {
      const auto index = IndexOf(kCtas, fields[i], [](const CtaName& cta) { return cta.name; });
      if (!index.has_value()) return absl::InvalidArgumentError("cta is 0 to 3, or small, narrow, big, wide");
      value = *index;
    } else {
      value = NumberOf(fields[i]);
    }
    if (!value.has_value()) return absl::InvalidArgumentError("expected a number up to 2^60");
    values[i] = *value;
  }
  return absl::OkStatus();
}

absl::Status Check(const std::array<std::int64_t, kFields>& values, std::size_t& field) {
  constexpr std::int64_t kKnobMax = std::int64_t{1} << 20;
  for (const auto& [min, max] : {std::pair{kMMin, kMMax}, std::pair{kNMin, kNMax}, std::pair{kKMin, kKMax}}) {
    field = max + 1;
    if (values[max] != 0 && values[min] >= values[max]) {
      return absl::InvalidArgumentError("the band is empty: it has what is above min, up to max; 0 is open");
    }
  }
  field = kCrosswise + 1;
  if (values[kCrosswise] > 2) return absl::InvalidArgumentError("0 to 2 operands are crosswise");
  for (const Field small : {kRaster, kMinCtas}) {
    field = small + 1;
    if (values[small] > kKnobMax) return absl::InvalidArgumentError("above 2^20");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Row>> PositionalGemmRows(std::span<const std::string_view> fields,
                                                    std::span<const GemmVariant> catalogue, std::size_t& field) {
  std::array<std::int64_t, kFields> values{};
  if (absl::Status read = Read(fields, values, field); !read.ok()) return read;
  if (absl::Status checked = Check(values, field); !checked.ok()) return checked;
  const CtaName& cta = kCtas[values[kCta]];
  std::vector<Row> rows;
  for (const GemmVariant& variant : catalogue) {
    const bool portable = variant.info.arch == kernels::Arch::kSm80 || variant.info.arch == kernels::Arch::kSm89;
    if (!portable || variant.tile.m != cta.m || variant.tile.n != cta.n || variant.tile.k != values[kRingK] ||
        variant.stages != values[kStages] || Crosswise(variant.gemm_class.layout) != values[kCrosswise] ||
        !IsOfPerfClass(variant.gemm_class, static_cast<std::size_t>(values[kPerfClass]))) {
      continue;
    }
    Row row;
    row.class_name = variant.info.class_name;
    row.recipe = variant.info.recipe;
    row.bands[0] = BandOf(values[kMMin], values[kMMax]);
    row.bands[1] = BandOf(values[kNMin], values[kNMax]);
    row.bands[2] = BandOf(values[kKMin], values[kKMax]);
    row.blocks = values[kMinCtas];
    row.knobs[0] = static_cast<int>(values[kRaster]);
    rows.push_back(std::move(row));
  }
  if (!rows.empty()) return rows;
  field = kCta + 1;
  return absl::InvalidArgumentError(
      absl::StrCat("no portable kernel of ", Av(kPerfClasses[values[kPerfClass]]), " has tiles of ", cta.m, "x", cta.n,
                   "x", values[kRingK], " in ", values[kStages], " stages and ", values[kCrosswise],
                   " crosswise operands; `tessera plan vocabulary` lists the recipes there are"));
}

}  // namespace tessera::planner
