// Tuned rows of one device that outlive the daemon, shared by all daemons that use the same directory.
//
// A file a signature, planner/tuned_rows.h says how it reads. Saving takes the file's lock, merges with what another
// daemon wrote meanwhile, and replaces the file atomically, so that a reader or a kill sees the old file or the new
// one. A file that cannot be trusted is renamed and never merged back. Nothing that is wrong with the directory keeps a
// daemon from working: it then has no rows from a former run, or leaves none behind; one warning says which.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/state_directory.h"
#include "planner/device_signature.h"
#include "planner/tuned_rows.h"
#include "planner/tuning_counters.h"

namespace tessera::planner {

// Thread-safe. Load and Save wait for the disk and for other processes, `patience` at most for the latter: they are for
// threads that serve nobody else meanwhile. counters() never waits for them.
class TuningStore {
 public:
  struct Options {
    std::string directory;      // absolute; empty: keeps nothing
    DeviceSignature signature;  // whose rows; one that CheckedSignature refuses keeps nothing
    // The hash of a variant's source in this build; empty if this build has no such variant. Rows that were measured
    // with another are not answered, but stay in the file for the daemons of another build.
    std::function<std::string(std::string_view variant)> source_hash_of;
    // Whether a row says something legal, of the variant that it names; called only for rows whose hash is right.
    std::function<absl::Status(const TunedRow& row)> check;
    // Hears each kind of trouble once, until a save has worked again.
    std::function<void(std::string_view)> warn;
    std::chrono::milliseconds patience = std::chrono::seconds(2);
  };

  explicit TuningStore(Options options);

  // The rows of the device that this build can use, in the file's order. Empty if there is no file, or none that can be
  // trusted. Makes the directory, and warns if nothing can be saved there later.
  std::vector<TunedRow> Load();

  // Puts `rows`, in their order, ahead of what the file has, and answers how many it has then. `forgotten` leave the
  // file, if they are there as they are given. Where both sides answer one question, that of the later measurement
  // stays. Nothing is written if one of `rows` is no row. What fails here has been counted and warned of: the caller
  // goes on.
  absl::StatusOr<std::size_t> Save(std::span<const TunedRow> rows, std::span<const TunedRow> forgotten = {});

  // Leaves a file without rows, whoever saved them.
  absl::Status Clear();

  TuningCounters counters() const;

  // The file's name in the directory; empty if the store keeps nothing.
  const std::string& file_name() const { return file_name_; }

 private:
  struct Refused {
    SetAside reason;
    std::string message;
  };
  // What stands on the disk: rows, or why not.
  struct Contents {
    std::vector<TunedRow> rows;
    std::optional<Refused> refused;
  };

  using Merge = std::function<std::vector<TunedRow>(const std::vector<TunedRow>& stored)>;

  absl::StatusOr<StateDirectory> OpenToSave() const;
  Contents ReadFile(const StateDirectory& directory) const;
  // Reads again under the lock, and renames what is still not to be trusted.
  Contents ReadAndSetAside(const StateDirectory& directory);
  // Under the lock. The error if the file could not be renamed; a save must not replace it then.
  absl::Status SetFileAside(const StateDirectory& directory, const Refused& refused);
  void CountSetAside(const Refused& refused, const absl::Status& moved);
  // Replaces the file by what `merge` makes of it, under the lock, counted.
  absl::StatusOr<std::size_t> Write(const Merge& merge);
  absl::StatusOr<std::size_t> WriteUncounted(const Merge& merge);
  bool IsStale(const TunedRow& row) const;
  std::vector<TunedRow> Usable(std::vector<TunedRow> rows);
  std::vector<TunedRow> Merged(std::span<const TunedRow> stored, std::span<const TunedRow> rows,
                               std::span<const TunedRow> forgotten);
  absl::Status CountFailure(SaveFailure reason, const absl::Status& status);
  void Count(const std::function<void(TuningCounters&)>& change);
  void WarnOnce(std::string_view topic, std::string_view message);

  const Options options_;
  DeviceSignature signature_;
  std::string file_name_;
  absl::Status usable_;  // why the store keeps nothing, if it does

  std::mutex mutex_;                 // one Load or Save at a time
  std::vector<std::string> warned_;  // topics, guarded by mutex_

  mutable std::mutex counters_mutex_;  // nests in mutex_
  TuningCounters counters_;
};

}  // namespace tessera::planner
