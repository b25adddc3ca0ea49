#include "server/session/import_cache.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace tessera::server {

absl::StatusOr<std::shared_ptr<Mapping>> ImportCache::Get(const std::string& source, std::uint64_t allocation_id,
                                                          const Open& open) {
  std::shared_ptr<Mapping> mapping;  // before the lock: it may turn out to be the last owner
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(source);
  if (found != entries_.end()) mapping = found->second.mapping.lock();
  if (mapping == nullptr) {
    ASSIGN_OR_RETURN(mapping, open());
    std::erase_if(entries_, [](const auto& entry) { return entry.second.mapping.expired(); });
    entries_[source] = {.allocation_id = allocation_id, .mapping = mapping};
    return mapping;
  }
  if (found->second.allocation_id != allocation_id) {
    return absl::FailedPreconditionError(
        absl::StrCat("this memory is imported as allocation ", found->second.allocation_id, ", not ", allocation_id,
                     "; release its buffers before the memory is freed and imported anew"));
  }
  return mapping;
}

}  // namespace tessera::server
