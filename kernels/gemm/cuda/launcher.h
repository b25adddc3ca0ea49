// The macro that generated CUDA translation units expand: one GemmEntry a variant over the template that its row names,
//
//   template <DType kA, DType kB, DType kOut, Accumulation kAccumulation, GemmLayout kLayout, typename Tile>
//   struct Launcher {
//     static cudaError_t Launch(const GemmParams&, const LaunchShape&, const LaunchContext&);
//     static cudaError_t Prepare(KernelFacts&);
//   };
#pragma once

#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/cuda/tile_shape.h"
#include "kernels/gemm/gemm_entry.h"

#define TESSERA_GEMM_CUDA_LAUNCHER(symbol, class_name, launcher, tile_m, tile_n, tile_k, stages)                      \
  namespace tessera::kernels {                                                                                        \
  using symbol##_kernel =                                                                                             \
      launcher<ParseGemmClass(class_name)->gemm_class.a, ParseGemmClass(class_name)->gemm_class.b,                    \
               ParseGemmClass(class_name)->gemm_class.out, ParseGemmClass(class_name)->gemm_class.accumulation,       \
               ParseGemmClass(class_name)->gemm_class.layout, cuda::Tile<tile_m, tile_n, tile_k, stages>>;            \
  extern const GemmEntry symbol;                                                                                      \
  const GemmEntry symbol = {                                                                                          \
      .launch = [](const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) -> LaunchError { \
        return symbol##_kernel::Launch(params, shape, context);                                                       \
      },                                                                                                              \
      .prepare = [](KernelFacts& facts) -> LaunchError { return symbol##_kernel::Prepare(facts); }};                  \
  }
