#include "tests/gpu/e2e_problem.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/oracle/test_data.h"

namespace tessera::gpu_test {
namespace {

constexpr std::byte kGuard{0x5a};
constexpr std::byte kNanPoison{0xff};  // decodes as NaN: an element of D that nobody wrote is wrong
constexpr std::uint64_t kGuardBehind = 512;
constexpr std::uint64_t kElementBytes = 2;
constexpr oracle::GemmTypes kTypes{.a = DType::kBf16, .b = DType::kBf16, .d = DType::kBf16};

absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocateAt(Home home, std::uint64_t bytes) {
  if (home == Home::kLegacy) return AllocatePlain(bytes);
  if (home == Home::kDescriptor) return AllocateVmm(bytes);
  return nullptr;
}

std::uint64_t PackedBf16(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::uint64_t>(rows * cols) * kElementBytes;
}

}  // namespace

std::vector<std::byte> RandomBf16(std::int64_t elements, std::uint64_t seed) {
  oracle::Random random(seed);
  std::vector<std::byte> bytes(static_cast<std::size_t>(elements) * kElementBytes);
  for (std::size_t at = 0; at < bytes.size(); at += kElementBytes) {
    const std::uint16_t code = EncodeBf16(static_cast<float>(random.Uniform(-1, 1)));
    std::memcpy(bytes.data() + at, &code, sizeof(code));
  }
  return bytes;
}

std::uint64_t Operand::AllocationBytes() const {
  return offset_ + bytes_ + kGuardBehind;
}

absl::StatusOr<Operand> Operand::Make(client::Session& session, Home home, std::uint64_t bytes, std::uint64_t offset) {
  Operand operand(bytes, offset);
  ASSIGN_OR_RETURN(operand.allocation_, AllocateAt(home, operand.AllocationBytes()));
  if (operand.allocation_ == nullptr) {
    ASSIGN_OR_RETURN(operand.buffer_, session.AllocateOnDevice(operand.AllocationBytes()));
  } else {
    ASSIGN_OR_RETURN(operand.buffer_, session.ImportDevice(operand.allocation_->data() + offset, bytes));
  }
  return operand;
}

absl::Status Operand::Write(const std::vector<std::byte>& bytes) {
  std::vector<std::byte> all(AllocationBytes(), kGuard);
  std::copy(bytes.begin(), bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(offset_));
  if (allocation_ == nullptr) return buffer_->Upload(all.data(), all.size());
  return CopyIn(allocation_->data(), all.data(), all.size());
}

absl::StatusOr<std::vector<std::byte>> Operand::Read() const {
  std::vector<std::byte> all(AllocationBytes());
  RETURN_IF_ERROR(allocation_ == nullptr ? buffer_->Download(all.data(), all.size())
                                         : CopyOut(all.data(), allocation_->data(), all.size()));
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(offset_);
  const auto end = begin + static_cast<std::ptrdiff_t>(bytes_);
  const auto is_guard = [](std::byte value) { return value == kGuard; };
  if (!std::all_of(all.begin(), begin, is_guard) || !std::all_of(end, all.end(), is_guard)) {
    return absl::DataLossError("bytes outside D were written");
  }
  return std::vector<std::byte>(begin, end);
}

client::TensorView Operand::View(std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) const {
  return buffer_->Tensor(DType::kBf16, std::move(shape), allocation_ == nullptr ? offset_ : 0, std::move(strides));
}

Problem::Problem(std::string name, std::int64_t m, std::int64_t n, std::int64_t k, bool b_by_columns,
                 std::uint64_t offset)
    : name_(std::move(name)),
      m_(m),
      n_(n),
      k_(k),
      b_by_columns_(b_by_columns),
      offset_(offset),
      a_(RandomBf16(m * k, static_cast<std::uint64_t>(m * 31 + k))),
      b_(RandomBf16(n * k, static_cast<std::uint64_t>(n * 37 + k + (b_by_columns ? 1 : 0)))) {
  params_.m = m;
  params_.n = n;
  params_.k = k;
  params_.a = {.data = a_.data(), .row_stride = k, .col_stride = 1};
  params_.b = {.data = b_.data(), .row_stride = b_by_columns ? 1 : k, .col_stride = b_by_columns ? n : 1};
  params_.d = {.data = nullptr, .row_stride = n, .col_stride = 1};
  truth_ = oracle::ComputeGemm(params_, kTypes);
}

absl::StatusOr<client::GemmResult> Problem::Compute(client::Session& session, const Homes& homes, v1::Backend backend,
                                                    std::vector<std::byte>& d) {
  ASSIGN_OR_RETURN(Operand a, Operand::Make(session, homes.a, PackedBf16(m_, k_), offset_));
  ASSIGN_OR_RETURN(Operand b, Operand::Make(session, homes.b, PackedBf16(n_, k_), offset_));
  ASSIGN_OR_RETURN(Operand out, Operand::Make(session, homes.d, PackedBf16(m_, n_), offset_));
  RETURN_IF_ERROR(a.Write(a_));
  RETURN_IF_ERROR(b.Write(b_));
  RETURN_IF_ERROR(out.Write(std::vector<std::byte>(PackedBf16(m_, n_), kNanPoison)));
  const client::TensorView b_view = b_by_columns_ ? b.View({k_, n_}).Transposed() : b.View({n_, k_});
  ASSIGN_OR_RETURN(client::GemmResult result,
                   session.Gemm({.a = a.View({m_, k_}), .b = b_view, .d = out.View({m_, n_}), .backend = backend}));
  ASSIGN_OR_RETURN(d, out.Read());
  RETURN_IF_ERROR(a.buffer().Release());
  RETURN_IF_ERROR(b.buffer().Release());
  RETURN_IF_ERROR(out.buffer().Release());
  return result;
}

std::string Problem::Judge(std::vector<std::byte>& d) {
  params_.d.data = d.data();
  const oracle::Verdict verdict = oracle::CheckGemm(params_, kTypes, truth_);
  params_.d.data = nullptr;
  return verdict.ok ? "" : absl::StrCat(verdict.wrong, " elements are wrong, the first: ", verdict.first);
}

std::string Problem::Run(client::Session& session, const Homes& homes, v1::Backend backend,
                         const std::string& backend_name) {
  std::vector<std::byte> d;
  const absl::StatusOr<client::GemmResult> result = Compute(session, homes, backend, d);
  const std::string where = absl::StrCat(name_, " on ", backend_name, ": ");
  if (!result.ok()) return where + std::string(Sv(result.status().ToString()));
  if (result->report.backend() != backend_name) return absl::StrCat(where, "ran on ", result->report.backend());
  const std::string wrong = Judge(d);
  return wrong.empty() ? "" : absl::StrCat(where, result->report.variant(), ": ", wrong);
}

}  // namespace tessera::gpu_test
