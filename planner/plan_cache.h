// Problem, device and revision -> plan. Bounded, and free of locks: an entry is a row of atomic words under a version
// that is odd while somebody writes them, so that a reader takes an entry whole or not at all. A plan of an old
// revision is never found, as the revision is part of the key; its place is the first to be taken.
//
// Thread-safe. Who writes a set gives way to nobody and waits for nobody: of two writers of one entry the second
// leaves, and its plan is made once more.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "planner/plan.h"

namespace tessera::planner {

inline constexpr std::size_t kFactsWords = 6;

// Equal only for equal facts.
constexpr std::array<std::uint64_t, kFactsWords> FactsKey(const DeviceFacts& facts) {
  return {static_cast<std::uint64_t>(facts.backend) | std::uint64_t{facts.archs.bits()} << 8U,
          static_cast<std::uint32_t>(facts.processors) |
              static_cast<std::uint64_t>(static_cast<std::uint32_t>(facts.threads_per_processor)) << 32U,
          static_cast<std::uint64_t>(facts.workspace_bytes_max),
          static_cast<std::uint64_t>(facts.l2_bytes),
          static_cast<std::uint64_t>(facts.shared_bytes_per_block),
          static_cast<std::uint64_t>(facts.shared_bytes_per_processor)};
}

template <std::size_t kProblemWords>
class PlanCache {
 public:
  static constexpr std::size_t kKeyWords = kProblemWords + kFactsWords + 1;
  using Key = std::array<std::uint64_t, kKeyWords>;

  static Key KeyOf(const std::array<std::uint64_t, kProblemWords>& problem, const DeviceFacts& facts,
                   std::uint64_t revision) {
    Key key;
    key[0] = revision;
    std::size_t at = 1;
    for (const std::uint64_t word : problem) key[at++] = word;
    for (const std::uint64_t word : FactsKey(facts)) key[at++] = word;
    return key;
  }

  // Rounded up to a power of two of at least kWays; 0 = no cache.
  explicit PlanCache(std::size_t plans_max) {
    if (plans_max == 0) return;
    std::size_t sets = 1;
    while (sets * kWays < plans_max) sets *= 2;
    entries_ = std::make_unique<Entry[]>(sets * kWays);
    sets_ = sets;
  }

  std::optional<Plan> Find(const Key& key) const {
    if (sets_ == 0) return std::nullopt;
    const Entry* set = &entries_[SetOf(key)];
    for (std::size_t way = 0; way < kWays; ++way) {
      Words words;
      if (set[way].Read(key, words)) return Unpack(words);
    }
    return std::nullopt;
  }

  void Insert(const Key& key, const Plan& plan) {
    if (sets_ == 0) return;
    Entry* set = &entries_[SetOf(key)];
    Entry* target = nullptr;
    for (std::size_t way = 0; way < kWays; ++way) {
      Words words;
      // Threads that ask for the same new problem at once would else fill the set with it.
      if (set[way].Read(key, words)) return;
      if (target == nullptr && set[way].words[0].load(std::memory_order_relaxed) != key[0]) target = &set[way];
    }
    if (target == nullptr) target = &set[turn_.fetch_add(1, std::memory_order_relaxed) % kWays];
    target->Write(key, Pack(plan));
  }

  std::size_t capacity() const { return sets_ * kWays; }
  // Plans of this revision.
  std::size_t Count(std::uint64_t revision) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < capacity(); ++i) {
      if (entries_[i].words[0].load(std::memory_order_relaxed) == revision) ++count;
    }
    return count;
  }

 private:
  static constexpr std::size_t kWays = 4;
  static constexpr std::size_t kPlanWords = 3;
  using Words = std::array<std::uint64_t, kPlanWords>;

  struct alignas(64) Entry {  // two lines for GEMM
    std::atomic<std::uint64_t> version{0};
    std::array<std::atomic<std::uint64_t>, kKeyWords + kPlanWords> words{};  // revisions begin at 1: 0 = empty

    // Loads are acquire and stores release so that neither moves past the version that guards them; on x86 both are
    // plain moves.
    bool Read(const Key& key, Words& plan) const {
      const std::uint64_t before = version.load(std::memory_order_acquire);
      if (before % 2 != 0) return false;
      for (std::size_t i = 0; i < kKeyWords; ++i) {
        if (words[i].load(std::memory_order_acquire) != key[i]) return false;
      }
      for (std::size_t i = 0; i < kPlanWords; ++i) plan[i] = words[kKeyWords + i].load(std::memory_order_acquire);
      return version.load(std::memory_order_relaxed) == before;
    }

    void Write(const Key& key, const Words& plan) {
      std::uint64_t before = version.load(std::memory_order_relaxed);
      if (before % 2 != 0 || !version.compare_exchange_strong(before, before + 1, std::memory_order_acquire)) return;
      for (std::size_t i = 0; i < kKeyWords; ++i) words[i].store(key[i], std::memory_order_release);
      for (std::size_t i = 0; i < kPlanWords; ++i) words[kKeyWords + i].store(plan[i], std::memory_order_release);
      version.store(before + 2, std::memory_order_release);
    }
  };

  std::size_t SetOf(const Key& key) const {
    std::uint64_t hash = 0x9E3779B97F4A7C15;
    for (const std::uint64_t word : key) {
      hash = (hash ^ word) * 0xD6E8FEB86659FD93;
      hash ^= hash >> 32U;
    }
    return (hash & (sets_ - 1)) * kWays;
  }

  static Words Pack(const Plan& plan) {
    return {plan.variant << 8U | static_cast<std::uint64_t>(plan.source),
            static_cast<std::uint32_t>(plan.split) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(plan.raster))
                                                         << 32U,
            static_cast<std::uint64_t>(plan.workspace_bytes)};
  }
  static Plan Unpack(const Words& words) {
    return {.variant = static_cast<std::size_t>(words[0] >> 8U),
            .split = static_cast<int>(static_cast<std::uint32_t>(words[1])),
            .raster = static_cast<int>(static_cast<std::uint32_t>(words[1] >> 32U)),
            .workspace_bytes = static_cast<std::int64_t>(words[2]),
            .source = static_cast<Source>(words[0] & 0xFFU)};
  }

  std::unique_ptr<Entry[]> entries_;
  std::size_t sets_ = 0;
  std::atomic<std::uint32_t> turn_{0};  // which of a full set goes next
};

}  // namespace tessera::planner
