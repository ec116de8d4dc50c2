// Deep Gradient Compression's threshold from a sample, a fixed threshold, and random elements.
#include <algorithm>

#include "kernels/topk_others.h"
#include "kernels/topk_sample.h"

namespace hvd_ext::topk {

template <typename Bits>
int64_t SelectFrom(const Part<Bits>& part, Bits bound, Bits* greatest) {
  if (part.k == 0) return 0;
  int64_t ties = part.elements;
  if (CountFrom(part.x, part.elements, bound) > part.k) {
    uint64_t* keys = part.memory->Reserve(part.elements, 0);
    int64_t kept = 0;
    for (int64_t i = 0; i < part.elements; ++i) {
      keys[kept] = KeyOf(part.x[i]);
      kept += KeyOf(part.x[i]) >= bound;
    }
    const Kth<uint64_t> last = SelectKth(keys, kept, part.k);
    bound = static_cast<Bits>(last.key);
    ties = part.k - last.greater;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < part.elements && count < part.k; ++i) {
    const Bits key = KeyOf(part.x[i]);
    if (key < bound || (key == bound && ties-- <= 0)) continue;
    PutPick(part, count++, i, greatest);
  }
  return count;
}

// Section 5 of the Deep Gradient Compression paper: the threshold is estimated from a sample of 1 %. If more than k
// elements reach it, the k greatest of those are taken. If too few reach it (fewer than 0.8 k), it is lowered, as in
// the authors' code.
template <typename As>
int64_t SelectDgc(const Part<typename As::Bits>& part, typename As::Bits* greatest) {
  using Bits = typename As::Bits;
  if (part.k == 0) return 0;
  constexpr int64_t kStride = 100, kLeastSample = 1024;
  constexpr double kLower = 0.8;
  constexpr int kMostTries = 10;
  const int64_t stride = std::max<int64_t>(1, std::min(kStride, part.elements / kLeastSample));
  uint64_t* sample = part.memory->Reserve(part.elements / stride + 1, 0);
  int64_t sampled = 0;
  const uint64_t start = Mixed(part.seed) % static_cast<uint64_t>(stride);
  for (int64_t i = static_cast<int64_t>(start); i < part.elements; i += stride) sample[sampled++] = KeyOf(part.x[i]);
  const int64_t rank = std::max<int64_t>(1, (part.k * sampled + part.elements - 1) / part.elements);
  Bits bound = static_cast<Bits>(SelectKth(sample, sampled, std::min(rank, sampled)).key);
  for (int tries = 0; tries < kMostTries; ++tries) {
    const int64_t found = CountFrom(part.x, part.elements, bound);
    if (static_cast<double>(found) >= kLower * static_cast<double>(part.k) || bound == 0) break;
    bound = bound >= As::kInfinity ? static_cast<Bits>(As::kInfinity - 1) : BoundOf<As>(As::Value(bound) * kLower);
  }
  return SelectFrom(part, bound, greatest);
}

template <typename Bits>
int64_t SelectRandom(const Part<Bits>& part, Bits* greatest) {
  const bool left_out = part.k > part.elements / 2;  // then the elements that are not picked are drawn
  const int64_t wanted = left_out ? part.elements - part.k : part.k;
  uint64_t* drawn = part.memory->Reserve(wanted, 0);
  int64_t count = 0;
  uint64_t draw = Mixed(part.seed);
  while (count < wanted) {  // the first `wanted` distinct numbers of a sequence: each set is equally likely
    for (; count < wanted; ++count) {
      draw = Mixed(draw);
      drawn[count] = draw % static_cast<uint64_t>(part.elements);
    }
    std::sort(drawn, drawn + count);
    count = std::unique(drawn, drawn + count) - drawn;
  }
  if (!left_out) {
    for (int64_t i = 0; i < count; ++i) PutPick(part, i, static_cast<int64_t>(drawn[i]), greatest);
    return count;
  }
  int64_t picked = 0, next = 0;
  for (int64_t i = 0; i < part.elements; ++i) {
    if (next < count && drawn[next] == static_cast<uint64_t>(i)) {
      ++next;
    } else {
      PutPick(part, picked++, i, greatest);
    }
  }
  return picked;
}

template int64_t SelectFrom(const Part<uint16_t>&, uint16_t, uint16_t*);
template int64_t SelectFrom(const Part<uint32_t>&, uint32_t, uint32_t*);
template int64_t SelectFrom(const Part<uint64_t>&, uint64_t, uint64_t*);
template int64_t SelectRandom(const Part<uint16_t>&, uint16_t*);
template int64_t SelectRandom(const Part<uint32_t>&, uint32_t*);
template int64_t SelectRandom(const Part<uint64_t>&, uint64_t*);
template int64_t SelectDgc<AsFloat32>(const Part<uint32_t>&, uint32_t*);
template int64_t SelectDgc<AsFloat64>(const Part<uint64_t>&, uint64_t*);
template int64_t SelectDgc<AsFloat16>(const Part<uint16_t>&, uint16_t*);
template int64_t SelectDgc<AsBFloat16>(const Part<uint16_t>&, uint16_t*);

}  // namespace hvd_ext::topk
