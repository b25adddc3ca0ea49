// Rows that come with the build, of devices on which they were measured: planner/builtin/*.rows, a file a device.
#pragma once

#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "planner/row_set.h"

namespace tessera::planner {

struct BuiltinRows {
  std::string_view device;  // as its driver names it, such as "NVIDIA H200"
  std::string_view text;
};

std::span<const BuiltinRows> AllBuiltinRows();

// Those of the devices named, in their order; none for devices without. INTERNAL if the build has a text that is none
// (tests/planner/builtin_rows_test.cc).
absl::StatusOr<RowSetPtr> BuiltinRowsOf(std::span<const std::string_view> devices);

}  // namespace tessera::planner
