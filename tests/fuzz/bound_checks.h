// What must hold once a request is bound, computed from the request and the memory that it names, without the product's
// code: a mistake there cannot hide here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "server/exec/bind.h"
#include "tessera/v1/compute.pb.h"

namespace tessera::fuzz {

// Prints `what` about `field` and the request, and aborts.
[[noreturn]] void BrokenPromise(const v1::GemmRequest& request, std::string_view field, std::string_view what);

// A buffer that the calling session may use.
struct KnownBuffer {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  int memory = 0;                   // equal numbers: the same physical memory
  std::uint64_t memory_offset = 0;  // of the first byte within it
};
using KnownBuffers = std::map<std::string, KnownBuffer>;  // by the bytes of the id

// `request` bound to `bound`, its inline result (if it asked for one) to `inline_result`. Aborts unless
//   * M, N, K and the batch agree between the operands, and pair, scales and bias are legal
//   * every operand lies inside its storage, aligned to its element
//   * D names each of its bytes once and none of an input's: by brute force over all elements of small operands, and
//   over
//     at most 4096 elements of larger ones. The product may refuse more than that (server/exec/overlap.h: it answers
//     "apart" only where ranges are disjoint or a common pitch keeps the views apart); what it lets pass must be apart
//   * problem, parameters and flops say what the request says
void CheckBound(const v1::GemmRequest& request, const server::BoundGemm& bound, const KnownBuffers& buffers,
                const std::string& inline_result, std::uint64_t inline_bytes_max);

}  // namespace tessera::fuzz
