#include "tests/gpu/e2e_product.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::gpu_test {

std::vector<std::byte> Repeated(float number, std::uint64_t bytes) {
  const std::uint16_t code = EncodeBf16(number);
  std::vector<std::byte> result(bytes);
  for (std::size_t at = 0; at + kBf16Bytes <= result.size(); at += kBf16Bytes) {
    std::memcpy(result.data() + at, &code, kBf16Bytes);
  }
  return result;
}

std::string WrongNumbers(std::span<const std::byte> bytes, float number) {
  const std::uint16_t wanted = EncodeBf16(number);
  std::uint64_t wrong = 0;
  std::string first;
  for (std::size_t at = 0; at + kBf16Bytes <= bytes.size(); at += kBf16Bytes) {
    std::uint16_t code = 0;
    std::memcpy(&code, bytes.data() + at, kBf16Bytes);
    if (code == wanted) continue;
    if (wrong == 0) first = absl::StrCat(DecodeBf16(code), " at element ", at / kBf16Bytes);
    ++wrong;
  }
  return wrong == 0 ? "" : absl::StrCat(wrong, " elements are not ", number, ", the first: ", first);
}

absl::StatusOr<OnesProduct> OnesProduct::Make(client::Session& session, std::int64_t m, std::int64_t n,
                                              std::int64_t k) {
  const std::uint64_t b_bytes = static_cast<std::uint64_t>(n * k) * kBf16Bytes;
  ASSIGN_OR_RETURN(client::Buffer b, session.AllocateOnDevice(b_bytes));
  ASSIGN_OR_RETURN(client::Buffer d, session.AllocateOnDevice(static_cast<std::uint64_t>(m * n) * kBf16Bytes));
  const std::vector<std::byte> ones = Repeated(1, b_bytes);
  RETURN_IF_ERROR(b.Upload(ones.data(), ones.size()));
  return OnesProduct(m, n, k, std::move(b), std::move(d));
}

absl::Status OnesProduct::Call(client::Session& session, const client::TensorView& a) const {
  return session.Gemm({.a = a, .b = b_view(), .d = d_.Tensor(DType::kBf16, {m_, n_}), .backend = v1::BACKEND_CUDA})
      .status();
}

std::string OnesProduct::Run(client::Session& session, const client::TensorView& a, float number) {
  std::vector<std::byte> d(d_bytes(), kPoison);
  absl::Status status = d_.Upload(d.data(), d.size());
  if (status.ok()) status = Call(session, a);
  if (status.ok()) status = d_.Download(d.data(), d.size());
  if (!status.ok()) return std::string(Sv(status.ToString()));
  return WrongNumbers(d, number * static_cast<float>(k_));
}

}  // namespace tessera::gpu_test
