// The macro that generated vendor translation units expand: one GemmEntry a variant over the type that its row names
// (see CublasLt in vendor/cublaslt.h for its two functions). Tiles and stages are the library's own choice.
#pragma once

#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/gemm_entry.h"
#include "kernels/gemm/vendor/problem.h"

#define TESSERA_GEMM_VENDOR_LAUNCHER(symbol, class_name, launcher, tile_m, tile_n, tile_k, stages)                \
  namespace tessera::kernels {                                                                                    \
  static_assert((tile_m) == 1 && (tile_n) == 1 && (tile_k) == 1 && (stages) == 0, "the library tiles by itself"); \
  static_assert(vendor::IllegalClass(ParseGemmClass(class_name)->gemm_class).empty(), "no such product there");   \
  extern const GemmEntry symbol;                                                                                  \
  const GemmEntry symbol = {                                                                                      \
      .launch = [](const GemmParams& params, const LaunchShape&, const LaunchContext& context) -> LaunchError {   \
        return launcher::Launch(ParseGemmClass(class_name)->gemm_class, params, context);                         \
      },                                                                                                          \
      .prepare = &launcher::Prepare};                                                                             \
  }
