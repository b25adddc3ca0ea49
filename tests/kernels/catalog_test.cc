// The GEMM catalogue: ids, classes, coverage and workspace arithmetic.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/catalog/gemm_catalog.h"

namespace tessera::kernels {
namespace {

constexpr std::pair<DType, DType> kPairs[] = {
    {DType::kBf16, DType::kBf16}, {DType::kE4m3, DType::kE4m3}, {DType::kE4m3, DType::kE5m2},
    {DType::kE5m2, DType::kE4m3}, {DType::kE5m2, DType::kE5m2}, {DType::kS8, DType::kS8},
    {DType::kBf16, DType::kS8},   {DType::kS8, DType::kBf16},
};

std::set<std::string_view> CpuRecipes(const GemmClass& gemm_class) {
  std::set<std::string_view> recipes;
  for (const GemmVariant& variant : GemmVariants()) {
    if (variant.info.backend == Backend::kCpu && variant.gemm_class == gemm_class) recipes.insert(variant.info.recipe);
  }
  return recipes;
}

GemmVariant VariantWith(WorkspaceRule rule, DType a, DType b) {
  GemmVariant variant;
  variant.info.workspace = rule;
  variant.gemm_class = {.a = a, .b = b, .out = DType::kF32};
  return variant;
}

TEST(GemmCatalogue, IdsAreUniqueAndMadeOfClassAndRecipe) {
  std::set<std::string_view> ids;
  for (const GemmVariant& variant : GemmVariants()) {
    EXPECT_TRUE(ids.insert(variant.info.id).second) << variant.info.id;
    EXPECT_EQ(variant.info.id, std::string(variant.info.class_name) + "/" + std::string(variant.info.recipe));
  }
  EXPECT_FALSE(ids.empty());
}

TEST(GemmCatalogue, EveryClassNameParsesBackToItself) {
  for (const GemmVariant& variant : GemmVariants()) {
    const auto parsed = ParseGemmClass(variant.info.class_name);
    ASSERT_TRUE(parsed.has_value()) << variant.info.class_name;
    EXPECT_EQ(parsed->arch, variant.info.arch) << variant.info.id;
    EXPECT_EQ(BackendOf(parsed->arch), variant.info.backend) << variant.info.id;
    EXPECT_TRUE(parsed->gemm_class == variant.gemm_class) << variant.info.id;
    const std::string rest = variant.gemm_class.ToString();
    ASSERT_TRUE(variant.info.class_name.ends_with("." + rest)) << variant.info.class_name;
    const std::string_view head = variant.info.class_name.substr(0, variant.info.class_name.size() - rest.size());
    EXPECT_EQ(head, "gemm." + std::string(ArchName(variant.info.arch)) + ".");
  }
}

TEST(GemmCatalogue, MalformedClassNamesDoNotParse) {
  for (const std::string_view name : {"",
                                      "gemm",
                                      "gemm.cpu",
                                      "attention.cpu.bf16_bf16.bf16.fast.NT",
                                      "gemm.tpu.bf16_bf16.bf16.fast.NT",
                                      "gemm..bf16_bf16.bf16.fast.NT",
                                      "gemm.cpu.bf16.bf16.fast.NT",
                                      "gemm.cpu.bf16_.bf16.fast.NT",
                                      "gemm.cpu._bf16.bf16.fast.NT",
                                      "gemm.cpu.bf16_bf16_bf16.bf16.fast.NT",
                                      "gemm.cpu.bf16_bf17.bf16.fast.NT",
                                      "gemm.cpu.bf16_bf16.fast.NT",
                                      "gemm.cpu.bf16_bf16.f64.fast.NT",
                                      "gemm.cpu.bf16_bf16.bf16.slow.NT",
                                      "gemm.cpu.bf16_bf16.bf16.fast",
                                      "gemm.cpu.bf16_bf16.bf16.fast.",
                                      "gemm.cpu.bf16_bf16.bf16.fast.nt",
                                      "gemm.cpu.bf16_bf16.bf16.fast.NT.",
                                      "gemm.cpu.bf16_bf16.bf16.fast.NTN",
                                      "GEMM.cpu.bf16_bf16.bf16.fast.NT"}) {
    EXPECT_FALSE(ParseGemmClass(name).has_value()) << name;
  }
}

TEST(GemmCatalogue, ArchitecturesNameTheirBackend) {
  EXPECT_EQ(BackendOf(ParseGemmClass("gemm.cpu.bf16_bf16.bf16.fast.NT")->arch), Backend::kCpu);
  EXPECT_EQ(BackendOf(ParseGemmClass("gemm.sm90a.bf16_bf16.bf16.fast.NT")->arch), Backend::kCuda);
  EXPECT_EQ(BackendOf(ParseGemmClass("gemm.vendor.bf16_bf16.bf16.fast.NT")->arch), Backend::kVendor);
}

TEST(GemmCatalogue, KeysOfDifferentClassesDiffer) {
  std::map<std::uint32_t, GemmClass> by_key;
  for (const GemmVariant& variant : GemmVariants()) {
    const GemmClass& first = by_key.emplace(variant.gemm_class.Key(), variant.gemm_class).first->second;
    EXPECT_TRUE(first == variant.gemm_class) << variant.info.id;
  }
}

TEST(GemmCatalogue, TheHostHasThreeRecipesForEveryClass) {
  std::size_t classes = 0;
  for (const auto& [a, b] : kPairs) {
    for (const DType out : {DType::kBf16, DType::kF32}) {
      for (const GemmLayout layout : {GemmLayout::kNT, GemmLayout::kNN, GemmLayout::kTN, GemmLayout::kTT}) {
        for (const Accumulation accumulation : {Accumulation::kFast, Accumulation::kExact}) {
          const bool offered = accumulation == Accumulation::kFast || (IsFp8(a) && IsFp8(b));
          const GemmClass c = {.a = a, .b = b, .out = out, .accumulation = accumulation, .layout = layout};
          if (offered) {
            EXPECT_GE(CpuRecipes(c).size(), 3U) << c.ToString();
            ++classes;
          } else {
            EXPECT_TRUE(CpuRecipes(c).empty()) << c.ToString();
          }
        }
      }
    }
  }
  std::set<std::uint32_t> keys;
  for (const GemmVariant& variant : GemmVariants()) {
    if (variant.info.backend == Backend::kCpu) keys.insert(variant.gemm_class.Key());
  }
  EXPECT_EQ(keys.size(), classes) << "a class that this test does not list";
}

TEST(GemmCatalogue, RowsStateTileAndSourceHash) {
  std::map<std::string_view, std::string_view> hashes;  // recipe -> hash
  for (const GemmVariant& variant : GemmVariants()) {
    EXPECT_GT(variant.tile.m, 0) << variant.info.id;
    EXPECT_GT(variant.tile.n, 0) << variant.info.id;
    EXPECT_GT(variant.tile.k, 0) << variant.info.id;
    EXPECT_EQ(variant.info.source_hash.size(), 16U) << variant.info.id;
    EXPECT_EQ(variant.info.source_hash.find_first_not_of("0123456789abcdef"), std::string_view::npos);
    if (variant.info.backend != Backend::kCpu) continue;
    const auto [at, inserted] = hashes.emplace(variant.info.recipe, variant.info.source_hash);
    EXPECT_EQ(at->second, variant.info.source_hash) << "one row, one hash: " << variant.info.id;
  }
  std::set<std::string_view> distinct;
  for (const auto& [recipe, hash] : hashes) distinct.insert(hash);
  EXPECT_EQ(distinct.size(), hashes.size()) << "different rows, different hashes";
}

TEST(GemmCatalogue, FindsVariantsByIdOnly) {
  const auto variants = GemmVariants();
  for (std::size_t i = 0; i < variants.size(); ++i) EXPECT_EQ(FindGemmVariant(variants[i].info.id), i);
  const std::string id(variants.front().info.id);
  for (const std::string& other : {std::string(), id + "x", id.substr(0, id.size() - 1), id + " ",
                                   std::string(variants.front().info.class_name), std::string("gemm")}) {
    EXPECT_EQ(FindGemmVariant(other), std::nullopt) << other;
  }
}

TEST(GemmWorkspace, IsAccumulatorsOfSplitBatchMAndN) {
  const GemmVariant floats = VariantWith(WorkspaceRule::kSplitPartials, DType::kBf16, DType::kS8);
  const GemmVariant integers = VariantWith(WorkspaceRule::kSplitPartials, DType::kS8, DType::kS8);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 2, 3, 5, 1, 7), 4 * 2 * 3 * 5 * 7);
  EXPECT_EQ(GemmWorkspaceBytes(integers, 2, 3, 5, 1, 7), 8 * 2 * 3 * 5 * 7);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 0, 3, 5, 1, 7), 0);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, 0, 5, 1, 7), 0);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, 65'536, 65'536, 1, 2), std::int64_t{1} << 35);
}

TEST(GemmWorkspace, IsNothingForVariantsThatTakeNone) {
  for (const WorkspaceRule rule : {WorkspaceRule::kNone, WorkspaceRule::kCluster}) {
    EXPECT_EQ(GemmWorkspaceBytes(VariantWith(rule, DType::kBf16, DType::kBf16), 1, 16, 4096, 1, 8), 0);
  }
  const GemmVariant variant = VariantWith(WorkspaceRule::kNone, DType::kS8, DType::kS8);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(GemmWorkspaceBytes(variant, kMax, kMax, kMax, 1, 1), 0);
}

TEST(GemmWorkspace, OfALibraryIsFixed) {
  const GemmVariant variant = VariantWith(WorkspaceRule::kLibrary, DType::kBf16, DType::kBf16);
  EXPECT_EQ(GemmWorkspaceBytes(variant, 1, 1, 1, 1, 1), kLibraryWorkspaceBytes);
  EXPECT_EQ(GemmWorkspaceBytes(variant, 9, 4096, 4096, 1, 1), kLibraryWorkspaceBytes);
  EXPECT_EQ(GemmWorkspaceBytes(variant, 1, 0, 4096, 1, 1), 0);
}

TEST(GemmWorkspace, OfPackedOperandsIsAllOfThemOrEnoughForParts) {
  GemmVariant variant = VariantWith(WorkspaceRule::kPacked, DType::kE4m3, DType::kE4m3);
  variant.tile = {.m = 128, .n = 256, .k = 128};
  // Rows of 112 bytes for K = 100.
  EXPECT_EQ(GemmWorkspaceBytes(variant, 2, 3, 5, 100, 1), 2 * (3 + 5) * 112 + 2 * kPackAlignment);
  EXPECT_EQ(GemmWorkspaceBytes(variant, 1, 3, 0, 100, 1), 0);
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  EXPECT_EQ(GemmWorkspaceBytes(variant, 1, 8192, 57344, 8192, 1), 64 * kMiB);
  EXPECT_EQ(GemmWorkspaceBytes(variant, std::int64_t{1} << 40, 65536, 65536, 65536, 1), 64 * kMiB);
  // A tile of each, however long.
  EXPECT_EQ(GemmWorkspaceBytes(variant, 1, 8192, 8192, kMiB, 1), (128 + 256) * kMiB + 2 * kPackAlignment);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(GemmWorkspaceBytes(variant, kMax, kMax, kMax, 1, 1), 64 * kMiB);
  EXPECT_EQ(GemmWorkspaceBytes(variant, 1, 1, 1, kMax, 1), std::nullopt);
}

TEST(GemmWorkspace, PackingTakesWhatTheCopyEngineCountsAndInt32Sums) {
  const GemmClass floats = {.a = DType::kE4m3, .b = DType::kE5m2};
  const GemmClass integers = {.a = DType::kS8, .b = DType::kS8};
  constexpr std::int64_t kLargest = (std::int64_t{1} << 31) - 1;
  EXPECT_TRUE(PackedTakes(floats, kLargest, kLargest, kLargest));
  EXPECT_FALSE(PackedTakes(floats, kLargest + 1, 1, 1));
  EXPECT_FALSE(PackedTakes(floats, 1, kLargest + 1, 1));
  EXPECT_FALSE(PackedTakes(floats, 1, 1, kLargest + 1));
  EXPECT_TRUE(PackedTakes(integers, 1, 1, (1 << 17) - 1));
  EXPECT_FALSE(PackedTakes(integers, 1, 1, 1 << 17));
}

TEST(GemmWorkspace, BeyondSixtyThreeBitsIsNullopt) {
  const GemmVariant floats = VariantWith(WorkspaceRule::kSplitPartials, DType::kBf16, DType::kBf16);
  const GemmVariant integers = VariantWith(WorkspaceRule::kSplitPartials, DType::kS8, DType::kS8);
  constexpr std::int64_t kTwo31 = std::int64_t{1} << 31;
  constexpr std::int64_t kLargest = (std::int64_t{1} << 61) - 1;  // float32 accumulators below 2^63 bytes
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, kLargest, 1, 1, 1), kLargest * 4);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, kLargest + 1, 1, 1, 1), std::nullopt);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, 1, kLargest, 1, 2), std::nullopt);
  EXPECT_EQ(GemmWorkspaceBytes(floats, kTwo31, kTwo31, 1, 1, 1), std::nullopt);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, kTwo31, kTwo31 / 2, 1, 1), std::nullopt);
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, kTwo31, kTwo31 / 4, 1, 1), std::int64_t{1} << 62);
  EXPECT_EQ(GemmWorkspaceBytes(integers, 1, kTwo31, kTwo31 / 4, 1, 1), std::nullopt);
  // 2^64 + 2^34 bytes would wrap to a small positive number.
  EXPECT_EQ(GemmWorkspaceBytes(floats, 1, kTwo31, kTwo31 + 2, 1, 1), std::nullopt);
}

}  // namespace
}  // namespace tessera::kernels
