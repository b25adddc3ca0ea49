#include "kernels/launch/gemm_launch.h"

#include <iterator>

#include "kernels/catalog/gemm_catalog.h"

namespace tessera::kernels {

using GemmLauncher = LaunchError (*)(const GemmParams&, const LaunchShape&, const LaunchContext&);

#define TESSERA_GEMM_VARIANT(symbol, ...) \
  LaunchError symbol(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context);
#include "kernels/gemm/gemm_variants.inc"
#undef TESSERA_GEMM_VARIANT

namespace {

#define TESSERA_GEMM_VARIANT(symbol, ...) &symbol,
constexpr GemmLauncher kLaunchers[] = {
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
  if (variant.info.workspace == WorkspaceRule::kNone) return shape.split == 1;
  std::int64_t batch = 1;
  for (const std::int64_t extent : params.batch_shape) batch *= extent;
  const auto needed = GemmWorkspaceBytes(variant, batch, params.m, params.n, shape.split);
  return needed.has_value() && static_cast<std::uint64_t>(*needed) <= context.workspace.bytes;
}

}  // namespace

LaunchError LaunchGemm(std::size_t index, const GemmParams& params, const LaunchShape& shape,
                       const LaunchContext& context) {
  if (index >= std::size(kLaunchers)) return kLaunchInvalidValue;
  if (!HasWork(params)) return kLaunchOk;
  if (!ShapeFits(GemmVariants()[index], params, shape, context)) return kLaunchInvalidValue;
  return kLaunchers[index](params, shape, context);
}

}  // namespace tessera::kernels
