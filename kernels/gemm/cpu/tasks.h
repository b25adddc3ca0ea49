// How CPU variants spread work: tasks over borrowed threads, and the batch arithmetic that every task starts with.
#pragma once

#include <cstdint>

#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"

namespace tessera::kernels::cpu {

// Calls body(0..tasks-1), side by side where the context lends threads.
template <typename Body>
void ForEachTask(const HostParallel& parallel, std::int64_t tasks, Body& body) {
  if (parallel.run == nullptr || tasks <= 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  parallel.run(
      parallel.self, tasks, [](void* arg, std::int64_t task) { (*static_cast<Body*>(arg))(task); }, &body);
}

constexpr std::int64_t CeilDiv(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}

inline std::int64_t BatchCount(const GemmParams& params) {
  std::int64_t count = 1;
  for (const std::int64_t extent : params.batch_shape) count *= extent;
  return count;
}

// Elements from a matrix's base to its batch entry number `batch`.
inline std::int64_t BatchOffset(const GemmParams& params, const GemmMatrix& matrix, std::int64_t batch) {
  std::int64_t offset = 0;
  for (int dim = kGemmBatchDimsMax - 1; dim >= 0; --dim) {
    offset += batch % params.batch_shape[dim] * matrix.batch_stride[dim];
    batch /= params.batch_shape[dim];
  }
  return offset;
}

}  // namespace tessera::kernels::cpu
