// What the planner is told about a device, and what it answers. Free of CUDA: facts are data, so that any machine can
// plan as any other. Plain values: whoever shares one synchronises.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/catalog/variant.h"

namespace tessera::planner {

// Who decided, in the order in which the chain asks.
enum class Source : std::uint8_t { kOverride, kInjected, kBuiltin, kModel, kDegraded };
inline constexpr std::array<std::string_view, 5> kSourceNames = {"override", "injected", "builtin", "model",
                                                                 "degraded"};
constexpr std::string_view SourceName(Source source) {
  return kSourceNames[static_cast<std::size_t>(source)];
}

// 0 in the sizes of a processor means not known: what would need them abstains.
struct DeviceFacts {
  kernels::Backend backend = kernels::Backend::kCpu;
  kernels::ArchSet archs = {kernels::Arch::kCpu};  // trees of variants that run on it
  int processors = 1;                              // CPU threads, or SMs
  std::int64_t workspace_bytes_max = 0;            // scratch that one launch may use
  std::int64_t l2_bytes = 0;
  std::int64_t shared_bytes_per_block = 0;      // that a kernel can ask for
  std::int64_t shared_bytes_per_processor = 0;  // of all blocks that are resident
  int threads_per_processor = 0;

  friend bool operator==(const DeviceFacts&, const DeviceFacts&) = default;
};

// A decision: variant and run-time shape of one launch.
struct Plan {
  std::size_t variant = 0;  // index in the family's catalogue
  int split = 1;            // K slices
  int raster = 0;           // tiles of M walked together, 0 = the variant's own choice
  std::int64_t workspace_bytes = 0;
  Source source = Source::kDegraded;

  friend bool operator==(const Plan&, const Plan&) = default;
};

}  // namespace tessera::planner
