// Tables changed by lines and words rather than by bytes, so that many of them still are tables.
#pragma once

#include <string>
#include <string_view>

namespace tessera::fuzz {

// An input of planner_rows.h that is `input` changed in a few places; equal for equal arguments.
std::string MutateRows(std::string_view input, unsigned seed);

}  // namespace tessera::fuzz
