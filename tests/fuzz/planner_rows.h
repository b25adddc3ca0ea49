// What one input does to the planner's rows, and what must hold after it. The first kChoices bytes choose a problem and
// a device, the rest is a table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "planner/gemm/problem.h"
#include "planner/plan.h"

namespace tessera::fuzz {

inline constexpr std::size_t kChoices = 8;

enum class RowsOutcome : std::uint8_t {
  kRefused,     // no table
  kPassedOver,  // no row of it decided
  kDecided,
};
inline constexpr std::array<std::string_view, 3> kRowsOutcomeNames = {"refused", "passed_over", "decided"};

struct RowsQuestion {
  planner::GemmProblem problem;
  planner::DeviceFacts facts;
};

// What the first kChoices bytes choose; there must be so many. Printable ones for seeds: 'a' is the first of
// everything.
RowsQuestion QuestionOf(std::string_view input);

// Ends the process with "broken promise: .." where one is. `refusal`: null, or where to put its message.
RowsOutcome DrivePlannerRows(std::string_view input, std::string* refusal = nullptr);

// What is wrong with a refusal of `text`: "" if its code is one of a refusal, and it says where and within the text.
// For tests of the harness itself.
std::string WhyBadRefusal(std::string_view text, bool invalid, std::string_view message);

}  // namespace tessera::fuzz
