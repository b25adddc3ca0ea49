// Random order on a GPU: products over the streams and timelines of a session, ordered among each other by waits and
// signals alone, which must compute what they do one after the other.
#pragma once

#include <string_view>

#include "tests/gpu/e2e_client.h"

namespace tessera::gpu_test {

// A client job of one row. Its detail names the seed; TESSERA_TEST_SEED gives it.
inline constexpr std::string_view kOrderRandomJob = "order_random";
int RunOrderRandomJob(const ClientJob& job);  // as RunClient

}  // namespace tessera::gpu_test
