// What is reckoned from sizes: what blocks take, how many are resident, the model's order and the raster.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "kernels/catalog/gemm_geometry.h"
#include "planner/gemm/model.h"
#include "planner/gemm_planner.h"
#include "tests/planner/plan_checks.h"

namespace tessera::planner {
namespace {

using kernels::Arch;
using kernels::GemmVariant;
using kernels::GemmVariants;
using ::testing::HasSubstr;

constexpr kernels::GemmClass kBf16 = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16};

const DeviceFacts& Device(std::string_view name) {
  return FindDevice(name)->facts;
}

// The report of a run on a GPU has what the driver says of each kernel.
TEST(DeviceModel, BlocksTakeWhatTheDriverReported) {
  std::ifstream report(TESSERA_CONFORMANCE_REPORT);
  ASSERT_TRUE(report.is_open()) << TESSERA_CONFORMANCE_REPORT;
  const std::regex field("\"(id|shared_bytes|threads)\": \"?([^\",]*)\"?,?");
  std::map<std::string, std::map<std::string, std::int64_t>> reported;
  std::string id;
  for (std::string line; std::getline(report, line);) {
    std::smatch match;
    if (!std::regex_search(line, match, field)) continue;
    if (match[1] == "id") {
      id = match[2];
    } else {
      reported[id][match[1]] = std::stoll(match[2]);
    }
  }
  int compared = 0;
  for (const GemmVariant& variant : GemmVariants()) {
    const auto found = reported.find(std::string(variant.info.id));
    if (variant.info.backend != kernels::Backend::kCuda || found == reported.end()) continue;
    EXPECT_EQ(kernels::GemmSharedBytes(variant), found->second["shared_bytes"]) << variant.info.id;
    EXPECT_EQ(kernels::GemmBlockThreads(variant), found->second["threads"]) << variant.info.id;
    ++compared;
  }
  EXPECT_GE(compared, 150) << "the report and the catalogue name few variants in common";
}

TEST(DeviceModel, ResidencyFollowsSharedMemoryAndThreads) {
  const auto portable = kernels::FindGemmVariant("gemm.sm80.bf16_bf16.bf16.fast.NT/128x128x32_s4");
  ASSERT_TRUE(portable.has_value());
  const GemmVariant& variant = GemmVariants()[*portable];  // 64 KiB, 128 threads
  EXPECT_EQ(ResidentBlocks(variant, Device("a100")), 2);
  EXPECT_EQ(ResidentBlocks(variant, Device("l20")), 1);
  EXPECT_EQ(ResidentBlocks(variant, Device("h200")), 3);
  DeviceFacts few_threads = Device("h200");
  few_threads.threads_per_processor = 256;
  EXPECT_EQ(ResidentBlocks(variant, few_threads), 2);
  EXPECT_EQ(ResidentBlocks(variant, CpuFacts(8)), 1);
}

// Recipes of the portable tree that do not exist, to see the order.
GemmVariant Portable(std::string_view recipe, kernels::GemmTile tile, int stages) {
  return {.info = {.id = recipe,
                   .class_name = "gemm.sm80.bf16_bf16.bf16.fast.NT",
                   .recipe = recipe,
                   .arch = Arch::kSm80,
                   .backend = kernels::Backend::kCuda},
          .gemm_class = kBf16,
          .tile = tile,
          .stages = stages};
}

TEST(DeviceModel, RanksByResidencyThenStagesThenOrder) {
  const GemmVariant wide = Portable("wide", {128, 128, 64}, 3);      // 96 KiB
  const GemmVariant shallow = Portable("shallow", {64, 64, 32}, 3);  // 24 KiB
  const GemmVariant deep = Portable("deep", {64, 64, 32}, 4);        // 32 KiB
  const GemmVariant again = Portable("again", {64, 64, 32}, 4);
  const GemmProblem problem = {.gemm_class = kBf16, .m = 4096, .n = 4096, .k = 4096};
  const DeviceFacts l20 = Device("l20");
  const auto pick = [&](std::vector<GemmVariant> catalogue, const DeviceFacts& facts) -> std::string {
    const auto plan = GemmFamily(catalogue).Model(problem, facts, facts);
    return plan.plan.has_value() ? std::string(catalogue[plan.plan->variant].info.recipe) : plan.detail;
  };
  EXPECT_EQ(pick({wide, deep, shallow}, l20), "shallow") << "4 blocks rather than 3 and 1";
  DeviceFacts few_threads = l20;
  few_threads.threads_per_processor = 256;
  EXPECT_EQ(pick({wide, shallow, deep, again}, few_threads), "deep") << "2 blocks each: the deeper ring, the first";
  EXPECT_THAT(pick({deep, again}, l20), HasSubstr("abstains: all candidates have 3 resident"));
  EXPECT_EQ(pick({wide}, l20), "wide");
  DeviceFacts unknown = l20;
  unknown.shared_bytes_per_processor = 0;
  EXPECT_THAT(pick({wide, deep}, unknown), HasSubstr("not known"));
  EXPECT_THAT(pick({wide, deep}, Device("h200")), HasSubstr("abstains"));
  DeviceFacts tight = l20;
  tight.shared_bytes_per_block = 20'000;
  EXPECT_THAT(pick({wide, deep}, tight), HasSubstr("no portable kernel"));
}

TEST(DeviceModel, RasterFollowsL2) {
  const GemmVariant variant = Portable("tile", {128, 128, 32}, 4);
  DeviceFacts a100 = Device("a100");  // 40 MiB, 108 processors, 2 blocks each
  const auto raster = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return RasterFor(variant, {.gemm_class = kBf16, .m = m, .n = n, .k = k}, a100);
  };
  EXPECT_EQ(raster(8192, 1024, 4096), 1) << "8 MiB of B stay in L2";
  // B of 128 MiB: 40 MiB * 3 / 4 hold 30 tiles of 128 rows of 8 KiB where A is no thinner, 20 where it is.
  EXPECT_EQ(raster(16'384, 16'384, 4096), 30);
  EXPECT_EQ(raster(8192, 16'384, 4096), 20);
  // One tile of A has 32 MiB: what keeps 216 blocks busy along N decides.
  EXPECT_EQ(raster(1 << 20, 2048, 131'072), (216 + 15) / 16);
  EXPECT_EQ(raster(128, 16'384, 4096), 1) << "no higher than the problem";
  EXPECT_EQ(raster(0, 16'384, 4096), 0);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_GE(raster(kMost, kMost, kMost), 1);
  a100.l2_bytes = 0;
  EXPECT_EQ(raster(16'384, 16'384, 4096), 0) << "not known";
  EXPECT_EQ(RasterFor(variant, {.gemm_class = kBf16, .m = 4096, .n = 65'536, .k = 4096}, Device("h200")), 0)
      << "measured, not reckoned";
}

TEST(DeviceModel, KnowsDevicesByName) {
  for (const KnownDevice& device : KnownDevices()) {
    EXPECT_EQ(FindDevice(device.name), &device);
    EXPECT_LT(device.facts.shared_bytes_per_block, device.facts.shared_bytes_per_processor);
    // No kernel of this build is too large for a device that its tree runs on.
    for (const GemmVariant& variant : GemmVariants()) {
      if (device.facts.archs.Has(variant.info.arch)) {
        EXPECT_LE(kernels::GemmSharedBytes(variant), device.facts.shared_bytes_per_block) << variant.info.id;
      }
    }
  }
  EXPECT_EQ(FindDevice("h100"), nullptr);
  EXPECT_EQ(FindDevice(""), nullptr);
}

}  // namespace
}  // namespace tessera::planner
