#include "planner/known_devices.h"

#include <cstdint>

namespace tessera::planner {
namespace {

using kernels::Arch;
using kernels::Backend;

constexpr std::int64_t kKiB = 1024;
constexpr std::int64_t kMiB = 1024 * kKiB;
constexpr std::int64_t kWorkspace = 256 * kMiB;  // the default of gpu_workspace_bytes_max

// Shared memory and threads of a processor: CUDA C++ programming guide, table "technical specifications per compute
// capability" (8.0, 8.9, 9.0, 12.0); a block can have what a processor has, less 1 KiB. Processors and L2:
//   A100      "NVIDIA A100 Tensor Core GPU Architecture" (108 SMs, 40 MB)
//   L20       the AD102 of "NVIDIA Ada GPU Architecture" with 92 of its SMs and all of its 96 MB
//   H200      what its driver reports (cudaDeviceProp: 132 SMs, 62914560 bytes)
//   RTX 5090  "NVIDIA RTX Blackwell GPU Architecture" (170 SMs); deviceQuery says 100663296 bytes
constexpr KnownDevice kDevices[] = {
    {"a100",
     "NVIDIA A100 80 GB (sm_80)",
     {.backend = Backend::kCuda,
      .archs = {Arch::kSm80},
      .processors = 108,
      .workspace_bytes_max = kWorkspace,
      .l2_bytes = 40 * kMiB,
      .shared_bytes_per_block = 163 * kKiB,
      .shared_bytes_per_processor = 164 * kKiB,
      .threads_per_processor = 2048},
     "NVIDIA A100-SXM4-80GB"},
    {"l20",
     "NVIDIA L20 (sm_89)",
     {.backend = Backend::kCuda,
      .archs = {Arch::kSm80, Arch::kSm89},
      .processors = 92,
      .workspace_bytes_max = kWorkspace,
      .l2_bytes = 96 * kMiB,
      .shared_bytes_per_block = 99 * kKiB,
      .shared_bytes_per_processor = 100 * kKiB,
      .threads_per_processor = 1536},
     "NVIDIA L20"},
    {"h200",
     "NVIDIA H200 (sm_90)",
     {.backend = Backend::kCuda,
      .archs = {Arch::kSm80, Arch::kSm89, Arch::kSm90a},
      .processors = 132,
      .workspace_bytes_max = kWorkspace,
      .l2_bytes = 60 * kMiB,
      .shared_bytes_per_block = 227 * kKiB,
      .shared_bytes_per_processor = 228 * kKiB,
      .threads_per_processor = 2048},
     "NVIDIA H200"},
    {"rtx5090",
     "NVIDIA GeForce RTX 5090 (sm_120)",
     {.backend = Backend::kCuda,
      .archs = {Arch::kSm80, Arch::kSm89},
      .processors = 170,
      .workspace_bytes_max = kWorkspace,
      .l2_bytes = 96 * kMiB,
      .shared_bytes_per_block = 99 * kKiB,
      .shared_bytes_per_processor = 100 * kKiB,
      .threads_per_processor = 1536},
     "NVIDIA GeForce RTX 5090"},
};

}  // namespace

std::span<const KnownDevice> KnownDevices() {
  return kDevices;
}

const KnownDevice* FindDevice(std::string_view name) {
  for (const KnownDevice& device : kDevices) {
    if (device.name == name) return &device;
  }
  return nullptr;
}

}  // namespace tessera::planner
