// Algorithm 1 of CommLib (MLSys 2021), with its names: thres1 is the least threshold tried that has at most k elements
// above it, and thres2 the greatest tried that has more. The picks that thres1 leaves open are a random run of the
// elements between the two.
//
// As printed, the algorithm returns every element where no threshold has at most k elements above it (ties, zeros, an
// infinity, NaN), because thres1 stays 0. Here thres1 begins above every key, the mean and the maximum are those of the
// finite elements, and elements that are not finite count as greater than any threshold. So exactly k elements come out
// of every input.
#include <algorithm>

#include "kernels/topk_others.h"
#include "kernels/topk_sample.h"

namespace hvd_ext::topk {
namespace {

#if defined(__x86_64__)
#define HVD_EXT_WIDE __attribute__((target("avx2")))
#else
#define HVD_EXT_WIDE
#endif

template <typename Bits>
__attribute__((always_inline)) inline int64_t CountLoop(const Bits* x, int64_t elements, Bits bound) {
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

template <typename Bits>
HVD_EXT_WIDE int64_t CountWide(const Bits* x, int64_t elements, Bits bound) {
  return CountLoop(x, elements, bound);
}

}  // namespace

template <typename Bits>
int64_t CountFrom(const Bits* x, int64_t elements, Bits bound) {
  return CurrentPath() == Path::kPortable ? CountLoop(x, elements, bound) : CountWide(x, elements, bound);
}

template <typename As>
int64_t SelectMSTopK(const Part<typename As::Bits>& part, int32_t samplings, typename As::Bits* greatest) {
  using Bits = typename As::Bits;
  double sum = 0, most = 0;
  int64_t finite = 0;
  for (int64_t i = 0; i < part.elements; ++i) {
    const Bits key = KeyOf(part.x[i]);
    if (key >= As::kInfinity) continue;
    const double a = As::Value(key);
    sum += a;
    most = std::max(most, a);
    ++finite;
  }
  const double mean = finite == 0 || std::isinf(sum) ? 0 : sum / static_cast<double>(finite);
  double left = 0, right = 1;
  int64_t k1 = 0, k2 = part.elements;
  Bits thres1 = kAbove<Bits>, thres2 = 0;
  for (int32_t n = 0; n < samplings; ++n) {
    const double ratio = left + (right - left) / 2;
    const Bits thres = BoundOf<As>(mean + ratio * (most - mean));
    const int64_t nonzeros = CountFrom(part.x, part.elements, thres);
    if (nonzeros <= part.k) {
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
  const int64_t open = part.k - k1, runs = k2 - k1 - open + 1;
  const int64_t first = static_cast<int64_t>(Mixed(part.seed) % static_cast<uint64_t>(runs));
  int64_t count = 0, between = 0;
  for (int64_t i = 0; i < part.elements && count < part.k; ++i) {
    const Bits key = KeyOf(part.x[i]);
    if (key < thres2) continue;
    bool picked = key >= thres1;
    if (!picked) {
      picked = between >= first && between < first + open;
      ++between;
    }
    if (picked) PutPick(part, count++, i, greatest);
  }
  return count;
}

template int64_t CountFrom(const uint16_t*, int64_t, uint16_t);
template int64_t CountFrom(const uint32_t*, int64_t, uint32_t);
template int64_t CountFrom(const uint64_t*, int64_t, uint64_t);
template int64_t SelectMSTopK<AsFloat32>(const Part<uint32_t>&, int32_t, uint32_t*);
template int64_t SelectMSTopK<AsFloat64>(const Part<uint64_t>&, int32_t, uint64_t*);
template int64_t SelectMSTopK<AsFloat16>(const Part<uint16_t>&, int32_t, uint16_t*);
template int64_t SelectMSTopK<AsBFloat16>(const Part<uint16_t>&, int32_t, uint16_t*);

}  // namespace hvd_ext::topk
