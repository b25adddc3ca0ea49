#include "server/session/import_cache.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace tessera::server {

absl::StatusOr<std::shared_ptr<Mapping>> ImportCache::Get(const std::string& source, std::uint64_t allocation_id,
                                                          const Open& open) {
  const auto deadline = std::chrono::steady_clock::now() + kClosingWait;
  std::unique_lock<std::mutex> lock(state_->mutex);
  while (true) {
    const auto found = state_->entries.find(source);
    if (found == state_->entries.end()) return OpenNew(source, allocation_id, open);
    const Entry& entry = found->second;
    if (entry.allocation_id != allocation_id && !entry.mapping.expired()) {
      return absl::FailedPreconditionError(
          absl::StrCat("this memory is imported as another allocation than ", allocation_id,
                       "; release its buffers before the memory is freed and imported anew"));
    }
    // Not for another allocation, where this could turn out to be the last owner.
    if (entry.allocation_id == allocation_id) {
      if (std::shared_ptr<Mapping> mapping = entry.mapping.lock(); mapping != nullptr) return mapping;
    }
    if (state_->closed.wait_until(lock, deadline) == std::cv_status::timeout) {
      return absl::AbortedError("this memory's former import is being closed; try again");
    }
  }
}

absl::StatusOr<std::shared_ptr<Mapping>> ImportCache::OpenNew(const std::string& source, std::uint64_t allocation_id,
                                                              const Open& open) {
  ASSIGN_OR_RETURN(std::unique_ptr<Mapping> opened, open());
  const std::shared_ptr<Mapping> mapping(opened.release(), [state = state_, source](Mapping* last) {
    delete last;
    {
      const std::lock_guard<std::mutex> lock(state->mutex);
      state->entries.erase(source);
    }
    state->closed.notify_all();
  });
  state_->entries[source] = {.allocation_id = allocation_id, .mapping = mapping};
  return mapping;
}

}  // namespace tessera::server
