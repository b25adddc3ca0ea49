// What every kernel variant says about itself, whatever its family. No CUDA, no gRPC: planner, server, metrics and
// tests read the catalogue.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::kernels {

// Values equal `tessera.v1.Backend` less AUTO; see server/rpc/decode.cc.
enum class Backend : std::uint8_t { kCpu, kCuda, kVendor };
inline constexpr std::string_view kBackendNames[] = {"cpu", "cuda", "vendor"};
constexpr std::string_view BackendName(Backend backend) {
  return kBackendNames[static_cast<int>(backend)];
}

// Bytes of scratch that a launch needs, as a rule that the plan evaluates.
enum class WorkspaceRule : std::uint8_t {
  kNone,
  kSplitPartials,  // split x batch x M x N accumulators
};

struct VariantInfo {
  std::string_view id;          // class/recipe: the one key, in plans, metrics, logs, tests and reports
  std::string_view class_name;  // what is asked, such as gemm.cpu.bf16_bf16.bf16.fast.NT
  std::string_view recipe;      // how it is done, such as blocked_96x96x256
  Backend backend = Backend::kCpu;
  WorkspaceRule workspace = WorkspaceRule::kNone;
  std::string_view source_hash;  // of the row and its sources; keys measured plans
};

}  // namespace tessera::kernels
