// The fuzzer's seeds, each through the function that the fuzzer drives: the name says how it ends, and a line
// "# Refused: <text>" with what the refusal begins. Seeds are text (`.textproto`) but for bytes that are no request
// (`.bin`).
#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/v1/compute.pb.h"
#include "tests/fuzz/gemm_request.h"

namespace tessera::fuzz {
namespace {

using ::testing::StartsWith;

struct Seed {
  std::string name;
  std::string bytes;    // of the request
  std::string refusal;  // how its message begins; empty where the seed names none
};

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Seed ReadSeed(const std::filesystem::path& path) {
  Seed seed{.name = path.stem().string(), .bytes = ReadFile(path)};
  if (path.extension() != ".textproto") return seed;
  v1::GemmRequest request;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(seed.bytes, &request)) << path;
  std::istringstream lines(seed.bytes);
  constexpr std::string_view kMark = "# Refused: ";
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(kMark)) seed.refusal = line.substr(kMark.size());
  }
  seed.bytes = request.SerializeAsString();
  return seed;
}

std::vector<Seed> ReadSeeds() {
  std::vector<Seed> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_FUZZ_CORPUS "/gemm_request")) {
    seeds.push_back(ReadSeed(entry.path()));
  }
  std::sort(seeds.begin(), seeds.end(), [](const Seed& a, const Seed& b) { return a.name < b.name; });
  return seeds;
}

std::string_view NameOf(Outcome outcome) {
  return kOutcomeNames[static_cast<std::size_t>(outcome)];
}

TEST(GemmRequestCorpus, EverySeedEndsAsItsNameSays) {
  for (const Seed& seed : ReadSeeds()) {
    SCOPED_TRACE(seed.name);
    std::string refusal;
    const Outcome outcome = DriveGemmRequest(seed.bytes, &refusal);
    EXPECT_THAT(seed.name, StartsWith(std::string(NameOf(outcome)) + "_")) << refusal;
    EXPECT_THAT(refusal, StartsWith(seed.refusal));
    const bool refused = outcome != Outcome::kBound && outcome != Outcome::kUnparsable;
    EXPECT_EQ(refused, !seed.refusal.empty()) << "a seed that is refused says how, and no other";
    EXPECT_EQ(DriveGemmRequest(seed.bytes), outcome) << "the second time";
  }
}

TEST(GemmRequestCorpus, EveryOutcomeHasSeedsAndOneInFiveBinds) {
  const std::vector<Seed> seeds = ReadSeeds();
  std::map<Outcome, std::size_t> counts;
  for (const Seed& seed : seeds) ++counts[DriveGemmRequest(seed.bytes)];
  for (std::size_t i = 0; i < kOutcomeNames.size(); ++i) {
    const std::size_t count = counts[static_cast<Outcome>(i)];
    std::cout << kOutcomeNames[i] << ": " << count << " of " << seeds.size() << " seeds\n";
    EXPECT_GT(count, 0U) << kOutcomeNames[i];
  }
  EXPECT_GE(5 * counts[Outcome::kBound], seeds.size());
}

}  // namespace
}  // namespace tessera::fuzz
