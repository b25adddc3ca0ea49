// Who changed what and when: a bounded record of changes, kept in a file of the state directory so that it survives
// restarts. A damaged line is skipped and counted, never fatal; without a directory, or where it cannot be written, the
// record lives in memory alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::planner {

struct AuditEntry {
  std::uint64_t sequence = 0;  // from 1, rises over restarts
  std::uint64_t old_revision = 0;
  std::uint64_t revision = 0;  // that the change made
  std::int64_t time_unix_ms = 0;
  std::string epoch;      // of the process that made it
  std::string who;        // the caller's principal, or settings
  std::string what;       // SetTable, InjectRows, ..
  std::string old_value;  // shortened to kAuditValueBytesMax
  std::string new_value;

  friend bool operator==(const AuditEntry&, const AuditEntry&) = default;
};

inline constexpr std::size_t kAuditValueBytesMax = 4096;
inline constexpr std::size_t kAuditEntriesMax = 1000;  // that are kept
inline constexpr std::size_t kAuditFileBytesMax = std::size_t{16} << 20;

struct AuditPage {
  std::vector<AuditEntry> entries;  // newest first
  bool more = false;                // older ones are kept
};

struct AuditStats {
  std::uint64_t entries = 0;        // recorded, of former processes too, as far as they are kept
  std::uint64_t damaged_lines = 0;  // of the file, when it was read
  std::uint64_t write_failures = 0;
  bool persisted = false;  // all entries that are kept are on the disk
  std::string error;       // why not; empty without a directory
};

// Thread-safe. Append waits for the disk; List and Stats do not, whatever it does.
class AuditLog {
 public:
  // `directory`: where the file is, which this process has to itself; empty = none. Made if it is not there.
  explicit AuditLog(const std::string& directory = {});

  // Gives the entry its number and the time.
  void Append(AuditEntry entry);

  // Entries older than `before_sequence` (0 = from the newest on), at most `limit`.
  AuditPage List(std::size_t limit, std::uint64_t before_sequence) const;
  AuditStats Stats() const;

 private:
  void Load();
  // With file_mutex_ held; "", or what went wrong.
  std::string Write(const std::string& line);  // appends
  std::string Rewrite();                       // the entries that are kept, as a new file
  void Note(const std::string& error);         // of a write

  const std::string path_;  // empty: none
  std::mutex file_mutex_;   // of the file, and so of the order of its lines; taken before mutex_
  std::size_t file_bytes_ = 0;
  mutable std::mutex mutex_;        // of what follows; held for no longer than to look
  std::deque<AuditEntry> entries_;  // oldest first
  std::uint64_t next_sequence_ = 1;
  AuditStats stats_;
};

// One line of the file without its end; and back, or false if it is damaged.
std::string AuditLine(const AuditEntry& entry);
bool ParseAuditLine(const std::string& line, AuditEntry& entry);

}  // namespace tessera::planner
