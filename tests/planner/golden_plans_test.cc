// The plans of four devices, as text: what the chain answers without rows for a few hundred problems each, so that a
// change of a rule, of the model or of a device's facts shows as a diff. gemm_plans.golden beside it has the bands
// alone, for the CPU and for GPUs of unknown sizes. TESSERA_UPDATE_GOLDEN=1 rewrites the files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/gemm_addressable.h"
#include "planner/builtin_rows.h"
#include "planner/gemm_planner.h"
#include "tests/planner/plan_checks.h"

namespace tessera::planner {
namespace {

using kernels::GemmClass;
using kernels::GemmLayout;
using kernels::GemmVariant;
using kernels::GemmVariants;

struct Shape {
  std::int64_t n;
  std::int64_t k;
};

// M from nothing to a long prefill, on the edges of tiles and beyond; N and K of layers, one of few tiles, one whose B
// is beyond every L2, and the last two whose rows are no multiple of 16 bytes.
constexpr std::int64_t kManyRows[] = {0, 1, 8, 16, 17, 64, 65, 128, 512, 1000, 2048, 8192};
constexpr Shape kManyShapes[] = {{4096, 4096},   {11'008, 4096}, {1024, 8192}, {256, 256},
                                 {28'672, 8192}, {4095, 4097},   {1000, 77}};
constexpr std::int64_t kSomeRows[] = {1, 16, 64, 512, 8192};
constexpr Shape kSomeShapes[] = {{4096, 4096}, {28'672, 8192}, {4095, 4097}};
constexpr std::int64_t kFewRows[] = {1, 4096};
constexpr Shape kFewShapes[] = {{4096, 4112}};
constexpr GemmClass kMain = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16};

// How the operands lie: packed on good addresses, or not.
enum class Lying : std::uint8_t { kPacked, kOddAddress, kOddStrides };
constexpr std::string_view kLyingNames[] = {"", " odd_address", " odd_strides"};

struct Asked {
  GemmProblem problem;
  std::string text;
};

// One matrix of `outer` rows of `inner` contiguous elements.
void Lay(kernels::GemmMatrix& matrix, bool along_k, std::int64_t inner, std::int64_t outer, std::size_t bytes,
         Lying lying) {
  const std::int64_t stride = std::max<std::int64_t>(1, inner) + (lying == Lying::kOddStrides ? 1 : 0);
  // Asked for its alignment, and never read.
  matrix.data = reinterpret_cast<void*>(lying == Lying::kOddAddress ? std::uintptr_t{256} + bytes : 256);
  matrix.row_stride = along_k ? stride : 1;
  matrix.col_stride = along_k ? 1 : stride;
  matrix.batch_stride[kernels::kGemmBatchDimsMax - 1] = stride * outer;
}

Asked Ask(const GemmClass& of, std::int64_t m, Shape shape, std::int64_t batch = 1, Lying lying = Lying::kPacked) {
  Asked asked{.problem = {.gemm_class = of, .batch = batch, .m = m, .n = shape.n, .k = shape.k}, .text = {}};
  kernels::GemmParams params{.m = m, .n = shape.n, .k = shape.k};
  params.batch_shape[kernels::kGemmBatchDimsMax - 1] = batch;
  const bool a_along_k = of.layout == GemmLayout::kNT || of.layout == GemmLayout::kNN;
  const bool b_along_k = of.layout == GemmLayout::kNT || of.layout == GemmLayout::kTT;
  Lay(params.a, a_along_k, a_along_k ? shape.k : m, a_along_k ? m : shape.k, DTypeBytes(of.a), lying);
  Lay(params.b, b_along_k, b_along_k ? shape.k : shape.n, b_along_k ? shape.n : shape.k, DTypeBytes(of.b), lying);
  params.d = {.data = reinterpret_cast<void*>(std::uintptr_t{256}), .row_stride = shape.n, .col_stride = 1};
  params.d.batch_stride[kernels::kGemmBatchDimsMax - 1] = m * shape.n;
  asked.problem.addressable = kernels::AddressableBy(of, params);
  asked.text = absl::StrCat(of.ToString(), " m=", m, " n=", shape.n, " k=", shape.k);
  if (batch != 1) absl::StrAppend(&asked.text, " batch=", batch);
  absl::StrAppend(&asked.text, Av(kLyingNames[static_cast<std::size_t>(lying)]));
  return asked;
}

// Every class that the catalogue has for GPUs, in its order.
std::vector<GemmClass> Classes() {
  std::vector<GemmClass> classes;
  for (const GemmVariant& variant : GemmVariants()) {
    const bool seen = std::find(classes.begin(), classes.end(), variant.gemm_class) != classes.end();
    if (variant.info.backend == kernels::Backend::kCuda && !seen) classes.push_back(variant.gemm_class);
  }
  return classes;
}

bool Runs(const DeviceFacts& facts, const GemmClass& of) {
  return std::any_of(GemmVariants().begin(), GemmVariants().end(), [&](const GemmVariant& variant) {
    return variant.gemm_class == of && facts.archs.Has(variant.info.arch);
  });
}

template <std::size_t kRows, std::size_t kShapes>
void AskGrid(const GemmClass& of, const std::int64_t (&rows)[kRows], const Shape (&shapes)[kShapes],
             std::vector<Asked>& asked) {
  for (const Shape& shape : shapes) {
    for (const std::int64_t m : rows) asked.push_back(Ask(of, m, shape));
  }
}

std::vector<Asked> Problems(const DeviceFacts& facts) {
  std::vector<Asked> asked;
  for (const GemmClass& of : Classes()) {
    const bool portable = of.a == DType::kBf16;
    if (!Runs(facts, of)) {
      if (of.layout == GemmLayout::kNT) asked.push_back(Ask(of, 512, kSomeShapes[0]));
    } else if (of == kMain) {
      AskGrid(of, kManyRows, kManyShapes, asked);
    } else if (portable || (of.layout == GemmLayout::kNT && of.out == DType::kBf16)) {
      AskGrid(of, kSomeRows, kSomeShapes, asked);
    } else {
      AskGrid(of, kFewRows, kFewShapes, asked);
    }
    if (of.out != DType::kBf16 || of.layout != GemmLayout::kNT || !Runs(facts, of)) continue;
    for (const std::int64_t m : {1, 64, 4096}) {
      asked.push_back(Ask(of, m, kSomeShapes[0], 1, Lying::kOddAddress));
      asked.push_back(Ask(of, m, kSomeShapes[0], 1, Lying::kOddStrides));
      for (const std::int64_t batch : {0, 3, 64}) asked.push_back(Ask(of, m, {512, 1024}, batch));
    }
  }
  return asked;
}

std::string Answer(const absl::StatusOr<Plan>& plan) {
  if (!plan.ok()) return absl::StrCat(absl::StatusCodeToString(plan.status().code()), ": ", plan.status().message());
  const kernels::VariantInfo& info = GemmVariants()[plan->variant].info;
  return absl::StrCat(Av(kernels::ArchName(info.arch)), "/", Av(info.recipe), " split=", plan->split,
                      " raster=", plan->raster, " ", Av(SourceName(plan->source)));
}

std::string Header(const KnownDevice& device) {
  return absl::StrCat("# ", Av(device.description),
                      ": problem -> variant, K slices, raster, who decided. Packed operands unless a line says "
                      "otherwise.\n# Written by golden_plans_test with TESSERA_UPDATE_GOLDEN=1; review the diff.\n");
}

class GoldenPlans : public ::testing::TestWithParam<KnownDevice> {
 protected:
  static std::string Path() { return absl::StrCat(TESSERA_GOLDEN_PLANS "/plans_", Av(GetParam().name), ".txt"); }
};

TEST_P(GoldenPlans, AreThoseOfTheFile) {
  const KnownDevice& device = GetParam();
  const std::string_view names[] = {device.device};
  PlannerConfig config;
  config.tier_ptr(Tier::kBuiltin) = BuiltinRowsOf(names).value();
  const GemmPlanner planner(GemmVariants(), config);
  std::string now = Header(device);
  std::set<std::string> questions;
  for (const Asked& asked : Problems(device.facts)) {
    const auto plan = planner.Decide(asked.problem, device.facts);
    EXPECT_TRUE(questions.insert(asked.text).second) << "asked twice: " << asked.text;
    if (plan.ok()) {
      EXPECT_EQ(WhyIllegalPlan(*plan, asked.problem, device.facts), "") << asked.text;
    }
    absl::StrAppend(&now, asked.text, " -> ", Answer(plan), "\n");
  }
  EXPECT_GE(questions.size(), 200U);
  if (std::getenv("TESSERA_UPDATE_GOLDEN") != nullptr) {
    ASSERT_FALSE(HasFailure());
    std::ofstream file(Path(), std::ios::binary | std::ios::trunc);
    file << now;
    ASSERT_TRUE(file.flush().good()) << Path();
    return;
  }
  std::ifstream file(Path());
  ASSERT_TRUE(file.is_open()) << Path();
  std::istringstream expected(now);
  std::string line;
  std::string expected_line;
  int differing = 0;
  while (std::getline(expected, expected_line)) {
    line.clear();
    std::getline(file, line);
    if (line != expected_line && ++differing <= 5) {
      ADD_FAILURE() << "now:  " << expected_line << "\nfile: " << line << "\nif intended: TESSERA_UPDATE_GOLDEN=1";
    }
  }
  EXPECT_EQ(differing, 0);
  EXPECT_FALSE(std::getline(file, line)) << "the file has more: " << line;
}

INSTANTIATE_TEST_SUITE_P(OfDevice, GoldenPlans, ::testing::ValuesIn(KnownDevices().begin(), KnownDevices().end()),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace tessera::planner
