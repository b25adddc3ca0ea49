#include "server/rpc/sync_point.h"

#include "absl/strings/str_cat.h"
#include "common/sync_slot.h"
#include "common/text.h"

namespace tessera::server {

absl::StatusOr<SessionTable::FoundPoint> ResolvePoint(SessionTable& sessions, const Session& session, const Id& id,
                                                      std::uint64_t value, std::string_view field) {
  absl::StatusOr<SessionTable::FoundPoint> found = sessions.FindPoint(session, id);
  if (!found.ok()) return InField(absl::StrCat(Av(field), ".id"), found.status());
  if (found->event != nullptr && value != 0) {
    return absl::InvalidArgumentError(absl::StrCat(Av(field), ".value: ", value, "; an event has none, and wants 0"));
  }
  if (found->event == nullptr && found->timeline->word() != nullptr && value >= kSyncValueMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(Av(field), ".value: ", value, "; points of an exported timeline are below ", kSyncValueMax));
  }
  return found;
}

}  // namespace tessera::server
