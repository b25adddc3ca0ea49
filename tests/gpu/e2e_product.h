// Products whose result is known without an oracle: an A of one number times a B of ones gives that number times K
// everywhere, exactly where K is a power of two and the number has at most 8 significant bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"

namespace tessera::gpu_test {

inline constexpr std::uint64_t kBf16Bytes = 2;
inline constexpr std::byte kPoison{0xff};  // of it, every bf16 is a NaN

std::vector<std::byte> Repeated(float number, std::uint64_t bytes);  // as bf16
// How many elements are not `number`, and the first of them; "" if none.
std::string WrongNumbers(std::span<const std::byte> bytes, float number);

class OnesProduct {
 public:
  // With B[n, k] and D[m, n] in the daemon's memory, buffers of `session`.
  static absl::StatusOr<OnesProduct> Make(client::Session& session, std::int64_t m, std::int64_t n, std::int64_t k);

  // The call with `a`, a view of [m, k].
  absl::Status Call(client::Session& session, const client::TensorView& a) const;
  // The same, on a D that was poisoned; what is wrong with it if `a` is of `number`, or "".
  std::string Run(client::Session& session, const client::TensorView& a, float number);

  client::TensorView a_view(const client::Buffer& buffer, std::uint64_t byte_offset = 0) const {
    return buffer.Tensor(DType::kBf16, {m_, k_}, byte_offset);
  }
  client::TensorView b_view() const { return b_.Tensor(DType::kBf16, {n_, k_}); }
  std::uint64_t a_bytes() const { return static_cast<std::uint64_t>(m_ * k_) * kBf16Bytes; }
  std::uint64_t d_bytes() const { return static_cast<std::uint64_t>(m_ * n_) * kBf16Bytes; }

 private:
  OnesProduct(std::int64_t m, std::int64_t n, std::int64_t k, client::Buffer b, client::Buffer d)
      : m_(m), n_(n), k_(k), b_(std::move(b)), d_(std::move(d)) {}

  std::int64_t m_;
  std::int64_t n_;
  std::int64_t k_;
  client::Buffer b_;
  client::Buffer d_;
};

}  // namespace tessera::gpu_test
