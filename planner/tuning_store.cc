#include "planner/tuning_store.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::planner {
namespace {

constexpr std::string_view kCannotSave = "save";  // topic of all that keeps rows from the disk

std::size_t Index(SetAside reason) {
  return static_cast<std::size_t>(reason);
}

SaveFailure FailureOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kPermissionDenied:
      return SaveFailure::kNotPermitted;
    case absl::StatusCode::kResourceExhausted:
      return SaveFailure::kNoSpace;
    case absl::StatusCode::kDeadlineExceeded:
      return SaveFailure::kLocked;
    case absl::StatusCode::kInvalidArgument:  // a path that is not absolute
    case absl::StatusCode::kNotFound:
      return SaveFailure::kNoDirectory;
    default:
      return SaveFailure::kIo;
  }
}

SetAside ReasonOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOutOfRange:
      return SetAside::kTooLarge;
    case absl::StatusCode::kFailedPrecondition:
      return SetAside::kNotAFile;
    default:
      return SetAside::kUnreadable;
  }
}

// The first field in which two signatures differ.
std::string DifferenceOf(const DeviceSignature& found, const DeviceSignature& own) {
  const SignatureFields theirs = FieldsOf(found);
  const SignatureFields ours = FieldsOf(own);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (theirs[i] == ours[i]) continue;
    return absl::StrCat("its ", Av(ours[i].first), " is '", Av(theirs[i].second), "', here it is '", Av(ours[i].second),
                        "'");
  }
  return "";
}

// A clock that was once wrong must not make a row the latest for ever.
absl::Time NotAfter(absl::Time now, const TunedRow& row) {
  return std::min(now, row.when);
}

}  // namespace

TuningStore::TuningStore(Options options) : options_(std::move(options)) {
  if (options_.directory.empty()) {
    usable_ = absl::FailedPreconditionError("there is no directory for them");
    return;
  }
  const absl::StatusOr<DeviceSignature> signature = CheckedSignature(options_.signature);
  if (!signature.ok()) {
    usable_ = signature.status();
    return;
  }
  signature_ = *signature;
  file_name_ = absl::StrCat(FileStemOf(signature_), ".v", kTunedRowsFormat, ".rows");
}

std::vector<TunedRow> TuningStore::Load() {
  const std::lock_guard lock(mutex_);
  Count([](TuningCounters& counters) { ++counters.loads; });
  const absl::StatusOr<StateDirectory> writable = OpenToSave();
  if (!writable.ok()) {
    WarnOnce(kCannotSave, absl::StrCat("tuned rows will not be saved: ", writable.status().message()));
  }
  if (!usable_.ok()) return {};
  const absl::StatusOr<StateDirectory> directory = StateDirectory::Open(options_.directory, /*create=*/false);
  if (!directory.ok()) return {};
  Contents contents = ReadFile(*directory);
  if (contents.refused) contents = ReadAndSetAside(*directory);
  std::vector<TunedRow> rows = Usable(std::move(contents.rows));
  Count([&](TuningCounters& counters) { counters.rows_loaded += rows.size(); });
  return rows;
}

absl::StatusOr<std::size_t> TuningStore::Save(std::span<const TunedRow> rows, std::span<const TunedRow> forgotten) {
  const std::lock_guard lock(mutex_);
  if (rows.size() > kTunedRowsLimit) {
    return CountFailure(SaveFailure::kRefused,
                        absl::InvalidArgumentError(absl::StrCat(rows.size(), " rows; a file holds ", kTunedRowsLimit)));
  }
  for (const TunedRow& row : rows) {
    if (const absl::Status checked = CheckTunedRow(row); !checked.ok()) {
      return CountFailure(SaveFailure::kRefused, checked);
    }
  }
  return Write([&](const std::vector<TunedRow>& stored) { return Merged(stored, rows, forgotten); });
}

absl::Status TuningStore::Clear() {
  const std::lock_guard lock(mutex_);
  return Write([](const std::vector<TunedRow>& /*stored*/) { return std::vector<TunedRow>(); }).status();
}

TuningCounters TuningStore::counters() const {
  const std::lock_guard lock(counters_mutex_);
  return counters_;
}

absl::StatusOr<StateDirectory> TuningStore::OpenToSave() const {
  RETURN_IF_ERROR(usable_);
  ASSIGN_OR_RETURN(StateDirectory directory, StateDirectory::Open(options_.directory, /*create=*/true));
  RETURN_IF_ERROR(directory.CheckWritable());
  return directory;
}

absl::StatusOr<std::size_t> TuningStore::Write(const Merge& merge) {
  if (!usable_.ok()) return CountFailure(SaveFailure::kNoDirectory, usable_);
  absl::StatusOr<std::size_t> rows = WriteUncounted(merge);
  if (!rows.ok()) return CountFailure(FailureOf(rows.status().code()), rows.status());
  Count([](TuningCounters& counters) { ++counters.saves; });
  warned_.clear();
  return rows;
}

absl::StatusOr<std::size_t> TuningStore::WriteUncounted(const Merge& merge) {
  ASSIGN_OR_RETURN(const StateDirectory directory, OpenToSave());
  ASSIGN_OR_RETURN(const FileLock lock, directory.Lock(file_name_ + ".lock", options_.patience));
  const Contents contents = ReadFile(directory);
  if (contents.refused) RETURN_IF_ERROR(SetFileAside(directory, *contents.refused));
  const std::vector<TunedRow> rows = merge(contents.rows);
  RETURN_IF_ERROR(directory.Replace(file_name_, ToText(signature_, rows)));
  return rows.size();
}

TuningStore::Contents TuningStore::ReadFile(const StateDirectory& directory) const {
  const absl::StatusOr<std::string> text = directory.Read(file_name_, kTunedBytesLimit);
  if (absl::IsNotFound(text.status())) return {};
  if (!text.ok()) return {.refused = Refused{ReasonOf(text.status().code()), MessageOf(text.status())}};
  absl::StatusOr<TunedFile> file = ParseTunedRows(*text);
  if (!file.ok()) return {.refused = Refused{SetAside::kDamaged, MessageOf(file.status())}};
  if (file->signature != signature_) {
    return {.refused = Refused{SetAside::kForeign, DifferenceOf(file->signature, signature_)}};
  }
  return {.rows = std::move(file->rows)};
}

TuningStore::Contents TuningStore::ReadAndSetAside(const StateDirectory& directory) {
  const absl::StatusOr<FileLock> lock = directory.Lock(file_name_ + ".lock", options_.patience);
  // Another daemon may have replaced the file since.
  Contents contents = ReadFile(directory);
  if (!contents.refused) return contents;
  if (lock.ok()) {
    // Has been counted and warned of; there are no rows either way.
    SetFileAside(directory, *contents.refused).IgnoreError();
  } else {
    CountSetAside(*contents.refused, lock.status());
  }
  return contents;
}

absl::Status TuningStore::SetFileAside(const StateDirectory& directory, const Refused& refused) {
  absl::Status moved;
  if (refused.reason == SetAside::kUnreadable) {
    moved = absl::PermissionDeniedError(Av(refused.message));
  } else {
    // One file a reason is kept, for who wants to see what happened; so they cannot fill the disk.
    moved = directory.Rename(file_name_, absl::StrCat(file_name_, ".", Av(kSetAsideNames[Index(refused.reason)])));
  }
  CountSetAside(refused, moved);
  return moved;
}

void TuningStore::CountSetAside(const Refused& refused, const absl::Status& moved) {
  Count([&](TuningCounters& counters) { ++counters.set_aside[Index(refused.reason)]; });
  const std::string_view name = kSetAsideNames[Index(refused.reason)];
  WarnOnce(name, absl::StrCat("tuned rows in ", options_.directory, "/", file_name_, " are not used (", Av(name),
                              "): ", refused.message,
                              moved.ok() ? absl::StrCat("; the file is now ", file_name_, ".", Av(name))
                                         : absl::StrCat("; it stays there: ", moved.message())));
}

bool TuningStore::IsStale(const TunedRow& row) const {
  return options_.source_hash_of && options_.source_hash_of(row.variant) != row.source_hash;
}

std::vector<TunedRow> TuningStore::Usable(std::vector<TunedRow> rows) {
  std::uint64_t stale = 0;
  std::uint64_t refused = 0;
  std::string first_refusal;
  std::vector<TunedRow> usable;
  for (TunedRow& row : rows) {
    if (IsStale(row)) {
      ++stale;
      continue;
    }
    const absl::Status checked = options_.check ? options_.check(row) : absl::OkStatus();
    if (checked.ok()) {
      usable.push_back(std::move(row));
    } else if (++refused == 1) {
      first_refusal = absl::StrCat("'", row.text, "': ", checked.message());
    }
  }
  Count([&](TuningCounters& counters) {
    counters.rows_stale += stale;
    counters.rows_refused += refused;
  });
  if (refused > 0) {
    WarnOnce("rows", absl::StrCat(refused, " tuned rows in ", options_.directory, "/", file_name_,
                                  " are not used, the first of them ", first_refusal));
  }
  return usable;
}

std::vector<TunedRow> TuningStore::Merged(std::span<const TunedRow> stored, std::span<const TunedRow> rows,
                                          std::span<const TunedRow> forgotten) {
  const absl::Time now = absl::Now();
  const auto latest_of = [&](std::map<std::string_view, absl::Time>& latest, const TunedRow& row) {
    absl::Time& time = latest[row.question()];
    time = std::max(time, NotAfter(now, row));
  };
  std::set<std::string_view> gone;
  for (const TunedRow& row : forgotten) gone.insert(row.text);
  const auto is_gone = [&](const TunedRow& row) {
    // As somebody else has measured it anew, it is no longer what is to be forgotten.
    return gone.contains(row.text) && std::find(forgotten.begin(), forgotten.end(), row) != forgotten.end();
  };
  std::map<std::string_view, absl::Time> theirs;  // question -> latest measurement
  std::map<std::string_view, absl::Time> ours;
  // Rows of another build's variants answer no question here, and stay for that build.
  for (const TunedRow& row : stored) {
    if (!IsStale(row) && !is_gone(row)) latest_of(theirs, row);
  }
  for (const TunedRow& row : rows) latest_of(ours, row);
  const auto is_later_there = [&](std::string_view question) {
    const auto found = theirs.find(question);
    return found != theirs.end() && ours.at(question) < found->second;
  };
  std::vector<TunedRow> merged;
  for (const TunedRow& row : rows) {
    if (!is_later_there(row.question())) merged.push_back(row);
  }
  for (const TunedRow& row : stored) {
    const bool is_replaced = !IsStale(row) && ours.contains(row.question()) && !is_later_there(row.question());
    if (!is_replaced && !is_gone(row)) merged.push_back(row);
  }
  // What was saved last stands first.
  if (merged.size() > kTunedRowsLimit) {
    Count([&](TuningCounters& counters) { counters.rows_evicted += merged.size() - kTunedRowsLimit; });
    merged.resize(kTunedRowsLimit);
  }
  return merged;
}

absl::Status TuningStore::CountFailure(SaveFailure reason, const absl::Status& status) {
  Count([&](TuningCounters& counters) { ++counters.save_failures[static_cast<std::size_t>(reason)]; });
  WarnOnce(reason == SaveFailure::kRefused ? kSaveFailureNames[static_cast<std::size_t>(reason)] : kCannotSave,
           absl::StrCat("tuned rows are not saved: ", status.message()));
  return status;
}

void TuningStore::Count(const std::function<void(TuningCounters&)>& change) {
  const std::lock_guard lock(counters_mutex_);
  change(counters_);
}

void TuningStore::WarnOnce(std::string_view topic, std::string_view message) {
  if (std::find(warned_.begin(), warned_.end(), topic) != warned_.end()) return;
  warned_.emplace_back(topic);
  if (options_.warn) options_.warn(message);
}

}  // namespace tessera::planner
