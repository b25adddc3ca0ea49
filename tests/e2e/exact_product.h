// A product of small integers in a buffer: exact in whatever order the sums are made, so that a single wrong bit of the
// result shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "client/client.h"
#include "common/dtype.h"
#include "tests/oracle/codec.h"

namespace tessera::e2e {

class ExactProduct {
 public:
  // bf16 A [m, k] and B [n, k], f32 D [m, n], one after the other from `byte_offset` on, which is a multiple of 64. The
  // memory is left as it is.
  ExactProduct(const client::Buffer& buffer, std::int64_t m, std::int64_t n, std::int64_t k,
               std::uint64_t byte_offset = 0)
      : spec_{.a = buffer.Tensor(DType::kBf16, {m, k}, byte_offset),
              .b = buffer.Tensor(DType::kBf16, {n, k}, byte_offset + Padded(2 * m * k)),
              .d = buffer.Tensor(DType::kF32, {m, n}, byte_offset + Padded(2 * m * k) + Padded(2 * n * k))} {}

  static std::uint64_t Bytes(std::int64_t m, std::int64_t n, std::int64_t k) {
    return Padded(2 * m * k) + Padded(2 * n * k) + Padded(4 * m * n);
  }

  const client::GemmSpec& spec() const { return spec_; }

  // Operands that belong to `number`, and a D that no result has.
  void Fill(std::uint64_t number) {
    const std::vector<int> a = A(number);
    const std::vector<int> b = B(number);
    for (std::size_t i = 0; i < a.size(); ++i) oracle::Encode(DType::kBf16, a[i], spec_.a.data + 2 * i);
    for (std::size_t i = 0; i < b.size(); ++i) oracle::Encode(DType::kBf16, b[i], spec_.b.data + 2 * i);
    std::memset(spec_.d.data, kUntouched, 4 * static_cast<std::size_t>(spec_.d.elements()));
  }

  // Whether D is the product of what Fill(number) wrote.
  bool Right(std::uint64_t number) const {
    const std::vector<int> a = A(number);
    const std::vector<int> b = B(number);
    const auto k = static_cast<std::size_t>(spec_.a.shape[1]);
    const std::byte* d = spec_.d.data;
    for (auto row = a.begin(); row != a.end(); row += static_cast<std::ptrdiff_t>(k)) {
      for (auto column = b.begin(); column != b.end(); column += static_cast<std::ptrdiff_t>(k), d += 4) {
        int sum = 0;
        for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(k); ++i) sum += row[i] * column[i];
        float value = 0;
        std::memcpy(&value, d, 4);
        if (value != static_cast<float>(sum)) return false;
      }
    }
    return true;
  }

  // Whether D is as Fill left it.
  bool Untouched() const {
    for (std::int64_t i = 0; i < 4 * spec_.d.elements(); ++i) {
      if (spec_.d.data[i] != static_cast<std::byte>(kUntouched)) return false;
    }
    return true;
  }

 private:
  static constexpr int kUntouched = 0x7b;  // of every byte, which makes a number of 1e36

  static std::uint64_t Padded(std::int64_t bytes) { return (static_cast<std::uint64_t>(bytes) + 63) / 64 * 64; }
  std::vector<int> A(std::uint64_t number) const { return Integers(spec_.a.elements(), number, 7); }
  std::vector<int> B(std::uint64_t number) const { return Integers(spec_.b.elements(), number * 3 + 1, 5); }
  static std::vector<int> Integers(std::int64_t count, std::uint64_t number, std::uint64_t range) {
    std::vector<int> values(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<int>((i + i / 11 + number) % range) - static_cast<int>(range / 2);
    }
    return values;
  }

  client::GemmSpec spec_;
};

}  // namespace tessera::e2e
