// What processes of the end-to-end program tell each other while they run: a page of a file that all of them map.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera::gpu_test {

class Board {
 public:
  // All 0 at first. Each field is written by one side.
  struct Page {
    std::atomic<std::uint64_t> asked;       // by the starter: the step to take; kStop ends a job that goes on and on
    std::atomic<std::uint64_t> reached;     // by the job: steps that it has taken; 1: it is at work
    std::atomic<std::uint64_t> count;       // by the job: what it has done, right or wrong
    std::atomic<std::uint64_t> wrong;       // of those
    std::atomic<std::uint64_t> free_bytes;  // by the job: of the GPU, as it saw it in the last of `count` looks
    std::array<std::array<char, 16>, 2> buffer_ids;  // by the starter, before the job starts
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "others cannot be shared by processes");
  static constexpr std::uint64_t kStop = ~std::uint64_t{0};

  static absl::StatusOr<Board> Make(const std::string& path);  // a new file
  static absl::StatusOr<Board> Open(const std::string& path);

  Page* operator->() const { return page_.get(); }

 private:
  struct Unmapper {
    void operator()(Page* page) const;
  };
  static absl::StatusOr<Board> Map(const std::string& path, int flags);
  explicit Board(Page* page) : page_(page) {}

  std::unique_ptr<Page, Unmapper> page_;
};

}  // namespace tessera::gpu_test
