// A small product whose tensors travel inside the messages, with values that every way of computing gives exactly.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/client.h"
#include "common/dtype.h"
#include "tests/oracle/codec.h"

namespace tessera::e2e {

class InlineProblem {
 public:
  InlineProblem(std::int64_t m, std::int64_t n, std::int64_t k)
      : m_(m),
        n_(n),
        k_(k),
        a_(Bytes(DType::kBf16, m * k)),
        b_(Bytes(DType::kBf16, n * k)),
        d_(Bytes(DType::kF32, m * n)) {
    for (std::int64_t i = 0; i < m * k; ++i) oracle::Encode(DType::kBf16, A(i), a_.data() + 2 * i);
    for (std::int64_t i = 0; i < n * k; ++i) oracle::Encode(DType::kBf16, B(i), b_.data() + 2 * i);
  }

  client::GemmSpec spec() {
    return {.a = client::InlineTensor(a_.data(), DType::kBf16, {m_, k_}),
            .b = client::InlineTensor(b_.data(), DType::kBf16, {n_, k_}),
            .d = client::InlineTensor(d_.data(), DType::kF32, {m_, n_})};
  }

  void ExpectRight() const {
    for (std::int64_t m = 0; m < m_; ++m) {
      for (std::int64_t n = 0; n < n_; ++n) {
        double sum = 0;
        for (std::int64_t k = 0; k < k_; ++k) sum += A(m * k_ + k) * B(n * k_ + k);
        ASSERT_EQ(oracle::Decode(DType::kF32, d_.data() + 4 * (m * n_ + n)), sum) << m << ", " << n;
      }
    }
  }

 private:
  static std::vector<std::byte> Bytes(DType dtype, std::int64_t elements) {
    return std::vector<std::byte>(static_cast<std::size_t>(elements) * DTypeBytes(dtype));
  }
  static double A(std::int64_t i) { return static_cast<double>(i % 7 - 3); }
  static double B(std::int64_t i) { return static_cast<double>(i % 5 - 2); }

  const std::int64_t m_, n_, k_;
  std::vector<std::byte> a_, b_, d_;
};

}  // namespace tessera::e2e
