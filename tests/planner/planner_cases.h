// What the tests of planner.h plan, and how they ask.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "planner/planner.h"
#include "tests/planner/plan_checks.h"

namespace tessera::planner {

inline constexpr kernels::GemmClass kBf16 = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16};
inline const GemmProblem kProblem = {.gemm_class = kBf16, .m = 512, .n = 1024, .k = 2048};

inline ChangeOptions By(std::string who) {
  return {.who = std::move(who)};
}
inline const DeviceFacts& Device(std::string_view name) {
  return FindDevice(name)->facts;
}
inline std::string_view RecipeOf(const absl::StatusOr<Plan>& plan) {
  return plan.ok() ? kernels::GemmVariants()[plan->variant].info.recipe : "none";
}
inline std::string Code(const absl::Status& status) {
  return absl::StatusCodeToString(status.code());
}

// `changed`: the change was accepted and is one.
inline void ExpectChanged(const absl::StatusOr<ChangeResult>& result) {
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->changed);
}

inline std::string CpuRow(std::string_view rest) {
  return absl::StrCat("gemm.cpu.bf16_bf16.bf16.fast.NT ", Av(rest), "\n");
}

}  // namespace tessera::planner
