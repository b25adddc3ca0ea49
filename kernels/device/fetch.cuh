// Asking for memory ahead of time.
#pragma once

namespace tessera::kernels::device {

// Loads a word and drops it, so that the multiprocessor's cache has it soon. Nobody waits for it. (PTX has
// prefetch.global.L1 for this, which promises less.)
__device__ __forceinline__ void Fetch(const float* word) {
  asm volatile(
      "{\n"
      ".reg .f32 dropped;\n"
      "ld.global.f32 dropped, [%0];\n"
      "}" ::"l"(word));
}

}  // namespace tessera::kernels::device
