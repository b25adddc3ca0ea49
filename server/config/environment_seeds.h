// Variables of the environment by the names that the kernels' former front end had for them, with this project's
// prefix. Each stands for a setting, is read once at start, and is weaker than that setting's own variable. Deprecated:
// for scripts that move here.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera::server {

struct EnvironmentSeed {
  enum class Takes { kText, kPlannerRank, kSwitch, kInvertedSwitch, kNothing };
  std::string_view variable;
  std::string_view setting;  // empty for kNothing: known, and without effect
  Takes takes = Takes::kText;
  std::string_view help;  // plain text, no '|'
};

std::span<const EnvironmentSeed> EnvironmentSeeds();

// `text` of the variable as text of its setting; INVALID_ARGUMENT says what it takes.
absl::StatusOr<std::string> SeedText(const EnvironmentSeed& seed, const std::string& text);

// The seeds as a Markdown section.
std::string EnvironmentSeedsMarkdown();

}  // namespace tessera::server
