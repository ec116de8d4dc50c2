// The selectors other than the exact one; each call selects from one segment. They are for comparison and written for
// clarity.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/half.h"
#include "kernels/topk_memory.h"
#include "kernels/topk_scan.h"

namespace hvd_ext::topk {

// Conversions between the bits of an element and its value.
struct AsFloat32 {
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7f800000u;
  static double Value(Bits bits) { return FloatOf(bits); }
  static Bits Nearest(double value) { return BitsOf(static_cast<float>(value)); }
};

struct AsFloat64 {
  using Bits = uint64_t;
  static constexpr Bits kInfinity = uint64_t{0x7ff} << 52;
  static double Value(Bits bits) {
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static Bits Nearest(double value) {
    Bits bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
};

struct AsFloat16 {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7c00;
  static double Value(Bits bits) { return ToFloat(Float16{bits}); }
  static Bits Nearest(double value) { return ToFloat16(static_cast<float>(value)).bits; }
};

struct AsBFloat16 {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7f80;
  static double Value(Bits bits) { return ToFloat(BFloat16{bits}); }
  static Bits Nearest(double value) { return ToBFloat16(static_cast<float>(value)).bits; }
};

// Returns the least key whose value is >= `value`, which must not be negative.
template <typename As>
typename As::Bits BoundOf(double value) {
  typename As::Bits key = KeyOf(As::Nearest(value));
  while (key < As::kInfinity && As::Value(key) < value) ++key;
  return key;
}

// Returns the number of keys >= bound in x.
template <typename Bits>
int64_t CountFrom(const Bits* x, int64_t elements, Bits bound);

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
};

// Each of these returns how many picks it has written; *greatest grows as in Loops::emit.
template <typename As>
int64_t SelectMSTopK(const Part<typename As::Bits>& part, int32_t samplings, typename As::Bits* greatest);
template <typename As>
int64_t SelectDgc(const Part<typename As::Bits>& part, typename As::Bits* greatest);
// Picks the elements with a key >= bound, and only the k greatest of them if there are more.
template <typename Bits>
int64_t SelectFrom(const Part<Bits>& part, Bits bound, Bits* greatest);
template <typename Bits>
int64_t SelectRandom(const Part<Bits>& part, Bits* greatest);

template <typename Bits>
void PutPick(const Part<Bits>& part, int64_t place, int64_t i, Bits* greatest) {
  const int64_t at = part.at + place, index = part.begin + i;
  if (part.picks.wide) {
    static_cast<int64_t*>(part.picks.indices)[at] = index;
  } else {
    static_cast<int32_t*>(part.picks.indices)[at] = static_cast<int32_t>(index);
  }
  if (part.picks.values != nullptr) part.picks.values[at] = part.x[i];
  *greatest = std::max(*greatest, KeyOf(part.x[i]));
}

}  // namespace hvd_ext::topk
