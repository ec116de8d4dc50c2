// MSTopK, Deep Gradient Compression's threshold from a sample, a fixed threshold, and random elements.
#include "kernels/topk_others.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "kernels/topk_sample.h"

namespace hvd_ext::topk {
namespace {

// One segment of x and where its picks go.
template <typename Bits>
struct Part {
  const Bits* x;  // the first element of the segment
  int64_t begin;  // the index of that element
  int64_t elements;
  int64_t k;
  uint64_t seed;
  Picks<Bits> picks;
  int64_t at;
  Buffer<uint64_t>* memory;
  Bits greatest = 0;  // key that has been picked

  void Pick(int64_t place, int64_t i) {
    Put(picks, at + place, begin + i, x[i]);
    greatest = std::max(greatest, KeyOf(x[i]));
  }
};

// Returns the least key whose value is >= `value`, which must not be negative.
template <typename T>
typename As<T>::Bits BoundOf(double value) {
  typename As<T>::Bits key = KeyOf(As<T>::Nearest(value));
  while (key < As<T>::kInfinity && As<T>::Value(key) < value) ++key;
  return key;
}

template <typename Bits>
HVD_EXT_ALWAYS int64_t CountLoop(const Bits* x, int64_t elements, Bits bound) {
  constexpr int64_t kRun = 4096;  // short enough that the count fits into an integer of an element's width
  int64_t count = 0;
  for (int64_t begin = 0; begin < elements; begin += kRun) {
    const int64_t end = std::min(elements, begin + kRun);
    Bits here = 0;
    for (int64_t i = begin; i < end; ++i) here = static_cast<Bits>(here + (KeyOf(x[i]) >= bound));
    count += static_cast<int64_t>(here);
  }
  return count;
}

// Each of these selectors returns how many elements it has picked.

// Algorithm 1 of CommLib (MLSys 2021), with its names: thres1 is the least threshold tried that has at most k elements
// above it, and thres2 the greatest tried that has more. The picks that thres1 leaves open are a random run of the
// elements between the two.
//
// As printed, the algorithm returns every element where no threshold has at most k elements above it (ties, zeros, an
// infinity, NaN), because thres1 stays 0. Here thres1 begins above every key, the mean and the maximum are those of the
// finite elements, and elements that are not finite count as greater than any threshold. So exactly k elements come out
// of every input.
template <typename T>
int64_t SelectMSTopK(Part<typename As<T>::Bits>* part, int32_t samplings) {
  using Bits = typename As<T>::Bits;
  double sum = 0, most = 0;
  int64_t finite = 0;
  for (int64_t i = 0; i < part->elements; ++i) {
    const Bits key = KeyOf(part->x[i]);
    if (key >= As<T>::kInfinity) continue;
    const double a = As<T>::Value(key);
    sum += a;
    most = std::max(most, a);
    ++finite;
  }
  const double mean = finite == 0 || std::isinf(sum) ? 0 : sum / static_cast<double>(finite);
  double left = 0, right = 1;
  int64_t k1 = 0, k2 = part->elements;
  Bits thres1 = kAbove<Bits>, thres2 = 0;
  for (int32_t n = 0; n < samplings; ++n) {
    const double ratio = left + (right - left) / 2;
    const Bits thres = BoundOf<T>(mean + ratio * (most - mean));
    const int64_t nonzeros = CountFrom(part->x, part->elements, thres);
    if (nonzeros <= part->k) {
      right = ratio;
      if (nonzeros > k1) {
        k1 = nonzeros;
        thres1 = thres;
      }
    } else {
      left = ratio;
      if (nonzeros < k2) {
        k2 = nonzeros;
        thres2 = thres;
      }
    }
  }
  const int64_t open = part->k - k1, runs = k2 - k1 - open + 1;
  const int64_t first = static_cast<int64_t>(Mixed(part->seed) % static_cast<uint64_t>(runs));
  int64_t count = 0, between = 0;
  for (int64_t i = 0; i < part->elements && count < part->k; ++i) {
    const Bits key = KeyOf(part->x[i]);
    if (key < thres2) continue;
    bool picked = key >= thres1;
    if (!picked) {
      picked = between >= first && between < first + open;
      ++between;
    }
    if (picked) part->Pick(count++, i);
  }
  return count;
}

// Picks the elements with a key >= bound, and only the k greatest of them if there are more.
template <typename Bits>
int64_t SelectFrom(Part<Bits>* part, Bits bound) {
  int64_t ties = part->elements;
  if (CountFrom(part->x, part->elements, bound) > part->k) {
    uint64_t* keys = part->memory->Reserve(part->elements, 0);
    int64_t kept = 0;
    for (int64_t i = 0; i < part->elements; ++i) {
      keys[kept] = KeyOf(part->x[i]);
      kept += KeyOf(part->x[i]) >= bound;
    }
    const Kth<uint64_t> last = SelectKth(keys, kept, part->k);
    bound = static_cast<Bits>(last.key);
    ties = part->k - last.greater;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < part->elements && count < part->k; ++i) {
    const Bits key = KeyOf(part->x[i]);
    if (key < bound || (key == bound && ties-- <= 0)) continue;
    part->Pick(count++, i);
  }
  return count;
}

// Section 5 of the Deep Gradient Compression paper: the threshold is estimated from a sample of 1 %. If more than k
// elements reach it, the k greatest of those are taken. If too few reach it (fewer than 0.8 k), it is lowered, as in
// the authors' code.
template <typename T>
int64_t SelectDgc(Part<typename As<T>::Bits>* part) {
  using Bits = typename As<T>::Bits;
  constexpr int64_t kStride = 100, kLeastSample = 1024;
  constexpr double kLower = 0.8;
  constexpr int kMostTries = 10;
  const int64_t stride = std::max<int64_t>(1, std::min(kStride, part->elements / kLeastSample));
  uint64_t* sample = part->memory->Reserve(part->elements / stride + 1, 0);
  int64_t sampled = 0;
  const uint64_t start = Mixed(part->seed) % static_cast<uint64_t>(stride);
  for (int64_t i = static_cast<int64_t>(start); i < part->elements; i += stride) sample[sampled++] = KeyOf(part->x[i]);
  const int64_t rank = std::max<int64_t>(1, (part->k * sampled + part->elements - 1) / part->elements);
  Bits bound = static_cast<Bits>(SelectKth(sample, sampled, std::min(rank, sampled)).key);
  for (int tries = 0; tries < kMostTries; ++tries) {
    const int64_t found = CountFrom(part->x, part->elements, bound);
    if (static_cast<double>(found) >= kLower * static_cast<double>(part->k) || bound == 0) break;
    bound =
        bound >= As<T>::kInfinity ? static_cast<Bits>(As<T>::kInfinity - 1) : BoundOf<T>(As<T>::Value(bound) * kLower);
  }
  return SelectFrom(part, bound);
}

template <typename Bits>
int64_t SelectRandom(Part<Bits>* part) {
  const bool left_out = part->k > part->elements / 2;  // then the elements that are not picked are drawn
  const int64_t wanted = left_out ? part->elements - part->k : part->k;
  uint64_t* drawn = part->memory->Reserve(wanted, 0);
  int64_t count = 0;
  uint64_t draw = Mixed(part->seed);
  while (count < wanted) {  // the first `wanted` distinct numbers of a sequence: each set is equally likely
    for (; count < wanted; ++count) {
      draw = Mixed(draw);
      drawn[count] = draw % static_cast<uint64_t>(part->elements);
    }
    std::sort(drawn, drawn + count);
    count = std::unique(drawn, drawn + count) - drawn;
  }
  if (!left_out) {
    for (int64_t i = 0; i < count; ++i) part->Pick(i, static_cast<int64_t>(drawn[i]));
    return count;
  }
  int64_t picked = 0, next = 0;
  for (int64_t i = 0; i < part->elements; ++i) {
    if (next < count && drawn[next] == static_cast<uint64_t>(i)) {
      ++next;
    } else {
      part->Pick(picked++, i);
    }
  }
  return picked;
}

template <typename T>
int64_t SelectOther(const TopKOptions& options, Part<typename As<T>::Bits>* part) {
  switch (options.selector) {
    case Selector::kMSTopK:
      return SelectMSTopK<T>(part, options.samplings);
    case Selector::kDgc:
      return SelectDgc<T>(part);
    case Selector::kThreshold:
      return SelectFrom(part, BoundOf<T>(options.threshold));
    case Selector::kRandom:
      return SelectRandom(part);
    case Selector::kExact:
      break;
  }
  std::fprintf(stderr, "hvd_ext: selector %d: a bug, callers must refuse it\n", static_cast<int>(options.selector));
  std::abort();
}

}  // namespace

template <typename Bits>
int64_t CountFrom(const Bits* x, int64_t elements, Bits bound) {
  if (CurrentPath() == Path::kPortable) return CountLoop(x, elements, bound);
  return ForAvx2<CountLoop<Bits>>(x, elements, bound);
}

template <typename T>
bool SelectOthers(const TopKOptions& options, const typename As<T>::Bits* x, const TopKSegment* segments,
                  int64_t n_segments, Buffer<uint64_t>* memory, int64_t* counts, Picks<typename As<T>::Bits> picks) {
  int64_t at = 0;
  bool non_finite = false;
  for (int64_t s = 0; s < n_segments; ++s) {
    const TopKSegment& segment = segments[s];
    const uint64_t seed = Mixed(options.seed) + static_cast<uint64_t>(s);
    Part<typename As<T>::Bits> part{
        x + segment.begin, segment.begin, segment.elements, segment.k, seed, picks, at, memory};
    if (segment.k == 0) {
      counts[s] = 0;
      non_finite |= CountFrom(part.x, part.elements, As<T>::kInfinity) > 0;
      continue;
    }
    counts[s] = SelectOther<T>(options, &part);
    non_finite |= part.greatest >= As<T>::kInfinity;
    at += segment.k;
  }
  return non_finite;
}

#define HVD_EXT_SELECT_OTHERS(T)                                                                     \
  template bool SelectOthers<T>(const TopKOptions&, const As<T>::Bits*, const TopKSegment*, int64_t, \
                                Buffer<uint64_t>*, int64_t*, Picks<As<T>::Bits>);
HVD_EXT_SELECT_OTHERS(float)
HVD_EXT_SELECT_OTHERS(double)
HVD_EXT_SELECT_OTHERS(Float16)
HVD_EXT_SELECT_OTHERS(BFloat16)
template int64_t CountFrom(const uint32_t*, int64_t, uint32_t);

}  // namespace hvd_ext::topk
