// What the store of tuned rows counts, and why it did not use a file or did not write one. Plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera::planner {

// Why a file's contents were not used.
enum class SetAside : std::uint8_t {
  kDamaged,     // cut, edited to something that no row file says, empty
  kForeign,     // of another device, driver or CUDA
  kTooLarge,    // more bytes than kTunedBytesLimit
  kNotAFile,    // a link, FIFO, directory or device bears the name
  kUnreadable,  // no permission, or the disk fails; stays where it is
};
inline constexpr std::array<std::string_view, 5> kSetAsideNames = {"damaged", "foreign", "too_large", "not_a_file",
                                                                   "unreadable"};

// Why a save left the disk as it was.
enum class SaveFailure : std::uint8_t {
  kNoDirectory,   // none was configured or could be made
  kNotPermitted,  // a read-only file system, or another user's directory
  kNoSpace,
  kLocked,   // another process held the lock for longer than `patience`
  kRefused,  // the rows given are none
  kIo,
};
inline constexpr std::array<std::string_view, 6> kSaveFailureNames = {"no_directory", "not_permitted", "no_space",
                                                                      "locked",       "refused",       "io"};

// Events since the store was made.
struct TuningCounters {
  std::uint64_t loads = 0;
  std::uint64_t rows_loaded = 0;   // that loads answered
  std::uint64_t rows_stale = 0;    // left out by loads: measured with a variant that this build does not have
  std::uint64_t rows_refused = 0;  // left out by loads: the check refused them
  std::uint64_t rows_evicted = 0;  // left out of a save because the file was full
  std::uint64_t saves = 0;         // that reached the disk
  std::array<std::uint64_t, kSetAsideNames.size()> set_aside = {};
  std::array<std::uint64_t, kSaveFailureNames.size()> save_failures = {};

  TuningCounters& operator+=(const TuningCounters& other) {
    loads += other.loads;
    rows_loaded += other.rows_loaded;
    rows_stale += other.rows_stale;
    rows_refused += other.rows_refused;
    rows_evicted += other.rows_evicted;
    saves += other.saves;
    for (std::size_t i = 0; i < set_aside.size(); ++i) set_aside[i] += other.set_aside[i];
    for (std::size_t i = 0; i < save_failures.size(); ++i) save_failures[i] += other.save_failures[i];
    return *this;
  }
};

}  // namespace tessera::planner
