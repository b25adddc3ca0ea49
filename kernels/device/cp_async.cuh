// cp.async: copies from global to shared memory that run while the thread goes on, sm_80 and later. A thread's copies
// are waited for in groups, oldest first; other threads see them after a barrier that follows the wait.
#pragma once

#include <cstdint>

namespace tessera::kernels::device {

// Copies 16 bytes; both addresses are aligned to 16.
__device__ __forceinline__ void CopyAsync16(std::uint32_t shared_address, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(source) : "memory");
}

// The same, or 16 zero bytes without a read if `copy` is false.
__device__ __forceinline__ void CopyAsync16OrZero(std::uint32_t shared_address, const void* source, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(source), "r"(copy ? 16 : 0)
               : "memory");
}

// Ends a group: the thread's copies since the last one, possibly none.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when at most `kPending` of the thread's newest groups are still under way.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tessera::kernels::device
