// Call -> bound call: ids become pinned memory, views are checked against it, and the whole becomes the parameters that
// kernels take. After binding, nothing about the call can be wrong any more.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/gemm/gemm_params.h"
#include "planner/gemm/problem.h"
#include "server/exec/call.h"
#include "server/session/session_table.h"

namespace tessera::server {

struct BoundGemm {
  planner::GemmProblem problem;
  kernels::GemmParams params;      // addresses in `space`
  MemorySpace space;               // of every tensor; who launches on another device must refuse
  std::vector<BufferPin> pins;     // keep every buffer mapped
  bool has_inline_tensor = false;  // of the request's or the reply's memory

  bool Empty() const { return problem.m == 0 || problem.n == 0 || problem.batch == 0; }
  std::uint64_t Flops() const;             // 2 * batch * M * N * K; binding has made sure that it fits
  std::uint64_t ScalarOperations() const;  // multiply-adds, or elements of D where K is 0
};

// Where tensors of a call may live.
struct BindScope {
  SessionTable* sessions = nullptr;
  const Session* session = nullptr;      // null: the call has none, only inline tensors bind
  std::string* inline_result = nullptr;  // receives an inline output
  std::uint64_t inline_bytes_max = 0;    // of one inline tensor
  Metrics* metrics = nullptr;
};

// Errors begin with the field's path. A failed bind has changed nothing but `inline_result`.
absl::StatusOr<BoundGemm> BindGemm(const GemmCall& call, const BindScope& scope);

}  // namespace tessera::server
