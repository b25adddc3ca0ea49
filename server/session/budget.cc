#include "server/session/budget.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {

MemoryBudget::MemoryBudget(const MemoryLimits& limits, Metrics& metrics, std::shared_ptr<MemoryBudget> parent)
    : limits_(limits), metrics_(metrics), parent_(std::move(parent)) {}

absl::Status MemoryBudget::Reserve(std::uint64_t bytes) {
  // Bytes that are not limited here may be any number until the parents have agreed to them.
  const std::uint64_t bytes_before = limits_.bytes_max == kNoLimit ? 0 : bytes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(CheckRoom(bytes_before));
    used_.bytes += bytes_before;
    ++used_.buffers;
  }
  absl::Status status = parent_ == nullptr ? absl::OkStatus() : parent_->Reserve(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (status.ok()) {
    used_.bytes += bytes - bytes_before;
  } else {
    used_.bytes -= bytes_before;
    --used_.buffers;
  }
  return status;
}

absl::Status MemoryBudget::CheckRoom(std::uint64_t bytes) const {
  if (used_.buffers >= limits_.buffers_max) {
    metrics_.Refused(limits_.buffers_limit);
    return absl::ResourceExhaustedError(absl::StrCat(Av(LabelText(limits_.buffers_limit)), ": the limit of ",
                                                     limits_.buffers_max,
                                                     " is reached; released buffers count until their memory is gone"));
  }
  if (bytes > limits_.bytes_max - used_.bytes) {
    metrics_.Refused(limits_.bytes_limit);
    return absl::ResourceExhaustedError(absl::StrCat(Av(LabelText(limits_.bytes_limit)), ": ", bytes,
                                                     " bytes asked for, ", limits_.bytes_max - used_.bytes, " of ",
                                                     limits_.bytes_max, " left"));
  }
  return absl::OkStatus();
}

void MemoryBudget::Return(std::uint64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.bytes -= bytes;
    --used_.buffers;
  }
  if (parent_ != nullptr) parent_->Return(bytes);
}

MemoryUse MemoryBudget::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

absl::StatusOr<Reservation> Reservation::Make(std::shared_ptr<MemoryBudget> budget, std::uint64_t bytes) {
  RETURN_IF_ERROR(budget->Reserve(bytes));
  return Reservation(std::move(budget), bytes);
}

Reservation::~Reservation() {
  if (budget_ != nullptr) budget_->Return(bytes_);
}

}  // namespace tessera::server
