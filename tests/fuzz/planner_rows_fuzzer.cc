// libFuzzer's side of planner_rows.h. tools/fuzz.sh runs it.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <string_view>

#include "tests/fuzz/planner_rows.h"
#include "tests/fuzz/rows_mutator.h"

// Of libFuzzer: changes bytes in place, returns the new size.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

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

// By words and lines three times in four, else as bytes: most bytes that are changed make no table.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  if (seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string mutated =
      tessera::fuzz::MutateRows(std::string_view(reinterpret_cast<const char*>(data), size), seed);
  if (mutated.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, mutated.data(), mutated.size());
  return mutated.size();
}
