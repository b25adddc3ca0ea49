// Host side that the Hopper kernels share: what a launch needs beside its arguments.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/catalog/variant.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/tile_walk.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

template <typename Kernel>
cudaError_t PrepareKernel(const Kernel& kernel, std::uint32_t shared_bytes, int threads, KernelFacts& facts) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes = {};
  error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  facts.registers = attributes.numRegs;
  facts.local_bytes = static_cast<int>(attributes.localSizeBytes);
  facts.shared_bytes = static_cast<int>(attributes.sharedSizeBytes + shared_bytes);
  facts.threads = threads;
  return cudaSuccess;
}

// A persistent grid: as many clusters as run at once, or as there are units.
struct GridShape {
  std::uint32_t units = 0;
  std::uint32_t cluster = 1;  // blocks
  std::uint32_t threads = 0;  // a block
  std::uint32_t shared_bytes = 0;
};

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchPersistent(void (*kernel)(Parameters...), const GridShape& shape, void* stream,
                             const Arguments&... arguments) {
  int ordinal = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error != cudaSuccess) return error;
  int processors = 0;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, ordinal);
  if (error != cudaSuccess) return error;
  const std::uint32_t clusters =
      std::min(shape.units, static_cast<std::uint32_t>(ClustersAtOnce(processors, static_cast<int>(shape.cluster))));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = shape.cluster;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  // The kernel may start before the one ahead of it in the stream has ended, and waits for that by itself
  // (kernels/device/grid_order.cuh).
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * shape.cluster);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The walk over a problem in units of unit_m x unit_n outputs and steps of step_k.
inline TileGrid GridOf(const GemmParams& params, std::int64_t unit_m, std::int64_t unit_n, std::int64_t step_k,
                       std::uint32_t raster) {
  const auto count = [](std::int64_t extent, std::int64_t tile) {
    return static_cast<std::uint32_t>((extent + tile - 1) / tile);
  };
  TileGrid grid;
  grid.m_tiles = count(params.m, unit_m);
  grid.n_tiles = count(params.n, unit_n);
  grid.k_tiles = count(params.k, step_k);
  grid.tiles = static_cast<std::uint32_t>(CountTiles(params, unit_m, unit_n));
  grid.raster = std::max(1U, std::min(raster, grid.m_tiles));
  grid.batch_1 = static_cast<std::uint32_t>(params.batch_shape[1]);
  grid.batch_2 = static_cast<std::uint32_t>(params.batch_shape[2]);
  return grid;
}

}  // namespace tessera::kernels::sm90a
