// One GEMM problem on the device in one layout: its operands, launches of variants on it, and the one checker that
// judges what they leave behind, be they right or damaged on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/catalog/gemm_catalog.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"
#include "tests/gpu/gemm_case.h"
#include "tests/gpu/gpu.h"
#include "tests/oracle/gemm_oracle.h"

namespace tessera::gpu_test {

// A case with its numbers and its truth, both made when first asked for and shared by all layouts and threads.
class SharedCase {
 public:
  SharedCase(GpuCase problem, DType a, DType b, std::uint64_t seed)
      : problem_(std::move(problem)), a_(a), b_(b), seed_(seed) {}

  const GpuCase& problem() const { return problem_; }
  DType a() const { return a_; }
  DType b() const { return b_; }
  bool exact() const { return problem_.fill == Fill::kIntegers || problem_.fill == Fill::kOneHot; }

  const CaseData& Data();
  // compute() gives the truth; it is called once.
  const oracle::GemmTruth& Truth(const std::function<oracle::GemmTruth()>& compute);

 private:
  GpuCase problem_;
  DType a_;
  DType b_;
  std::uint64_t seed_;
  std::once_flag data_made_;
  CaseData data_;
  std::once_flag truth_made_;
  oracle::GemmTruth truth_;
};

// D's memory in its type, on the device, and where its elements are.
struct Output {
  Placed placed;  // without bytes
  std::size_t size = 0;
  DeviceBytes device;
};

// D is filled with one of these before a launch: a NaN, and a finite number that no result has, so that an element
// which is not written shows whether NaN or a number is due.
inline constexpr std::byte kNanPoison{0xff};
inline constexpr std::byte kFinitePoison{0x7b};

struct Run {
  kernels::LaunchError launch = kernels::kLaunchOk;  // what LaunchGemm returned
  std::string fault;                                 // what else went wrong, empty = nothing
  std::byte poison{};
  std::vector<std::byte> bytes;  // D's memory afterwards, guards included
};

class GemmProblem {
 public:
  // Places and uploads the operands. `tight`: nothing is allocated behind the last element of a view.
  GemmProblem(Gpu& gpu, SharedCase& shared, kernels::GemmLayout layout, bool tight);
  ~GemmProblem();  // takes the GPU's mutex to free the memory
  GemmProblem(const GemmProblem&) = delete;
  GemmProblem& operator=(const GemmProblem&) = delete;

  const GpuCase& problem() const { return shared_.problem(); }
  Gpu& gpu() const { return gpu_; }
  // From the host's oracle, or from the naive kernel where that would take long.
  const oracle::GemmTruth& Truth();
  oracle::GemmTruth HostTruth() const;
  oracle::GemmTruth NaiveTruthOf() const;

  const Output& OutputOf(DType dtype);
  // Device addresses throughout.
  kernels::GemmParams Params(DType out);

  // Poisons D, launches with scratch of exactly the promised size between guards, waits, calls poke(D's memory) if
  // given, and reads D's memory back.
  Run Launch(std::size_t variant, const kernels::GemmParams& params, const kernels::LaunchShape& shape,
             std::byte poison, const std::function<void(std::byte*)>& poke = {});

  // What is wrong with a finished run, empty = nothing: faults, bytes outside the view, values. `worst` grows to the
  // largest error / allowed error.
  std::string Check(Run& run, const kernels::GemmClass& gemm_class, double* worst);
  // Whether all bytes between and around D's elements are as they were poisoned.
  bool OutsideIntact(const Run& run, DType out);
  // Whether D holds the same bits in both.
  bool SameBits(const Run& one, const Run& other, DType out);
  // Whether D's memory is as it was poisoned.
  static bool Untouched(const Run& run);
  // Whether A and B still are what was uploaded.
  bool InputsIntact() const;

 private:
  kernels::GemmParams ParamsAt(const std::byte* a, const std::byte* b, const std::byte* bias, const float* a_scales,
                               const float* b_scales) const;

  Gpu& gpu_;
  SharedCase& shared_;
  bool tight_;
  Placed a_;
  Placed b_;
  std::vector<std::byte> bias_;  // as on the device
  std::size_t bias_first_byte_ = 0;
  DeviceBytes device_a_;
  DeviceBytes device_b_;
  DeviceBytes device_bias_;
  DeviceBytes device_a_scales_;
  DeviceBytes device_b_scales_;
  std::map<DType, Output> outputs_;  // references into it stay good
};

// Whether the variant declined the launch before it called CUDA: cudaErrorInvalidValue, and of a library also
// cudaErrorNotSupported, for only the library knows what it has no kernel for.
bool Refused(const kernels::GemmVariant& variant, const Run& run);

// What a variant of the class may keep its sums in.
oracle::Accumulator AccumulatorOf(const kernels::GemmClass& gemm_class);

// Whether a variant has to take the problem: sm80 and sm89 take any view; sm90a what tensor maps can express, or any
// view if it packs, and int32 can sum; a library's minimum is one plain aligned product.
bool MustTake(const kernels::GemmVariant& variant, const kernels::GemmParams& params);

}  // namespace tessera::gpu_test
