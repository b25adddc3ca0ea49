#include "planner/audit_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/text.h"
#include "common/unique_fd.h"

namespace tessera::planner {
namespace {

constexpr char kFileName[] = "/planner_changes.log";
// Version, six fields that are numbers or short, two values, checksum.
constexpr std::string_view kVersion = "1";
constexpr std::size_t kFields = 11;

// FNV-1a: against a damaged line, not against who can write the file.
std::uint64_t Checksum(std::string_view text) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

template <typename Number>
bool Parse(absl::string_view text, Number& number, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return error == std::errc() && end == text.data() + text.size();
}

bool WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

// All of the file, or nothing if that is no file to be read: too large, no regular file, a link.
std::optional<std::string> ReadAll(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status = {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  if (status.st_size > static_cast<off_t>(2 * kAuditFileBytesMax)) return std::nullopt;
  std::string text;
  std::array<char, 1 << 16> part;
  for (;;) {
    const ssize_t got = ::read(fd.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 || text.size() > 2 * kAuditFileBytesMax) return std::nullopt;
    if (got == 0) return text;
    text.append(part.data(), static_cast<std::size_t>(got));
  }
}

std::string PathIn(const std::string& directory) {
  if (directory.empty()) return {};
  std::error_code ignored;  // what cannot be made cannot be written, which is told then
  std::filesystem::create_directories(directory, ignored);
  return directory + kFileName;
}

std::string DirectoryOf(const std::string& path) {
  return path.substr(0, path.rfind('/'));
}

std::string Shortened(std::string value) {
  if (value.size() > kAuditValueBytesMax) value.resize(kAuditValueBytesMax);
  return value;
}

}  // namespace

std::string AuditLine(const AuditEntry& entry) {
  std::string line = absl::StrCat(Av(kVersion), "\t", entry.sequence, "\t", entry.old_revision, "\t", entry.revision,
                                  "\t", entry.time_unix_ms, "\t", absl::CEscape(entry.epoch));
  for (const std::string* text : {&entry.who, &entry.what, &entry.old_value, &entry.new_value}) {
    absl::StrAppend(&line, "\t", absl::CEscape(*text));
  }
  return absl::StrCat(line, "\t", absl::Hex(Checksum(line), absl::kZeroPad16));
}

bool ParseAuditLine(const std::string& line, AuditEntry& entry) {
  const std::vector<absl::string_view> fields = absl::StrSplit(line, '\t');
  if (fields.size() != kFields || Sv(fields[0]) != kVersion) return false;
  std::uint64_t checksum = 0;
  const std::string_view checked = std::string_view(line).substr(0, line.size() - fields.back().size() - 1);
  if (!Parse(fields.back(), checksum, 16) || checksum != Checksum(checked)) return false;
  AuditEntry parsed;
  if (!Parse(fields[1], parsed.sequence) || !Parse(fields[2], parsed.old_revision) ||
      !Parse(fields[3], parsed.revision) || !Parse(fields[4], parsed.time_unix_ms) || parsed.sequence == 0) {
    return false;
  }
  std::string* const texts[] = {&parsed.epoch, &parsed.who, &parsed.what, &parsed.old_value, &parsed.new_value};
  for (std::size_t i = 0; i < std::size(texts); ++i) {
    if (!absl::CUnescape(fields[5 + i], texts[i])) return false;
  }
  entry = std::move(parsed);
  return true;
}

AuditLog::AuditLog(const std::string& directory) : path_(PathIn(directory)) {
  if (!path_.empty()) Load();
}

void AuditLog::Load() {
  const std::lock_guard<std::mutex> file_lock(file_mutex_);
  const std::optional<std::string> text = ReadAll(path_);
  if (!text.has_value()) {
    struct stat status = {};
    if (::lstat(path_.c_str(), &status) == 0) {
      // What stands there is no record: out of the way with it, rather than lost. If it cannot be moved, what follows
      // says so.
      ++stats_.damaged_lines;
      (void)std::rename(path_.c_str(), (path_ + ".damaged").c_str());
    }
    return Note(Rewrite());  // whether there can be one
  }
  file_bytes_ = text->size();
  const bool whole = text->empty() || text->back() == '\n';
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
      AuditEntry entry;
      // Sequences rise: a line of before is a copy that somebody put there.
      if (!ParseAuditLine(std::string(line), entry) || entry.sequence < next_sequence_) {
        ++stats_.damaged_lines;
        continue;
      }
      next_sequence_ = entry.sequence + 1;
      entries_.push_back(std::move(entry));
      if (entries_.size() > kAuditEntriesMax) entries_.pop_front();
    }
  }
  // A line that was cut short would swallow the next one. Else nothing is written, but known is whether it could be.
  Note(whole ? Write("") : Rewrite());
}

void AuditLog::Note(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.persisted = error.empty();
  stats_.error = error;
}

std::string AuditLog::Write(const std::string& line) {
  const UniqueFd fd(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd || !WriteAll(fd.get(), line) || (!line.empty() && ::fdatasync(fd.get()) != 0)) return std::strerror(errno);
  file_bytes_ += line.size();
  return {};
}

std::string AuditLog::Rewrite() {
  std::deque<std::string> lines;
  std::size_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
      lines.push_front(AuditLine(*entry) + "\n");
      bytes += lines.front().size();
      if (bytes > kAuditFileBytesMax / 2) break;
    }
  }
  const std::string temporary = path_ + ".tmp";
  // What a killed process has left there, or anything else: neither waited for nor written through.
  if (::unlink(temporary.c_str()) != 0 && errno != ENOENT) return std::strerror(errno);
  const UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  const bool written =
      fd &&
      std::all_of(lines.begin(), lines.end(), [&](const std::string& line) { return WriteAll(fd.get(), line); }) &&
      ::fsync(fd.get()) == 0 && ::rename(temporary.c_str(), path_.c_str()) == 0;
  if (!written) return std::strerror(errno);
  file_bytes_ = bytes;
  // The name is as durable as the lines only once its directory is.
  const UniqueFd directory(::open(DirectoryOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return directory && ::fsync(directory.get()) == 0 ? std::string() : std::strerror(errno);
}

void AuditLog::Append(AuditEntry entry) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  entry.time_unix_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  for (std::string* text : {&entry.epoch, &entry.who, &entry.what, &entry.old_value, &entry.new_value}) {
    *text = Shortened(std::move(*text));
  }
  const std::lock_guard<std::mutex> file_lock(file_mutex_);
  std::string line;
  bool appends = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entry.sequence = next_sequence_++;
    entries_.push_back(std::move(entry));
    if (entries_.size() > kAuditEntriesMax) entries_.pop_front();
    if (path_.empty()) return;
    line = AuditLine(entries_.back()) + "\n";
    // A file that is full, or that lacks what could not be written, is written anew.
    appends = stats_.persisted && file_bytes_ + line.size() <= kAuditFileBytesMax;
  }
  std::string error = appends ? Write(line) : Rewrite();
  // Somebody may have taken the file away.
  if (appends && !error.empty()) error = Rewrite();
  Note(error);
  if (error.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.write_failures;
}

AuditPage AuditLog::List(std::size_t limit, std::uint64_t before_sequence) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  AuditPage page;
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (before_sequence != 0 && entry->sequence >= before_sequence) continue;
    if (page.entries.size() == limit) {
      page.more = true;
      break;
    }
    page.entries.push_back(*entry);
  }
  return page;
}

AuditStats AuditLog::Stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  AuditStats stats = stats_;
  stats.entries = entries_.size();
  return stats;
}

}  // namespace tessera::planner
