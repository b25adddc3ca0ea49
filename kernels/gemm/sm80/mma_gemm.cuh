// bf16 x bf16 on the tensor cores of every GPU from sm_80 on, with mma.sync. A block of four warps computes one tile of
// D at a time, a quarter of it each:
//
//   global --cp.async, or element by element--> ring of kStages tiles of K in shared memory --ldmatrix--> fragments
//          --mma--> float32 accumulators --staged through the same shared memory--> epilogue --> D
//
// Extents and strides are run-time arguments and may be anything. An operand whose lines are not contiguous or not
// aligned to 16 bytes is gathered element by element; the other operand and the rest of the kernel do not know.
//
// Synchronisation: one barrier a tile of K. It ends the wait of each thread for its own copies, which makes the oldest
// tile of the ring visible to all, and it says that all warps have read the tile before that one, whose place is filled
// next.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/catalog/gemm_class.h"
#include "kernels/device/cp_async.cuh"
#include "kernels/gemm/cuda/epilogue.cuh"
#include "kernels/gemm/gemm_params.h"
#include "kernels/gemm/sm80/legality.h"
#include "kernels/gemm/sm80/operand_loader.cuh"
#include "kernels/gemm/sm80/store.cuh"
#include "kernels/gemm/sm80/swizzle.cuh"
#include "kernels/gemm/sm80/tile_order.cuh"
#include "kernels/gemm/sm80/warp_product.cuh"
#include "kernels/launch/launch.h"

namespace tessera::kernels::sm80 {

inline constexpr int kWarps = 4;  // two along M, two along N
inline constexpr int kThreads = kWarps * 32;

struct MmaArguments {
  GemmParams params;
  TileOrder order;
  bool a_chunked = false;  // see OperandLoader
  bool b_chunked = false;
  bool d_vectors = false;  // see StoreRows
};

// What a layout and a tile make of the parts: types and sizes, for the kernel and its launcher.
template <GemmLayout kLayout, typename Tile>
struct MmaConfig {
  static constexpr bool kAKContiguous = kLayout == GemmLayout::kNT || kLayout == GemmLayout::kNN;
  static constexpr bool kBKContiguous = kLayout == GemmLayout::kNT || kLayout == GemmLayout::kTT;
  static constexpr int kWarpM = Tile::kM / 2;
  static constexpr int kWarpN = Tile::kN / 2;
  using LoaderA = OperandLoader<Tile::kM, Tile::kK, kAKContiguous, kThreads>;
  using LoaderB = OperandLoader<Tile::kN, Tile::kK, kBKContiguous, kThreads>;
  using Product = WarpProduct<typename LoaderA::Tile, typename LoaderB::Tile, Tile::kK, kWarpM, kWarpN, kAKContiguous,
                              kBKContiguous>;
  static constexpr int kStageBytes = LoaderA::Tile::kBytes + LoaderB::Tile::kBytes;
  static constexpr int kWarpStagingBytes = kWarpM * kWarpN * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = std::max(Tile::kStages * kStageBytes, kWarps* kWarpStagingBytes);
  static constexpr int kBlocksPerSm = Tile::kM * Tile::kN > 64 * 64 ? 2 : 3;  // that registers must allow
  static_assert(Tile::kStages >= 2, "one tile is filled while another is read");
  static_assert(kSharedBytes <= 99 * 1024, "what a block may have on sm_86, sm_89 and sm_120");
};

// Computes the sums of one tile; on return, all warps have done with the ring.
template <GemmLayout kLayout, typename Tile>
__device__ __forceinline__ void SumTile(const MmaArguments& args, const TileIndex& tile, unsigned char* ring,
                                        typename MmaConfig<kLayout, Tile>::Product& product) {
  using Config = MmaConfig<kLayout, Tile>;
  const GemmParams& params = args.params;
  typename Config::LoaderA a(
      static_cast<const std::uint16_t*>(params.a.data) + cuda::BatchOffset(params, params.a, tile.batch),
      params.a.row_stride, params.a.col_stride, static_cast<std::uint32_t>(tile.m * Tile::kM),
      static_cast<std::uint32_t>(params.m), static_cast<std::uint32_t>(params.k), args.a_chunked);
  typename Config::LoaderB b(
      static_cast<const std::uint16_t*>(params.b.data) + cuda::BatchOffset(params, params.b, tile.batch),
      params.b.row_stride, params.b.col_stride, static_cast<std::uint32_t>(tile.n * Tile::kN),
      static_cast<std::uint32_t>(params.n), static_cast<std::uint32_t>(params.k), args.b_chunked);
  const auto load = [&](int slot) {
    unsigned char* const target = ring + slot * Config::kStageBytes;
    a.LoadNext(target);
    b.LoadNext(target + Config::LoaderA::Tile::kBytes);
  };

  const int depth_tiles = static_cast<int>((params.k + Tile::kK - 1) / Tile::kK);
#pragma unroll 1  // it is long, and runs once
  for (int slot = 0; slot < Tile::kStages - 1; ++slot) {
    if (slot < depth_tiles) load(slot);
    device::CommitCopies();
  }
  product.Clear();
  const auto ring_address = static_cast<std::uint32_t>(__cvta_generic_to_shared(ring));
  int read_slot = 0;
  int fill_slot = Tile::kStages - 1;
#pragma unroll 1
  for (int i = 0; i < depth_tiles; ++i) {
    // One group was committed for every tile up to i + kStages - 2, so this waits for tile i.
    device::WaitCopies<Tile::kStages - 2>();
    __syncthreads();
    if (i + Tile::kStages - 1 < depth_tiles) load(fill_slot);
    device::CommitCopies();
    const std::uint32_t a_address = ring_address + read_slot * Config::kStageBytes;
    product.Accumulate(a_address, a_address + Config::LoaderA::Tile::kBytes);
    fill_slot = read_slot;
    read_slot = read_slot + 1 < Tile::kStages ? read_slot + 1 : 0;
  }
  device::WaitCopies<0>();
  __syncthreads();
}

template <DType kOut, GemmLayout kLayout, typename Tile>
__global__ void __launch_bounds__(kThreads, (MmaConfig<kLayout, Tile>::kBlocksPerSm))
    MmaKernel(const __grid_constant__ MmaArguments args) {
  using Config = MmaConfig<kLayout, Tile>;
  using Element = typename cuda::Output<kOut>::Element;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const GemmParams& params = args.params;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warp_m = warp / 2 * Config::kWarpM;
  const int warp_n = warp % 2 * Config::kWarpN;
  for (std::int64_t index = blockIdx.x; index < args.order.total; index += gridDim.x) {
    const TileIndex tile = TileAt(args.order, index);
    typename Config::Product product(warp_m, warp_n, lane);
    SumTile<kLayout, Tile>(args, tile, shared_memory, product);

    // Each warp stages its own outputs in its own part of what was the ring.
    auto* const staging = reinterpret_cast<float*>(shared_memory + warp * Config::kWarpStagingBytes);
    product.Stage(staging);
    __syncwarp();
    Element* const d = static_cast<Element*>(params.d.data) + cuda::BatchOffset(params, params.d, tile.batch);
    StoreRows<kOut, Config::kWarpM, Config::kWarpN>(params, d, tile.m * Tile::kM + warp_m, tile.n * Tile::kN + warp_n,
                                                    staging, lane, args.d_vectors);
    __syncthreads();  // the next tile's loads overwrite the staged sums
  }
}

template <DType kA, DType kB, DType kOut, Accumulation kAccumulation, GemmLayout kLayout, typename Tile>
struct MmaGemm {
  static_assert(kA == DType::kBf16 && kB == DType::kBf16, "the operands of MmaBf16M16N8K16");

  // Loads the kernel into the current context and allows it its shared memory.
  static cudaError_t Prepare(KernelFacts& facts) {
    const cudaError_t allowed =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
    if (allowed != cudaSuccess) return allowed;
    cudaFuncAttributes attributes;
    const cudaError_t read = cudaFuncGetAttributes(&attributes, kKernel);
    if (read != cudaSuccess) return read;
    facts.registers = attributes.numRegs;
    facts.local_bytes = static_cast<int>(attributes.localSizeBytes);
    facts.shared_bytes = static_cast<int>(attributes.sharedSizeBytes) + Config::kSharedBytes;
    facts.threads = kThreads;
    return cudaSuccess;
  }

  static cudaError_t Launch(const GemmParams& params, const LaunchShape& shape, const LaunchContext& context) {
    const MmaArguments args = Arguments(params, shape);
    const auto blocks = static_cast<unsigned>(std::min(args.order.total, kMaxBlocks));
    MmaKernel<kOut, kLayout, Tile>
        <<<blocks, kThreads, Config::kSharedBytes, static_cast<cudaStream_t>(context.stream)>>>(args);
    return cudaGetLastError();
  }

 private:
  using Config = MmaConfig<kLayout, Tile>;
  static constexpr auto kKernel = MmaKernel<kOut, kLayout, Tile>;
  // Blocks beyond these take several tiles; far more than run at once, and far from the limit of a grid.
  static constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 20;
  // Tiles of M in a band when the plan leaves it open: a band of 8 x 8 tiles reads 16 lines of tiles for 64 products.
  static constexpr std::int64_t kDefaultRaster = 8;

  static TileOrder Order(const GemmParams& params, const LaunchShape& shape) {
    TileOrder order;
    order.tiles_m = (params.m + Tile::kM - 1) / Tile::kM;
    order.tiles_n = (params.n + Tile::kN - 1) / Tile::kN;
    order.total = order.tiles_m * order.tiles_n;
    for (const std::int64_t extent : params.batch_shape) order.total *= extent;
    order.raster = std::min(shape.raster > 0 ? shape.raster : kDefaultRaster, order.tiles_m);
    return order;
  }

  // Strides of a tile's lines are those of its layout; a view that has them the other way round is gathered.
  static bool Chunked(const GemmParams& params, const GemmMatrix& matrix, std::int64_t rows, bool k_contiguous) {
    const ViewDimension row{.extent = rows, .stride = matrix.row_stride};
    const ViewDimension depth{.extent = params.k, .stride = matrix.col_stride};
    return LinesAligned(params, matrix, k_contiguous ? row : depth, k_contiguous ? depth : row, 2, kChunkBytes);
  }

  static MmaArguments Arguments(const GemmParams& params, const LaunchShape& shape) {
    constexpr auto kOutBytes = static_cast<std::int64_t>(DTypeBytes(kOut));
    MmaArguments args;
    args.params = params;
    args.order = Order(params, shape);
    args.a_chunked = Chunked(params, params.a, params.m, Config::kAKContiguous);
    args.b_chunked = Chunked(params, params.b, params.n, Config::kBKContiguous);
    args.d_vectors = LinesAligned(params, params.d, {params.m, params.d.row_stride}, {params.n, params.d.col_stride},
                                  kOutBytes, kStoreElements * kOutBytes);
    return args;
  }
};

}  // namespace tessera::kernels::sm80
