// Clusters: blocks that run at the same time on neighbouring multiprocessors and reach each other's shared memory (PTX
// ISA, "Cluster of CTAs", state space shared::cluster). A kernel that is launched without clusters has clusters of one
// block. Needs sm_90.
#pragma once

#include <cstdint>

namespace tessera::kernels::device {

__device__ __forceinline__ std::uint32_t ClusterRank() {
  std::uint32_t rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ std::uint32_t ClusterBlocks() {
  std::uint32_t blocks = 0;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// The cluster's number in the grid, and the number of them, of a grid of one dimension.
__device__ __forceinline__ std::uint32_t ClusterIndex() {
  std::uint32_t index = 0;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ std::uint32_t ClusterCount() {
  std::uint32_t count = 0;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// Waits for all warps of the cluster that have not left, each with all its threads together. It makes nobody's writes
// visible, which would wait for all of them to reach L2: barriers in shared memory have FenceMbarrierInit, and data has
// the barrier that counts it.
__device__ __forceinline__ void ClusterBarrier() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// The address in block `rank`'s shared memory of what lies at `shared_address` in ours.
__device__ __forceinline__ std::uint32_t InBlock(std::uint32_t shared_address, std::uint32_t rank) {
  std::uint32_t address = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
  return address;
}

// `bytes`, a multiple of 16, of our shared memory at `source` to any block's at `destination`, by the copy engine,
// which counts them into a barrier of that block; whoever waits for the barrier sees them. `destination` and `barrier`
// from InBlock, of the same block. Ordinary writes to `source` need FenceAsyncProxy by their threads and a barrier
// before; it may be written again when the other block says that the bytes have come.
__device__ __forceinline__ void CopyToBlock(std::uint32_t destination, std::uint32_t source, std::uint32_t bytes,
                                            std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Arrivals at a barrier of any block of the cluster, at an address from InBlock: for telling others that what lies in
// our shared memory was read. They make no writes visible to other blocks.
__device__ __forceinline__ void MbarrierArriveInBlock(std::uint32_t address, std::uint32_t arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}

}  // namespace tessera::kernels::device
