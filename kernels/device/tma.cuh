// The copy engine (PTX ISA, "Data Movement and Conversion Instructions: Tensor copy", cp.async.bulk.tensor): one thread
// asks for a box of a tensor, the engine writes it to shared memory and counts its bytes into an mbarrier. Elements of
// the box that lie outside the tensor arrive as zeros and are counted all the same, so a copy always completes the
// bytes of the whole box. Needs sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tessera::kernels::device {

// True in one thread of the warp, the same one every time. All 32 threads must be there. Unlike `lane == 0` it lets the
// compiler know that a single thread goes on, which spares the loop it otherwise builds around warp-wide instructions.
__device__ __forceinline__ bool ElectOne() {
  std::uint32_t elected = 0;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, chosen;\n"
      "}"
      : "=r"(elected)::"memory");
  return elected != 0;
}

// Fetches the map itself, so that the first copy does not wait for it. `map` lies in constant or parameter memory.
__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}

// First element of a box, fastest dimension first. Signed: what lies outside the tensor is zero.
struct TensorCoordinates {
  std::int32_t at[5];
};

// Box of a five-dimensional map -> shared memory at `destination`, completing `barrier` by the box's bytes.
__device__ __forceinline__ void TmaLoad(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                                        const TensorCoordinates& box) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(destination),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]),
      "r"(box.at[3]), "r"(box.at[4])
      : "memory");
}

// The same box into every block of the cluster whose bit `blocks` has, each at the same address of its own shared
// memory and counted by the barrier at the same address there.
__device__ __forceinline__ void TmaLoadMulticast(std::uint32_t destination, const CUtensorMap* map,
                                                 std::uint32_t barrier, const TensorCoordinates& box,
                                                 std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]),
      "r"(box.at[3]), "r"(box.at[4]), "h"(blocks)
      : "memory");
}

// Shared memory at `source` -> box of a map, of which what lies outside the tensor is not written; one bulk group.
// Ordinary writes to `source` need FenceAsyncProxy by their threads and a barrier before.
__device__ __forceinline__ void TmaStore(const CUtensorMap* map, std::uint32_t source, const TensorCoordinates& box) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(source), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4])
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until no more than kPending of this thread's stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all of this thread's stores are done.
__device__ __forceinline__ void WaitStoresDone() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Ordinary writes of this thread to shared memory come before what the copy engine does after a barrier.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace tessera::kernels::device
