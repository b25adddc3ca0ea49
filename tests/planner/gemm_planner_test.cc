// The GEMM planner: total over every class and shape, obedient to limits, clear when it has nothing; and the plans of
// gemm_plans.golden, so that a change of rule shows as a diff (TESSERA_UPDATE_GOLDEN=1 rewrites the file).
#include "planner/gemm_planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/text.h"

namespace tessera::planner {
namespace {

using kernels::Arch;
using kernels::Backend;
using kernels::GemmClass;
using kernels::GemmVariant;
using kernels::GemmVariants;
using ::testing::HasSubstr;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kExtents[] = {0, 1, 2, 13, 16, 17, 64, 96, 97, 1025, 65'537, std::int64_t{1} << 31};
constexpr GemmClass kBf16Class = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16};

DeviceFacts Cpu(int threads, std::int64_t workspace_bytes_max = 64 * kMiB) {
  return {.backend = Backend::kCpu, .processors = threads, .workspace_bytes_max = workspace_bytes_max};
}

std::vector<GemmClass> CpuClasses() {
  std::map<std::uint32_t, GemmClass> classes;
  for (const GemmVariant& variant : GemmVariants()) {
    if (variant.info.backend == Backend::kCpu) classes.emplace(variant.gemm_class.Key(), variant.gemm_class);
  }
  std::vector<GemmClass> listed;
  for (const auto& [key, gemm_class] : classes) listed.push_back(gemm_class);
  return listed;
}

std::string Text(const GemmProblem& problem, const DeviceFacts& facts) {
  std::ostringstream text;
  text << problem.gemm_class.ToString() << " batch=" << problem.batch << " m=" << problem.m << " n=" << problem.n
       << " k=" << problem.k << " threads=" << facts.processors << " scratch=" << facts.workspace_bytes_max;
  return text.str();
}

// Why the plan cannot be launched on that problem; empty if it can.
std::string WhyIllegal(const Plan& plan, const GemmProblem& problem, const DeviceFacts& facts) {
  if (plan.variant >= GemmVariants().size()) return "variant beyond the catalogue";
  const GemmVariant& variant = GemmVariants()[plan.variant];
  if (variant.info.backend != facts.backend) return "another backend";
  if (!(variant.gemm_class == problem.gemm_class)) return "another class";
  if (plan.split < 1) return "split below 1";
  if (plan.workspace_bytes > facts.workspace_bytes_max) return "workspace above the limit";
  const auto needed = GemmWorkspaceBytes(variant, problem.batch, problem.m, problem.n, problem.k, plan.split);
  if (needed != plan.workspace_bytes) return "workspace is not what the variant needs";
  if (plan.split == 1) return "";
  if (!kernels::TakesSplit(variant.info.workspace)) return "splits a variant that does not";
  if (plan.split > 2 * facts.processors) return "more than two slices a thread";
  if (plan.split > (problem.k - 1) / variant.tile.k + 1) return "slices shorter than a K block";
  return "";
}

std::string_view RecipeOf(const Plan& plan) {
  return GemmVariants()[plan.variant].info.recipe;
}

TEST(GemmPlanner, PlansEveryClassAndShapeLegally) {
  const GemmPlanner planner(GemmVariants());
  std::int64_t wrong = 0;
  for (const GemmClass& gemm_class : CpuClasses()) {
    for (const int threads : {1, 2, 64}) {
      const DeviceFacts facts = Cpu(threads);
      for (const std::int64_t m : kExtents) {
        for (const std::int64_t n : kExtents) {
          for (const std::int64_t k : kExtents) {
            for (const std::int64_t batch : {0, 1, 65'537}) {
              const GemmProblem problem = {.gemm_class = gemm_class, .batch = batch, .m = m, .n = n, .k = k};
              const auto plan = planner.Decide(problem, facts);
              const std::string why = plan.ok() ? WhyIllegal(*plan, problem, facts) : MessageOf(plan.status());
              if (!why.empty() && ++wrong <= 5) ADD_FAILURE() << Text(problem, facts) << ": " << why;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(GemmPlanner, PlansTheLargestExtents) {
  const GemmPlanner planner(GemmVariants());
  const GemmProblem problems[] = {
      {.gemm_class = kBf16Class, .m = kInt64Max, .n = kInt64Max, .k = kInt64Max},
      {.gemm_class = kBf16Class, .batch = kInt64Max, .m = 96, .n = 96, .k = 4096},
      {.gemm_class = kBf16Class, .m = 1, .n = 1, .k = kInt64Max},
  };
  for (const GemmProblem& problem : problems) {
    const auto plan = planner.Decide(problem, Cpu(64));
    ASSERT_TRUE(plan.ok()) << Text(problem, Cpu(64)) << ": " << plan.status();
    EXPECT_EQ(WhyIllegal(*plan, problem, Cpu(64)), "") << Text(problem, Cpu(64));
  }
  const auto long_k = planner.Decide(problems[2], Cpu(64));
  ASSERT_TRUE(long_k.ok());
  EXPECT_EQ(long_k->split, 128) << "a K of 2^63 - 1 has blocks for every thread";
}

TEST(GemmPlanner, UsesEveryRecipeOverASweep) {
  const GemmPlanner planner(GemmVariants());
  for (const GemmClass& gemm_class : CpuClasses()) {
    std::set<std::string_view> recipes;
    for (const std::int64_t size : {8, 64, 512}) {
      for (const std::int64_t k : {16, 512, 8192}) {
        const auto plan = planner.Decide({.gemm_class = gemm_class, .m = size, .n = size, .k = k}, Cpu(8));
        ASSERT_TRUE(plan.ok()) << plan.status();
        recipes.insert(RecipeOf(*plan));
      }
    }
    EXPECT_GE(recipes.size(), 3U) << gemm_class.ToString();
  }
}

TEST(GemmPlanner, SplitsFollowTheThreads) {
  const GemmPlanner planner(GemmVariants());
  const GemmProblem problem = {.gemm_class = kBf16Class, .m = 16, .n = 64, .k = 65'536};
  for (const auto& [threads, split] : std::map<int, int>{{-1, 2}, {0, 2}, {1, 2}, {2, 4}, {64, 128}, {1000, 128}}) {
    const auto plan = planner.Decide(problem, Cpu(threads));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->split, split) << threads;
  }
}

TEST(GemmPlanner, FallsToAnotherRecipeWhereScratchIsShort) {
  const GemmPlanner planner(GemmVariants());
  const GemmProblem problem = {.gemm_class = kBf16Class, .batch = 3, .m = 64, .n = 80, .k = 8192};
  const auto roomy = planner.Decide(problem, Cpu(4));
  ASSERT_TRUE(roomy.ok()) << roomy.status();
  ASSERT_GT(roomy->workspace_bytes, 0);
  const std::string_view preferred = RecipeOf(*roomy);

  const auto exact = planner.Decide(problem, Cpu(4, roomy->workspace_bytes));
  ASSERT_TRUE(exact.ok()) << exact.status();
  EXPECT_EQ(RecipeOf(*exact), preferred);
  for (const std::int64_t limit : {roomy->workspace_bytes - 1, std::int64_t{0}}) {
    const auto tight = planner.Decide(problem, Cpu(4, limit));
    ASSERT_TRUE(tight.ok()) << tight.status();
    EXPECT_EQ(WhyIllegal(*tight, problem, Cpu(4, limit)), "") << limit;
    EXPECT_NE(RecipeOf(*tight), preferred) << limit;
  }
}

DeviceFacts Hopper(int processors) {
  return {.backend = Backend::kCuda,
          .archs = {Arch::kSm80, Arch::kSm89, Arch::kSm90a},
          .processors = processors,
          .workspace_bytes_max = 64 * kMiB};
}

// Whether all that a Hopper has of a class packs its operands, and cannot where an extent is 2^31.
bool OnlyPacks(const GemmClass& gemm_class) {
  return std::ranges::all_of(GemmVariants(), [&](const GemmVariant& variant) {
    return variant.info.backend != Backend::kCuda || !(variant.gemm_class == gemm_class) ||
           variant.info.workspace == kernels::WorkspaceRule::kPacked;
  });
}

TEST(GemmPlanner, PlansEveryShapeOfTheHopperClassesLegally) {
  const GemmPlanner planner(GemmVariants());
  std::int64_t wrong = 0;
  for (const GemmVariant& variant : GemmVariants()) {
    if (variant.info.arch != Arch::kSm90a) continue;
    for (const int processors : {1, 78, 114, 132}) {
      const DeviceFacts facts = Hopper(processors);
      for (const std::int64_t m : kExtents) {
        for (const std::int64_t n : kExtents) {
          for (const std::int64_t k : kExtents) {
            const GemmProblem problem = {.gemm_class = variant.gemm_class, .m = m, .n = n, .k = k};
            const auto plan = planner.Decide(problem, facts);
            const bool too_large = !kernels::PackedTakes(problem.gemm_class, m, n, k);
            if (too_large && !plan.ok() && OnlyPacks(problem.gemm_class)) continue;
            std::string why = plan.ok() ? WhyIllegal(*plan, problem, facts) : MessageOf(plan.status());
            if (plan.ok() && !kernels::LegalClusterSplit(plan->split)) why = "no split of a cluster";
            if (!why.empty() && ++wrong <= 5) ADD_FAILURE() << Text(problem, facts) << ": " << why;
          }
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(GemmPlanner, FewRowsOnAHopperKeepMemoryBusy) {
  const GemmPlanner planner(GemmVariants());
  for (const std::int64_t m : {1, 16, 17, 64, 100}) {
    for (const std::int64_t n : {1024, 2048, 4096}) {
      const GemmProblem problem = {.gemm_class = kBf16Class, .m = m, .n = n, .k = 8192};
      const auto plan = planner.Decide(problem, Hopper(132));
      ASSERT_TRUE(plan.ok()) << plan.status();
      const GemmVariant& variant = GemmVariants()[plan->variant];
      const std::int64_t blocks = ((m - 1) / variant.tile.m + 1) * ((n - 1) / variant.tile.n + 1) * plan->split;
      EXPECT_GE(blocks, 2 * 132 / 5) << Text(problem, Hopper(132));
    }
  }
}

TEST(GemmPlanner, BytesOfAnyLayoutAndAlignmentHaveAKernelOnAHopper) {
  const GemmPlanner planner(GemmVariants());
  for (const auto& [a, b] : {std::pair{DType::kE4m3, DType::kE5m2}, std::pair{DType::kS8, DType::kS8}}) {
    for (const kernels::GemmLayout layout :
         {kernels::GemmLayout::kNT, kernels::GemmLayout::kNN, kernels::GemmLayout::kTN, kernels::GemmLayout::kTT}) {
      for (const std::int64_t m : {1, 100, 4096}) {
        const GemmProblem problem = {.gemm_class = {.a = a, .b = b, .out = DType::kBf16, .layout = layout},
                                     .m = m,
                                     .n = 4096,
                                     .k = 4097,
                                     .addressable = {Arch::kSm80, Arch::kSm89}};
        const auto plan = planner.Decide(problem, Hopper(132));
        ASSERT_TRUE(plan.ok()) << plan.status();
        EXPECT_EQ(GemmVariants()[plan->variant].info.workspace, kernels::WorkspaceRule::kPacked);
        EXPECT_EQ(WhyIllegal(*plan, problem, Hopper(132)), "");
      }
    }
  }
}

// The catalogue of one recipe alone.
std::vector<GemmVariant> OnlyRecipe(std::string_view recipe) {
  std::vector<GemmVariant> variants;
  for (const GemmVariant& variant : GemmVariants()) {
    if (variant.info.recipe == recipe) variants.push_back(variant);
  }
  return variants;
}

TEST(GemmPlanner, ABackendWithoutKernelsIsUnimplementedWithTheReason) {
  const std::vector<GemmVariant> host_only = OnlyRecipe("reference");
  const GemmPlanner planner(host_only);
  for (const Backend backend : {Backend::kCuda, Backend::kVendor}) {
    const auto plan = planner.Decide({.gemm_class = kBf16Class, .m = 1, .n = 1, .k = 1}, {.backend = backend});
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(MessageOf(plan.status()), HasSubstr("bf16_bf16.bf16.fast.NT"));
    EXPECT_THAT(MessageOf(plan.status()), HasSubstr(std::string(kernels::BackendName(backend))));
  }
}

TEST(GemmPlanner, AClassWithoutKernelsIsUnimplementedWithTheReason) {
  const GemmPlanner planner(GemmVariants());
  GemmClass halves = kBf16Class;
  halves.a = DType::kF16;
  GemmClass chosen = kBf16Class;
  chosen.accumulation = kernels::Accumulation::kExact;
  for (const GemmClass& gemm_class : {halves, chosen}) {
    const auto plan = planner.Decide({.gemm_class = gemm_class, .m = 1, .n = 1, .k = 1}, Cpu(1));
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(MessageOf(plan.status()), HasSubstr(gemm_class.ToString()));
    EXPECT_THAT(MessageOf(plan.status()), HasSubstr("cpu"));
  }
}

TEST(GemmPlanner, UsesWhatTheCatalogueHas) {
  const std::vector<GemmVariant> reference = OnlyRecipe("reference");
  const GemmPlanner planner(reference);
  const auto large = planner.Decide({.gemm_class = kBf16Class, .m = 512, .n = 512, .k = 512}, Cpu(4));
  ASSERT_TRUE(large.ok()) << large.status();
  EXPECT_EQ(reference[large->variant].info.recipe, "reference");
  EXPECT_TRUE(reference[large->variant].gemm_class == kBf16Class);

  const std::vector<GemmVariant> split = OnlyRecipe("splitk_48x48x512");
  ASSERT_FALSE(split.empty());
  const GemmProblem long_k = {.gemm_class = kBf16Class, .m = 64, .n = 64, .k = 8192};
  EXPECT_TRUE(GemmPlanner(split).Decide(long_k, Cpu(4)).ok());
  const auto none = GemmPlanner(split).Decide(long_k, Cpu(4, 0));
  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnimplemented);
  for (const char* part : {"bf16_bf16.bf16.fast.NT", "M=64", "N=64", "K=8192", "cpu"}) {
    EXPECT_THAT(MessageOf(none.status()), HasSubstr(part));
  }
  EXPECT_EQ(GemmPlanner({}).Decide(long_k, Cpu(4)).status().code(), absl::StatusCode::kUnimplemented);
}

// --- Golden plans ----------------------------------------------------------------------------------------------------

constexpr std::string_view kArrow = " -> ";

struct Question {
  GemmProblem problem;
  DeviceFacts facts;
};

// What runs on the least device of a tree.
kernels::ArchSet ArchsOf(Arch arch) {
  kernels::ArchSet archs = {arch};
  if (arch == Arch::kSm89 || arch == Arch::kSm90a) archs.Add(Arch::kSm80);
  if (arch == Arch::kSm90a) archs.Add(Arch::kSm89);
  return archs;
}

// "<class> batch=1 m=2 n=3 k=4 threads=8 scratch=67108864"; nullopt unless every field is there once, and no other. The
// class's architecture says what device it is. A further field `strided=1`: operands that only the portable trees can
// address.
std::optional<Question> ParseQuestion(const std::string& text) {
  std::istringstream words(text);
  std::string class_name;
  words >> class_name;
  const auto named = kernels::ParseGemmClass(class_name);
  if (!named.has_value()) return std::nullopt;
  std::map<std::string, std::int64_t> fields;
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) return std::nullopt;
    std::istringstream number(word.substr(equals + 1));
    std::int64_t value = 0;
    number >> value;
    if (number.fail() || !number.eof() || !fields.emplace(word.substr(0, equals), value).second) return std::nullopt;
  }
  for (const char* key : {"batch", "m", "n", "k", "threads", "scratch"}) {
    if (!fields.contains(key)) return std::nullopt;
  }
  const bool strided = fields.contains("strided");
  if (fields.size() != (strided ? 7 : 6)) return std::nullopt;
  GemmProblem problem = {
      .gemm_class = named->gemm_class, .batch = fields["batch"], .m = fields["m"], .n = fields["n"], .k = fields["k"]};
  if (strided) problem.addressable = {Arch::kCpu, Arch::kSm80, Arch::kSm89};
  return Question{.problem = problem,
                  .facts = {.backend = kernels::BackendOf(named->arch),
                            .archs = ArchsOf(named->arch),
                            .processors = static_cast<int>(fields["threads"]),
                            .workspace_bytes_max = fields["scratch"]}};
}

std::string Answer(const GemmPlanner& planner, const Question& question) {
  const auto plan = planner.Decide(question.problem, question.facts);
  std::ostringstream text;
  if (!plan.ok()) {
    text << absl::StatusCodeToString(plan.status().code()) << ": " << MessageOf(plan.status());
    return text.str();
  }
  text << RecipeOf(*plan) << " split=" << plan->split << " raster=" << plan->raster
       << " workspace=" << plan->workspace_bytes << " by=" << SourceName(plan->source);
  return text.str();
}

TEST(GemmPlanner, AgreesWithTheGoldenPlans) {
  const GemmPlanner planner(GemmVariants());
  std::ifstream file(TESSERA_GEMM_PLANS_GOLDEN);
  ASSERT_TRUE(file.is_open()) << TESSERA_GEMM_PLANS_GOLDEN;
  const bool update = std::getenv("TESSERA_UPDATE_GOLDEN") != nullptr;
  std::string rewritten;
  std::set<std::string> questions;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') {
      rewritten += line + "\n";
      continue;
    }
    const std::string left = line.substr(0, line.find(kArrow));
    const auto question = ParseQuestion(left);
    ASSERT_TRUE(question.has_value()) << "not a problem: " << line;
    EXPECT_TRUE(questions.insert(left).second) << "stands twice: " << left;
    const std::string now = left + std::string(kArrow) + Answer(planner, *question);
    if (!update) {
      EXPECT_EQ(now, line) << "if intended: TESSERA_UPDATE_GOLDEN=1";
    }
    rewritten += now + "\n";
  }
  EXPECT_GE(questions.size(), 40U);
  if (!update || HasFailure()) return;
  file.close();
  std::ofstream output(TESSERA_GEMM_PLANS_GOLDEN, std::ios::trunc);
  output << rewritten;
  EXPECT_TRUE(output.flush().good()) << TESSERA_GEMM_PLANS_GOLDEN;
}

}  // namespace
}  // namespace tessera::planner
