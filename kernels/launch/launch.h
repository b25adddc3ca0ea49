// The contract between the host and every kernel variant: what a launcher is given and what it returns. POD only, so
// that CUDA and CPU variants share it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::kernels {

// A cudaError_t by value (0 = success), as an int so that builds without CUDA have the same signatures.
using LaunchError = int;
inline constexpr LaunchError kLaunchOk = 0;
inline constexpr LaunchError kLaunchInvalidValue = 1;  // cudaErrorInvalidValue

// Run-time choices of the planner that are not part of the variant.
struct LaunchShape {
  int split = 1;   // K slices; > 1 only for variants that take it
  int raster = 0;  // tiles of M walked together, 0 = the variant's own choice
};

// Scratch memory of one launch: one arena a stream, sized by the plan. Contents are undefined at entry.
struct Workspace {
  void* scratch = nullptr;  // aligned to kWorkspaceAlignment
  std::size_t bytes = 0;
};
inline constexpr std::size_t kWorkspaceAlignment = 256;

// Threads that a CPU variant may borrow. `run` calls body(arg, 0..tasks-1), each once, on the caller and on idle
// workers, and returns when all are done. Tasks must not depend on one another.
struct HostParallel {
  void (*run)(void* self, std::int64_t tasks, void (*body)(void* arg, std::int64_t task), void* arg) = nullptr;
  void* self = nullptr;
  int width = 1;  // threads that can work at once, the caller included
};

struct LaunchContext {
  void* stream = nullptr;  // cudaStream_t; unused by CPU variants, which finish before they return
  Workspace workspace;
  HostParallel parallel;  // CPU variants only
  bool may_wait = true;   // a launch may wait for the stream, as a library does that measures its choices first
};

// What the compiled kernel of a CUDA variant takes, as the driver reports it.
struct KernelFacts {
  int registers = 0;     // a thread
  int local_bytes = 0;   // a thread; anything but 0 is a spill or an array that lost its registers
  int shared_bytes = 0;  // a block, static and dynamic
  int threads = 0;       // a block
};

}  // namespace tessera::kernels
