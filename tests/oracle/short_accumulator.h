// What Hopper's tensor cores may lose of a sum of fp8 products. Their accumulator has the exponent of a float32 but 13
// fraction bits. One instruction takes 32 products and the accumulator, aligns all of these addends to the largest of
// them, cuts each where the 13 bits end, adds, and cuts the sum the same way: products have different exponents, so
// that the bits of a small one go where a large one stands beside it. That is less than
//   2^-13 max(|addends|, |sum|)
// for each addend and once for the sum. What an accumulator can hold at the time is the sum of the products from the
// first of its slice of K, at a multiple of 32, to now, so at most the largest difference of two sums that begin at
// the first product. Where the accumulation is exact, the accumulator is moved to a float32 and cleared every 128
// products: then only those of the same 128 count.
//
// This follows the largest number that a sum meets on its way, not the sum of all magnitudes: among products of about
// the same size the bound stays near what is lost, and one that outweighs the others raises it for those beside it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace tessera::oracle {

inline constexpr double kShortUnit = 0x1p-13;
inline constexpr std::int64_t kShortStep = 32;        // products of an instruction
inline constexpr std::int64_t kShortPromotion = 128;  // products until an exact accumulation moves the sum away

// The bound for kLanes sums side by side, fed with their products in ascending order of K.
template <int kLanes>
class ShortAccumulator {
 public:
  using Lanes = std::array<double, kLanes>;

  void Add(const Lanes& products) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sum_[lane] += products[lane];
      largest_[lane] = std::max(largest_[lane], std::abs(products[lane]));
    }
    if (++added_ % kShortStep == 0) EndStep(kShortStep);
    if (added_ % kShortPromotion == 0) window_ = {sum_, sum_};
  }

  // After the last product.
  void Finish() {
    if (added_ % kShortStep != 0) EndStep(added_ % kShortStep);
  }

  const Lanes& throughout() const { return throughout_; }
  const Lanes& promoted() const { return promoted_; }

 private:
  // The sums that an accumulator may have begun with or reached.
  struct Range {
    Lanes low{};
    Lanes high{};

    // Its extent once it takes in `sum`.
    double Extend(int lane, double sum) {
      low[lane] = std::min(low[lane], sum);
      high[lane] = std::max(high[lane], sum);
      return high[lane] - low[lane];
    }
  };

  void EndStep(std::int64_t products) {
    const double cuts = kShortUnit * static_cast<double>(products + 2);  // the accumulator's and the sum's, too
    for (int lane = 0; lane < kLanes; ++lane) {
      throughout_[lane] += cuts * std::max(largest_[lane], all_.Extend(lane, sum_[lane]));
      promoted_[lane] += cuts * std::max(largest_[lane], window_.Extend(lane, sum_[lane]));
      largest_[lane] = 0;
    }
  }

  std::int64_t added_ = 0;
  Lanes sum_{};
  Lanes largest_{};  // product of this step
  Range all_;
  Range window_;
  Lanes throughout_{};
  Lanes promoted_{};
};

}  // namespace tessera::oracle
