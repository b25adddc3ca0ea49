// libFuzzer's side of planner_rows.h. tools/fuzz.sh runs it.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "tests/fuzz/planner_rows.h"

namespace tessera::fuzz {
namespace {

// How many inputs ended how; tools/fuzz.sh reads the line.
std::array<std::uint64_t, kRowsOutcomeNames.size()>& Counts() {
  static auto& counts = *new std::array<std::uint64_t, kRowsOutcomeNames.size()>();
  return counts;
}

void PrintCounts() {
  std::cerr << "outcomes:";
  for (std::size_t i = 0; i < Counts().size(); ++i) std::cerr << " " << kRowsOutcomeNames[i] << "=" << Counts()[i];
  std::cerr << std::endl;
}

}  // namespace
}  // namespace tessera::fuzz

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  return std::atexit(tessera::fuzz::PrintCounts);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto outcome = tessera::fuzz::DrivePlannerRows(std::string_view(reinterpret_cast<const char*>(data), size));
  ++tessera::fuzz::Counts()[static_cast<std::size_t>(outcome)];
  return 0;
}
