// Counts of a planner, read when somebody asks. Thread-safe; decisions are counted in stripes, so that threads that
// decide at once do not wait for each other's cache line.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/chain.h"
#include "planner/plan.h"
#include "planner/reason.h"

namespace tessera::planner {

class PlannerCounters {
 public:
  explicit PlannerCounters(std::size_t variants)
      : cells_((variants * kSources + kLine - 1) / kLine * kLine), decided_(kStripes * cells_) {}

  void Decided(const Plan& plan) {
    decided_[Stripe() * cells_ + Cell(plan.variant, plan.source)].fetch_add(1, std::memory_order_relaxed);
  }
  void Made() { made_.fetch_add(1, std::memory_order_relaxed); }
  void Refused() { refused_.fetch_add(1, std::memory_order_relaxed); }
  void Passed(const PassedOver& passed) {
    if (!passed.any) return;
    for (std::size_t i = 0; i < kCountedReasons; ++i) {
      passed_[i].fetch_add(passed.by_reason[i], std::memory_order_relaxed);
    }
  }
  void Changed() { changes_.fetch_add(1, std::memory_order_relaxed); }
  void ChangeRefused() { refused_changes_.fetch_add(1, std::memory_order_relaxed); }

  std::uint64_t decided(std::size_t variant, Source source) const {
    std::uint64_t sum = 0;
    for (std::size_t stripe = 0; stripe < kStripes; ++stripe) {
      sum += decided_[stripe * cells_ + Cell(variant, source)].load(std::memory_order_relaxed);
    }
    return sum;
  }
  std::uint64_t decided() const {
    std::uint64_t sum = 0;
    for (const auto& cell : decided_) sum += cell.load(std::memory_order_relaxed);
    return sum;
  }
  std::uint64_t made() const { return made_.load(std::memory_order_relaxed); }
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  std::uint64_t changes() const { return changes_.load(std::memory_order_relaxed); }
  std::uint64_t refused_changes() const { return refused_changes_.load(std::memory_order_relaxed); }
  std::array<std::uint64_t, kCountedReasons> passed() const {
    std::array<std::uint64_t, kCountedReasons> counts{};
    for (std::size_t i = 0; i < kCountedReasons; ++i) counts[i] = passed_[i].load(std::memory_order_relaxed);
    return counts;
  }

 private:
  static constexpr std::size_t kSources = kSourceNames.size();
  static constexpr std::size_t kStripes = 8;
  static constexpr std::size_t kLine = 8;  // counters

  static std::size_t Cell(std::size_t variant, Source source) {
    return variant * kSources + static_cast<std::size_t>(source);
  }
  static std::size_t Stripe() {
    static std::atomic<std::size_t> next{0};
    thread_local const std::size_t kMine = next.fetch_add(1, std::memory_order_relaxed) % kStripes;
    return kMine;
  }

  const std::size_t cells_;  // of a stripe
  std::vector<std::atomic<std::uint64_t>> decided_;
  std::atomic<std::uint64_t> made_{0};
  std::atomic<std::uint64_t> refused_{0};
  std::atomic<std::uint64_t> changes_{0};
  std::atomic<std::uint64_t> refused_changes_{0};
  std::array<std::atomic<std::uint64_t>, kCountedReasons> passed_{};
};

}  // namespace tessera::planner
