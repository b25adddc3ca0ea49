// What a run of the conformance program found: counted by several threads, printed as a table and written as JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/catalog/gemm_catalog.h"
#include "kernels/launch/launch.h"
#include "tests/gpu/gpu.h"

namespace tessera::gpu_test {

struct VariantResult {
  std::size_t index = 0;  // in GemmVariants()
  kernels::KernelFacts facts;
  std::int64_t cases = 0;    // computed and compared
  std::int64_t refused = 0;  // cases that the variant need not take, refused properly
  std::int64_t failed = 0;
  std::int64_t controls = 0;
  std::int64_t controls_caught = 0;
  double worst = 0;  // largest error / allowed error

  const kernels::GemmVariant& variant() const { return kernels::GemmVariants()[index]; }
};

class Report {
 public:
  void AddVariant(std::size_t index, const kernels::KernelFacts& facts);

  // `position` counts through the variants in the order in which they were added.
  void CountCase(std::size_t position, double worst);
  void CountRefusal(std::size_t position);
  void CountControl(std::size_t position, bool caught);
  void CountOracleCheck();
  void CountJob();
  // A failure of one variant, and one of the run as a whole.
  void Fail(std::size_t position, const std::string& what);
  void Fail(const std::string& what);

  // After all threads are done: demands that every variant ran and every control was caught.
  void Conclude(bool controls_expected);

  const std::vector<VariantResult>& variants() const { return variants_; }
  std::int64_t jobs() const { return jobs_; }
  bool ok() const { return failed_ == 0; }

  void PrintTable(const GpuFacts& gpu) const;
  // False if the file cannot be written.
  bool WriteJson(const std::string& path, const GpuFacts& gpu, const std::string& git, std::uint64_t seed,
                 double seconds) const;

 private:
  struct Totals {
    std::int64_t ran = 0;
    std::int64_t cases = 0;
    std::int64_t refused = 0;
    std::int64_t controls = 0;
    std::int64_t caught = 0;
  };
  Totals Sum() const;
  void Note(const std::string& what);

  std::mutex mutex_;  // for all below while threads run
  std::vector<VariantResult> variants_;
  std::vector<std::string> failures_;  // the first kFailuresKept
  std::int64_t failed_ = 0;
  std::int64_t oracle_checks_ = 0;
  std::int64_t jobs_ = 0;
};

}  // namespace tessera::gpu_test
