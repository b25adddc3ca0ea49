// ldmatrix: a warp reads four 8 x 8 matrices of 16-bit elements from shared memory into mma fragments, sm_75 and later.
#pragma once

#include <cstdint>

namespace tessera::kernels::device {

// Lane l gives the shared-memory address of row l % 8 of matrix l / 8: 16 bytes, aligned to 16. Of matrix i it
// receives, in fragment[i], the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1).
__device__ __forceinline__ void LoadMatrixX4(std::uint32_t (&fragment)[4], std::uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}

// The same, of the transposed matrices: the lane receives (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4) as stored.
__device__ __forceinline__ void LoadMatrixX4Transposed(std::uint32_t (&fragment)[4], std::uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}

// The way back, needs sm_90: four 8 x 8 matrices of 16-bit elements from registers to shared memory. Thread l gives the
// address of row l % 8 of matrix l / 8, 16 bytes, and has in word i the two elements of matrix i at row l / 4, columns
// 2 (l % 4) and the next.
__device__ __forceinline__ void StoreMatrices(std::uint32_t address, const std::uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

// The same of the transposed matrices: the thread has the elements at rows 2 (l % 4) and the next, column l / 4, as
// they will stand in memory.
__device__ __forceinline__ void StoreMatricesTransposed(std::uint32_t address, const std::uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

}  // namespace tessera::kernels::device
