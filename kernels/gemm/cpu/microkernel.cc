#include "kernels/gemm/cpu/microkernel.h"

#include <cstring>

namespace tessera::kernels::cpu {
namespace {

// GCC vector extension: the compiler picks the registers of the target that the caller is compiled for.
using Vector = float __attribute__((vector_size(32)));
constexpr int kLanes = 8;
constexpr int kVectors = kMicroN / kLanes;

__attribute__((always_inline)) inline Vector Load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

__attribute__((always_inline)) inline void Store(float* to, const Vector& value) {
  std::memcpy(to, &value, sizeof(value));
}

__attribute__((always_inline)) inline void MicroTile(const float* a, const float* b, int k, float* c, int c_stride) {
  Vector acc[kMicroM][kVectors];  // (kMicroM, kMicroN)
  for (int i = 0; i < kMicroM; ++i) {
    for (int v = 0; v < kVectors; ++v) acc[i][v] = Load(c + i * c_stride + v * kLanes);
  }
  for (int p = 0; p < k; ++p) {
    Vector b_row[kVectors];
    for (int v = 0; v < kVectors; ++v) b_row[v] = Load(b + p * kMicroN + v * kLanes);
    for (int i = 0; i < kMicroM; ++i) {
      const float a_value = a[p * kMicroM + i];
      for (int v = 0; v < kVectors; ++v) acc[i][v] += a_value * b_row[v];
    }
  }
  for (int i = 0; i < kMicroM; ++i) {
    for (int v = 0; v < kVectors; ++v) Store(c + i * c_stride + v * kLanes, acc[i][v]);
  }
}

void MicroTilePortable(const float* a, const float* b, int k, float* c, int c_stride) {
  MicroTile(a, b, k, c, c_stride);
}

using MicroTileFunction = void (*)(const float*, const float*, int, float*, int);

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void MicroTileAvx2(const float* a, const float* b, int k, float* c, int c_stride) {
  MicroTile(a, b, k, c, c_stride);
}

// Not target_clones: its resolver runs before a sanitizer's runtime is up.
MicroTileFunction ChooseMicroTile() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? MicroTileAvx2 : MicroTilePortable;
}
#else
MicroTileFunction ChooseMicroTile() {
  return MicroTilePortable;
}
#endif

}  // namespace

void MultiplyMicroTile(const float* a, const float* b, int k, float* c, int c_stride) {
  static const MicroTileFunction function = ChooseMicroTile();
  function(a, b, k, c, c_stride);
}

}  // namespace tessera::kernels::cpu
