// A row: bands of problems of one class and the recipe that takes them. Family-blind: what the axes and knobs are
// called, and what a class name means, is in the family's RowSchema. Plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::planner {

inline constexpr std::size_t kAxesMax = 4;
inline constexpr std::size_t kKnobsMax = 4;
inline constexpr std::int64_t kOpen = std::numeric_limits<std::int64_t>::max();

using Extents = std::array<std::int64_t, kAxesMax>;  // by axis; unused ones are 0

// min < extent <= max.
struct Band {
  std::int64_t min = -1;  // -1 = open: an extent of 0 is inside
  std::int64_t max = kOpen;

  constexpr bool Has(std::int64_t extent) const { return extent > min && extent <= max; }
  constexpr bool open() const { return min < 0 && max == kOpen; }
  friend constexpr bool operator==(const Band&, const Band&) = default;
};

struct Row {
  std::string class_name;  // such as gemm.sm90a.bf16_bf16.bf16.fast.NT
  std::string recipe;
  std::array<Band, kAxesMax> bands;  // by axis of the family
  // Gates: it matches only where the recipe's own tiles are as many. 0 = no gate.
  std::int64_t waves = 0;              // times all blocks that the device holds at once
  std::int64_t blocks = 0;             // a processor
  std::array<int, kKnobsMax> knobs{};  // by knob of the family; 0 = the family chooses
  std::uint64_t class_key = 0;         // RowSchema::ClassKey of class_name
  int line = 0;                        // of the text that it stood in, from 1; 0 = none

  // Whatever line it stood in.
  friend bool operator==(const Row& left, const Row& right) {
    return left.class_name == right.class_name && left.recipe == right.recipe && left.bands == right.bands &&
           left.waves == right.waves && left.blocks == right.blocks && left.knobs == right.knobs;
  }
};

// What a family's rows look like. Thread-safe: immutable.
class RowSchema {
 public:
  virtual ~RowSchema() = default;

  virtual std::string_view family() const = 0;  // the first part of its class names
  virtual std::span<const std::string_view> axes() const = 0;
  virtual std::span<const std::string_view> knobs() const = 0;
  // The same for all classes of the same problems on one backend, whatever the tree; nullopt if that is no class.
  virtual std::optional<std::uint64_t> ClassKey(std::string_view class_name) const = 0;
  // Rows of a positional line of version 1, or why it has none here. The field that is wrong is counted from 1 in
  // `field`; 0 = the line as a whole.
  virtual absl::StatusOr<std::vector<Row>> FromPositional(std::span<const std::string_view> fields,
                                                          std::size_t& field) const = 0;
};

}  // namespace tessera::planner
