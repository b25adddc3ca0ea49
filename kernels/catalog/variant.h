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
  constexpr bool Has(Arch arch) const { return (bits_ & Bit(arch)) != 0; }

 private:
  static constexpr std::uint32_t Bit(Arch arch) { return std::uint32_t{1} << static_cast<unsigned>(arch); }
  std::uint32_t bits_ = 0;
};

// Bytes of scratch that a launch needs, as a rule that the plan evaluates.
enum class WorkspaceRule : std::uint8_t {
  kNone,
  kSplitPartials,  // split x batch x M x N accumulators
  kLibrary,        // kLibraryWorkspaceBytes, whatever the problem
};

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
