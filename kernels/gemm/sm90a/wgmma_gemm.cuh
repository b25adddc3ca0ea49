// GEMM for Hopper: the copy engine feeds a ring of stages in shared memory, tensor cores read it there. A block is
// three warpgroups, of which one keeps the ring full and two multiply, 64 rows of the tile each. The grid is
// persistent: a block a multiprocessor, tile after tile, and the ring fills for the next tile while this one is being
// stored.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "kernels/catalog/gemm_class.h"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/tensor_map.h"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm90a/legality.h"
#include "kernels/gemm/sm90a/ring.cuh"
#include "kernels/gemm/sm90a/store_tile.cuh"
#include "kernels/gemm/sm90a/tile_walk.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm90a {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kConsumers = 2;  // warpgroups; the producer is the one after them
inline constexpr int kConsumerWarps = kConsumers * kWarpgroupThreads / 32;
inline constexpr int kBlockThreads = (kConsumers + 1) * kWarpgroupThreads;
// A thread of a consumer holds up to 128 accumulators, the producer next to nothing.
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kProducerRegisters = 40;
static_assert(kWarpgroupThreads * (kConsumers * kConsumerRegisters + kProducerRegisters) <= 65536,
              "RaiseRegisters would wait for ever");

// Where in an input's tensor map the tile begins that starts at `row`; K is added as the ring goes. A batch dimension
// that the input repeats has extent 1 in its map.
__device__ __forceinline__ device::TensorCoordinates TileCoordinates(const GemmMatrix& matrix, const TileIndex& tile,
                                                                     std::uint32_t row) {
  device::TensorCoordinates box = {{0, static_cast<std::int32_t>(row), 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    box.at[4 - i] = matrix.batch_stride[i] == 0 ? 0 : static_cast<std::int32_t>(tile.batch[i]);
  }
  return box;
}

// One thread: fills stage after stage for all tiles of the block.
template <typename Tile, typename Stages>
__device__ __forceinline__ void Produce(const CUtensorMap& a_map, const CUtensorMap& b_map, const GemmParams& params,
                                        const TileGrid& grid, const Stages& ring) {
  if (grid.k_tiles == 0) return;  // there are no maps then
  device::PrefetchTensorMap(&a_map);
  device::PrefetchTensorMap(&b_map);
  RingPosition<Stages::kStages> at;
  for (std::uint32_t tile = blockIdx.x; tile < grid.tiles; tile += gridDim.x) {
    const TileIndex index = TileAt(grid, tile);
    device::TensorCoordinates a_box = TileCoordinates(params.a, index, index.m * Tile::kM);
    device::TensorCoordinates b_box = TileCoordinates(params.b, index, index.n * Tile::kN);
    for (std::uint32_t k = 0; k < grid.k_tiles; ++k) {
      a_box.at[0] = b_box.at[0] = static_cast<std::int32_t>(k * Tile::kK);
      device::MbarrierWait(ring.Empty(at.stage), at.parity ^ 1U);
      device::MbarrierArriveExpect(ring.Full(at.stage), Stages::kStageBytes);
      device::TmaLoad(ring.A(at.stage), &a_map, ring.Full(at.stage), a_box);
      device::TmaLoad(ring.B(at.stage), &b_map, ring.Full(at.stage), b_box);
      at.Advance();
    }
  }
}

// One consumer warpgroup: the products of its 64 rows over the whole of K. The products of a stage run while the stage
// before is given back, so that the tensor cores always have the next ones waiting.
template <typename Tile, typename Stages, int kCount>
__device__ __forceinline__ void MultiplyTile(const Stages& ring, RingPosition<Stages::kStages>& at, int consumer,
                                             std::uint32_t k_tiles, float (&acc)[kCount]) {
  constexpr std::uint32_t kStepBytes = 32;  // of K, in one instruction
  // Also what K = 0 leaves. A first product that ignores what the accumulators hold would spare these 128 moves a tile,
  // but then K = 0 is a second source of the accumulators, and merging the two costs more moves or spills.
#pragma unroll
  for (float& value : acc) value = 0.0F;
  const bool first_lane = threadIdx.x % 32 == 0;
  const std::uint32_t row_offset = consumer * device::WgmmaFragment::kRows * device::kSwizzleRowBytes;
  int previous = 0;
  for (std::uint32_t k = 0; k < k_tiles; ++k) {
    device::MbarrierWait(ring.Full(at.stage), at.parity);
    const std::uint64_t a = device::SwizzledOperand(ring.A(at.stage) + row_offset);
    const std::uint64_t b = device::SwizzledOperand(ring.B(at.stage));
    device::WgmmaFence();
#pragma unroll
    for (std::uint32_t step = 0; step < device::kSwizzleRowBytes; step += kStepBytes) {
      device::WgmmaBf16<Tile::kN>::Multiply(acc, device::AdvanceOperand(a, step), device::AdvanceOperand(b, step),
                                            true);
    }
    device::WgmmaCommit();
    device::WgmmaWait<1>();
    if (k > 0 && first_lane) device::MbarrierArrive(ring.Empty(previous));
    previous = at.stage;
    at.Advance();
  }
  device::WgmmaWait<0>();
  device::PinAccumulators(acc);
  if (k_tiles > 0 && first_lane) device::MbarrierArrive(ring.Empty(previous));
}

// One consumer warpgroup: all tiles of the block.
template <DType kOut, typename Tile, typename Stages>
__device__ __forceinline__ void Consume(const GemmParams& params, const TileGrid& grid, bool d_vectors,
                                        const Stages& ring, int consumer) {
  using Fragment = device::WgmmaFragment;
  RingPosition<Stages::kStages> at;
  for (std::uint32_t tile = blockIdx.x; tile < grid.tiles; tile += gridDim.x) {
    float acc[Fragment::kRows * Tile::kN / kWarpgroupThreads];
    MultiplyTile<Tile>(ring, at, consumer, grid.k_tiles, acc);
    const TileIndex index = TileAt(grid, tile);
    FragmentPlace place;
    for (int i = 0; i < kGemmBatchDimsMax; ++i) place.batch_offset += index.batch[i] * params.d.batch_stride[i];
    place.row = std::int64_t{index.m} * Tile::kM + consumer * Fragment::kRows + Fragment::FirstRow(threadIdx.x);
    place.column = std::int64_t{index.n} * Tile::kN + Fragment::FirstColumn(threadIdx.x);
    place.rows = static_cast<int>(params.m - place.row);
    place.columns = static_cast<int>(params.n - place.column);
    FinishFragment(params, place, acc);
    if (d_vectors) {
      VectorStore<kOut>::Store(params, place, acc);
    } else {
      StoreElements<kOut>(params, place, acc);
    }
  }
}

template <DType kOut, typename Tile>
__global__ void __launch_bounds__(kBlockThreads, 1)
    WgmmaGemmKernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ GemmParams params, const __grid_constant__ TileGrid grid,
                    const bool d_vectors) {
  extern __shared__ unsigned char dynamic_shared[];
  const Ring<Tile::kM, Tile::kN, Tile::kStages> ring(dynamic_shared);
  if (threadIdx.x == 0) ring.Init(kConsumerWarps);
  __syncthreads();
  // Read from one lane, so that the compiler sees that a warp has one role.
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kConsumerWarps) {
    device::RaiseRegisters<kConsumerRegisters>();
    Consume<kOut, Tile>(params, grid, d_vectors, ring, warp / 4);
  } else {
    device::LowerRegisters<kProducerRegisters>();
    // The other threads of the producer have nothing to do. Shared memory stays until the last consumer has left.
    if (warp == kConsumerWarps && device::ElectOne()) Produce<Tile>(a_map, b_map, params, grid, ring);
  }
}

// An input of rows x k elements a matrix as the copy engine sees it: K, rows, batch dimensions from the fastest on.
inline device::TensorMapShape InputMap(const GemmMatrix& matrix, std::int64_t rows, std::int64_t k,
                                       std::uint32_t tile_rows, std::uint32_t tile_k,
                                       const std::int64_t (&batch_shape)[kGemmBatchDimsMax]) {
  constexpr std::uint64_t kBytes = DTypeBytes(DType::kBf16);
  constexpr std::uint64_t kAlign = kTmaAlignment;
  const std::uint64_t dense_row = (static_cast<std::uint64_t>(k) * kBytes + kAlign - 1) / kAlign * kAlign;
  device::TensorMapShape map = {.type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, .base = matrix.data};
  map.extent[0] = static_cast<std::uint64_t>(k);
  map.extent[1] = static_cast<std::uint64_t>(rows);
  map.stride[0] = rows > 1 ? static_cast<std::uint64_t>(matrix.row_stride) * kBytes : dense_row;
  map.box[0] = tile_k;
  map.box[1] = tile_rows;
  for (int i = 0; i < kGemmBatchDimsMax; ++i) {
    const int dimension = kGemmBatchDimsMax - 1 - i;
    const bool present = batch_shape[dimension] > 1 && matrix.batch_stride[dimension] != 0;
    map.extent[2 + i] = present ? static_cast<std::uint64_t>(batch_shape[dimension]) : 1;
    map.stride[1 + i] = present ? static_cast<std::uint64_t>(matrix.batch_stride[dimension]) * kBytes : map.stride[i];
    map.box[2 + i] = 1;
  }
  return map;
}

template <DType kA, DType kB, DType kOut, GemmLayout kLayout, typename Tile>
struct WgmmaGemm {
  static_assert(kA == DType::kBf16 && kB == DType::kBf16, "the products are of bf16");
  static_assert(kLayout == GemmLayout::kNT, "both operands are K-contiguous in shared memory");
  static_assert(Tile::kM == kConsumers * device::WgmmaFragment::kRows, "64 rows a consumer");
  static_assert(Tile::kK * DTypeBytes(kA) == device::kSwizzleRowBytes, "a step of K is one swizzled row");
  static_assert(Tile::kN <= 256, "rows of one copy");

  using Stages = Ring<Tile::kM, Tile::kN, Tile::kStages>;
  // Tiles of M walked together by default: near the square root of a Hopper's 132 blocks times kN / kM, which makes the
  // block of the output that is computed at one time about square.
  static constexpr std::uint32_t kDefaultRaster = 8 * Tile::kN / Tile::kM;

  static cudaError_t Prepare(KernelFacts& facts) {
    const auto kernel = &WgmmaGemmKernel<kOut, Tile>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Stages::kSharedBytes);
    if (error != cudaSuccess) return error;
    cudaFuncAttributes attributes = {};
    error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    facts.registers = attributes.numRegs;
    facts.local_bytes = static_cast<int>(attributes.localSizeBytes);
    facts.shared_bytes = static_cast<int>(attributes.sharedSizeBytes + Stages::kSharedBytes);
    facts.threads = kBlockThreads;
    return cudaSuccess;
  }

  static cudaError_t Launch(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    if (shape.split != 1 || shape.raster < 0) return cudaErrorInvalidValue;
    if (!GemmIllegal(params, DTypeBytes(kA), DTypeBytes(kB), Tile::kM, Tile::kN).empty()) return cudaErrorInvalidValue;
    const TileGrid grid = GridOf(params, shape);
    if (grid.tiles == 0) return cudaSuccess;
    CUtensorMap a_map = {};
    CUtensorMap b_map = {};
    if (grid.k_tiles > 0) {
      const cudaError_t error = EncodeInputs(params, a_map, b_map);
      if (error != cudaSuccess) return error;
    }
    int blocks = 0;
    const cudaError_t error = CountMultiprocessors(blocks);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(std::min(static_cast<std::uint32_t>(blocks), grid.tiles));
    config.blockDim = dim3(kBlockThreads);
    config.dynamicSmemBytes = Stages::kSharedBytes;
    config.stream = static_cast<cudaStream_t>(context.stream);
    return cudaLaunchKernelEx(&config, &WgmmaGemmKernel<kOut, Tile>, a_map, b_map, params, grid,
                              TakesVectors<kOut>(params));
  }

 private:
  static TileGrid GridOf(const GemmParams& params, const LaunchShape& shape) {
    const auto count = [](std::int64_t extent, std::int64_t tile) {
      return static_cast<std::uint32_t>((extent + tile - 1) / tile);
    };
    TileGrid grid;
    grid.m_tiles = count(params.m, Tile::kM);
    grid.n_tiles = count(params.n, Tile::kN);
    grid.k_tiles = count(params.k, Tile::kK);
    grid.tiles = static_cast<std::uint32_t>(CountTiles(params, Tile::kM, Tile::kN));
    const std::uint32_t raster = shape.raster == 0 ? kDefaultRaster : static_cast<std::uint32_t>(shape.raster);
    grid.raster = std::max(1U, std::min(raster, grid.m_tiles));
    grid.batch_1 = static_cast<std::uint32_t>(params.batch_shape[1]);
    grid.batch_2 = static_cast<std::uint32_t>(params.batch_shape[2]);
    return grid;
  }

  static cudaError_t EncodeInputs(const GemmParams& params, CUtensorMap& a_map, CUtensorMap& b_map) {
    const cudaError_t error =
        device::EncodeTensorMap(InputMap(params.a, params.m, params.k, Tile::kM, Tile::kK, params.batch_shape), a_map);
    if (error != cudaSuccess) return error;
    return device::EncodeTensorMap(InputMap(params.b, params.n, params.k, Tile::kN, Tile::kK, params.batch_shape),
                                   b_map);
  }

  static cudaError_t CountMultiprocessors(int& count) {
    int ordinal = 0;
    const cudaError_t error = cudaGetDevice(&ordinal);
    if (error != cudaSuccess) return error;
    return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, ordinal);
  }
};

}  // namespace tessera::kernels::sm90a
