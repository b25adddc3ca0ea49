// What client_death_test and the program that it kills agree on.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "client/client.h"
#include "tests/e2e/daemon_process.h"

namespace tessera::e2e {

// A point in the life of a client. It says "ready" on its output when it is there, and waits for its end.
struct VictimPoint {
  const char* name;
  int waiting = 0;  // calls that wait behind a slow one that runs
};

inline constexpr std::array kVictimPoints = {
    VictimPoint{"connecting"},          // opens and ends connections and sessions without a pause
    VictimPoint{"side-channel"},        // connected to the side channel, no session
    VictimPoint{"half-connected"},      // half of the first bytes of a gRPC connection sent
    VictimPoint{"descriptors-passed"},  // which no ImportBuffer has asked for
    VictimPoint{"importing"},           // imports and releases without a pause
    VictimPoint{"idle"},                // imported and allocated buffers
    VictimPoint{"running"},             // one slow call
    VictimPoint{"enqueued"},            // one slow call that was answered at its launch
    VictimPoint{"queued", 20},          // calls behind a slow one
    VictimPoint{"stream", 30},          // a stream whose answers nobody takes
    VictimPoint{"releasing"},           // waits for the release of the buffer that a running call uses
    VictimPoint{"attached", 5},         // the same as queued, on a lease of another kind
    VictimPoint{"time-to-live", 5},     // likewise
};

inline constexpr std::chrono::milliseconds kVictimTtl{300};

// The memory of a victim, which belongs to the test: it can look at it when the victim is gone. A row of ones, the D of
// a slow product, and those of small ones. All rows of A, and all of B, are the row of ones, so that each element of a
// D is its K.
class VictimGround {
 public:
  static constexpr std::uint64_t kBytes = 1 << 20;
  static constexpr std::int64_t kSlowTerms = kSanitized ? 8192 : 131072;  // some 200 ms of one thread
  static constexpr std::int64_t kSlowExtent = 256;
  static constexpr std::uint64_t kSlowAt = 2 * 131072;
  static constexpr std::int64_t kSmallTerms = 8;
  static constexpr std::int64_t kSmallExtent = 4;
  static constexpr std::uint64_t kSmallAt = kSlowAt + 4 * kSlowExtent * kSlowExtent;
  static constexpr std::uint64_t kSmallBytes = 4 * kSmallExtent * kSmallExtent;

  static client::GemmSpec Slow(const std::string& buffer) { return Product(buffer, kSlowExtent, kSlowTerms, kSlowAt); }
  static client::GemmSpec Small(const std::string& buffer, int number) {
    return Product(buffer, kSmallExtent, kSmallTerms, kSmallAt + static_cast<std::uint64_t>(number) * kSmallBytes);
  }

 private:
  static client::GemmSpec Product(const std::string& buffer, std::int64_t extent, std::int64_t terms,
                                  std::uint64_t d_at) {
    const auto view = [&](std::uint64_t at, DType dtype, std::int64_t columns, std::int64_t row_stride) {
      return client::TensorView{.buffer_id = buffer,
                                .byte_offset = at,
                                .dtype = dtype,
                                .shape = {extent, columns},
                                .strides = {row_stride, 1}};
    };
    return {.a = view(0, DType::kBf16, terms, 0),
            .b = view(0, DType::kBf16, terms, 0),
            .d = view(d_at, DType::kF32, extent, extent)};
  }
};

static_assert(2 * VictimGround::kSlowTerms <= VictimGround::kSlowAt);
static_assert(VictimGround::kSmallAt + 64 * VictimGround::kSmallBytes <= VictimGround::kBytes);

}  // namespace tessera::e2e
