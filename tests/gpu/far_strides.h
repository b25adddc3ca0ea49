// Products whose rows, columns or matrices are more than 2^31 elements apart, so that offsets leave 32 bits: a variant
// must leave the same bits as on the same numbers close together, and nothing anywhere else in D's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/gemm/gemm_params.h"
#include "kernels/launch/launch.h"
#include "tests/gpu/gpu.h"

namespace tessera::gpu_test {

class FarStrides {
 public:
  // Whether the device has room: some 95 GB.
  static bool Fits();

  // Allocates and poisons the memory, while nobody else uses the GPU.
  explicit FarStrides(Gpu& gpu);

  // What is wrong with the variant, empty = nothing. *ran is how many far products it took.
  std::string Check(std::size_t variant, int* ran);

 private:
  // Elements from line to line and from matrix to matrix, and how many matrices there are.
  struct Apart {
    std::int64_t line = 0;
    std::int64_t matrix = 0;
    std::int64_t matrices = 1;
  };

  // One operand, or D: matrices of lines of elements that are contiguous.
  struct Lines {
    DType dtype = DType::kUnspecified;
    std::int64_t lines = 0;
    std::int64_t length = 0;  // elements
    bool are_rows = true;
  };
  struct Operands {
    Lines a;
    Lines b;
    Lines d;
  };

  std::string CheckFar(std::size_t variant, const Apart& far, int* ran);
  kernels::LaunchError Launch(std::size_t variant, const Operands& operands, const Apart& apart);
  static kernels::GemmMatrix Place(const Lines& of, const Apart& apart, const DeviceBytes& arena);
  // f(offset of a line in its arena, number of the line)
  template <typename Visit>
  static void ForEachLine(const Lines& of, const Apart& apart, const Visit& visit);
  void Put(const Lines& of, const Apart& apart, const DeviceBytes& arena, std::uint64_t seed);
  void Wipe(const Lines& of, const Apart& apart, const DeviceBytes& arena);
  std::string Result(const Lines& of, const Apart& apart) const;
  bool IsWiped() const;

  Gpu& gpu_;
  DeviceBytes a_;
  DeviceBytes b_;
  DeviceBytes d_;
  DeviceBytes count_;
  DeviceBytes scratch_;
};

}  // namespace tessera::gpu_test
