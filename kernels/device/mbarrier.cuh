// Barriers in shared memory that count arriving threads and arriving bytes (PTX ISA, "Parallel Synchronization and
// Communication Instructions: mbarrier"). A barrier is in a phase, 0 at first, and turns to the next when its pending
// arrivals and its pending bytes are both zero. A waiter names the parity of the phase whose end it waits for: waiting
// for parity 1 on a fresh barrier returns at once, as the phase before the first counts as over.
//
// Shared memory is named by its 32-bit address in the shared window (SharedAddress), so that no generic address has to
// be converted in a loop. All of it needs sm_90.
#pragma once

#include <cstdint>

namespace tessera::kernels::device {

inline constexpr int kMbarrierBytes = 8;  // and its alignment

__device__ __forceinline__ std::uint32_t SharedAddress(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four words at an address that is a multiple of 16. Eight threads in a row, of each quarter of a warp, are served at
// once if their words lie in different banks.
struct alignas(16) SharedVector {
  std::uint32_t word[4];
};

__device__ __forceinline__ SharedVector LoadSharedVector(std::uint32_t address) {
  SharedVector value;
  asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void StoreSharedVector(std::uint32_t address, const SharedVector& value) {
  asm volatile("st.shared::cta.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

// `arrivals` a phase. One thread initialises; FenceMbarrierInit and a block barrier come before any use.
__device__ __forceinline__ void MbarrierInit(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialising thread's barriers visible to the copy engine, which completes them from the async proxy, and
// to the other blocks of a cluster.
__device__ __forceinline__ void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void MbarrierArrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that also makes the phase wait for `bytes` of bulk copies.
__device__ __forceinline__ void MbarrierArriveExpect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of `parity` is over; may suspend the thread for a while before it says no.
__device__ __forceinline__ bool MbarrierTryWait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.b32 %0, 1, 0, over;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Everything that arriving threads and copies wrote before the end of the phase is visible afterwards.
__device__ __forceinline__ void MbarrierWait(std::uint32_t barrier, std::uint32_t parity) {
  while (!MbarrierTryWait(barrier, parity)) {
  }
}

}  // namespace tessera::kernels::device
