// The rows that come with the build: each is legal, names a kernel of the catalogue, decides somewhere on its device,
// and there alone.
#include "planner/builtin_rows.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "planner/gemm_planner.h"
#include "planner/known_devices.h"

namespace tessera::planner {
namespace {

const KnownDevice* DeviceNamed(std::string_view driver_name) {
  for (const KnownDevice& device : KnownDevices()) {
    if (device.device == driver_name) return &device;
  }
  return nullptr;
}

TEST(BuiltinRows, EachDecidesOnItsDevice) {
  const kernels::GemmVariant* const begin = kernels::GemmVariants().data();
  ASSERT_FALSE(AllBuiltinRows().empty());
  for (const BuiltinRows& builtin : AllBuiltinRows()) {
    const KnownDevice* const device = DeviceNamed(builtin.device);
    ASSERT_NE(device, nullptr) << builtin.device;
    const std::string_view names[] = {builtin.device};
    const auto rows = BuiltinRowsOf(names);
    ASSERT_TRUE(rows.ok()) << rows.status();
    ASSERT_FALSE((*rows)->rows().empty()) << builtin.device;
    PlannerConfig config;
    config.tier_ptr(Tier::kBuiltin) = *rows;
    const GemmPlanner planner(kernels::GemmVariants(), config);
    for (const Row& row : (*rows)->rows()) {
      const std::string id = row.class_name + "/" + row.recipe;
      const auto variant = kernels::FindGemmVariant(id);
      ASSERT_TRUE(variant.has_value()) << id;
      // The problem at the upper end of all bands.
      const GemmProblem problem{.gemm_class = begin[*variant].gemm_class,
                                .m = row.bands[0].max,
                                .n = row.bands[1].max,
                                .k = row.bands[2].max};
      const auto plan = planner.Decide(problem, device->facts);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_EQ(plan->source, Source::kBuiltin) << id;
      EXPECT_EQ(plan->variant, *variant) << id;
    }
  }
}

TEST(BuiltinRows, OtherDevicesHaveNone) {
  const std::string_view names[] = {"NVIDIA H100 80GB HBM3", "AMD EPYC", ""};
  const auto rows = BuiltinRowsOf(names);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_TRUE((*rows)->rows().empty());
}

}  // namespace
}  // namespace tessera::planner
