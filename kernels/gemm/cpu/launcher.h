// The macro that generated translation units expand: one GemmEntry a variant over the template that its row names.
#pragma once

#include "kernels/catalog/gemm_class.h"
#include "kernels/gemm/cpu/tile_shape.h"
#include "kernels/gemm/gemm_entry.h"

#define TESSERA_GEMM_CPU_LAUNCHER(symbol, class_name, launcher, tile_m, tile_n, tile_k, stages)               \
  namespace tessera::kernels {                                                                                \
  static_assert((stages) == 0, "CPU variants have no pipeline stages");                                       \
  extern const GemmEntry symbol;                                                                              \
  const GemmEntry symbol = {                                                                                  \
      .launch = &launcher<ParseGemmClass(class_name)->gemm_class.a, ParseGemmClass(class_name)->gemm_class.b, \
                          ParseGemmClass(class_name)->gemm_class.out, cpu::Tile<tile_m, tile_n, tile_k>>};    \
  }
