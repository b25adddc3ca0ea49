// The text in which tuned rows are kept. It is an ordinary table of rows, so that people can read it and load it as
// one; what the store needs besides stands in its comments:
//
//   #! tessera tuned rows 1
//   #! device = NVIDIA H200
//   #! capability = 9.0
//   #! processors = 132
//   #! driver = 570.124.06
//   #! cuda = 12.8
//   gemm.sm90a.bf16_bf16.bf16.fast.NT m(0,16] -> 64x128x64_s6 split=4 #! variant=... hash=... us=12.5 when=2026-...Z
//   #! end
//
// Blank lines and lines that begin with "# " are allowed, and not kept. The last line is there so that a file that was
// cut is seen to be. Nothing here knows a family's axes: a row is text, what it says is for who asks for rows.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "planner/device_signature.h"

namespace tessera::planner {

inline constexpr int kTunedRowsFormat = 1;  // part of the file's name too: daemons of two formats do not meet
inline constexpr std::size_t kTunedRowsLimit = 4096;
inline constexpr std::size_t kTunedLineLimit = 1024;       // bytes, without the newline
inline constexpr std::size_t kTunedBytesLimit = 5U << 20;  // more than so many rows of that length

// One measured decision.
struct TunedRow {
  std::string text;         // "class bands -> recipe launch", one blank between words; no '#'
  std::string variant;      // id of the variant that it names
  std::string source_hash;  // of the variant when it was measured: 8 to 64 hexadecimal digits
  double us = 0.0;          // time of one launch, microseconds; 0 if nobody measured it
  absl::Time when;          // of the measurement; whole milliseconds

  // What it decides about: rows of one question exclude each other. All of `text` before " -> ".
  std::string_view question() const { return std::string_view(text).substr(0, text.find(" -> ")); }

  bool operator==(const TunedRow&) const = default;
};

// INVALID_ARGUMENT unless the row can be written and read back as it is.
absl::Status CheckTunedRow(const TunedRow& row);

// `text` with one blank between words and none around them: the form that TunedRow wants.
std::string NormalizedRowText(std::string_view text);

// The file's text. Rows must be checked, at most kTunedRowsLimit of them.
std::string ToText(const DeviceSignature& signature, std::span<const TunedRow> rows);

struct TunedFile {
  DeviceSignature signature;
  std::vector<TunedRow> rows;
};

// Reads what ToText wrote, or was edited by hand. INVALID_ARGUMENT, with line and reason, for anything else; never
// reads a row without checking it. For any text.
absl::StatusOr<TunedFile> ParseTunedRows(std::string_view text);

}  // namespace tessera::planner
