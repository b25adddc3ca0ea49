// Why a candidate or a row did not decide: one table for probes, counters, metrics and logs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::planner {

enum class Reason : std::uint8_t {
  // A row that matches is stale or illegal here, and is passed over; counted.
  kUnknownRecipe,  // its class has no such recipe in this build
  kNotOnDevice,    // the device does not run its tree
  kStagingOff,     // its tree is switched off by SetStaging
  kAlignment,      // its loaders cannot address these operands
  kSharedMemory,   // its ring is larger than what a block can ask for
  kSplit,          // no legal number of slices for this variant and K
  kRaster,         // it walks tiles in an order of its own
  kWorkspace,      // more scratch than one launch may use
  // A row that does not apply; not counted.
  kBands,   // an extent is outside of its bands
  kBlocks,  // its tiles are fewer than its gate asks for
  // A candidate that could have run.
  kOutranked,  // the model or the bands prefer another
  kRowDecided  // a row names another
};
inline constexpr std::size_t kReasons = 12;
inline constexpr std::array<std::string_view, kReasons> kReasonNames = {
    "unknown_recipe", "not_on_device", "staging_off", "alignment", "shared_memory", "split",
    "raster",         "workspace",     "bands",       "blocks",    "outranked",     "row_decided"};
inline constexpr std::size_t kCountedReasons = 8;  // the first ones

inline constexpr std::span<const std::string_view, kCountedReasons> kCountedReasonNames(kReasonNames.data(),
                                                                                        kCountedReasons);

constexpr std::string_view ReasonName(Reason reason) {
  return kReasonNames[static_cast<std::size_t>(reason)];
}
constexpr bool IsCounted(Reason reason) {
  return static_cast<std::size_t>(reason) < kCountedReasons;
}

// One sentence without a full stop, for people.
std::string_view Explain(Reason reason);

}  // namespace tessera::planner
