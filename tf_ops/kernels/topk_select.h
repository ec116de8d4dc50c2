// Selects the r-th greatest of keys in cache, with histograms of 2048 counters between the least and the greatest key.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "kernels/topk_scan.h"

namespace hvd_ext::topk {

constexpr int kCounterBits = 11;
constexpr int64_t kCounters = int64_t{1} << kCounterBits;

template <typename Bits>
struct Kth {
  Bits key;
  int64_t greater;  // keys above it
};

// Returns the bucket of the `rank`-th greatest key, where *greater keys are above all buckets. *greater grows by the
// number of keys in the buckets above the result.
template <typename Count>
int64_t BucketOf(const Count* counters, int64_t rank, int64_t* greater) {
  for (int64_t bucket = kCounters - 1;; --bucket) {
    const int64_t here = static_cast<int64_t>(counters[bucket]);
    if (*greater + here >= rank || bucket == 0) return bucket;
    *greater += here;
  }
}

// 1 <= rank <= count. The keys are reordered and overwritten.
template <typename Bits>
Kth<Bits> SelectKth(Bits* keys, int64_t count, int64_t rank) {
  constexpr int64_t kFew = 256;
  int64_t greater = 0;
  while (true) {
    if (count <= kFew) {
      std::nth_element(keys, keys + (rank - greater - 1), keys + count, std::greater<Bits>());
      const Bits key = keys[rank - greater - 1];
      for (int64_t i = 0; i < count; ++i) greater += keys[i] > key;
      return {key, greater};
    }
    Bits least = keys[0], greatest = keys[0];
    for (int64_t i = 1; i < count; ++i) {
      least = std::min(least, keys[i]);
      greatest = std::max(greatest, keys[i]);
    }
    if (least == greatest) return {least, greater};
    int shift = 0;
    while ((static_cast<Bits>(greatest - least) >> shift) >= kCounters) ++shift;
    uint32_t counters[kCounters] = {};
    for (int64_t i = 0; i < count; ++i) ++counters[static_cast<Bits>(keys[i] - least) >> shift];
    const int64_t bucket = BucketOf(counters, rank, &greater);
    if (shift == 0) return {static_cast<Bits>(least + bucket), greater};
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Bits key = keys[i];
      keys[kept] = key;
      kept += (static_cast<Bits>(key - least) >> shift) == static_cast<Bits>(bucket);
    }
    count = kept;
  }
}

// The same with the vector loops of a processor: a sample of the keys gives an interval that contains only a few of
// them. `keys` has room for 2 * count + kSpare elements.
template <typename Bits>
Kth<Bits> SelectKth(const Loops<Bits>& loops, Bits* keys, int64_t count, int64_t rank) {
  constexpr int64_t kMany = 256, kSteps = 256;
  if (count <= kMany) return SelectKth(keys, count, rank);
  Bits* sample = keys + count;
  const int64_t sampled = std::min<int64_t>(count / 8, 1024), stride = count / sampled;
  for (int64_t i = 0; i < sampled; ++i) sample[i] = keys[i * stride];
  Bits least = sample[0], greatest = sample[0];
  for (int64_t i = 1; i < sampled; ++i) {
    least = std::min(least, sample[i]);
    greatest = std::max(greatest, sample[i]);
  }
  int shift = 0;
  while ((static_cast<Bits>(greatest - least) >> shift) >= kSteps) ++shift;
  uint32_t counters[kSteps] = {};
  for (int64_t i = 0; i < sampled; ++i) ++counters[static_cast<Bits>(sample[i] - least) >> shift];
  const double part = static_cast<double>(rank) / static_cast<double>(count),
               middle = part * static_cast<double>(sampled);
  const double doubt = 3 * std::sqrt(middle * (1 - part)) + 3;
  Bits low = 0, high = static_cast<Bits>(kMagnitude<Bits> + 1);
  double seen = 0;
  for (int64_t step = kSteps - 1; step >= 0; --step) {
    if (seen + counters[step] < middle - doubt) high = static_cast<Bits>(least + (static_cast<Bits>(step) << shift));
    seen += counters[step];
    if (seen < middle + doubt) continue;
    low = static_cast<Bits>(least + (static_cast<Bits>(step) << shift));
    break;
  }
  int64_t above = 0;
  const int64_t kept = loops.between(keys, count, low, high, sample, &above);
  if (rank <= above || rank > above + kept) return SelectKth(keys, count, rank);
  Kth<Bits> kth = SelectKth(sample, kept, rank - above);
  kth.greater += above;
  return kth;
}

constexpr int kTables = 4;  // additions to one counter wait for each other, so neighbours use different tables

// Counts the elements with `prefix` in the bits of the key from `above` up, by the bits [below, above). `tables` has
// kTables * kCounters elements; the first kCounters of them receive the counts.
template <typename Bits>
void CountDigits(const Bits* x, int64_t elements, Bits prefix, int above, int below, uint32_t* tables) {
  std::fill(tables, tables + kTables * kCounters, 0);
  const Bits digit = static_cast<Bits>((Bits{1} << (above - below)) - 1);
  for (int64_t i = 0; i < elements; ++i) {
    const Bits key = KeyOf(x[i]);
    tables[(i % kTables) * kCounters + ((key >> below) & digit)] += static_cast<Bits>(key >> above) == prefix;
  }
  for (int64_t i = 0; i < kCounters; ++i) {
    for (int t = 1; t < kTables; ++t) tables[i] += tables[t * kCounters + i];
  }
}

}  // namespace hvd_ext::topk
