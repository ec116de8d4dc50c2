// Estimates bounds for the scan from a sample. A wrong bound costs time, but never changes the answer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/half.h"
#include "kernels/topk_memory.h"
#include "kernels/topk_scan.h"
#include "kernels/topk_select.h"

namespace hvd_ext::topk {

// The k-th greatest key is almost always in [low, high).
template <typename Bits>
struct Bounds {
  Bits low;
  Bits high;
};

template <typename Bits>
constexpr Bits kAbove = static_cast<Bits>(kMagnitude<Bits> + 1);  // above every key

// In shorter segments a sample costs more than it saves.
constexpr int64_t kUnsampled = 1024;

inline uint64_t Mixed(uint64_t x) {  // splitmix64 (Steele, Lea, Flood 2014)
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The sample is read in runs of 256 bytes, because the expensive part of a run is that its page is not in the TLB.
template <typename Bits>
constexpr int64_t kRun = 256 / static_cast<int64_t>(sizeof(Bits));

// Returns how many runs to read. A run costs about as much as 40 candidates. What the sample leaves uncertain becomes
// candidates: the margin is 3 * sqrt(hits) + 2 of the hits in the sample, each of which stands for d / sample elements.
// This margin is too small about once in a thousand times, and then the segment is scanned once more.
inline int64_t SampledRuns(int64_t elements, int64_t k, int64_t run) {
  constexpr double kCost = 40;
  const double d = static_cast<double>(elements), length = static_cast<double>(run);
  const double spread = std::pow(std::sqrt(static_cast<double>(k) * d / length) * 1.5 / kCost, 2.0 / 3);
  const double constant = std::sqrt(2 * d / length / kCost);
  return std::min(4 + static_cast<int64_t>(std::max(spread, constant)), elements / run);
}

// A histogram of the keys of a sample, from the greatest key downward, with buckets of about 1 %.
template <typename Bits>
class Ranks {
 public:
  Ranks(const Bits* keys, int64_t count) {
    for (int64_t i = 0; i < count; ++i) most_ = std::max(most_, keys[i]);
    for (int64_t i = 0; i < count; ++i) ++counters_[BucketOf(keys[i])];
  }
  // Returns the bucket b of the rank-th greatest key, which is in [Low(b), High(b)). The last bucket holds all keys
  // that are far below the greatest.
  int64_t Bucket(int64_t rank) const {
    int64_t bucket = 0;
    for (int64_t seen = counters_[0]; seen < rank && bucket < kCounters - 1; seen += counters_[bucket]) ++bucket;
    return bucket;
  }
  bool Far(int64_t bucket) const { return bucket == kCounters - 1; }
  Bits Low(int64_t bucket) const {
    const uint64_t down = (static_cast<uint64_t>(bucket + 1) << kShift) - 1;
    return down < most_ ? static_cast<Bits>(most_ - down) : Bits{0};
  }
  Bits High(int64_t bucket) const { return static_cast<Bits>(most_ - (static_cast<uint64_t>(bucket) << kShift) + 1); }

 private:
  static constexpr int kShift = sizeof(Bits) == 2 ? 2 : sizeof(Bits) == 4 ? 16 : 45;
  int64_t BucketOf(Bits key) const {
    return std::min<int64_t>(kCounters - 1, static_cast<int64_t>(static_cast<Bits>(most_ - key) >> kShift));
  }

  Bits most_ = 0;
  uint32_t counters_[kCounters] = {};
};

// `at(i)` returns the bits of element i, and `ask(i)` prefetches it.
template <typename Bits, typename At, typename Ask>
Bounds<Bits> SampleBounds(int64_t elements, int64_t k, uint64_t seed, Buffer<Bits>* memory, At at, Ask ask) {
  constexpr int64_t kLength = kRun<Bits>;
  const int64_t runs = SampledRuns(elements, k, kLength), sampled = runs * kLength;
  Bits* keys = memory->Reserve(2 * sampled, 0);
  const int64_t stratum = elements / kLength / runs;
  auto begin_of = [&](int64_t i) {  // a random run of the i-th of equal strata
    const uint64_t draw = Mixed(seed + static_cast<uint64_t>(i)) >> 32;
    return (i * stratum + static_cast<int64_t>((draw * static_cast<uint64_t>(stratum)) >> 32)) * kLength;
  };
  constexpr int64_t kAsked = 32;
  for (int64_t i = 0; i < std::min(kAsked, runs); ++i) ask(begin_of(i));
  for (int64_t i = 0; i < runs; ++i) {
    if (i + kAsked < runs) ask(begin_of(i + kAsked));
    const int64_t begin = begin_of(i);
    for (int64_t j = 0; j < kLength; ++j) keys[i * kLength + j] = KeyOf(at(begin + j));
  }
  const double hits = static_cast<double>(k) * static_cast<double>(sampled) / static_cast<double>(elements);
  const Ranks<Bits> ranks(keys, sampled);
  const Bits middle = ranks.Low(ranks.Bucket(static_cast<int64_t>(hits) + 1));
  double squares = 0;  // hits come in clusters, so the variance is that of runs, not of elements
  for (int64_t i = 0; i < runs; ++i) {
    Bits here = 0;
    for (int64_t j = 0; j < kLength; ++j) here = static_cast<Bits>(here + (keys[i * kLength + j] >= middle));
    squares += static_cast<double>(here) * static_cast<double>(here);
  }
  const double doubt = 3 * std::sqrt(squares) + 2;
  const int64_t last = static_cast<int64_t>(hits + doubt) + 1, first = static_cast<int64_t>(hits - doubt);
  Bounds<Bits> bounds{0, kAbove<Bits>};
  const int64_t low = ranks.Bucket(last);
  if (last <= sampled && !ranks.Far(low)) bounds.low = ranks.Low(low);
  if (last <= sampled && ranks.Far(low)) {
    std::copy(keys, keys + sampled, keys + sampled);
    bounds.low = SelectKth(keys + sampled, sampled, last).key;
  }
  const int64_t high = ranks.Bucket(std::max<int64_t>(first, 1));
  if (first >= 1) bounds.high = ranks.High(high);
  return bounds;
}

// Returns bounds for a segment of x or, with a feedback, of the gradient that it will accumulate there.
template <typename Bits>
Bounds<Bits> Sampled(const Bits* x, const ErrorFeedback* feedback, const TopKSegment& segment, uint64_t seed,
                     Buffer<Bits>* memory) {
  if constexpr (sizeof(Bits) == 4) {
    if (feedback != nullptr) {
      const ErrorFeedback from = From(*feedback, segment.begin);
      float unused = 0;
      auto at = [&](int64_t i) {
        ErrorFeedback one = From(from, i);
        one.next_velocity = &unused;
        return BitsOf(Accumulated(one, 0));
      };
      auto ask = [&](int64_t i) {
        __builtin_prefetch(from.gradient + i);
        __builtin_prefetch(from.residual + i);
        if (from.velocity != nullptr) __builtin_prefetch(from.velocity + i);
      };
      return SampleBounds<Bits>(segment.elements, segment.k, seed, memory, at, ask);
    }
  }
  x += segment.begin;
  return SampleBounds<Bits>(
      segment.elements, segment.k, seed, memory, [x](int64_t i) { return x[i]; },
      [x](int64_t i) { __builtin_prefetch(x + i); });
}

}  // namespace hvd_ext::topk
