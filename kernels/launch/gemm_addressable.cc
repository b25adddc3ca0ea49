#include "kernels/launch/gemm_addressable.h"

#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/vendor/legality.h"

namespace tessera::kernels {
namespace {

// The smallest tile of a Hopper variant: fewer tiles than with it are legal for all.
constexpr std::int64_t kLeastTileM = 16;
constexpr std::int64_t kLeastTileN = 32;

}  // namespace

ArchSet AddressableBy(const GemmClass& gemm_class, const GemmParams& params) {
  ArchSet archs = {Arch::kCpu, Arch::kSm80, Arch::kSm89};
  if (sm90a::GemmIllegal(params, gemm_class, kLeastTileM, kLeastTileN).empty()) archs.Add(Arch::kSm90a);
  if (VendorIllegal(params, gemm_class).empty()) archs.Add(Arch::kVendor);
  return archs;
}

}  // namespace tessera::kernels
