// The macro that generated translation units expand: one launcher function a variant, named by its symbol, over the
// template that its row names.
#pragma once

#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/cpu/tile_shape.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"

#define TESSERA_GEMM_CPU_LAUNCHER(symbol, class_name, launcher, tile_m, tile_n, tile_k)                         \
  namespace tessera::kernels {                                                                                  \
  LaunchError symbol(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context);         \
  LaunchError symbol(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {        \
    constexpr GemmClass kClass = ParseGemmClass(class_name).value().gemm_class;                                 \
    return launcher<kClass.a, kClass.b, kClass.out, cpu::Tile<tile_m, tile_n, tile_k>>(params, shape, context); \
  }                                                                                                             \
  }
