// What the planner of a daemon begins with, from the settings.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "planner/planner.h"
#include "planner/tuning_counters.h"
#include "server/config/settings.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {

// Reads the setting planner_table, if it names a file: an error names the setting, and the line. `epoch`: of the
// process.
absl::StatusOr<planner::PlannerOptions> PlannerOptionsOf(const LoadedSettings& settings, std::string epoch);

PlannerReading ReadingOf(const planner::PlannerState& state, const planner::TuningCounters& store);

}  // namespace tessera::server
