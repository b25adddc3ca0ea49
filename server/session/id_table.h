// Slots addressed by Id, with the lookups that tell a caller exactly why an id is no good. Not thread-safe: its owner
// locks.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/text.h"
#include "server/session/id.h"

namespace tessera::server {

template <typename T>
class IdTable {
 public:
  // `what` names an entry in errors, such as "buffer".
  IdTable(std::string_view what, std::uint32_t epoch) : what_(what), epoch_(epoch) {}

  std::size_t size() const { return slots_.size() - free_.size(); }

  // `make` builds the entry from its id.
  template <typename Make>
  T& Insert(Make make) {
    if (free_.empty()) {
      free_.push_back(static_cast<std::uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    Slot& slot = slots_[index];
    slot.id = Id{.epoch = epoch_, .index = index, .generation = slot.id.generation + 1, .nonce = RandomNonce()};
    slot.value.emplace(make(slot.id));
    return *slot.value;
  }

  // FAILED_PRECONDITION for an id of a former daemon process, NOT_FOUND for any other stranger. No epoch is 0.
  absl::StatusOr<T*> Find(const Id& id) {
    if (id.epoch != epoch_ && id.epoch != 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          Av(what_), " id is of a former daemon process: open a new session and register its buffers again"));
    }
    if (id.index >= slots_.size() || !slots_[id.index].value.has_value() || !(slots_[id.index].id == id)) {
      return absl::NotFoundError(absl::StrCat("no such ", Av(what_)));
    }
    return &*slots_[id.index].value;
  }

  // Removes the entry; nullopt if it is not there.
  std::optional<T> Remove(const Id& id) {
    if (!Find(id).ok()) return std::nullopt;
    std::optional<T> removed;
    slots_[id.index].value.swap(removed);
    free_.push_back(id.index);
    return removed;
  }

  // Of the entry that is in this slot now, if it is of this generation.
  std::optional<Id> IdOf(std::uint32_t index, std::uint32_t generation) const {
    if (index >= slots_.size() || !slots_[index].value.has_value()) return std::nullopt;
    if (slots_[index].id.generation != generation) return std::nullopt;
    return slots_[index].id;
  }

  // In the order of the slots.
  template <typename Visit>
  void ForEach(Visit visit) {
    for (Slot& slot : slots_) {
      if (slot.value.has_value()) visit(slot.id, *slot.value);
    }
  }

 private:
  struct Slot {
    Id id;
    std::optional<T> value;
  };

  std::string_view what_;
  std::uint32_t epoch_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;  // indices of empty slots
};

}  // namespace tessera::server
