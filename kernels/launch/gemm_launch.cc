#include "kernels/launch/gemm_launch.h"

#include <iterator>

#include "kernels/catalog/gemm_catalog.h"
#include "kernels/gemm/gemm_entry.h"

namespace tessera::kernels {

// Trees that this build has compiled; the build system says which CUDA ones.
#define TESSERA_GEMM_ENTRY_cpu(symbol) &symbol
#ifdef TESSERA_CUDA_SM80
#define TESSERA_GEMM_ENTRY_sm80(symbol) &symbol
#define TESSERA_GEMM_ENTRY_vendor(symbol) &symbol
#else
#define TESSERA_GEMM_ENTRY_sm80(symbol) nullptr
#define TESSERA_GEMM_ENTRY_vendor(symbol) nullptr
#endif
#ifdef TESSERA_CUDA_SM89
#define TESSERA_GEMM_ENTRY_sm89(symbol) &symbol
#else
#define TESSERA_GEMM_ENTRY_sm89(symbol) nullptr
#endif
#ifdef TESSERA_CUDA_SM90A
#define TESSERA_GEMM_ENTRY_sm90a(symbol) &symbol
#else
#define TESSERA_GEMM_ENTRY_sm90a(symbol) nullptr
#endif

#define TESSERA_GEMM_VARIANT(arch, symbol, ...) extern const GemmEntry symbol;
#include "kernels/gemm/gemm_variants.inc"
#undef TESSERA_GEMM_VARIANT

namespace {

#define TESSERA_GEMM_VARIANT(arch, symbol, ...) TESSERA_GEMM_ENTRY_##arch(symbol),
constexpr const GemmEntry* kEntries[] = {
#include "kernels/gemm/gemm_variants.inc"
};
#undef TESSERA_GEMM_VARIANT

bool HasWork(const GemmParams& params) {
  for (const std::int64_t extent : params.batch_shape) {
    if (extent == 0) return false;
  }
  return params.m > 0 && params.n > 0;
}

bool ShapeFits(const GemmVariant& variant, const GemmParams& params, const LaunchShape& shape,
               const LaunchContext& context) {
  if (shape.split < 1) return false;
  if (!TakesSplit(variant.info.workspace) && shape.split != 1) return false;
  std::int64_t batch = 1;
  for (const std::int64_t extent : params.batch_shape) batch *= extent;
  const auto needed = GemmWorkspaceBytes(variant, batch, params.m, params.n, params.k, shape.split);
  return needed.has_value() && static_cast<std::uint64_t>(*needed) <= context.workspace.bytes;
}

}  // namespace

bool GemmBuilt(std::size_t index) {
  return index < std::size(kEntries) && kEntries[index] != nullptr;
}

LaunchError PrepareGemm(std::size_t index, KernelFacts& facts) {
  facts = {};
  if (!GemmBuilt(index)) return kLaunchInvalidValue;
  return kEntries[index]->prepare == nullptr ? kLaunchOk : kEntries[index]->prepare(facts);
}

LaunchError LaunchGemm(std::size_t index, const GemmParams& params, const LaunchShape& shape,
                       const LaunchContext& context) {
  if (!GemmBuilt(index)) return kLaunchInvalidValue;
  if (!HasWork(params)) return kLaunchOk;
  if (!ShapeFits(GemmVariants()[index], params, shape, context)) return kLaunchInvalidValue;
  return kEntries[index]->launch(params, shape, context);
}

}  // namespace tessera::kernels
