// What a measurement depends on besides the problem and the kernel: rows tuned under one signature say nothing about
// another.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"

namespace tessera::planner {

// Made by CheckedSignature: each field is then 1 to 128 printable ASCII characters without spaces at its ends.
struct DeviceSignature {
  std::string device;      // such as "NVIDIA H200", or the model of a CPU
  std::string capability;  // such as "9.0"; "-" for what has none
  std::string processors;  // SMs, or the threads that compute; a slice of a GPU has fewer
  std::string driver;      // such as "570.124.06"; "-" for none
  std::string cuda;        // such as "12.8"; "-" for none

  bool operator==(const DeviceSignature&) const = default;
};

using SignatureFields = std::array<std::pair<std::string_view, std::string_view>, 5>;

// {name, value} of each field, in the order in which files list them.
inline SignatureFields FieldsOf(const DeviceSignature& signature) {
  return {{{"device", signature.device},
           {"capability", signature.capability},
           {"processors", signature.processors},
           {"driver", signature.driver},
           {"cuda", signature.cuda}}};
}

// `raw` with what drivers do not promise put right: outer blanks go, other characters than printable ASCII become '?'.
// INVALID_ARGUMENT, naming the field, if one is empty or too long.
absl::StatusOr<DeviceSignature> CheckedSignature(DeviceSignature raw);

// Name, without an ending, of the files that belong to a checked signature: readable, of characters that every file
// system takes, and another for another signature (a hash of all of it ends the name).
std::string FileStemOf(const DeviceSignature& signature);

}  // namespace tessera::planner
