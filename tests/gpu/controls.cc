#include "tests/gpu/controls.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::gpu_test {
namespace {

using kernels::GemmParams;

constexpr float kBias = 8.0F;  // beyond what the sums of a control case may be off by
constexpr float kScaleFactor = 1.03F;
constexpr float kShortScaleFactor = 1.25F;  // where a short accumulator is allowed more

struct LaunchDamage {
  std::string name;
  std::function<void(GemmParams&)> apply;
};

struct Poke {
  std::string name;
  std::size_t at;  // byte of D's memory
  std::uint8_t flip;
};

// Everything that the controls of one variant share.
class Controls {
 public:
  Controls(GemmProblem& problem, Report& report, std::size_t position)
      : problem_(problem),
        report_(report),
        position_(position),
        index_(report.variants()[position].index),
        out_(report.variants()[position].variant().gemm_class.out),
        shape_{.split = kernels::TakesSplit(Variant().info.workspace) ? 2 : 1} {}

  const kernels::GemmVariant& Variant() const { return kernels::GemmVariants()[index_]; }

  // The undamaged launch must pass, or a caught control would prove nothing.
  bool Passes() {
    good_ = problem_.Launch(index_, problem_.Params(out_), shape_, kNanPoison);
    const std::string wrong = Check(good_);
    if (!wrong.empty()) report_.Fail(position_, "control, undamaged: " + wrong);
    return wrong.empty();
  }

  void Damage(const LaunchDamage& damage) {
    GemmParams params = problem_.Params(out_);
    damage.apply(params);
    Run run = problem_.Launch(index_, params, shape_, kNanPoison);
    // A library may refuse what the damage asks of it; then it is not a control. Ours take all of them.
    if (Variant().info.arch == kernels::Arch::kVendor && Refused(Variant(), run)) return;
    if (!run.fault.empty() || run.launch != kernels::kLaunchOk) {
      report_.Fail(position_, "control '" + damage.name + "' did not launch: error " + std::to_string(run.launch) +
                                  (run.fault.empty() ? "" : ", " + run.fault));
      return;
    }
    Count(damage.name, !Check(run).empty());
  }

  // The same launch with a byte of D's memory flipped after it.
  void Damage(const Poke& poke) {
    Run run = Poked(poke);
    Count(poke.name, !Check(run).empty());
  }

  // A difference that the error bound allows shows between two runs.
  void DamageSecondRun(const Poke& poke) { Count(poke.name, !problem_.SameBits(good_, Poked(poke), out_)); }

 private:
  std::string Check(Run& run) {
    double worst = 0;
    return problem_.Check(run, Variant().gemm_class, &worst);
  }

  Run Poked(const Poke& poke) {
    return problem_.Launch(index_, problem_.Params(out_), shape_, kNanPoison, [&](std::byte* memory) {
      std::uint8_t byte = 0;
      Require(cudaMemcpy(&byte, memory + poke.at, 1, cudaMemcpyDeviceToHost), "read the byte to damage");
      byte ^= poke.flip;
      Require(cudaMemcpy(memory + poke.at, &byte, 1, cudaMemcpyHostToDevice), "damage a byte");
    });
  }

  void Count(const std::string& name, bool caught) {
    report_.CountControl(position_, caught);
    if (!caught) report_.Fail(position_, "control '" + name + "' was not caught");
  }

  GemmProblem& problem_;
  Report& report_;
  std::size_t position_;
  std::size_t index_;
  DType out_;
  kernels::LaunchShape shape_;
  Run good_;
};

std::vector<LaunchDamage> LaunchDamages(const kernels::GemmVariant& variant, const DeviceBytes& bias) {
  const bool short_sums = AccumulatorOf(variant.gemm_class) != oracle::Accumulator::kFloat32;
  const float factor = short_sums ? kShortScaleFactor : kScaleFactor;
  const int k_tile = std::max(variant.tile.k, 16);
  return {
      {"a_scale is off", [=](GemmParams& params) { params.a_scale.scalar *= factor; }},
      {"a bias is added", [&](GemmParams& params) { params.bias = {.data = bias.data(), .stride = 1}; }},
      {"the last K tile is dropped", [=](GemmParams& params) { params.k -= k_tile; }},
      {"the last row is not written", [](GemmParams& params) { params.m -= 1; }},
      {"the last column is not written", [](GemmParams& params) { params.n -= 1; }},
  };
}

std::size_t LargestElement(const oracle::GemmTruth& truth) {
  const auto smaller = [](double x, double y) { return std::fabs(x) < std::fabs(y); };
  return static_cast<std::size_t>(std::max_element(truth.value.begin(), truth.value.end(), smaller) -
                                  truth.value.begin());
}

// Offset of an element of the one matrix D in its memory; `index` is packed.
std::size_t OutputByte(const Placed& placed, std::size_t index) {
  const auto element = static_cast<std::int64_t>(index);
  const std::int64_t offset =
      element / placed.cols * placed.matrix.row_stride + element % placed.cols * placed.matrix.col_stride;
  return placed.first_byte + static_cast<std::size_t>(offset) * DTypeBytes(placed.dtype);
}

DeviceBytes UploadBias(Gpu& gpu, std::int64_t n) {
  const std::vector<float> bias(static_cast<std::size_t>(n), kBias);
  return Upload(gpu, std::as_bytes(std::span(bias)));
}

}  // namespace

void RunControls(GemmProblem& problem, Report& report, std::size_t position) {
  Controls controls(problem, report, position);
  if (!controls.Passes()) return;
  const DType out = controls.Variant().gemm_class.out;
  const Placed& placed = problem.OutputOf(out).placed;
  const std::size_t size = DTypeBytes(out);
  const std::size_t last = OutputByte(placed, static_cast<std::size_t>(placed.rows * placed.cols) - 1);
  if (problem.problem().fill == Fill::kOneHot) {
    controls.Damage(Poke{"the lowest bit of one element of exact data", last, 1});
    return;
  }
  DeviceBytes bias;
  {
    const std::lock_guard lock(problem.gpu().mutex);
    if (problem.gpu().lost) return;
    bias = UploadBias(problem.gpu(), placed.cols);
  }
  for (const LaunchDamage& damage : LaunchDamages(controls.Variant(), bias)) controls.Damage(damage);
  const std::size_t largest = OutputByte(placed, LargestElement(problem.Truth()));
  controls.Damage(Poke{"the sign of one element", largest + size - 1, 0x80});
  controls.Damage(Poke{"a byte before D", placed.first_byte - 1, 1});
  controls.Damage(
      Poke{"a byte between two rows of D", OutputByte(placed, static_cast<std::size_t>(placed.cols) - 1) + size, 1});
  controls.Damage(Poke{"a byte behind D", last + size, 1});
  controls.DamageSecondRun(Poke{"the lowest bit of one element in a second run", last, 1});
  const std::lock_guard lock(problem.gpu().mutex);
  bias = DeviceBytes();
}

}  // namespace tessera::gpu_test
