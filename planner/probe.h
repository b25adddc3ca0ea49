// What a decision looked at on its way. Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/plan.h"
#include "planner/reason.h"
#include "planner/row.h"

namespace tessera::planner {

inline constexpr std::size_t kProbeCandidates = 64;  // unless asked otherwise
inline constexpr std::size_t kProbeCandidatesMax = 1024;

// A row that was looked at, or a variant of the problem's class, and why it did not decide.
struct Candidate {
  Source source = Source::kDegraded;   // where it was looked at
  std::optional<std::size_t> variant;  // index in the family's catalogue; nullopt: a row names what is not there
  std::optional<Row> row;              // nullopt: a variant
  Reason reason = Reason::kOutranked;
};

struct Probe {
  std::uint64_t revision = 0;
  absl::StatusOr<Plan> plan = Plan{};  // or why there is none
  std::optional<Row> row;              // that decided
  std::vector<Candidate> candidates;   // rows in the order of the chain, then variants in the catalogue's
  bool more = false;                   // there were more candidates than fit
  std::string detail;                  // what decided among the rest, for people
};

}  // namespace tessera::planner
