#include "tests/kernels/gemm_runner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "kernels/launch/gemm_launch.h"
#include "tests/oracle/gemm_oracle.h"
#include "tests/oracle/test_data.h"

namespace tessera::kernels {
namespace {

constexpr std::uint8_t kScratchPattern = 0xff;  // NaN as float32, -1 as an integer

bool ScratchGuardsIntact(const oracle::GuardedStorage& scratch, std::size_t used) {
  for (std::size_t at = 0; at < scratch.size(); ++at) {
    const bool inside = at >= scratch.first_byte() && at < scratch.first_byte() + used;
    if (!inside && scratch.bytes()[at] != std::byte{kScratchPattern}) return false;
  }
  return true;
}

}  // namespace

void LentThreads::Run(void* self, std::int64_t tasks, void (*body)(void* arg, std::int64_t task), void* arg) {
  std::atomic<std::int64_t> left = tasks;
  const auto work = [&] {
    for (std::int64_t task = --left; task >= 0; task = --left) body(arg, task);
  };
  std::vector<std::jthread> helpers;
  for (int i = 1; i < static_cast<LentThreads*>(self)->width_; ++i) helpers.emplace_back(work);
  work();
}

std::vector<int> SplitsFor(const GemmVariant& variant, std::int64_t k) {
  if (variant.info.workspace != WorkspaceRule::kSplitPartials) return {1};
  const auto blocks = static_cast<int>((k + variant.tile.k - 1) / variant.tile.k);
  const std::set<int> splits = {1, 2, 3, blocks + 2};
  return {splits.begin(), splits.end()};
}

LaunchError RunGemm(std::size_t variant, const GemmParams& params, int split, const HostParallel& parallel) {
  const auto bytes =
      GemmWorkspaceBytes(GemmVariants()[variant], oracle::BatchCount(params), params.m, params.n, params.k, split);
  if (!bytes.has_value()) {
    ADD_FAILURE() << "workspace does not fit";
    return kLaunchInvalidValue;
  }
  oracle::GuardedStorage scratch(DType::kS8, *bytes, 0, kScratchPattern);
  const LaunchContext context = {.workspace = {.scratch = scratch.first(), .bytes = static_cast<std::size_t>(*bytes)},
                                 .parallel = parallel};
  const LaunchError error = LaunchGemm(variant, params, {.split = split}, context);
  EXPECT_TRUE(ScratchGuardsIntact(scratch, context.workspace.bytes)) << "wrote outside its scratch";
  return error;
}

std::vector<std::byte> PackedOutput(const GemmParams& params, DType dtype) {
  EXPECT_EQ(params.d.col_stride, 1);
  const std::size_t bytes = DTypeBytes(dtype);
  const std::size_t row_bytes = static_cast<std::size_t>(params.n) * bytes;
  std::vector<std::byte> packed;
  for (std::int64_t batch = 0; batch < oracle::BatchCount(params); ++batch) {
    for (std::int64_t m = 0; m < params.m; ++m) {
      const auto element = static_cast<std::size_t>(oracle::ElementOffset(params, params.d, batch, m, 0));
      const std::byte* row = static_cast<const std::byte*>(params.d.data) + element * bytes;
      packed.insert(packed.end(), row, row + row_bytes);
    }
  }
  return packed;
}

}  // namespace tessera::kernels
