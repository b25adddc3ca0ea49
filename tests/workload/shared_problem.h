// A GEMM case in memory that is shared with a daemon: the same bytes are the call's tensors and the oracle's operands.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/oracle/gemm_oracle.h"
#include "tests/oracle/test_data.h"

namespace tessera::workload {

enum class MemoryOwner { kDaemon, kClient };

class SharedProblem {
 public:
  // Fills the operands from `seed` and D with a pattern that no result has.
  static absl::StatusOr<SharedProblem> Make(client::Session& session, const oracle::GemmCase& gemm_case,
                                            std::uint64_t seed, MemoryOwner owner);

  const client::GemmSpec& spec() const { return spec_; }
  client::GemmSpec& spec() { return spec_; }
  const kernels::GemmParams& params() const { return params_; }
  const client::Buffer& buffer() const { return buffer_; }

  // D, read through this process's own mapping, against float64.
  oracle::Verdict Check() const;
  // Changes one element of D by far more than any tolerance.
  void DamageOutput();

 private:
  SharedProblem(client::Buffer buffer, const oracle::GemmCase& gemm_case)
      : buffer_(std::move(buffer)), types_{gemm_case.a, gemm_case.b, gemm_case.d} {}

  client::Buffer buffer_;
  oracle::GemmTypes types_;
  client::GemmSpec spec_;
  kernels::GemmParams params_;
};

// The parameters that a kernel would get for these views (all in this process).
kernels::GemmParams ParamsOf(const client::GemmSpec& spec);

}  // namespace tessera::workload
