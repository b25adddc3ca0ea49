// What every kernel variant says about itself, whatever its family. No CUDA, no gRPC: planner, server, metrics and
// tests read the catalogue.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace tessera::kernels {

// Values equal `tessera.v1.Backend` less AUTO; see server/rpc/decode.cc.
enum class Backend : std::uint8_t { kCpu, kCuda, kVendor };
inline constexpr std::string_view kBackendNames[] = {"cpu", "cuda", "vendor"};
constexpr std::string_view BackendName(Backend backend) {
  return kBackendNames[static_cast<int>(backend)];
}

// The tree of sources that a variant is compiled from, by the least processor that it runs on. sm80 and sm89 run on
// every later GPU too; sm90a uses instructions that only Hopper has.
enum class Arch : std::uint8_t { kCpu, kSm80, kSm89, kSm90a, kVendor };
inline constexpr std::string_view kArchNames[] = {"cpu", "sm80", "sm89", "sm90a", "vendor"};
constexpr std::string_view ArchName(Arch arch) {
  return kArchNames[static_cast<int>(arch)];
}
constexpr Backend BackendOf(Arch arch) {
  switch (arch) {
    case Arch::kCpu:
      return Backend::kCpu;
    case Arch::kVendor:
      return Backend::kVendor;
    case Arch::kSm80:
    case Arch::kSm89:
    case Arch::kSm90a:
      break;
  }
  return Backend::kCuda;
}

// A set of trees.
class ArchSet {
 public:
  constexpr ArchSet() = default;
  constexpr ArchSet(std::initializer_list<Arch> archs) {
    for (const Arch arch : archs) Add(arch);
  }
  constexpr void Add(Arch arch) { bits_ |= Bit(arch); }
  constexpr void Remove(Arch arch) { bits_ &= ~Bit(arch); }
  constexpr bool Has(Arch arch) const { return (bits_ & Bit(arch)) != 0; }
  // One bit a tree; equal sets have equal bits.
  constexpr std::uint32_t bits() const { return bits_; }
  friend constexpr bool operator==(const ArchSet&, const ArchSet&) = default;

 private:
  static constexpr std::uint32_t Bit(Arch arch) { return std::uint32_t{1} << static_cast<unsigned>(arch); }
  std::uint32_t bits_ = 0;
};

// Bytes of scratch that a launch needs, as a rule that the plan evaluates.
enum class WorkspaceRule : std::uint8_t {
  kNone,
  kSplitPartials,  // split x batch x M x N accumulators
  kCluster,        // none: the slices of K meet in the shared memory of a cluster of blocks
  kPacked,         // operands that are copied first, as far as they fit PackedWorkspaceBytes
  kLibrary,        // kLibraryWorkspaceBytes, whatever the problem
};

// Whether a launch may cut K into slices.
constexpr bool TakesSplit(WorkspaceRule rule) {
  return rule == WorkspaceRule::kSplitPartials || rule == WorkspaceRule::kCluster;
}

inline constexpr int kClusterLimit = 8;  // blocks; more are not portable

// Slices of K that the blocks of a cluster share: as many as leave room for what a block receives.
constexpr bool LegalClusterSplit(int split) {
  return (split >= 1 && split <= 4) || split == kClusterLimit;
}

// Clusters of that many blocks that run at once. The multiprocessors of a Hopper come in pairs and, of those that are
// on, in at least 16 a cluster's reach.
constexpr int ClustersAtOnce(int processors, int blocks) {
  constexpr int kReach = 16;
  if (blocks <= 2) return processors / blocks > 0 ? processors / blocks : 1;
  const int clusters = processors / kReach * (kReach / blocks);
  return clusters > 0 ? clusters : 1;
}

// What a vendor library may use. cuBLASLt's own advice for Hopper.
inline constexpr std::int64_t kLibraryWorkspaceBytes = std::int64_t{32} << 20;

struct VariantInfo {
  std::string_view id;          // class/recipe: the one key, in plans, metrics, logs, tests and reports
  std::string_view class_name;  // what is asked, such as gemm.cpu.bf16_bf16.bf16.fast.NT
  std::string_view recipe;      // how it is done, such as blocked_96x96x256
  Arch arch = Arch::kCpu;
  Backend backend = Backend::kCpu;
  WorkspaceRule workspace = WorkspaceRule::kNone;
  std::string_view source_hash;  // of the row and its sources; keys measured plans
};

}  // namespace tessera::kernels
