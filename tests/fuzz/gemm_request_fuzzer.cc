// libFuzzer's side of gemm_request.h. tools/fuzz.sh runs it.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <string_view>

#include "tessera/v1/compute.pb.h"
#include "tests/fuzz/gemm_request.h"
#include "tests/fuzz/request_mutator.h"

// Of libFuzzer: changes bytes in place, returns the new size.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace tessera::fuzz {
namespace {

// How many inputs ended how; tools/fuzz.sh reads the line.
class OutcomeCounts {
 public:
  void Add(Outcome outcome) { ++counts_[static_cast<std::size_t>(outcome)]; }

  void Print() const {
    std::cerr << "outcomes:";
    for (std::size_t i = 0; i < counts_.size(); ++i) std::cerr << " " << kOutcomeNames[i] << "=" << counts_[i];
    std::cerr << std::endl;
  }

 private:
  std::array<std::uint64_t, kOutcomeNames.size()> counts_{};
};

OutcomeCounts& Counts() {
  static OutcomeCounts& counts = *new OutcomeCounts();
  return counts;
}

}  // namespace
}  // namespace tessera::fuzz

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  return std::atexit([] { tessera::fuzz::Counts().Print(); });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::fuzz::Counts().Add(
      tessera::fuzz::DriveGemmRequest(std::string_view(reinterpret_cast<const char*>(data), size)));
  return 0;
}

// Structurally, and now and then as bytes: the parser is part of what is tested.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  tessera::v1::GemmRequest request;
  if (seed % 64 == 0 || !request.ParseFromArray(data, static_cast<int>(size))) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  tessera::fuzz::MutateRequest(request, seed);
  const std::string bytes = request.SerializeAsString();
  if (bytes.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}
