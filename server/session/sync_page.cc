#include "server/session/sync_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::server {

absl::StatusOr<std::unique_ptr<SyncPage>> SyncPage::Make(const std::vector<DeviceMemory*>& devices) {
  constexpr absl::StatusCode kExhausted = absl::StatusCode::kResourceExhausted;
  UniqueFd fd(::memfd_create("tessera-timelines", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return ErrnoStatus(kExhausted, "memfd_create");
  if (::ftruncate(fd.get(), kBytes) != 0) return ErrnoStatus(kExhausted, "a page for timelines");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus(absl::StatusCode::kInternal, "sealing a memfd");
  }
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return ErrnoStatus(kExhausted, "mapping a page for timelines");
  std::unique_ptr<SyncPage> page(new SyncPage(std::move(fd), new (memory) SyncSlot[kSlots]));
  for (DeviceMemory* const device : devices) {
    ASSIGN_OR_RETURN(std::unique_ptr<HostRegistration> registration,
                     device->RegisterHost(static_cast<std::byte*>(memory), kBytes));
    page->devices_.push_back({MemorySpace::Gpu(device->uuid()), std::move(registration)});
  }
  return page;
}

SyncPage::~SyncPage() {
  devices_.clear();
  ::munmap(slots_, kBytes);
}

std::optional<SharedWord> SyncPage::Take(std::uint64_t value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto* const free = std::find(taken_.begin(), taken_.end(), false);
  if (free == taken_.end()) return std::nullopt;
  *free = true;
  SharedWord word(shared_from_this(), static_cast<std::size_t>(free - taken_.begin()));
  word.slot().error_code.store(0, std::memory_order_relaxed);
  word.slot().error_value.store(0, std::memory_order_relaxed);
  word.slot().value.store(value, std::memory_order_release);
  return word;
}

SharedWord::~SharedWord() {
  if (page_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(page_->mutex_);
  page_->taken_[index_] = false;
}

std::uint64_t SharedWord::Load() const {
  const std::uint64_t value = slot().value.load(std::memory_order_acquire);
  return value > kSyncValueMax ? 0 : value;  // a GPU's wait would not take it for reached
}

void SharedWord::Raise(std::uint64_t value) {
  RaiseTo(slot().value, value);
}

void SharedWord::Fail(std::uint64_t value, absl::StatusCode code) {
  const bool failed = slot().error_code.load(std::memory_order_relaxed) != 0;
  if (failed && slot().error_value.load(std::memory_order_relaxed) <= value) return;
  slot().error_value.store(value, std::memory_order_relaxed);
  slot().error_code.store(static_cast<std::uint32_t>(code), std::memory_order_release);
}

std::optional<std::uint64_t> SharedWord::AddressOn(const MemorySpace& space) const {
  for (const SyncPage::OnDevice& device : page_->devices_) {
    if (device.space == space) return device.registration->address() + byte_offset();
  }
  return std::nullopt;
}

}  // namespace tessera::server
