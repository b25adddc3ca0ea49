// Rows that a daemon keeps over restarts: where, those of which device in which file, and which of them are loaded.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "planner/config.h"
#include "planner/device_signature.h"
#include "planner/row_set.h"
#include "planner/tuning_directory.h"
#include "planner/tuning_store.h"
#include "server/config/settings.h"
#include "server/rpc/planner_service.h"

namespace tessera::server {

// By the setting cache_dir and this process's environment.
planner::TuningDirectory RowsDirectoryOf(const Settings& settings);

// A file for each device, in which the rows of its backends are. Rows that are kept without a measurement, as all that
// an administrator imports, have none.
// Thread-safe; Load comes first and once, Keep waits for the disk and for other daemons.
class RowsKeeper {
 public:
  // `signatures` of the devices; the last is the CPU's.
  RowsKeeper(const planner::TuningDirectory& directory, std::span<const planner::DeviceSignature> signatures);

  // Rows of a former run, or of another daemon, that can be used here.
  planner::RowSetPtr Load();

  // Makes the injected rows of `config` those that are kept; rows that other daemons have kept stay, unless `clear`.
  KeptRows Keep(const planner::PlannerConfig& config, bool clear);

  bool keeps_rows() const { return !stores_.empty(); }
  std::string file_names() const;  // with a comma between them; empty: nothing is kept
  std::string last_error() const;  // empty once rows have been kept again
  planner::TuningCounters counters() const;

 private:
  // By the row's text as the planner writes it.
  using RowsByText = std::map<std::string, planner::TunedRow>;
  struct Store {
    std::unique_ptr<planner::TuningStore> file;
    bool of_cpu = false;
    RowsByText kept;  // by this daemon, as far as it knows: what is no longer in force has to go
  };

  void Warn(std::string_view message);
  void SetError(std::string message);
  // The rows that belong to the store, with what was measured where that is known.
  std::vector<planner::TunedRow> RowsOf(const Store& store, std::span<const planner::Row> rows) const;
  absl::StatusOr<std::size_t> KeepIn(Store& store, std::span<const planner::Row> rows, bool clear);

  std::mutex mutex_;           // of what the stores have kept
  std::vector<Store> stores_;  // none: nothing is kept
  mutable std::mutex error_mutex_;
  std::string error_;
};

}  // namespace tessera::server
