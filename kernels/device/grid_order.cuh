// Grids that follow each other in a stream and overlap a little (PTX ISA, "griddepcontrol"): one launched so may start
// while the grid ahead of it still runs, and must wait for it before it touches memory that the other may use. Between
// grids that were not launched so, both calls do nothing. Needs sm_90.
#pragma once

namespace tessera::kernels::device {

// Until the grid ahead has ended and all it wrote is visible. By every thread that goes on to read or write memory
// outside the block, or is ordered behind such a thread by a barrier.
__device__ __forceinline__ void WaitForGridAhead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next grid may start, as soon as all blocks have said so or ended. It gets no processor before blocks of this grid
// leave theirs, but its launch is then behind it.
__device__ __forceinline__ void LetNextGridStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace tessera::kernels::device
