// Rows of version 1: positional lines of tables for the kernels' former front end, mapped onto recipes of today.
//   m_min m_max n_min n_max perf_class crosswise cta stages raster [k [k_min k_max [min_ctas_per_sm]]]
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/row.h"

namespace tessera::planner {

// Rows of all classes that the line's class of operands stands for and that have a portable recipe of its tile, depth
// and stages; Row::class_key is left to the caller. If there are none, or a field is wrong, INVALID_ARGUMENT with the
// reason, and `field` says which it is, from 1; 0 = the line as a whole.
absl::StatusOr<std::vector<Row>> PositionalGemmRows(std::span<const std::string_view> fields,
                                                    std::span<const kernels::GemmVariant> catalogue,
                                                    std::size_t& field);

}  // namespace tessera::planner
