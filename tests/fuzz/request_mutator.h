// Structural mutation of GEMM requests, for the fuzzer.
#pragma once

#include <cstdint>

#include "tessera/v1/compute.pb.h"

namespace tessera::fuzz {

// A random change: of one field (extent, stride, offset, type, storage, scale, ...) to anything, which finds what must
// be refused, or of all fields that a legal request has to change together, so that enough inputs get through to what
// comes after the checks. Equal seeds make equal changes.
void MutateRequest(v1::GemmRequest& request, std::uint32_t seed);

}  // namespace tessera::fuzz
