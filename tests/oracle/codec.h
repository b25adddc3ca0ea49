// Element types to and from double, written from the definition of each format so that the oracle shares no
// conversion with the code under test.
#pragma once

#include "common/dtype.h"

namespace tessera::oracle {

// The element at `element` (any alignment), exactly. NaN for an unknown type.
double Decode(DType dtype, const void* element);

// Stores `value` at `element` (any alignment), rounded once from double to nearest even. The sign of zero and NaN are
// kept. Beyond the finite range bf16, f16 and f32 give infinity; e4m3, e5m2 (infinities included) and the integers
// saturate. An integer type stores NaN as 0. An unknown type stores nothing.
void Encode(DType dtype, double value, void* element);

}  // namespace tessera::oracle
