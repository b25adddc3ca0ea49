#include "tests/gpu/far_strides.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "common/dtype.h"
#include "kernels/launch/gemm_launch.h"
#include "tests/gpu/stray_bytes.h"
#include "tests/oracle/codec.h"
#include "tests/oracle/test_data.h"

namespace tessera::gpu_test {
namespace {

using kernels::GemmLayout;
using kernels::GemmVariant;

// As many lines as memory has room for, and D's rows a multiple of 16 bytes, so that every path stores them.
constexpr std::int64_t kM = 3;
constexpr std::int64_t kN = 8;
constexpr std::int64_t kK = 8;
// Elements from line to line, or from matrix to matrix: whole 16 bytes of every type.
constexpr std::int64_t kNear = 16;
constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;
constexpr std::int64_t kNearMatrix = kNear * 16;

constexpr std::size_t kInputBytes = static_cast<std::size_t>(8 * kFar) * 2;    // 8 lines of bf16
constexpr std::size_t kOutputBytes = static_cast<std::size_t>(kM * kFar) * 4;  // 3 rows of float32
constexpr std::size_t kScratchBytes = std::size_t{128} << 20;
constexpr std::byte kPattern{0xff};  // NaN as a float of any size

}  // namespace

bool FarStrides::Fits() {
  std::size_t free = 0;
  std::size_t total = 0;
  constexpr std::size_t kOthers = std::size_t{4} << 30;  // that other cases use
  Require(cudaMemGetInfo(&free, &total), "ask for free memory");
  return free >= 2 * kInputBytes + kOutputBytes + kScratchBytes + kOthers;
}

FarStrides::FarStrides(Gpu& gpu)
    : gpu_(gpu),
      a_(kInputBytes),
      b_(kInputBytes),
      d_(kOutputBytes),
      count_(sizeof(std::uint64_t)),
      scratch_(kScratchBytes) {
  for (const DeviceBytes* arena : {&a_, &b_, &d_}) {
    Require(cudaMemsetAsync(arena->data(), static_cast<int>(kPattern), arena->size(), gpu.stream()), "poison");
  }
  Require(cudaStreamSynchronize(gpu.stream()), "poison");
}

std::string FarStrides::Check(std::size_t variant, int* ran) {
  *ran = 0;
  // Where lines are far apart there is memory for one matrix.
  const std::string lines = CheckFar(variant, {.line = kFar, .matrix = 0, .matrices = 1}, ran);
  if (!lines.empty()) return "lines far apart: " + lines;
  const std::string matrices = CheckFar(variant, {.line = kNear, .matrix = kFar, .matrices = 2}, ran);
  return matrices.empty() ? "" : "matrices far apart: " + matrices;
}

std::string FarStrides::CheckFar(std::size_t variant, const Apart& far, int* ran) {
  const kernels::GemmClass& c = kernels::GemmVariants()[variant].gemm_class;
  const bool a_rows = c.layout == GemmLayout::kNT || c.layout == GemmLayout::kNN;
  const bool b_rows = c.layout == GemmLayout::kNT || c.layout == GemmLayout::kTT;
  const Operands operands = {
      .a = {.dtype = c.a, .lines = a_rows ? kM : kK, .length = a_rows ? kK : kM, .are_rows = a_rows},
      .b = {.dtype = c.b, .lines = b_rows ? kN : kK, .length = b_rows ? kK : kN, .are_rows = b_rows},
      .d = {.dtype = c.out, .lines = kM, .length = kN}};
  const std::lock_guard lock(gpu_.mutex);
  std::array<std::string, 2> result;
  std::array<kernels::LaunchError, 2> error{};
  for (const bool is_far : {false, true}) {
    const Apart apart = is_far ? far : Apart{.line = kNear, .matrix = kNearMatrix, .matrices = far.matrices};
    error[is_far] = Launch(variant, operands, apart);
    if (gpu_.lost) return "the kernel failed";
    if (error[is_far] == kernels::kLaunchOk) result[is_far] = Result(operands.d, apart);
    Wipe(operands.d, apart, d_);
    if (!IsWiped()) return "wrote elsewhere in D's memory";
  }
  if (error[0] != error[1])
    return "launch returned " + std::to_string(error[1]) + ", and " + std::to_string(error[0]) +
           " for the same close together";
  if (error[0] != kernels::kLaunchOk) return "";
  ++*ran;
  return result[0] == result[1] ? "" : "other bits than close together";
}

kernels::LaunchError FarStrides::Launch(std::size_t variant, const Operands& operands, const Apart& apart) {
  kernels::GemmParams params;
  params.m = kM;
  params.n = kN;
  params.k = kK;
  params.batch_shape[kernels::kGemmBatchDimsMax - 1] = apart.matrices;
  params.a = Place(operands.a, apart, a_);
  params.b = Place(operands.b, apart, b_);
  params.d = Place(operands.d, apart, d_);
  Put(operands.a, apart, a_, 1);
  Put(operands.b, apart, b_, 2);
  static_cast<void>(cudaGetLastError());
  const kernels::LaunchError error = kernels::LaunchGemm(
      variant, params, {},
      {.stream = gpu_.stream(), .workspace = {.scratch = scratch_.data(), .bytes = scratch_.size()}});
  if (cudaStreamSynchronize(gpu_.stream()) != cudaSuccess) gpu_.lost = true;
  if (gpu_.lost) return error;
  Wipe(operands.a, apart, a_);
  Wipe(operands.b, apart, b_);
  return error;
}

kernels::GemmMatrix FarStrides::Place(const Lines& of, const Apart& apart, const DeviceBytes& arena) {
  kernels::GemmMatrix matrix = {
      .data = arena.data(), .row_stride = of.are_rows ? apart.line : 1, .col_stride = of.are_rows ? 1 : apart.line};
  if (apart.matrices > 1) matrix.batch_stride[kernels::kGemmBatchDimsMax - 1] = apart.matrix;
  return matrix;
}

template <typename Visit>
void FarStrides::ForEachLine(const Lines& of, const Apart& apart, const Visit& visit) {
  const auto size = static_cast<std::int64_t>(DTypeBytes(of.dtype));
  for (std::int64_t matrix = 0; matrix < apart.matrices; ++matrix) {
    for (std::int64_t line = 0; line < of.lines; ++line) {
      visit(static_cast<std::size_t>((matrix * apart.matrix + line * apart.line) * size), matrix * of.lines + line);
    }
  }
}

void FarStrides::Put(const Lines& of, const Apart& apart, const DeviceBytes& arena, std::uint64_t seed) {
  const std::size_t size = DTypeBytes(of.dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(of.length) * size);
  ForEachLine(of, apart, [&](std::size_t at, std::int64_t line) {
    oracle::Random random(seed * 1000 + static_cast<std::uint64_t>(line));
    for (std::size_t i = 0; i < bytes.size(); i += size) {
      oracle::Encode(of.dtype, static_cast<double>(random.Int(-3, 3)), bytes.data() + i);
    }
    Require(cudaMemcpyAsync(arena.data() + at, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, gpu_.stream()),
            "place an operand");
    Require(cudaStreamSynchronize(gpu_.stream()), "place an operand");
  });
}

void FarStrides::Wipe(const Lines& of, const Apart& apart, const DeviceBytes& arena) {
  ForEachLine(of, apart, [&](std::size_t at, std::int64_t) {
    Require(cudaMemsetAsync(arena.data() + at, static_cast<int>(kPattern),
                            static_cast<std::size_t>(of.length) * DTypeBytes(of.dtype), gpu_.stream()),
            "wipe");
  });
}

std::string FarStrides::Result(const Lines& of, const Apart& apart) const {
  std::string result;
  ForEachLine(of, apart, [&](std::size_t at, std::int64_t) {
    const std::vector<std::byte> bytes =
        Download(gpu_, d_.data() + at, static_cast<std::size_t>(of.length) * DTypeBytes(of.dtype));
    result.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  return result;
}

bool FarStrides::IsWiped() const {
  auto* const count = reinterpret_cast<std::uint64_t*>(count_.data());
  Require(cudaMemsetAsync(count, 0, sizeof(*count), gpu_.stream()), "clear a count");
  Require(CountOtherWords(d_.data(), d_.size(), kPattern, count, gpu_.stream()), "look through D's memory");
  std::uint64_t others = 0;
  const std::vector<std::byte> bytes = Download(gpu_, count_.data(), sizeof(others));
  std::memcpy(&others, bytes.data(), sizeof(others));
  return others == 0;
}

}  // namespace tessera::gpu_test
