// What GEMM rows look like: axes m, n and k, knobs raster and split.

#include "kernels/catalog/gemm_class.h"
#include "planner/gemm/family.h"
#include "planner/gemm/positional_rows.h"
#include "planner/row.h"

namespace tessera::planner {
namespace {

constexpr std::string_view kAxes[] = {"m", "n", "k"};
constexpr std::string_view kKnobs[] = {"raster", "split"};

std::uint64_t KeyOf(const kernels::GemmClass& gemm_class, kernels::Backend backend) {
  return gemm_class.Key() | static_cast<std::uint64_t>(backend) << 24U;
}

class GemmRowSchema final : public RowSchema {
 public:
  std::string_view family() const override { return "gemm"; }
  std::span<const std::string_view> axes() const override { return kAxes; }
  std::span<const std::string_view> knobs() const override { return kKnobs; }

  std::optional<std::uint64_t> ClassKey(std::string_view class_name) const override {
    const auto named = kernels::ParseGemmClass(class_name);
    if (!named.has_value()) return std::nullopt;
    return KeyOf(named->gemm_class, kernels::BackendOf(named->arch));
  }

  absl::StatusOr<std::vector<Row>> FromPositional(std::span<const std::string_view> fields,
                                                  std::size_t& field) const override {
    auto rows = PositionalGemmRows(fields, kernels::GemmVariants(), field);
    if (!rows.ok()) return rows;
    for (Row& row : *rows) row.class_key = *ClassKey(row.class_name);
    return rows;
  }
};

}  // namespace

const RowSchema& GemmFamily::Schema() {
  static const GemmRowSchema kSchema;
  return kSchema;
}

std::uint64_t GemmFamily::ClassKey(const GemmProblem& problem, const DeviceFacts& facts) {
  return KeyOf(problem.gemm_class, facts.backend);
}

Extents GemmFamily::ExtentsOf(const GemmProblem& problem) {
  return {problem.m, problem.n, problem.k, 0};
}

}  // namespace tessera::planner
